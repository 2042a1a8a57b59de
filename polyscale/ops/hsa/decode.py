"""HSA of one new token: over the closed nodes of every open family, and itself."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.hsa.native import library, op
from polyscale.ops.hsa.native.build import LIBRARY
from polyscale.ops.native.backend import native_backend
from polyscale.ops.numerics import accumulation_dtype, masked_softmax
from polyscale.ops.rows import append_rows
from polyscale.ops.tracing import without_autocast


@dataclass(frozen=True)
class OpenFamily:
    """The closed children of a node that is still open, each as its means and its size."""

    keys: Tensor  # [B, H, room, D] means
    values: Tensor  # [B, H, room, Dv] means
    counts: Tensor  # [B, 1, room, 1] tokens under each
    filled: Tensor  # [B] how many there are

    @classmethod
    def empty(cls, key: Tensor, value: Tensor) -> "OpenFamily":
        """No members yet; `key` and `value` `[B, H, *, D]` show the shapes."""
        batch = key.shape[0]
        return cls(
            key[:, :, :0],
            value[:, :, :0],
            torch.zeros(batch, 1, 0, 1, dtype=torch.int64, device=key.device),
            torch.zeros(batch, dtype=torch.int64, device=key.device),
        )

    @classmethod
    def from_places(
        cls, key: Tensor, value: Tensor, place: Tensor, room: int, filled: Tensor
    ) -> "OpenFamily":
        """Tokens `[B, H, T, D]` that share a place `[B, T]` become one member, `room` are kept."""
        dtype = accumulation_dtype(key.dtype)
        counts = torch.zeros(len(place), room + 1, dtype=torch.int64, device=key.device)
        counts = counts.scatter_add(1, place, torch.ones_like(place))[:, None, :, None]
        means = []
        for part in (key, value):
            index = place[:, None, :, None].expand_as(part)
            shape = (*part.shape[:2], room + 1, part.shape[3])
            total = torch.zeros(shape, dtype=dtype, device=part.device)
            total = total.scatter_add(2, index, part.to(dtype))
            means.append((total / counts.clamp(min=1)).to(part.dtype)[:, :, :room])
        return cls(means[0], means[1], counts[:, :, :room], filled)

    def present(self) -> Tensor:
        """Which places hold a member, `[B, 1, room, 1]`."""
        place = torch.arange(self.keys.shape[2], device=self.keys.device)
        return (place < self.filled[:, None])[:, None, :, None]

    def mean(self) -> tuple[Tensor, Tensor, Tensor]:
        """The family as one node: mean key and value `[B, H, 1, D]`, and its count."""
        counts = self.counts * self.present()
        total = counts.sum(2, keepdim=True)
        dtype = accumulation_dtype(self.keys.dtype)
        share = counts.to(dtype) / total.clamp(min=1)
        key, value = (
            (part.to(dtype) * share).sum(2, keepdim=True).to(part.dtype)
            for part in (self.keys, self.values)
        )
        return key, value, total

    def add(self, key: Tensor, value: Tensor, count: Tensor, rows: Tensor) -> "OpenFamily":
        """One more member in the given rows `[B]` (bool)."""
        # Elsewhere the place written to stays beyond what is filled.
        room = int(self.filled.max()) + 1
        return OpenFamily(
            append_rows(self.keys, key, self.filled, room),
            append_rows(self.values, value, self.filled, room),
            append_rows(self.counts, count, self.filled, room),
            self.filled + rows,
        )


def hsa_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    families: Sequence[OpenFamily],
    *,
    scale: float,
    include_self: bool = True,
) -> Tensor:
    """The newest token's attention, `[B, H, 1, Dv]`, as `hsa_attention` with column ties has it.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, Hk, 1, D]`, where Hk divides H: query heads in turn share a key head.
        value: `[B, Hk, 1, Dv]`.
        families: the open families before the token, of every level.
        scale: of the dot products.
        include_self: whether the token attends to itself.
    """
    batch, heads, _, width = query.shape
    dtype = accumulation_dtype(query.dtype)
    # Query heads that share a key head stand in the place of tokens.
    grouped = query.to(dtype).reshape(batch, key.shape[1], -1, width)  # [B, Hk, G, D]
    scores, allowed, values = [], [], []
    with without_autocast(query.device):
        for family in families:
            score = scale * grouped @ family.keys.to(dtype).mT  # [B, Hk, G, room]
            scores.append(score + family.counts.clamp(min=1).to(dtype).log().mT)
            allowed.append(family.present().mT)  # [B, 1, 1, room]
            values.append(family.values)
        if include_self:
            scores.append(scale * grouped @ key.to(dtype).mT)
            allowed.append(torch.ones(batch, 1, 1, 1, dtype=torch.bool, device=query.device))
            values.append(value)
        weights = masked_softmax(torch.cat(scores, -1), torch.cat(allowed, -1))
        mixed = weights @ torch.cat(values, 2).to(dtype)  # [B, Hk, G, Dv]
    return mixed.reshape(batch, heads, 1, -1).to(value.dtype)


def close_families(
    families: Sequence[OpenFamily], closes: Tensor, key: Tensor, value: Tensor, rows: Tensor
) -> list[OpenFamily]:
    """The families once `closes` `[B]` levels, from the bottom, are closed in the given rows.

    `key` and `value` `[B, H, *, D]` show the shapes of a level that opens.
    """
    families = list(families)
    for height in range(int((closes * rows).max()) if len(closes) else 0):
        due = rows & (closes > height)
        family = families[height]
        if height + 1 == len(families):
            families.append(OpenFamily.empty(key, value))
        families[height + 1] = families[height + 1].add(*family.mean(), due & (family.filled > 0))
        families[height] = replace(family, filled=torch.where(due, 0, family.filled))
    return families


def add_token(
    families: Sequence[OpenFamily], key: Tensor, value: Tensor, rows: Tensor
) -> list[OpenFamily]:
    """The families with one more token `[B, H, 1, D]` in the given rows `[B]`."""
    families = list(families) or [OpenFamily.empty(key, value)]
    one = torch.ones(key.shape[0], 1, 1, 1, dtype=torch.int64, device=key.device)
    return [families[0].add(key, value, one, rows), *families[1:]]


def hsa_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    families: Sequence[OpenFamily],
    closes: Tensor,
    rows: Tensor,
    *,
    scale: float,
    include_self: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, list[OpenFamily]]:
    """One step of decoding: close families, attend, add the token.

    Args:
        query: `[B, H, 1, D]`.
        key: `[B, Hk, 1, D]`.
        value: `[B, Hk, 1, Dv]`.
        families: the open families of every level; without gradients their tensors may change in
            place.
        closes: `[B]`, how many levels close before the token.
        rows: bool `[B]`, the rows that have a token.
        scale: of the dot products.
        include_self: whether the token attends to itself.
        impl: `"auto"`, `"native"` (one call) or `"torch"`.

    Returns:
        The attention `[B, H, 1, Dv]` and the families with the token.
    """
    return HSA_STEP.run(impl, query, key, value, families, closes, rows, scale, include_self)


def _step_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    families: Sequence[OpenFamily],
    closes: Tensor,
    rows: Tensor,
    scale: float,
    include_self: bool,
) -> tuple[Tensor, list[OpenFamily]]:
    families = families or [OpenFamily.empty(key, value)]
    families = close_families(families, closes, key, value, rows)
    output = hsa_decode(query, key, value, families, scale=scale, include_self=include_self)
    return output, add_token(families, key, value, rows)


def _why_no_native_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    families: Sequence[OpenFamily],
    *_: object,
) -> str | None:
    if torch.is_grad_enabled():
        return "it changes the cache in place, which gradients forbid"
    # A step closes at most all open levels, which opens one above them.
    if len(families) + 1 >= library.MOST_OPEN:
        return f"it takes fewer than {library.MOST_OPEN} levels, got {len(families) + 1}"
    if any(family.keys.dtype != query.dtype for family in families):
        return "the cache must have the dtype of the query"
    return op.why_unsupported(query, key, value, None)


def _step_native(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    families: Sequence[OpenFamily],
    closes: Tensor,
    rows: Tensor,
    scale: float,
    include_self: bool,
) -> tuple[Tensor, list[OpenFamily]]:
    families = [_contiguous(family) for family in families] or [OpenFamily.empty(key, value)]
    output = value.new_empty(*query.shape[:3], value.shape[3])
    while True:
        parts = [(f.keys, f.values, f.counts, f.filled) for f in families]
        missing = library.decode(
            query, key, value, parts, closes, rows, output, scale, include_self
        )
        if missing < 0:
            return output, families
        if missing == len(families):
            families.append(OpenFamily.empty(key, value))
        families[missing] = _with_room(families[missing])


def _contiguous(family: OpenFamily) -> OpenFamily:
    parts = (family.keys, family.values, family.counts, family.filled)
    if all(part.is_contiguous() for part in parts):
        return family
    return OpenFamily(*(part.contiguous() for part in parts))


def _with_room(family: OpenFamily) -> OpenFamily:
    more = 4 + family.keys.shape[2] // 2
    keys, values, counts = (
        F.pad(part, (0, 0, 0, more)) for part in (family.keys, family.values, family.counts)
    )
    return OpenFamily(keys, values, counts, family.filled.clone())


HSA_STEP = Operation(
    "hsa_step",
    (
        Backend("torch", _step_torch, "level by level"),
        native_backend(
            LIBRARY,
            _step_native,
            "one call; CPU, float32 and bfloat16, no gradients",
            _why_no_native_step,
        ),
    ),
    preferred=("native", "torch"),
)
