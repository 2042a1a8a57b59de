"""Derivatives that the kernels do not have: how they are detected, and what computes them instead.

The kernels compute values and gradients. Gradients of gradients are those of plain torch functions
that compute the same; forward-mode AD and torch.func are left to other implementations.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad


def transformed(tensors: Sequence[Tensor]) -> bool:
    """Whether torch.func or forward-mode AD is active: the kernels have no rules for them."""
    return torch._C._are_functorch_transforms_active() or has_tangent(tensors)


def has_tangent(tensors: Sequence[Tensor]) -> bool:
    """Whether one of these has a tangent of forward-mode AD."""
    if torch.compiler.is_compiling():
        return forward_ad._current_level >= 0  # any may have one: tracing hides tangents
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def beyond_gradients(tensors: Sequence[Tensor]) -> bool:
    """Whether forward-mode AD is active, or torch.func takes a gradient of a gradient."""
    if torch.compiler.is_compiling():
        return has_tangent(tensors)
    kinds = [interpreter.key() for interpreter in get_interpreter_stack() or ()]
    if TransformType.Jvp in kinds or kinds.count(TransformType.Grad) > 1:
        return True
    return has_tangent(tensors)


def refuse_tangents(*cotangents: Tensor | None) -> None:
    """Raise where a backward pass is itself differentiated in forward mode."""
    if has_tangent([cotangent for cotangent in cotangents if cotangent is not None]):
        raise NotImplementedError(
            "the backward pass of a native kernel has no forward-mode derivatives; "
            "use impl='reference'"
        )


def differentiate_gradients(
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The backward pass of a backward pass.

    Args:
        function: plain torch that computes the same as the kernel.
        inputs: of the kernel.
        grad_outputs: gradients of its outputs.
        cotangents: gradients of a loss by the gradients of the inputs.

    Returns:
        Gradients of `grad_outputs` and of `inputs`.
    """
    once_more = torch.is_grad_enabled()
    with torch.enable_grad():
        # Separate views, as an input may be passed twice or be computed from another one.
        leaves = [x.view_as(x).requires_grad_() for x in inputs]
        upstream = [x.view_as(x).requires_grad_() for x in grad_outputs]
        gradients = torch.autograd.grad(function(*leaves), leaves, upstream, create_graph=True)
        pairs = zip(gradients, cotangents, strict=True)
        used = [(gradient, given) for gradient, given in pairs if given is not None]
        found = torch.autograd.grad(
            [gradient for gradient, _ in used],
            [*upstream, *leaves],
            [given for _, given in used],
            create_graph=once_more,
            allow_unused=True,
        )
    return list(found[: len(upstream)]), list(found[len(upstream) :])
