"""The rows with a tree: HTE models on sentence vectors."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyscale.models.hte.configuration import HTEConfig
from polyscale.models.hte.modeling import HTEForClassification
from polyscale.trees import SignalTree
from reproduction.documents.presets import Preset
from reproduction.documents.tasks import Sample, Task


class Inputs:
    """Batches of samples, with the trees of a row."""

    def __init__(self, vectors: Tensor, kind: str) -> None:
        # Of unit length, as the encoder gives them; a model wants entries of about one.
        self.vectors = vectors * vectors.shape[1] ** 0.5
        self.kind = kind
        self.trees: dict[int, tuple[SignalTree, Tensor]] = {}

    def batch(self, samples: Sequence[Sample]) -> dict[str, Any]:
        found = [self._of(sample) for sample in samples]
        return {
            "inputs": {"text": self.vectors[torch.cat([rows for _, rows in found])]},
            "tree": SignalTree.batch([tree for tree, _ in found]),
            "labels": torch.tensor([sample.label for sample in samples]),
        }

    def _of(self, sample: Sample) -> tuple[SignalTree, Tensor]:
        key = sample.number
        if key not in self.trees:
            tree, rows = sample.tree, sample.sentences
            if self.kind == "shuffled":  # the same shape; which sentence is where, is random
                rows = rows[torch.randperm(len(rows), generator=_generator(key))]
            elif self.kind == "flat":
                tree = tree.flatten()
            self.trees[key] = tree, rows
        return self.trees[key]


def train(
    task: Task,
    vectors: Tensor,
    preset: Preset,
    options: dict[str, Any],
    setting: dict[str, Any],
    seed: int,
) -> tuple[HTEForClassification, Inputs, dict[str, Any]]:
    """Train a row; returns it as it was after its best epoch on the validation documents."""
    options = dict(options)
    inputs = Inputs(vectors, options.pop("tree", "document"))
    torch.manual_seed(seed)
    config = HTEConfig(
        modalities={"text": {"width": vectors.shape[1]}},
        key_names=task.key_names,
        hidden_size=preset.hidden_size,
        num_attention_heads=preset.heads,
        num_labels=len(task.label_names),
        dropout=setting["dropout"],
        **options,
    )
    model = HTEForClassification(config)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setting["learning_rate"], weight_decay=0.01
    )
    steps = preset.epochs * -(-len(task.epoch(0)) // preset.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=setting["learning_rate"], total_steps=steps, pct_start=0.1
    )
    curve, best, state = [], -1.0, None
    began = time.perf_counter()
    for epoch in range(preset.epochs):
        model.train()
        for samples in _batches(task.epoch(epoch), preset.batch_size, seed * 1000 + epoch):
            model(**inputs.batch(samples)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        known = task.labels("validation")
        found = predict(model, inputs, task.parts["validation"], preset.batch_size)
        curve.append(round(float((found == known).float().mean()), 4))
        if curve[-1] > best:
            best, state = curve[-1], copy.deepcopy(model.state_dict())
    assert state is not None
    model.load_state_dict(state)
    record = {
        "curve": curve,
        "parameters": sum(p.numel() for p in model.parameters()),
        "fit_seconds": round(time.perf_counter() - began, 2),
    }
    return model, inputs, record


@torch.no_grad()
def predict(
    model: HTEForClassification, inputs: Inputs, samples: Sequence[Sample], batch_size: int
) -> Tensor:
    """The predicted classes."""
    model.eval()
    found = []
    for begin in range(0, len(samples), batch_size):
        batch = inputs.batch(samples[begin : begin + batch_size])
        found.append(model(batch["inputs"], batch["tree"]).logits.argmax(-1))
    return torch.cat(found)


def _batches(samples: list[Sample], size: int, seed: int) -> list[list[Sample]]:
    order = torch.randperm(len(samples), generator=_generator(seed)).tolist()
    return [
        [samples[index] for index in order[begin : begin + size]]
        for begin in range(0, len(order), size)
    ]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
