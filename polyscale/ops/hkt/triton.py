"""HKT attention in Triton, for GPUs: every level at its own resolution, memory linear in T.

The kernels are in `triton_kernels.py`, their parts in `triton_tiles.py`. This file says what they
take, launches them, and makes them a torch operation with gradients that `torch.compile` supports.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from polyscale._extras import require
from polyscale.ops.hkt.limits import why_beyond_limits
from polyscale.ops.hkt.mask import AttentionMask

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Triton's interpreter has no bfloat16: it multiplies the bit patterns.
INTERPRETED_DTYPES = (torch.float32, torch.float16)
SMALLEST_TILE = 16  # rows and columns of the smallest matrix product that all GPUs have


def hkt_attention_triton(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    mask: AttentionMask,
    scale: float,
    relative_bias: None = None,
) -> Tensor:
    """The attended values, `[B, H, T, Dv]`. Products are accumulated in float32, without TF32."""
    lengths, packed = mask.lengths, mask.packed
    longest, starts = value.shape[2], None
    if packed is not None:
        sizes = [high - low for low, high in pairwise(packed.boundaries[0])]
        lengths, longest = torch.tensor(sizes, device=value.device), max(sizes)  # [S]
        starts = torch.stack(packed.level_starts, dim=1).to(value.device)  # [S, L]
    # A copy only where channels are not contiguous.
    queries, keys = [_rows(q) for q in queries], [_rows(k) for k in keys]
    weights = level_weights.float().expand(value.shape[1], -1).contiguous()  # [H, L]
    if lengths is not None:
        lengths = lengths.to(torch.int32)
    output, _ = _forward(
        queries, keys, _rows(value), weights, lengths, starts, mask.causal, scale, longest
    )
    return output


def why_unavailable() -> str | None:
    """Why the kernels cannot run on this machine; None if they can."""
    if find_spec("triton") is None:
        return "needs triton: pip install 'polyscale[triton]'"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a CUDA or ROCm device (or TRITON_INTERPRET=1, slow, for tests)"
    return None


def tile_sizes(width: int, dtype: torch.dtype) -> tuple[tuple[int, int], ...]:
    """Queries and keys per tile, the preferred first, for the wider of D and Dv.

    Chosen by the registers and shared memory that the compiled code needs, not by timing. Where a
    GPU has too little shared memory, the next smaller tile is used. Three levels take 1.3125 times
    the score products of standard attention in tiles of 64, and 1.5 times in tiles of 32.
    """
    sizes = ((64, 64), (32, 32), (16, 16))
    return sizes if width <= 128 and dtype != torch.float32 else sizes[1:]


def why_unsupported(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    relative_bias: Sequence[Tensor] | None = None,
) -> str | None:
    """Why the kernels cannot take these tensors; None if they can."""
    if value.dtype not in DTYPES:
        return f"it takes float32, float16 and bfloat16, got {value.dtype}"
    return why_beyond_limits(queries, value, relative_bias)


def _check_device(value: Tensor) -> None:
    if value.device.type == "cuda":
        return
    if value.device.type != "cpu" or not _interpreted():
        raise ValueError(
            f"value must be on a CUDA or ROCm device for impl='triton', got {value.device} "
            "(on a CPU only Triton's interpreter runs it, for tests: start Python with "
            "TRITON_INTERPRET=1)"
        )
    if value.dtype not in INTERPRETED_DTYPES:
        raise TypeError(
            f"value must be of float32 or float16 in Triton's interpreter, got {value.dtype}"
        )


def _kernels() -> ModuleType:
    require("triton", "triton", "impl='triton'")
    from polyscale.ops.hkt import triton_kernels

    return triton_kernels


def _interpreted() -> bool:
    """Whether the kernels are those of the interpreter, which is decided at their import."""
    kernels = _kernels()
    return not isinstance(kernels.forward_kernel, kernels.triton.JITFunction)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def _all_strides(levels: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(_strides(x) for x in levels)


def _launch(
    queries: Sequence[Tensor],
    value: Tensor,
    causal: bool,
    launch: Callable[[ModuleType, dict[str, Any]], None],
) -> None:
    """Call `launch` with the kernels and what to compile them for."""
    kernels = _kernels()
    head_dim, value_dim = queries[0].shape[3], value.shape[3]
    blocks = [max(SMALLEST_TILE, 1 << (dim - 1).bit_length()) for dim in (head_dim, value_dim)]
    *larger, smallest = tile_sizes(max(blocks), value.dtype)

    def settings(rows: int, columns: int) -> dict[str, Any]:
        return {
            "D": head_dim,
            "DV": value_dim,
            "BLOCK_D": blocks[0],
            "BLOCK_DV": blocks[1],
            "BLOCK_M": rows,
            "BLOCK_N": columns,
            "LEVELS": len(queries),
            "DEEPEST": (min(rows, columns) // SMALLEST_TILE).bit_length() - 1,
            "CAUSAL": causal,
            "num_warps": 4 if max(blocks) <= 64 else 8,
            "num_stages": 2,
        }

    with _on(value.device):
        for tiles in larger:
            try:
                return launch(kernels, settings(*tiles))
            except kernels.triton.OutOfResources:  # raised before anything has run
                continue
        return launch(kernels, settings(*smallest))


def _on(device: torch.device) -> Any:
    """Triton launches on the current device, so that has to be the device of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@torch.library.custom_op("polyscale::hkt_triton", mutates_args=())
def _forward(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    weights: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    causal: bool,
    scale: float,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exps in base 2. `lengths` `[S]` and `starts` `[S, L]`: per sequence."""
    _check_device(value)  # here, and not while a compiler traces the code around it
    # Positions beyond a sequence's end are not visited.
    output = torch.empty_like(value) if lengths is None else torch.zeros_like(value)
    logsumexp = value.new_zeros(value.shape[:3], dtype=torch.float32)
    sequences = value.shape[0] if starts is None else len(starts)
    heads, length = value.shape[1:3]

    def launch(kernels: ModuleType, settings: dict[str, Any]) -> None:
        blocks = -(-longest // settings["BLOCK_M"])
        kernels.forward_kernel[(blocks * heads * sequences,)](
            tuple(queries), tuple(keys), value, weights, lengths, starts, output, logsumexp,
            _all_strides(queries), _all_strides(keys), _strides(value), _strides(output),
            blocks, heads, length, scale, **settings,
        )  # fmt: skip

    if sequences > 0:
        _launch(queries, value, causal, launch)
    return output, logsumexp


@_forward.register_fake
def _(
    queries: Sequence[Tensor], keys: Sequence[Tensor], value: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(value), value.new_empty(value.shape[:3], dtype=torch.float32)


@torch.library.custom_op("polyscale::hkt_triton_backward", mutates_args=())
def _backward(
    output_gradient: Tensor,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    weights: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    lengths: Tensor | None,
    starts: Tensor | None,
    causal: bool,
    scale: float,
    longest: int,
) -> list[Tensor]:
    """Gradients of the queries, the keys, the value and the weights, in this order."""
    new = torch.empty_like if lengths is None else torch.zeros_like
    query_gradients = [new(q) for q in queries]
    key_gradients, value_gradient = [new(k) for k in keys], new(value)
    delta = torch.empty_like(logsumexp)
    sequences = value.shape[0] if starts is None else len(starts)
    heads, length = value.shape[1:3]
    weight_gradient = torch.zeros_like(weights)

    def launch_queries(kernels: ModuleType, settings: dict[str, Any]) -> None:
        blocks = -(-longest // settings["BLOCK_M"])
        parts = weights.new_zeros(len(queries), sequences, heads, blocks)
        kernels.query_gradient_kernel[(blocks * heads * sequences,)](
            tuple(queries), tuple(keys), value, weights, lengths, starts, output,
            output_gradient, logsumexp, delta, tuple(query_gradients), parts,
            _all_strides(queries), _all_strides(keys), _strides(value), _strides(output),
            _strides(output_gradient), _all_strides(query_gradients),
            blocks, sequences, heads, length, scale, **settings,
        )  # fmt: skip
        weight_gradient.copy_(parts.sum((1, 3)).T)  # no atomics: the same result every time

    def launch_keys(kernels: ModuleType, settings: dict[str, Any]) -> None:
        blocks = -(-longest // settings["BLOCK_N"])
        kernels.key_gradient_kernel[(blocks * heads * sequences,)](
            tuple(queries), tuple(keys), value, weights, lengths, starts, output_gradient,
            logsumexp, delta, tuple(key_gradients), value_gradient,
            _all_strides(queries), _all_strides(keys), _strides(value),
            _strides(output_gradient), _all_strides(key_gradients), _strides(value_gradient),
            blocks, heads, length, scale, **settings,
        )  # fmt: skip

    if sequences > 0:
        _launch(queries, value, causal, launch_queries)  # writes delta, which the other reads
        _launch(queries, value, causal, launch_keys)
    return [*query_gradients, *key_gradients, value_gradient, weight_gradient]


@_backward.register_fake
def _(
    output_gradient: Tensor,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    weights: Tensor,
    *_: Any,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (*queries, *keys, value, weights)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, keys, value, weights, lengths, starts, *ctx.options = inputs
    ctx.levels = len(queries)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(value, weights, *output, lengths, starts, *queries, *keys)


def _differentiate(ctx: Any, output_gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    value, weights, output, logsumexp, lengths, starts, *levels = ctx.saved_tensors
    gradients = _backward(
        _rows(output_gradient),
        levels[: ctx.levels],
        levels[ctx.levels :],
        value,
        weights,
        output,
        logsumexp,
        lengths,
        starts,
        *ctx.options,
    )
    queries, keys = gradients[: ctx.levels], gradients[ctx.levels : -2]
    return queries, keys, *gradients[-2:], None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
