"""One vector per sequence."""

import torch
from torch import Tensor

from polyscale.checks import check_choice


def pool(
    x: Tensor,
    how: str,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The mean, first or last real token of each sequence: `[B, C]`, or `[S, C]` if packed.

    A row that is all padding gives zeros.

    >>> pool(torch.ones(2, 5, 8), "mean").shape
    torch.Size([2, 8])
    """
    check_choice("pooling", how, ("mean", "first", "last"))
    if cu_seqlens is not None:
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        if how != "mean":
            return x[0, starts if how == "first" else ends - 1]
        sequence = torch.repeat_interleave(ends - starts, output_size=x.shape[1])
        total = x.new_zeros(len(starts), x.shape[2]).index_add(0, sequence, x[0])
        return total / (ends - starts)[:, None]
    if key_padding_mask is None:
        return {"mean": x.mean(1), "first": x[:, 0], "last": x[:, -1]}[how]
    real = ~key_padding_mask
    unpadded = x.masked_fill(key_padding_mask[..., None], 0.0)
    if how == "mean":
        return unpadded.sum(1) / real.sum(1, keepdim=True).clamp(min=1)
    # The first (last) real column is where the count of real tokens reaches 1 (all).
    count = real.cumsum(1)
    target = torch.ones_like(count[:, -1:]) if how == "first" else count[:, -1:]
    column = ((count == target) & real).to(torch.uint8).argmax(1)
    return unpadded[torch.arange(len(x), device=x.device), column]
