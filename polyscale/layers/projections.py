"""Several projections of one input by one matrix product."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyscale.ops.hkt.native.op import transformed

# For fewer rows copying the weights side by side would take longer than the products.
_MANY_ROWS = 64


def project(x: Tensor, projections: Sequence[nn.Module]) -> Tensor:
    """What the projections make of `[B, T, C]`, side by side along the last axis.

    Example:
        >>> project(torch.randn(1, 5, 8), [nn.Linear(8, 8), nn.Linear(8, 4)]).shape
        torch.Size([1, 5, 12])
    """
    plain = [projection for projection in projections if _is_plain(projection)]
    if len(plain) < len(projections) or x.shape[0] * x.shape[1] < _MANY_ROWS:
        return torch.cat([projection(x) for projection in projections], dim=-1)
    weight = torch.cat(tuple(projection.weight for projection in plain))
    biases = tuple(projection.bias for projection in plain if projection.bias is not None)
    return linear(x, weight, torch.cat(biases) if biases else None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, on the CPU in float32 by oneDNN, which adds the bias while it multiplies.

    The product that `F.linear` takes there needs a pass over memory for the bias.
    """
    if not _takes(x, weight, bias):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def _is_plain(projection: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its weight and bias say everything: no adapter, no hook, nothing quantised."""
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    return type(projection) is nn.Linear and not hooks


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN can run, and nobody looks on who knows only torch's own products."""
    # First, as a compiler that traces the rest would cut its graph here.
    if torch.compiler.is_compiling():
        return False
    tensors = [tensor for tensor in (x, weight, bias) if tensor is not None]
    if any(tensor.device.type != "cpu" or tensor.dtype != torch.float32 for tensor in tensors):
        return False
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    # Autocast, subclasses of tensors, FLOP counters and other modes, torch.func.
    if torch.is_autocast_enabled("cpu"):
        return False
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        return False
    return not torch._C._len_torch_dispatch_stack() and not transformed(tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            linear(grad, weight.t(), None) if need_x else None,
            rows.t() @ x.flatten(0, -2) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )
