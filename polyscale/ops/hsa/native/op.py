"""HSA on the CPU as one kernel: a torch operation with its own backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from polyscale.ops.hsa.native import library
from polyscale.ops.hsa.native.library import Inputs
from polyscale.ops.hsa.native.plan import IN_ORDER
from polyscale.ops.native.derivatives import refuse_tangents, transformed

MAX_WIDTH = 1 << 16


def attend(*arguments: Any) -> tuple[Tensor, Tensor]:
    """What `attend_at_once` returns, with gradients, by the shortest way that torch can follow.

    A compiler or a dispatch mode has to see the operation, which takes some 20 microseconds of
    torch's dispatcher; gradients alone take an autograd function, without it half of that.
    """
    tensors = [x for x in arguments[:-4] if x is not None]
    if (
        torch.compiler.is_compiling()
        or _get_current_dispatch_mode() is not None
        or any(type(x) not in (Tensor, nn.Parameter) for x in tensors)
    ):
        return hsa_attention_native(*arguments)
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Attend.apply(*arguments)
    return attend_at_once(*arguments)


def why_unsupported(query: Tensor, key: Tensor, value: Tensor, alpha: Tensor | None) -> str | None:
    """Why the kernel cannot take these arguments; None if it can."""
    if alpha is not None:
        return "it computes softmax families only, got alpha other than 1"
    if query.device.type != "cpu":
        return f"it runs on the CPU, got tensors on {query.device}"
    if query.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, got {query.dtype}"
    if max(query.shape[-1], value.shape[-1]) > MAX_WIDTH:
        return f"it takes widths up to {MAX_WIDTH}, got {query.shape[-1]} and {value.shape[-1]}"
    # torch would take the operation for a constant: a tangent of zero, without a word.
    if transformed((query, key, value)):
        return "it has reverse-mode gradients only: no torch.func transforms, no forward mode"
    return None


def attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Tensor,
    ignored: Tensor | None,
    position_query: Tensor | None,
    position_key: Tensor | None,
    columns: bool,
    causal: bool,
    include_self: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output `[B, H, N, Dv]` and logarithms of sums `[B, H, N]`, past torch's dispatcher.

    The sums are those of every row for columns; for blocks those of the roots (minus their
    energies), which come first.
    """
    if causal and not int(plan[IN_ORDER]):
        raise ValueError(
            "causal=True: the tree's leaves, from left to right, must carry data rows in "
            "increasing order; got a tree whose leaves carry them in another order"
        )
    options = columns, causal, include_self, scale
    inputs = Inputs(query, key, value, plan, ignored, position_query, position_key, *options)
    output, log_sums = _empty_results(query, value)
    if not columns:
        log_sums.zero_()
    library.forward(inputs, output, log_sums)
    return output, log_sums


hsa_attention_native = torch.library.custom_op(
    "polyscale::hsa_attention", attend_at_once, mutates_args=(), device_types="cpu"
)


@hsa_attention_native.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(query, value)


def gradients_at_once(
    grad_output: Tensor,
    grad_log_sums: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Tensor,
    ignored: Tensor | None,
    position_query: Tensor | None,
    position_key: Tensor | None,
    columns: bool,
    causal: bool,
    include_self: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients of the query, the key and the value, and of the positions if there are any.

    Past torch's dispatcher.
    """
    options = columns, causal, include_self, scale
    inputs = Inputs(query, key, value, plan, ignored, position_query, position_key, *options)
    heads = query.shape[1]
    gradients = (
        _empty_gradient(query, heads),
        _empty_gradient(key, heads),
        _empty_gradient(value, heads),
    )
    positions = None
    if position_query is not None:
        size = (query.shape[0], heads, *position_query.shape[1:])
        positions = (
            query.new_zeros(size, dtype=torch.float32),
            query.new_zeros(size, dtype=torch.float32),
        )
    library.backward(inputs, grad_output, grad_log_sums, gradients, positions)
    found = [
        _per_head(gradient, like)
        for gradient, like in zip(gradients, (query, key, value), strict=True)
    ]
    if positions is not None and position_query is not None:
        found += [_per_position_head(part, position_query) for part in positions]
    return found


_backward = torch.library.custom_op(
    "polyscale::hsa_attention_backward", gradients_at_once, mutates_args=(), device_types="cpu"
)


def _per_head(gradient: Tensor, like: Tensor) -> Tensor:
    """Query heads that share a key head add up."""
    if gradient.shape[1] != like.shape[1]:
        gradient = gradient.unflatten(1, (like.shape[1], -1)).sum(2)
    return gradient.to(like.dtype)


def _per_position_head(gradient: Tensor, like: Tensor) -> Tensor:
    total = gradient.sum(0)
    return total.sum(0, keepdim=True) if like.shape[0] == 1 else total


@_backward.register_fake
def _(
    grad_output: Tensor,
    grad_log_sums: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: Tensor,
    ignored: Tensor | None,
    position_query: Tensor | None,
    position_key: Tensor | None,
    *_: Any,
) -> list[Tensor]:
    heads = query.shape[1]
    found = [_per_head(_empty_gradient(x, heads), x) for x in (query, key, value)]
    if position_query is not None and position_key is not None:
        found += [position_query.new_empty(position_query.shape) for _ in range(2)]
    return found


def _empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    width = value.shape[-1]
    # Heads side by side if the query's are: so the projection after the attention reads them.
    if query.stride(1) < query.stride(2):
        output = value.new_empty(batch, rows, heads, width).transpose(1, 2)
    else:
        output = value.new_empty(batch, heads, rows, width)
    return output, query.new_empty(batch, heads, rows, dtype=torch.float32)


def _empty_gradient(x: Tensor, heads: int) -> Tensor:
    """Laid out like the input if its channels lie side by side, as the kernel writes them."""
    if x.shape[1] == heads:
        like = torch.empty_like(x, dtype=torch.float32)
        if like.shape[-1] == 1 or like.stride(-1) == 1:
            return like
    shape = (x.shape[0], heads, *x.shape[2:])
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.columns, ctx.causal, ctx.include_self, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.value_shape = output[0].shape
    ctx.save_for_backward(*tensors)


def _differentiate(
    ctx: Any,
    grad_output: Tensor | None,
    grad_log_sums: Tensor | None,
    gradients_of: Callable[..., list[Tensor]] = _backward,
) -> tuple:
    refuse_tangents(grad_output, grad_log_sums)
    query, key, value, plan, ignored, *positions = ctx.saved_tensors
    if grad_output is None:
        grad_output = value.new_zeros(ctx.value_shape)
    gradients = gradients_of(
        grad_output.to(value.dtype),
        grad_log_sums,
        query,
        key,
        value,
        plan,
        ignored,
        *positions,
        ctx.columns,
        ctx.causal,
        ctx.include_self,
        ctx.scale,
    )
    found = gradients[3:] if len(gradients) > 3 else [None, None]
    return *gradients[:3], None, None, *found, *[None] * 4


hsa_attention_native.register_autograd(_differentiate, setup_context=_setup_context)


class _Attend(torch.autograd.Function):
    """The same past torch's dispatcher, for plain tensors."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        found = attend_at_once(*arguments)
        _setup_context(ctx, arguments, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple:
        # What gradients of gradients need is an operation that refuses to have them.
        again = torch.is_grad_enabled() or _get_current_dispatch_mode() is not None
        grad_output, grad_log_sums = grads
        gradients_of = _backward if again else gradients_at_once
        return _differentiate(ctx, grad_output, grad_log_sums, gradients_of)


def _refuse_second(ctx: Any, *_: Any) -> tuple:
    raise NotImplementedError(
        "the native kernel has no gradients of its gradients; use impl='torch'"
    )


_backward.register_autograd(_refuse_second, setup_context=lambda ctx, inputs, output: None)
