"""HSA of several new tokens at once over the open families of a hierarchical cache.

The tokens of a chunk fall in segments. Those of segment c stand under nodes that opened within the
chunk up to height c, and above it under nodes that were open before. So a token sees

- what is left of it in its own segment: causal attention over a tree of new tokens;
- closed nodes of the cache of height c and more;
- if c > 0, the node of height c that was open before the chunk and has closed in it, as one node.

The first part is `hsa_attention` over a forest with a tree for each segment. The others are few
columns: O(b log_b N) for any number of tokens. Log-sums merge the parts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.hsa.api import hsa_attention
from polyscale.ops.hsa.decode import OpenFamily
from polyscale.ops.numerics import accumulation_dtype, masked_softmax
from polyscale.ops.tracing import without_autocast
from polyscale.trees.growth import segment_forest

_NOTHING = -1e30  # the log-sum of no columns: finite, so that gradients are


def hsa_extend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    families: Sequence[OpenFamily],
    closes: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    include_self: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, list[OpenFamily]]:
    """What `hsa_step` makes of T tokens one after the other, in parallel.

    Args:
        query: `[B, H, T, D]`.
        key: `[B, Hk, T, D]`, where Hk divides H: query heads in turn share a key head.
        value: `[B, Hk, T, Dv]`.
        families: the open families of every level before the tokens.
        closes: `[B, T]`, how many levels close right before each token.
        lengths: `[B]`, how many tokens of each row are real; they come first.
        scale: of the dot products.
        include_self: whether a token attends to itself.
        impl: of `hsa_attention` over the new tokens.

    Returns:
        The attention `[B, H, T, Dv]` and the families with the tokens.

    >>> x, closes = torch.randn(1, 2, 5, 8), torch.tensor([[0, 0, 1, 0, 1]])
    >>> output, families = hsa_extend(x, x, x, [], closes, torch.tensor([5]), scale=0.3)
    >>> [int(family.filled) for family in families]
    [1, 2]
    """
    chunk = _Chunk(key, value, families, closes, lengths)
    dtype = accumulation_dtype(query.dtype)
    wide = query.to(dtype), key.to(dtype), value.to(dtype)
    with without_autocast(query.device):
        output, sums = _among_themselves(wide, chunk, scale, include_self, impl)
        seen, seen_sums = _over_the_cache(wide[0], chunk, scale)
        share = torch.sigmoid(sums.clamp(min=_NOTHING) - seen_sums)[..., None]
        output = share * output + (1 - share) * seen
    return output.to(value.dtype), chunk.families_after(key, value)


class _Chunk:
    """Where the new tokens stand in the hierarchy, and the nodes that they close."""

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        families: Sequence[OpenFamily],
        closes: Tensor,
        lengths: Tensor,
    ) -> None:
        batch, _, count, _ = key.shape
        self.lengths = lengths
        position = torch.arange(count, device=key.device)
        self.real = position < lengths[:, None]  # [B, T]
        self.closes = torch.where(self.real, closes, 0)
        most = int(self.closes.max()) if closes.numel() else 0
        missing = max(1, most + 1) - len(families)
        self.families = [*families, *[OpenFamily.empty(key, value)] * missing]
        levels = len(self.families)
        # The number of the node of each height that a token lies in; 0 was open before the chunk.
        self.numbers = [position.expand(batch, -1)]
        self.numbers += [(self.closes >= height).cumsum(1) for height in range(1, levels)]
        self.segment = torch.zeros_like(self.closes)  # [B, T]
        for number in self.numbers[1:]:
            self.segment += number > 0
        self.closing = self._closing(key, value)

    def _closing(self, key: Tensor, value: Tensor) -> OpenFamily:
        """Of every height, the node that is open before the chunk and closes in it.

        Under the one of height c are the cache's nodes below that height and the tokens of all
        segments before c.
        """
        levels = len(self.families)
        place = torch.where(self.real, self.segment, levels)
        new = OpenFamily.from_places(key, value, place, levels, self.lengths)
        means = [family.mean() for family in self.families]
        counts = torch.cat([total for _, _, total in means], 2)  # [B, 1, levels, 1]
        dtype = accumulation_dtype(key.dtype)
        total = counts + new.counts
        below = total.cumsum(2) - total
        pooled = []
        for old, fresh in zip((0, 1), (new.keys, new.values), strict=True):
            before = torch.cat([mean[old] for mean in means], 2).to(dtype)
            sums = counts * before + new.counts * fresh.to(dtype)
            mean = (sums.cumsum(2) - sums) / below.clamp(min=1)
            pooled.append(mean.to(key.dtype))
        return OpenFamily(pooled[0], pooled[1], below, self.lengths)

    def families_after(self, key: Tensor, value: Tensor) -> list[OpenFamily]:
        """The open families once the chunk's tokens are in them."""
        last = (self.lengths - 1).clamp(min=0)[:, None]
        newest_segment = self.segment.gather(1, last)  # [B, 1]
        after = []
        for height, old in enumerate(self.families):
            number = self.numbers[height]
            newest = number.gather(1, last)
            inside = self.real
            if height + 1 < len(self.families):
                above = self.numbers[height + 1]
                inside = inside & (above == above.gather(1, last))
            if height:  # the newest node is still open, and the first is no new one
                inside = inside & (number < newest) & (number > 0)
            fresh = _members(key, value, number, inside, newest + (height == 0))
            parts = [(old, old.filled * (newest_segment <= height)[:, 0])]
            if height:
                closed = self._closing_at(height)
                closes_here = (newest_segment[:, 0] == height) & (closed.counts.flatten() > 0)
                parts.append((closed, closes_here.long()))
            after.append(_joined([*parts, (fresh, fresh.filled)]))
        return after

    def _closing_at(self, height: int) -> OpenFamily:
        at = slice(height, height + 1)
        node = self.closing
        return OpenFamily(
            node.keys[:, :, at], node.values[:, :, at], node.counts[:, :, at], node.filled
        )


def _among_themselves(
    projected: tuple[Tensor, Tensor, Tensor],
    chunk: _Chunk,
    scale: float,
    include_self: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Attention over new tokens of the same segment, and log-sums `[B, H, T]`."""
    batch, heads, count, _ = projected[0].shape
    forest = segment_forest(chunk.closes, chunk.segment, chunk.lengths)
    query, key, value = (part.transpose(0, 1).flatten(1, 2) for part in projected)  # [H, B * T, D]
    output, sums = hsa_attention(
        query,
        key,
        value,
        forest,
        tie="columns",
        causal=True,
        include_self=include_self,
        scale=scale,
        enable_gqa=heads != len(key),
        return_lse=True,
        impl=impl,
    )
    output = output.unflatten(1, (batch, count)).transpose(0, 1)
    return output, sums.unflatten(1, (batch, count)).transpose(0, 1)


def _over_the_cache(query: Tensor, chunk: _Chunk, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over closed nodes that hold older tokens, and log-sums `[B, H, T]`."""
    batch, heads, count, width = query.shape
    segment = chunk.segment[:, None, :, None]  # [B, 1, T, 1]
    columns = [*chunk.families, chunk.closing]
    allowed = [
        family.present().mT & (segment <= height) for height, family in enumerate(chunk.families)
    ]
    height = torch.arange(len(chunk.families), device=query.device)
    closed = (chunk.closing.counts.mT > 0) & (height > 0)
    allowed.append(closed & (segment == height))
    dtype = query.dtype
    keys = torch.cat([part.keys for part in columns], 2).to(dtype)  # [B, Hk, E, D]
    values = torch.cat([part.values for part in columns], 2).to(dtype)
    counts = torch.cat([part.counts for part in columns], 2).clamp(min=1).to(dtype)
    key_heads = keys.shape[1]
    grouped = query.reshape(batch, key_heads, -1, width)  # [B, Hk, G * T, D]
    scores = scale * grouped @ keys.mT + counts.log().mT
    groups = heads // max(1, key_heads)
    seen = torch.cat(allowed, -1).repeat(1, 1, groups, 1)  # [B, 1, G * T, E]
    output = masked_softmax(scores, seen) @ values
    sums = torch.where(seen, scores, _NOTHING).logsumexp(-1)
    return output.reshape(batch, heads, count, -1), sums.reshape(batch, heads, count)


def _members(
    key: Tensor, value: Tensor, number: Tensor, inside: Tensor, stop: Tensor
) -> OpenFamily:
    """The nodes of the tokens `inside` `[B, T]`, which are numbered up to `stop` `[B, 1]`."""
    first = torch.where(inside, number, stop).amin(1, keepdim=True)  # [B, 1]
    filled = (stop - first)[:, 0]
    room = int(filled.max()) if len(filled) else 0
    # Members are summed at their place in the family, other tokens at the place after it.
    place = torch.where(inside, number - first, room)
    return OpenFamily.from_places(key, value, place, room, filled)


def _joined(parts: Sequence[tuple[OpenFamily, Tensor]]) -> OpenFamily:
    """The first members of several families, as many as given `[B]`, as one family."""
    filled = torch.stack([count for _, count in parts]).sum(0)  # [B]
    room = int(filled.max()) if len(filled) else 0
    begin = torch.zeros_like(filled)
    places = []
    for family, count in parts:
        offset = torch.arange(family.keys.shape[2], device=filled.device)
        place = begin[:, None] + offset
        places.append(torch.where(offset < count[:, None], place, room))
        begin = begin + count
    place = torch.cat(places, 1)[:, None, :, None]  # [B, 1, members, 1]

    def join(tensors: Sequence[Tensor]) -> Tensor:
        members = torch.cat(list(tensors), 2)
        empty = members.new_zeros(*members.shape[:2], room + 1, members.shape[3])
        return empty.scatter(2, place.expand_as(members), members)[:, :, :room].contiguous()

    return OpenFamily(
        join([family.keys for family, _ in parts]),
        join([family.values for family, _ in parts]),
        join([family.counts for family, _ in parts]),
        filled,
    )
