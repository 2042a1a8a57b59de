"""The gradient of a projection's weight and bias, in one pass over one or two inputs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.linear.native.library import LIBRARY
from polyscale.ops.linear.native.op import weight_gradient_native
from polyscale.ops.linear.reference import weight_gradient_reference
from polyscale.ops.linear.support import why_not_float32_on_cpu
from polyscale.ops.native.backend import native_backend


def _why_unsupported(inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> str | None:
    if torch.is_grad_enabled():
        return "it has no gradients of its own"
    return why_not_float32_on_cpu([*inputs, *grads])


WEIGHT_GRADIENT = Operation(
    "linear_weight_gradient",
    (
        Backend("reference", weight_gradient_reference, "one product per input"),
        native_backend(
            LIBRARY,
            weight_gradient_native,
            "one pass over all inputs; CPU, float32",
            _why_unsupported,
        ),
    ),
    preferred=("native", "reference"),
)
