"""Reading and appending rows where the entries of a batch differ in length."""

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


def append_rows(buffer: Tensor, new: Tensor, start: Tensor, room: int) -> Tensor:
    """Write `new` `[B, H, N, D]` at `start` `[B]`, into a buffer enlarged to `room` if needed."""
    buffer = _with_room(buffer, room)
    index = start[:, None] + torch.arange(new.shape[2], device=new.device)  # [B, N]
    index = index[:, None, :, None].expand_as(new)
    if torch.is_grad_enabled():
        return buffer.scatter(2, index, new)
    return buffer.scatter_(2, index, new)


def append_columns(buffer: Tensor, new: Tensor, start: int) -> Tensor:
    """`append_rows` where all entries of the batch have the same start: a plain copy."""
    end = start + new.shape[2]
    buffer = _with_room(buffer, end)
    if torch.is_grad_enabled():
        return torch.cat((buffer[:, :, :start], new, buffer[:, :, end:]), dim=2)
    buffer[:, :, start:end] = new
    return buffer


def _with_room(buffer: Tensor, room: int) -> Tensor:
    if room <= buffer.shape[2]:
        return buffer
    # Half as much again, so that growing costs a constant per token.
    return F.pad(buffer, (0, 0, 0, room + room // 2 - buffer.shape[2]))
