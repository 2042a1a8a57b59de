"""Loss and accuracy of a model on a split, over all processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn


@dataclass(frozen=True)
class Evaluation:
    """Means over the split, and the accuracy of every sample."""

    loss: float
    accuracy: float
    correct: Tensor  # [N], the share of correct predictions of each sample

    def metrics(self, kind: str) -> dict[str, float]:
        """The metrics of a curve; language models are compared by `bits_per_token`."""
        found = {"loss": self.loss, "accuracy": self.accuracy}
        if kind == "language":
            found["bits_per_token"] = self.loss / math.log(2)
        return found


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Any,
    collate: Callable[..., dict[str, Any]],
    batch_size: int,
    accelerator: Accelerator,
    *,
    bf16: bool = False,
) -> Evaluation:
    """Evaluate the model on a split; each process evaluates a part and gets the whole result.

    Labels of -100 do not count. The logits of a language model at one position predict the next.
    """
    was_training = model.training
    model.eval()
    if not len(split):
        raise ValueError("split must have at least one sample, got none")
    batches = split.lengths.argsort(stable=True).split(batch_size)  # sorted by length: less padding
    totals = torch.zeros(3, dtype=torch.float64)  # loss, correct predictions, labels
    correct = torch.zeros(len(split))
    rounds = -(-len(batches) // accelerator.num_processes)
    for turn in range(rounds):
        number = turn * accelerator.num_processes + accelerator.process_index
        mine = number < len(batches)
        # Sharded models communicate in every forward pass, so idle processes run one as well.
        indices = batches[number if mine else 0]
        batch = send_to_device(collate([split[int(i)] for i in indices]), accelerator.device)
        with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=bf16):
            output = model(**batch)
        if not mine:
            continue
        right, labelled = _correct_predictions(output.logits, batch["labels"])
        count = int(labelled.sum())
        totals += torch.tensor([float(output.loss) * count, float(right.sum()), count])
        correct[indices] = (right.sum(1) / labelled.sum(1).clamp(min=1)).cpu()
    totals = accelerator.reduce(totals.to(accelerator.device)).cpu()
    correct = accelerator.reduce(correct.to(accelerator.device)).cpu()
    model.train(was_training)
    loss, right_count, label_count = totals.tolist()
    if not label_count:
        raise ValueError("split must have labels other than -100, got none")
    return Evaluation(loss / label_count, right_count / label_count, correct)


def _correct_predictions(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which predictions are correct, and which positions have a label; one row per sample."""
    predictions = logits.argmax(-1)
    if labels.dim() == 1:
        predictions, labels = predictions[:, None], labels[:, None]  # [B, 1]
    else:
        predictions, labels = predictions[:, :-1], labels[:, 1:]  # [B, T - 1]
    asked = labels != -100
    return (predictions == labels) & asked, asked


def accuracy_by(
    correct: Tensor, groups: dict[str, Tensor], bins: int = 8
) -> dict[str, list[dict[str, float]]]:
    """Accuracy over ranges of a property of the samples, such as their length.

    A property with few values has one range for each; others have ranges of about equal counts.

    >>> accuracy_by(torch.tensor([1.0, 0.0, 1.0]), {"depth": torch.tensor([2, 2, 3])})["depth"][0]
    {'low': 2, 'high': 2, 'count': 2, 'accuracy': 0.5}
    """
    found: dict[str, list[dict[str, float]]] = {}
    for name, values in groups.items():
        distinct = values.unique()
        if len(distinct) < 2:
            continue
        if len(distinct) > bins:
            ranks = torch.linspace(0, len(values) - 1, bins + 1)[1:].round().long()
            distinct = values.sort().values[ranks].unique()
        ranges = torch.bucketize(values, distinct)  # range i holds what is <= distinct[i]
        found[name] = [
            {
                "low": int(values[inside].min()),
                "high": int(values[inside].max()),
                "count": int(inside.sum()),
                "accuracy": float(correct[inside].mean()),
            }
            for number in range(len(distinct))
            if (inside := ranges == number).any()
        ]
    return found
