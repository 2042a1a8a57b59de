"""The gradient of a projection on the CPU: weight and bias in one pass over one or two inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.linear.native import library


def weight_gradient_native(
    inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """As `weight_gradient_reference`; float32 on the CPU."""
    return _weight_gradient(list(inputs), list(grads))


@torch.library.custom_op("polyscale::weight_gradient", mutates_args=(), device_types="cpu")
def _weight_gradient(inputs: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    grad_weight, grad_bias = _empty_gradients(inputs, grads)
    rows = [x.flatten(0, -2).contiguous() for x in inputs]
    grad_rows = [grad.flatten(0, -2).contiguous() for grad in grads]
    library.weight_gradient(rows, grad_rows, grad_weight, grad_bias)
    return grad_weight, grad_bias


@_weight_gradient.register_fake
def _(inputs: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    return _empty_gradients(inputs, grads)


def _empty_gradients(inputs: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, Tensor]:
    outputs = grads[0].shape[-1]
    return inputs[0].new_empty(outputs, inputs[0].shape[-1]), inputs[0].new_empty(outputs)
