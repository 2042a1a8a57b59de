"""Checks of the options and inputs of `HKTAttention`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.checks import check_choice, check_integer, check_number
from polyscale.layers.filters import MODES
from polyscale.ops.hkt.api import DECODE, check_cu_seqlens, check_padding_mask

VALUES = ("fine", "merged")
KERNELS = ("dot", "psd")


def fixed_weights(level_weights: Sequence[float], levels: int) -> Tensor:
    """The given level weights as a tensor `[L]`, if they are convex."""
    weights = [float(weight) for weight in level_weights]
    if len(weights) != levels:
        raise ValueError(f"level_weights must be {levels} numbers, got {len(weights)}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"level_weights must be finite numbers of at least 0, got {weights}")
    if abs(sum(weights) - 1.0) > 1e-5:
        raise ValueError(f"level_weights must sum to 1, got {sum(weights):.6g}")
    return torch.tensor(weights)


def check_options(
    d_model: int,
    num_heads: int,
    levels: int,
    downsampling: str,
    values: str,
    kernel: str,
    relative_positions: int,
    rotary: bool,
) -> None:
    """Raise an error that names the option, what it must be and what it got."""
    check_integer("levels", levels, least=1, hint="use levels=1 for standard attention")
    check_integer("num_heads", num_heads, least=1)
    check_integer("d_model", d_model, least=1)
    if d_model % num_heads:
        raise ValueError(
            f"d_model must be a multiple of num_heads, got d_model={d_model}, num_heads={num_heads}"
        )
    check_choice("downsampling", downsampling, MODES)
    check_choice("values", values, VALUES)
    check_choice("kernel", kernel, KERNELS)
    check_integer("relative_positions", relative_positions, least=0)
    if kernel == "psd" and relative_positions:
        raise ValueError(
            f"relative_positions must be 0 with kernel='psd', got {relative_positions}: "
            "the relative term need not be positive semidefinite"
        )
    multiple = (2 if rotary else 1) * (4 if kernel == "psd" else 1)
    if (d_model // num_heads) % multiple:
        raise ValueError(
            f"d_model / num_heads must be a multiple of {multiple} with kernel={kernel!r} and "
            f"rotary={rotary}, got {d_model // num_heads}"
        )


def check_local_start(local_start: float, has_effect: bool) -> None:
    """Raise unless it is a number of at least 0, and 0 where it would have no effect.

    Without rotary positions and biases it does not make the scores depend on the distance.
    """
    check_number("local_start", local_start, least=0)
    if local_start and not has_effect:
        raise ValueError(
            f"local_start must be 0 without rotary positions and biases, got {local_start}"
        )


def check_input(
    x: Tensor,
    d_model: int,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
) -> None:
    """Raise unless x is `[B, T, d_model]` and one argument at most gives padding or packing."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"x must be a floating tensor, got {got}")
    if x.dim() != 3 or x.shape[2] != d_model:
        raise ValueError(
            f"x must have shape [B, T, d_model] with d_model = {d_model}, got {tuple(x.shape)}"
        )
    if x.shape[1] == 0:
        raise ValueError("x must have at least one position, got an empty sequence (T = 0)")
    arguments = {
        "key_padding_mask": key_padding_mask,
        "cu_seqlens": cu_seqlens,
        "lengths": lengths,
    }
    given = [name for name, argument in arguments.items() if argument is not None]
    if len(given) > 1:
        raise ValueError(f"pass only one of key_padding_mask, cu_seqlens and lengths, got {given}")
    if key_padding_mask is not None:
        check_padding_mask(key_padding_mask, x.shape[0], x.shape[1], x.device)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[1])
    if lengths is not None and lengths.shape != (x.shape[0],):
        raise ValueError(f"lengths must have shape [B] = [{x.shape[0]}], got {list(lengths.shape)}")


def check_cache(causal: bool, cu_seqlens: Tensor | None, return_details: bool, impl: str) -> None:
    """Raise where a cache would be wrong, or of no use."""
    DECODE.check_name(impl)
    if not causal:
        raise ValueError(
            "cache must be None unless causal=True: "
            "otherwise later tokens would change earlier ones"
        )
    if cu_seqlens is not None or return_details:
        raise ValueError("cache must be None with cu_seqlens or return_details")
