"""HSA of one new token: over the closed nodes of every open family, and itself."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.looks import without_autocast
from polyscale.ops.numerics import accumulation_dtype, masked_softmax
from polyscale.ops.rows import append_rows


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


HSA_DECODE = Operation(
    "hsa_decode",
    (Backend("torch", hsa_decode, "one new token over the open families"),),
    preferred=("torch",),
)
