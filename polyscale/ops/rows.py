"""Reading and appending rows of tensors whose entries of a batch differ in what they hold."""

import torch
import torch.nn.functional as F
from torch import Tensor


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, ..., index[b, n], :]`: `[B, ..., T, C]` by `[B, N]` to `[B, ..., N, C]`.

    An index of batch size 1 serves all entries.

    Example:
        >>> gather_rows(torch.arange(6.0).view(1, 3, 2), torch.tensor([[2, 0]])).tolist()
        [[[4.0, 5.0], [0.0, 1.0]]]
    """
    if index.shape[0] == 1:
        return x.index_select(-2, index[0])
    index = index.view(index.shape[0], *[1] * (x.dim() - 3), index.shape[1], 1)
    return x.gather(-2, index.expand(*x.shape[:-2], index.shape[-2], x.shape[-1]))


def append_rows(kept: Tensor, new: Tensor, start: Tensor, room: int) -> Tensor:
    """Write `new` `[B, H, N, D]` into `kept` at `start` `[B]`, in a larger buffer where needed."""
    kept = _with_room(kept, room)
    index = start[:, None] + torch.arange(new.shape[2], device=new.device)  # [B, N]
    index = index[:, None, :, None].expand_as(new)
    if torch.is_grad_enabled():
        return kept.scatter(2, index, new)
    return kept.scatter_(2, index, new)


def append_columns(kept: Tensor, new: Tensor, start: int) -> Tensor:
    """`append_rows` where all entries of the batch start at one place: a plain copy."""
    end = start + new.shape[2]
    kept = _with_room(kept, end)
    if torch.is_grad_enabled():
        return torch.cat((kept[:, :, :start], new, kept[:, :, end:]), dim=2)
    kept[:, :, start:end] = new
    return kept


def _with_room(kept: Tensor, room: int) -> Tensor:
    if room <= kept.shape[2]:
        return kept
    # Half as much again, so that growing costs a constant per token.
    return F.pad(kept, (0, 0, 0, room + room // 2 - kept.shape[2]))
