"""Projections by oneDNN on the CPU, with gradients of every order.

The product behind `torch.nn.functional.linear` needs another pass over memory for the bias; oneDNN
adds it while it multiplies. The gradients of the weight are an operation of their own.
"""

from typing import Any

import torch
from torch import Tensor

from polyscale.ops.linear.reference import linear_reference
from polyscale.ops.linear.support import why_not_float32_on_cpu
from polyscale.ops.linear.weight_gradient import WEIGHT_GRADIENT


def linear_onednn(
    x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor | None, outputs: int
) -> tuple[Tensor, Tensor | None]:
    """As `linear_reference`."""
    return _Linear.apply(x, other, weight, bias, outputs)


def why_unavailable() -> str | None:
    """Why oneDNN cannot run on this machine."""
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if not torch.backends.mkldnn.enabled:
        return "oneDNN is switched off (torch.backends.mkldnn)"
    return None


def why_unsupported(
    x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor | None, outputs: int
) -> str | None:
    """Why oneDNN cannot take these tensors."""
    return why_not_float32_on_cpu([each for each in (x, other, weight, bias) if each is not None])


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
        projected = _product(x, weight, bias)
        if other is None:
            return projected, None
        return projected, _product(
            other, weight[:outputs], None if bias is None else bias[:outputs]
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_other: Tensor | None) -> tuple[Tensor | None, ...]:
        x, other, weight = ctx.saved_tensors
        need_x, need_other, need_weight, need_bias, _ = ctx.needs_input_grad
        grad_x = grad_input = grad_weight = grad_bias = None
        inputs, grads = [x], [grad]
        if need_x:
            grad_x = _linear(grad, weight.t())
        if grad_other is not None:
            inputs, grads = [x, other], [grad, grad_other]
            if need_other:
                grad_input = _linear(grad_other, weight[: ctx.outputs].t())
        if need_weight or need_bias:
            grad_weight, grad_bias = WEIGHT_GRADIENT.run("auto", inputs, grads)
        return (
            grad_x,
            grad_input,
            grad_weight if need_weight else None,
            grad_bias if need_bias else None,
            None,
        )


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product by oneDNN, or by torch where something else differentiates or watches it."""
    run = linear_reference if why_unsupported(x, None, weight, None, 0) else linear_onednn
    return run(x, None, weight, None, 0)[0]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
