"""Gradients of `scaled_dot_product_attention` that hold at scores of any size.

The backward pass of its fused kernels computes the scores again and may round them differently. The
attention weights are `exp(score - lse)`: from scores of about 1e6 on they are wrong, and from about
1e9 on the exponential may overflow. Whether that happens depends on numbers, which a trace does not
have and an accelerator does not show without waiting. So the fused kernel always runs, and an
operator after its backward pass looks at the numbers and replaces the gradients where the scores
are huge.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.ops.numerics import accumulation_dtype
from polyscale.ops.tracing import without_autocast

# From here on a rounding error of the scores is no longer small beside 1.
HUGE_SCORE = 1e6
ROWS = 128  # the exact gradients take that many queries at a time


def has_huge_scores(query: Tensor, key: Tensor, scale: float) -> bool:
    """Whether a score may be beyond `HUGE_SCORE`, by the lengths of queries and keys."""
    if query.numel() == 0 or key.numel() == 0:
        return False
    longest = query.detach().norm(dim=-1).amax() * key.detach().norm(dim=-1).amax()
    return not float(longest) * abs(scale) <= HUGE_SCORE  # NaN counts as huge


def guarded_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """`scaled_dot_product_attention` whose gradients are replaced, when they are computed, if the
    scores are huge. For code that is traced, and for accelerators.
    """
    query, key, value, same_mask, token = _Inputs.apply(query, key, value, mask, causal, scale)
    if mask is not None and mask.requires_grad:
        mask = same_mask  # otherwise torch would look for a kernel with gradients of masks
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale
    )
    return _Output.apply(output, token)


class _Inputs(torch.autograd.Function):
    """The inputs as they are. Its backward pass is the last one, and corrects their gradients.

    It needs the gradient of the output too, which arrives as that of `token`: a zero of the
    output's shape that `_Output` takes and does not use.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> tuple[Tensor | None, ...]:
        token = value.new_zeros(()).expand(*query.shape[:-1], value.shape[-1])
        kept = None if mask is None else mask.view_as(mask)
        return query.view_as(query), key.view_as(key), value.view_as(value), kept, token

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(
        ctx: Any,
        grad_query: Tensor,
        grad_key: Tensor,
        grad_value: Tensor,
        grad_mask: Tensor | None,
        grad_output: Tensor,
    ) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        if not ctx.needs_input_grad[3]:
            grad_mask = None
        if not _is_differentiated_again():
            with torch.no_grad():
                correct_gradients(
                    query, key, value, mask, ctx.causal, ctx.scale, grad_output,
                    grad_query, grad_key, grad_value, grad_mask,
                )  # fmt: skip
        return grad_query, grad_key, grad_value, grad_mask, None, None


def _is_differentiated_again() -> bool:
    """Whether this backward pass is itself recorded. The plain kernel alone can do that."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False  # both record every backward pass
    return torch.is_grad_enabled()


class _Output(torch.autograd.Function):
    """The output as it is; its gradient is also that of `token`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, token: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Nothing is needed."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


@torch.library.custom_op(
    "polyscale::correct_sdpa_gradients",
    mutates_args=("grad_query", "grad_key", "grad_value", "grad_mask"),
    tags=(torch.Tag.cudagraph_unsafe,),  # it looks at numbers
)
def correct_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    grad_output: Tensor,
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    grad_mask: Tensor | None,
) -> None:
    """Replace the gradients of a fused kernel by exact ones if the scores are huge."""
    if not has_huge_scores(query, key, scale):
        return
    for gradient in (grad_query, grad_key, grad_value, grad_mask):
        if gradient is not None:
            gradient.zero_()
    dtype = accumulation_dtype(query.dtype)
    q, k, v, grad = (x.to(dtype) for x in (query, key, value, grad_output))
    total_key, total_value = torch.zeros_like(k), torch.zeros_like(v)
    with without_autocast(query.device):
        for start in range(0, q.shape[-2], ROWS):
            rows = slice(start, start + ROWS)
            attention = torch.softmax(_scores(q, k, mask, causal, scale, rows), dim=-1)
            grad_attention = grad[..., rows, :] @ v.mT  # [B, H, R, T]
            mean = (attention * grad_attention).sum(-1, keepdim=True)
            grad_scores = attention * (grad_attention - mean)
            grad_query[..., rows, :] = (grad_scores @ k * scale).to(query.dtype)
            total_key += grad_scores.mT @ (q[..., rows, :] * scale)
            total_value += attention.mT @ grad[..., rows, :]
            if grad_mask is not None:
                part = grad_mask[..., rows, :]
                part += grad_scores.sum_to_size(part.shape).to(part.dtype)
    grad_key.copy_(total_key)
    grad_value.copy_(total_value)


@correct_gradients.register_fake
def _(*tensors: Any) -> None:
    """Nothing is returned."""


@correct_gradients.register_vmap
def _(info: Any, batched: tuple[int | None, ...], *inputs: Any) -> tuple[None, None]:
    for number in range(info.batch_size):
        correct_gradients(
            *(
                x if dimension is None else x.select(dimension, number)
                for x, dimension in zip(inputs, batched, strict=True)
            )
        )
    return None, None


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float, rows: slice
) -> Tensor:
    """Of some queries, `[B, H, R, T]`; minus infinity where a key may not be seen."""
    scores = (query[..., rows, :] * scale) @ key.mT
    if causal:
        column = torch.arange(key.shape[-2], device=key.device)
        row = torch.arange(query.shape[-2], device=key.device)[rows, None]
        scores = scores.masked_fill(column > row, -torch.inf)
    if mask is None:
        return scores
    part = mask if mask.shape[-2] == 1 else mask[..., rows, :]
    if part.dtype == torch.bool:
        return scores.masked_fill(~part, -torch.inf)
    return scores + part.to(scores.dtype)
