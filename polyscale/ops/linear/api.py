"""`linear`: the product of a projection, for one input or for two that share a weight."""

from torch import Tensor

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.linear.onednn import linear_onednn, why_unavailable, why_unsupported
from polyscale.ops.linear.reference import linear_reference
from polyscale.ops.linear.weight_gradient import WEIGHT_GRADIENT

LINEAR = Operation(
    "linear",
    (
        Backend("reference", linear_reference, "torch.nn.functional.linear"),
        Backend(
            "native",
            linear_onednn,
            "oneDNN, which adds the bias while it multiplies; CPU, float32",
            why_unavailable=why_unavailable,
            why_unsupported=why_unsupported,
        ),
    ),
    preferred=("native", "reference"),
)
OPERATIONS = (LINEAR, WEIGHT_GRADIENT)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, impl: str = "auto") -> Tensor:
    """`torch.nn.functional.linear` with a choice of implementation.

    Args:
        x: `[.., C]`.
        weight: `[O, C]`.
        bias: `[O]` or None.
        impl: `"auto"`, or a name that `polyscale.implementations()` lists.

    Example:
        >>> import torch
        >>> linear(torch.ones(2, 3), torch.ones(4, 3), None).shape
        torch.Size([2, 4])
    """
    return LINEAR.run(impl, x, None, weight, bias, 0)[0]


def linear_together(
    x: Tensor,
    other: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    outputs: int,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`linear` of `x`, and of another input to the first `outputs`.

    The gradients of the weight are summed in one pass over both.
    """
    return LINEAR.run(impl, x, other, weight, bias, outputs)
