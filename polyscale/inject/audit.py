"""`opened_audit`: what an injected model lost in the calls that it served, exactly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polyscale._extras import require
from polyscale.checks import check_integer
from polyscale.inject.level_cache import LevelCache
from polyscale.inject.level_layer import LevelLayer
from polyscale.inject.modules import attention_layers
from polyscale.inject.opened import LISTENER
from polyscale.inject.opened_attention import RECORD, OpenedLayer, TextRead

EVERY = 8  # decoded tokens from one that is audited to the next


@dataclass
class LayerAudit:
    """What one layer kept and lost, summed over the calls of an audit."""

    layer: int
    rows: int = 0  # sampled rows of each head
    kl: Tensor = field(default_factory=lambda: torch.zeros(0))  # [H], nats, summed over rows
    kept: Tensor = field(default_factory=lambda: torch.zeros(0))  # [H], summed over rows
    worst: Tensor = field(default_factory=lambda: torch.zeros(0))  # [H], the greatest KL of a row
    pairs: float = 0.0  # of query and key that were computed, all rows of a batch
    dense_pairs: float = 0.0  # those of softmax attention
    decoded: list[tuple[float, float, int]] = field(default_factory=list)  # KL, error, heads
    bytes_read: int | None = None  # by a decoded token
    dense_bytes: int | None = None

    @property
    def mean_kl(self) -> float | None:
        """The KL of a sampled row to softmax attention in nats, mean over heads."""
        return float(self.kl.mean()) / self.rows if self.rows else None

    @property
    def mean_kept(self) -> float | None:
        """The share of its mass that a sampled row keeps, mean over heads."""
        return float(self.kept.mean()) / self.rows if self.rows else None

    @property
    def worst_kl(self) -> float | None:
        """The greatest KL of a sampled row of any head."""
        return float(self.worst.max()) if self.rows else None

    @property
    def share(self) -> float | None:
        """The share of pairs of query and key that were computed."""
        return self.pairs / self.dense_pairs if self.dense_pairs else None

    @property
    def decoded_kl(self) -> float | None:
        """The KL of an audited decoded token to exact attention, mean over heads."""
        heads = sum(count for _, _, count in self.decoded)
        return sum(kl for kl, _, _ in self.decoded) / heads if heads else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        per_head = max(self.rows, 1)
        return {
            "layer": self.layer,
            "rows": self.rows,
            "kl": self.mean_kl,
            "kl_of_heads": (self.kl / per_head).tolist(),
            "worst_kl_of_heads": self.worst.tolist(),
            "kept": self.mean_kept,
            "kept_of_heads": (self.kept / per_head).tolist(),
            "share": self.share,
            "decoded_kl": self.decoded_kl,
            "bytes_read": self.bytes_read,
            "dense_bytes": self.dense_bytes,
        }


class OpenedAudit:
    """Figures of every injected layer, collected by `opened_audit`; `print` shows a table.

    `layers` has one `LayerAudit` for each, in order. KL divergences are exact: of sampled rows of
    the texts that were read, and of every so-manieth token that was decoded.
    """

    def __init__(self, layers: list[int], every: int) -> None:
        self.every = every
        self.layers = [LayerAudit(number) for number in layers]
        self.opened = 0  # texts, or parts of prompts, that were opened
        self.dense = 0  # those that were read densely, being short
        self.caches: list[LevelCache] = []

    def text_read(self, text: TextRead) -> None:
        """Add a call in which a layer read a text."""
        one = next(one for one in self.layers if one.layer == text.layer)
        past = text.keys - text.queries
        pairs = text.queries * (past + (text.queries + 1) / 2 if text.causal else text.keys)
        pairs *= text.rows
        if one is self.layers[0]:
            self.opened += text.audit is not None
            self.dense += text.audit is None
        one.dense_pairs += pairs
        if text.audit is None:
            one.pairs += pairs
            return
        one.pairs += pairs * text.audit.share
        there = (text.audit.rows >= 0)[:, None]  # [B, 1, R]
        kl = text.audit.kl.double().cpu()
        if not one.rows:
            one.kl, one.kept, one.worst = kl.new_zeros(3, kl.shape[1])
        one.rows += int(there.sum())
        one.kl = one.kl + kl.sum((0, 2))
        one.kept = one.kept + text.audit.kept.double().sum((0, 2)).cpu()
        one.worst = torch.maximum(one.worst, kl.amax((0, 2)))

    def cache_used(self, cache: LevelCache) -> None:
        """Note a cache that the model read or filled."""
        if all(cache is not known for known in self.caches):
            self.caches.append(cache)

    def finish(self, numbers: dict[int, int]) -> None:
        """Read what the caches say; `numbers` are those of the layers in a cache."""
        for one in self.layers:
            sizes = []
            for cache in self.caches:
                level = cache.layers[numbers[one.layer]] if one.layer in numbers else None
                if isinstance(level, LevelLayer) and level.decoded:
                    one.decoded += level.audits
                    sizes.append(level.bytes())
            read = [size["read"] for size in sizes if size["read"] is not None]
            if read:
                one.bytes_read = max(read)
                one.dense_bytes = max(size["dense"] or 0 for size in sizes)
        self.caches = []

    @property
    def total(self) -> dict[str, Any]:
        """Means over layers, the worst of all rows, and the bytes that a decoded token reads."""
        return {
            "texts_opened": self.opened,
            "texts_read_densely": self.dense,
            "rows": sum(one.rows for one in self.layers),
            "kl": _mean([one.mean_kl for one in self.layers]),
            "worst_kl": max((one.worst_kl or 0.0 for one in self.layers if one.rows), default=None),
            "kept": _mean([one.mean_kept for one in self.layers]),
            "share": _mean([one.share for one in self.layers]),
            "decoded_kl": _mean([one.decoded_kl for one in self.layers]),
            "bytes_read": _sum([one.bytes_read for one in self.layers]),
            "dense_bytes": _sum([one.dense_bytes for one in self.layers]),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"total": self.total, "layers": [one.as_dict() for one in self.layers]}

    def __str__(self) -> str:
        head = (
            f"{self.opened} texts opened, {self.dense} read densely; KL to softmax attention in "
            "nats, exact on sampled rows"
        )
        names = ("layer", "mean KL", "worst head", "worst row", "kept", "pairs", "decoded KL", "")
        lines = [head, "", _line(*names, "read per token")]
        for one in self.layers:
            heads = one.kl / max(one.rows, 1)
            worst = None
            if one.rows:
                at = int(heads.argmax())
                worst = f"{at}: {float(heads[at]):.2g}"
            lines.append(
                _line(
                    str(one.layer),
                    _number(one.mean_kl),
                    worst or "-",
                    _number(one.worst_kl),
                    _percent(one.mean_kept),
                    _percent(one.share),
                    _number(one.decoded_kl),
                    "",
                    _bytes(one.bytes_read, one.dense_bytes),
                )
            )
        total = self.total
        lines.append(
            _line(
                "all",
                _number(total["kl"]),
                "",
                _number(total["worst_kl"]),
                _percent(total["kept"]),
                _percent(total["share"]),
                _number(total["decoded_kl"]),
                "",
                _bytes(total["bytes_read"], total["dense_bytes"]),
            )
        )
        return "\n".join(lines)

    def figure(self, path: str | os.PathLike[str]) -> Path:
        """Draw the KL and the kept mass of every head of every layer to a file; return its path.

        >>> audit.figure("audit.png")  # doctest: +SKIP
        """
        path = Path(path)
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"path must end in .png, .svg or .pdf, got {str(path)!r}")
        there = [one for one in self.layers if one.rows]
        if not there:
            raise ValueError(
                "audit must have a text that was opened to be drawn, got none; texts of up to "
                "prompt['dense'] tokens are read densely"
            )
        heads = len(there[0].kl)
        size = (3.0 + 0.5 * heads, 1.6 + 0.16 * len(there))
        figure = require("matplotlib.figure", "train", "an audit's picture").Figure(
            figsize=size, layout="constrained"
        )
        panels = (
            ("KL to softmax (nats)", [one.kl / one.rows for one in there], "magma_r"),
            ("mass left out", [1 - one.kept / one.rows for one in there], "viridis_r"),
        )
        for axes, (title, rows, colours) in zip(figure.subplots(1, 2), panels, strict=True):
            image = axes.imshow(torch.stack(rows).tolist(), aspect="auto", cmap=colours, vmin=0)
            axes.set_title(title, fontsize=9, loc="left")
            axes.set_xlabel("head", fontsize=8)
            axes.set_ylabel("layer", fontsize=8)
            step = max(1, len(there) // 12)
            axes.set_yticks(range(0, len(there), step), [one.layer for one in there[::step]])
            axes.tick_params(labelsize=7)
            figure.colorbar(image, ax=axes).ax.tick_params(labelsize=7)
        figure.savefig(path, dpi=150)
        return path


@contextmanager
def opened_audit(model: PreTrainedModel, every: int = EVERY) -> Iterator[OpenedAudit]:
    """Audit every call of a model with opened attention inside the block.

    The rows that chose what to open are compared with softmax attention over everything, which
    costs nothing that they had not computed, and every so-manieth token that is decoded from a
    cache of the model's own is read exactly, too, which is slow (0 is never). A `LevelCache` that
    is passed in is audited as its own `audit_every` says.

    Args:
        model: a model that `inject_opened` changed.
        every: decoded tokens from one that is audited to the next.

    >>> with opened_audit(model) as audit:  # doctest: +SKIP
    ...     model.generate(**inputs)
    >>> print(audit)  # doctest: +SKIP
    >>> audit.figure("audit.png")  # doctest: +SKIP
    """
    every = check_integer("every", every, least=0, hint="0 is never")
    records: dict[int, OpenedLayer] = {}
    numbers: dict[int, int] = {}
    for module in attention_layers(model):
        record = getattr(module, RECORD, None)
        if record is not None:
            records[record.number] = record
            number: Any = getattr(module, "layer_idx", None)
            if record.causal and number is not None:
                numbers[record.number] = number
    if not records:
        raise ValueError(
            "model must have layers with opened attention to be audited, got none; call "
            "polyscale.inject_opened(model) first"
        )
    if hasattr(model, LISTENER):
        raise ValueError("model must not be audited already, got one inside an opened_audit")
    audit = OpenedAudit(sorted(records), every)
    setattr(model, LISTENER, audit)
    for record in records.values():
        record.listener = audit.text_read
    try:
        yield audit
    finally:
        delattr(model, LISTENER)
        for record in records.values():
            record.listener = None
        audit.finish(numbers)


def _mean(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def _sum(values: list[int | None]) -> int | None:
    there = [value for value in values if value is not None]
    return sum(there) if there else None


def _line(*cells: str) -> str:
    widths = (5, 9, 12, 9, 7, 7, 10, 1, 0)
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _bytes(read: int | None, dense: int | None) -> str:
    if read is None or dense is None:
        return "-"
    return f"{read / 2**20:.2f} of {dense / 2**20:.2f} MiB"
