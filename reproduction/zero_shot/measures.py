"""Measurements of a classifier before and after an injection."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polyscale.data.splits import TokenSplit
from polyscale.inject import restore
from polyscale.inject.measure import Certificate, make_batches, watch
from reproduction.zero_shot.injections import Injection
from reproduction.zero_shot.replay import BlockOutputs

BATCH_TOKENS = 4_096  # of one forward pass, so that short texts come in large batches


@contextmanager
def injected(model: PreTrainedModel, injection: Injection | None, tokenizer: Any) -> Iterator[None]:
    """Inject within a context; None leaves the model as it is."""
    if injection is None:
        yield
        return
    injection.apply(model, tokenizer)
    try:
        yield
    finally:
        restore(model)


@torch.no_grad()
def predict(
    model: PreTrainedModel,
    split: TokenSplit,
    collate: Any,
    known: BlockOutputs | None = None,
    first: int = 0,
) -> Tensor:
    """Return the predicted class of each text, `[N]`.

    With `known`, the outputs of the blocks before `first` are taken from there. If `known` is
    empty, it is filled, and the model must not be injected.
    """
    model.eval()
    found = torch.zeros(len(split), dtype=torch.int64)
    recording = known is not None and not known.batches
    for number, indices in enumerate(_batches(split)):
        batch = collate([split[int(index)] for index in indices])
        batch.pop("labels")
        context: AbstractContextManager[None] = nullcontext()
        if known is not None:
            context = known.record(model) if recording else known.replay(model, number, first)
        with context:
            found[indices] = model(**batch).logits.argmax(-1)
    return found


def _batches(split: TokenSplit) -> Iterator[Tensor]:
    # Sorted by length, for less padding; the longest text of a batch determines its size.
    order = split.lengths.argsort(stable=True, descending=True)
    at = 0
    while at < len(order):
        size = max(1, BATCH_TOKENS // int(split.lengths[order[at]]))
        yield order[at : at + size]
        at += size


def as_text(predictions: Tensor) -> str:
    """Predictions as one digit each, which keeps the results file small."""
    if predictions.numel() and int(predictions.max()) > 9:
        raise ValueError(f"predictions must be classes 0 to 9, got {int(predictions.max())}")
    return "".join(str(number) for number in predictions.tolist())


def from_text(text: str) -> Tensor:
    """Undo `as_text`.

    >>> from_text(as_text(torch.tensor([3, 0, 1]))).tolist()
    [3, 0, 1]
    """
    return torch.tensor([int(digit) for digit in text])


def compare(before: Tensor, after: Tensor, labels: Tensor) -> dict[str, float]:
    """Accuracy before and after in percent, and the points lost, with standard errors.

    Predictions are paired by text, so the standard error of the difference is smaller than that of
    either accuracy if few predictions change.

    >>> labels = torch.tensor([0, 1, 1, 0])
    >>> compare(labels, torch.tensor([0, 1, 0, 0]), labels)["lost"]
    25.0
    """
    if not len(labels):
        raise ValueError("labels must have at least one text, got none")
    right, still = (before == labels).double(), (after == labels).double()
    lost = right - still
    spread = float(lost.std(correction=1)) if len(lost) > 1 else 0.0
    accuracy = float(still.mean())
    return {
        "texts": len(labels),
        "accuracy_before": 100 * float(right.mean()),
        "accuracy": 100 * accuracy,
        "accuracy_error": 100 * math.sqrt(accuracy * (1 - accuracy) / len(labels)),
        "lost": 100 * float(lost.mean()),
        "lost_error": 100 * spread / math.sqrt(len(lost)),
        "agreement": 100 * float((before == after).double().mean()),
    }


def certify(
    model: PreTrainedModel,
    kinds: Sequence[Injection],
    texts: Sequence[str],
    tokenizer: Any,
    length: int,
) -> list[dict[str, Any]]:
    """Return the KL of each layer and the attention FLOPs of one, for each kind of injection.

    The certificate's KL to the layer's own softmax is in nats per token and head, with sinks
    counted as tied and all other layers unchanged. FLOPs are the mean over texts of their real
    lengths.
    """
    settings = [one.settings(tokenizer) for one in kinds]
    batches = make_batches(list(texts), tokenizer, 16, length)
    certificate = Certificate(settings)
    model.eval()
    watch(model, batches, certificate, any(one.needs_tokens for one in settings))
    found = []
    for number, kind in enumerate(kinds):
        layers = sorted(certificate.flat)
        before = certificate.flat[layers[0]] / len(texts)
        after = certificate.flops[number, layers[0]] / len(texts)
        found.append(
            {
                "kind": kind.kind,
                "kl": [certificate.mean_kl(number, layer) for layer in layers],
                "flops_before": round(before),
                "flops_after": round(after),
                "saved": 1 - after / before,
            }
        )
    return found
