"""Measuring a model on unlabelled inputs: its outputs, and their distance to a hierarchy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from polyscale.inject.api import inject_hsa, restore
from polyscale.inject.attention import RECORD, Attended, Probe, exact_sinks
from polyscale.inject.flops import tree_flops
from polyscale.inject.layout import find_layout
from polyscale.inject.modules import attention_layers, is_causal
from polyscale.inject.settings import HSASettings
from polyscale.ops.hsa import hsa_energy
from polyscale.trees import SignalTree

POSITIONS = 16  # tokens of a text whose logits are compared, where each token has its own

Batch = dict[str, Any]


def make_batches(
    inputs: Sequence[Any], tokenizer: Any, batch_size: int, max_length: int
) -> list[Batch]:
    """Return batches of model inputs from texts, or check those that are given."""
    if isinstance(inputs, str | Mapping) or not isinstance(inputs, Sequence) or not inputs:
        raise TypeError(
            "texts must be a list of at least one text, or batch such as "
            f"{{'input_ids': ..., 'attention_mask': ...}}, got {type(inputs).__name__}"
        )
    if all(isinstance(one, Mapping) for one in inputs):
        return [dict(one) for one in inputs]
    if not all(isinstance(one, str) for one in inputs):
        raise TypeError(
            "texts must be texts or batches (dicts of tensors), all of one kind, got both or "
            "something else"
        )
    if tokenizer is None:
        raise ValueError(
            "tokenizer must be given for texts, got None; pass tokenizer=..., or batches of token "
            "ids"
        )
    if batch_size > 1 and getattr(tokenizer, "pad_token", True) is None:
        raise ValueError(
            "tokenizer must have a pad_token, got one without; set tokenizer.pad_token"
        )
    # Texts of like lengths together: less padding.
    ordered = sorted(inputs, key=len)
    return [
        dict(
            tokenizer(
                ordered[at : at + batch_size],
                padding=batch_size > 1,
                truncation=True,
                max_length=max_length,
                return_tensors="pt",
            )
        )
        for at in range(0, len(ordered), batch_size)
    ]


def on_device(batch: Batch, model: PreTrainedModel) -> Batch:
    """Return a batch as the model takes it, without labels, and without a cache."""
    moved = {
        name: part.to(model.device) if isinstance(part, Tensor) else part
        for name, part in batch.items()
        if name != "labels"
    }
    if any(is_causal(module, model) for module in attention_layers(model)):
        moved.setdefault("use_cache", False)
    return moved


@torch.no_grad()
def run(model: PreTrainedModel, batch: Batch) -> tuple[str, Tensor]:
    """Return what is compared of a batch: ("logits", log-probabilities) or ("embedding", ...)."""
    moved = on_device(batch, model)
    return compared(model(**moved), moved)


def compared(output: Any, batch: Batch) -> tuple[str, Tensor]:
    """Return what is compared of a batch's output."""
    mask = batch.get("attention_mask")
    logits = getattr(output, "logits", None)
    if logits is not None:
        if logits.dim() == 3 and mask is not None and mask.shape == logits.shape[:2]:
            logits = torch.cat(
                [_some(row[real.bool()]) for row, real in zip(logits, mask, strict=True)]
            )
        elif logits.dim() == 3:
            logits = torch.cat([_some(row) for row in logits])
        return "logits", F.log_softmax(logits.double(), -1)
    hidden = output.last_hidden_state.double()  # [B, N, C]
    share = torch.ones_like(hidden[..., :1]) if mask is None else mask[..., None].double()
    return "embedding", (hidden * share).sum(1) / share.sum(1).clamp(min=1)


def _some(rows: Tensor) -> Tensor:
    """Return evenly spaced rows, `POSITIONS` at most, the last among them."""
    count = min(len(rows), POSITIONS)
    return rows[torch.linspace(0, len(rows) - 1, count).round().long().unique().to(rows.device)]


def change(before: Sequence[tuple[str, Tensor]], after: Sequence[tuple[str, Tensor]]) -> float:
    """Return the mean KL of the logits, or one minus the mean cosine of the embeddings."""
    found = []
    for (kind, one), (_, two) in zip(before, after, strict=True):
        if kind == "logits":
            found.append((one.exp() * (one - two)).sum(-1).flatten())
        else:
            found.append(1 - F.cosine_similarity(one, two, dim=-1))
    return max(0.0, float(torch.cat(found).mean()))


@contextmanager
def injected(
    model: PreTrainedModel, layers: Sequence[int] | None, settings: HSASettings
) -> Iterator[None]:
    """Inject some layers for a while."""
    inject_hsa(
        model,
        layers,
        settings.hierarchy,
        settings.tie,
        settings.sinks,
        sink_ids=settings.sink_ids,
        sink_queries=settings.sink_queries,
        sentence_ends=settings.sentence_ends,
    )
    try:
        yield
    finally:
        restore(model)


@contextmanager
def watching(model: PreTrainedModel, probe: Probe, tokens: bool) -> Iterator[None]:
    """Show the probe what each layer attends to; the model does what it does without."""
    # One family is the original attention, and so is one sentence, which lets token ids through.
    settings = HSASettings("sentences", sentence_ends=(2**62,)) if tokens else HSASettings(())
    with injected(model, None, settings):
        for module in attention_layers(model):
            getattr(module, RECORD).probe = probe
        yield


def watch(model: PreTrainedModel, batches: Sequence[Batch], probe: Probe, tokens: bool) -> None:
    """Run the model as it is, and show the probe what each layer attends to."""
    with watching(model, probe, tokens):
        for batch in batches:
            run(model, batch)


class Certificate:
    """The KL of candidate hierarchies to each layer's attention, and what they cost."""

    def __init__(self, candidates: Sequence[HSASettings]) -> None:
        self.candidates = list(candidates)
        self.kl: dict[tuple[int, int], float] = {}  # (candidate, layer) -> nats, summed
        self.flops: dict[tuple[int, int], int] = {}
        self.flat: dict[int, int] = {}
        self.rows: dict[int, int] = {}  # layer -> rows times heads

    @torch.no_grad()
    def __call__(self, seen: Attended) -> None:
        """Add one batch of one layer."""
        batch, heads, length, width = seen.query.shape
        lengths = [length] * batch if seen.real is None else seen.real.sum(1).tolist()
        self._add(self.rows, seen.layer, heads * sum(lengths))
        self._add(self.flat, seen.layer, sum(4 * heads * n * n * width for n in lengths))
        for number, settings in enumerate(self.candidates):
            where = number, seen.layer
            layout = find_layout(settings, seen.real, seen.query, seen.causal, seen.tokens)
            rows = [layout.to_rows(part) for part in (seen.query, seen.key)]
            hidden = layout.hidden
            if layout.forest:
                rows = [part.transpose(0, 1).flatten(1, 2) for part in rows]
                hidden = None if hidden is None else hidden.flatten()
            self._add(self.kl, where, _total_kl(settings, layout.tree, rows, hidden, seen))
            pruned = layout.tree
            exact = exact_sinks(settings, layout, seen.causal)
            if layout.forest:
                pairs = sum(layout.sinks * n for n in lengths) if exact else 0
                self._add(
                    self.flops, where, tree_flops(pruned, heads, width, settings, pairs).total
                )
                continue
            for at, n in enumerate(lengths):
                if n == 0:
                    continue
                tree = pruned if layout.hidden is None else pruned.prune(~layout.hidden[at])
                pairs = layout.sinks * n if exact else 0
                self._add(self.flops, where, tree_flops(tree, heads, width, settings, pairs).total)

    @staticmethod
    def _add(table: dict[Any, Any], key: Any, amount: float) -> None:
        table[key] = table.get(key, 0) + amount

    def mean_kl(self, candidate: int, layer: int) -> float:
        """Return the KL per token and head, in nats."""
        return max(0.0, self.kl[candidate, layer] / max(1, self.rows[layer]))


def _total_kl(
    settings: HSASettings,
    tree: SignalTree,
    rows: list[Tensor],
    hidden: Tensor | None,
    seen: Attended,
) -> float:
    """Return the KL to softmax, summed over rows and heads, by the certificate."""
    query, key = rows
    options: dict[str, Any] = {
        "causal": seen.causal,
        "key_padding_mask": hidden,
        "scale": seen.scale,
    }
    energy = hsa_energy(query, key, tree, tie=settings.tie, **options)
    assert energy.kl is not None
    return float(energy.kl.sum())
