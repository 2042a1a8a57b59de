"""Several projections of one input by one matrix product."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyscale.ops.hkt.native import weight_gradient as native
from polyscale.ops.hkt.native.derivatives import transformed

# For fewer rows copying the weights side by side would take longer than the products.
_MANY_ROWS = 64


def project(x: Tensor, projections: Sequence[nn.Module], fused: bool = True) -> Tensor:
    """What the projections make of `[B, T, C]`, side by side along the last axis.

    `fused` lets faster products than torch's own run where they can.

    Example:
        >>> project(torch.randn(1, 5, 8), [nn.Linear(8, 8), nn.Linear(8, 4)]).shape
        torch.Size([1, 5, 12])
    """
    return project_together(x, None, projections, 0, fused)[0]


def project_together(
    x: Tensor,
    other: Tensor | None,
    projections: Sequence[nn.Module],
    shared: int,
    fused: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`project` of `x`, and of another input by the first `shared` of the projections.

    Their gradients are summed up in one pass over both.
    """
    plain = [projection for projection in projections if _is_plain(projection)]
    rows = sum(each.shape[0] * each.shape[1] for each in (x, other) if each is not None)
    # A compiled graph serves every number of rows.
    few = not torch.compiler.is_compiling() and rows < _MANY_ROWS
    if len(plain) < len(projections) or few:
        side_by_side = _one_by_one(x, projections)
        return side_by_side, None if other is None else _one_by_one(other, projections[:shared])
    weight = torch.cat(tuple(projection.weight for projection in plain))
    biases = tuple(projection.bias for projection in plain if projection.bias is not None)
    bias = torch.cat(biases) if biases else None
    outputs = sum(projection.out_features for projection in plain[:shared])
    if fused:
        return linear_together(x, other, weight, bias, outputs)
    return _torch_together(x, other, weight, bias, outputs)


def _one_by_one(x: Tensor, projections: Sequence[nn.Module]) -> Tensor:
    return torch.cat([projection(x) for projection in projections], dim=-1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`, on the CPU in float32 by oneDNN, which adds the bias while it multiplies.

    The product that `F.linear` takes there needs a pass over memory for the bias.
    """
    return linear_together(x, None, weight, bias, 0)[0]


def linear_together(
    x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor | None, outputs: int
) -> tuple[Tensor, Tensor | None]:
    """`linear` of `x`, and of another input to the first `outputs`."""
    if not _takes(x, other, weight, bias):
        return _torch_together(x, other, weight, bias, outputs)
    return _Linear.apply(x, other, weight, bias, outputs)


def _torch_together(
    x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor | None, outputs: int
) -> tuple[Tensor, Tensor | None]:
    made = F.linear(x, weight, bias)
    if other is None:
        return made, None
    return made, F.linear(other, weight[:outputs], None if bias is None else bias[:outputs])


def _is_plain(projection: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its weight and bias say everything: no adapter, no hook, nothing quantised."""
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    return type(projection) is nn.Linear and not hooks


def _takes(*given: Tensor | None) -> bool:
    """Whether oneDNN can run, and nobody looks on who knows only torch's own products."""
    # First, as a compiler that traces the rest would cut its graph here.
    if torch.compiler.is_compiling():
        return False
    tensors = [tensor for tensor in given if tensor is not None]
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
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        outputs: int,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(x, other, weight)
        ctx.outputs = outputs
        made = _product(x, weight, bias)
        if other is None:
            return made, None
        return made, _product(other, weight[:outputs], None if bias is None else bias[:outputs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_other: Tensor | None) -> tuple[Tensor | None, ...]:
        x, other, weight = ctx.saved_tensors
        need_x, need_other, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = grad_input = grad_weight = grad_bias = None
        inputs, grads = [x], [grad]
        if need_x:
            grad_x = linear(grad, weight.t(), None)
        if grad_other is not None:
            inputs, grads = [x, other], [grad, grad_other]
            if need_other:
                grad_input = linear(grad_other, weight[: ctx.outputs].t(), None)
        if need_weight or need_bias:
            grad_weight, grad_bias = _weight_gradient(inputs, grads)
        return (
            grad_x,
            grad_input,
            grad_weight if need_weight else None,
            grad_bias if need_bias else None,
            None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _weight_gradient(inputs: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    # The kernel has no gradients of its own.
    if not torch.is_grad_enabled() and _takes(*inputs, *grads) and native.is_available():
        return native.weight_gradient(inputs, grads)
    first, outputs = grads[0].flatten(0, -2), grads[0].shape[-1]
    weight, bias = first.t() @ inputs[0].flatten(0, -2), first.sum(0)
    for x, grad in zip(inputs[1:], grads[1:], strict=True):
        rows, missing = grad.flatten(0, -2), outputs - grad.shape[-1]
        weight = weight + F.pad(rows.t() @ x.flatten(0, -2), (0, 0, 0, missing))
        bias = bias + F.pad(rows.sum(0), (0, missing))
    return weight, bias
