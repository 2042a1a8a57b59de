"""The options of `HKTAttention`, and what is wrong with a bad one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.layers.filters import MODES
from polyscale.ops.hkt.api import check_cu_seqlens, check_padding_mask
from polyscale.ops.hkt.decode import check_decodes

VALUES = ("fine", "merged")
KERNELS = ("dot", "psd")


def fixed_weights(level_weights: Sequence[float], levels: int) -> Tensor:
    """The given level weights as a tensor `[L]`, once they are seen to be convex."""
    weights = [float(weight) for weight in level_weights]
    if len(weights) != levels:
        raise ValueError(f"level_weights must be {levels} numbers, got {len(weights)}")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError(f"level_weights must be finite and not negative, got {weights}")
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
    """Raise a ValueError that names the option, what it got and what it takes."""
    if levels < 1:
        raise ValueError(f"levels must be at least 1, got {levels}")
    if num_heads < 1 or d_model < 1 or d_model % num_heads:
        raise ValueError(
            f"d_model must be a multiple of num_heads, got d_model={d_model}, num_heads={num_heads}"
        )
    for name, value, known in (
        ("downsampling", downsampling, MODES),
        ("values", values, VALUES),
        ("kernel", kernel, KERNELS),
    ):
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    if relative_positions < 0:
        raise ValueError(f"relative_positions must not be negative, got {relative_positions}")
    if kernel == "psd" and relative_positions:
        raise ValueError(
            "relative_positions must be 0 with kernel='psd': "
            "the relative term need not be positive semidefinite"
        )
    multiple = (2 if rotary else 1) * (4 if kernel == "psd" else 1)
    if (d_model // num_heads) % multiple:
        raise ValueError(
            f"d_model / num_heads must be a multiple of {multiple} with kernel={kernel!r} and "
            f"rotary={rotary}, got {d_model // num_heads}"
        )


def check_local_start(local_start: float, takes: bool) -> None:
    """Raise unless it is a number from 0, and 0 without rotary positions and biases."""
    if not (math.isfinite(local_start) and local_start >= 0):
        raise ValueError(f"local_start must be a number from 0, got {local_start}")
    if local_start and not takes:
        raise ValueError(
            f"local_start needs rotary positions and biases: without them it says nothing of "
            f"distance, got {local_start}"
        )


def check_input(
    x: Tensor,
    d_model: int,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
) -> None:
    """Raise unless x is `[B, T, d_model]` and at most one of the others says what is real."""
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
        raise ValueError(f"pass one of key_padding_mask, cu_seqlens and lengths, got {given}")
    if key_padding_mask is not None:
        check_padding_mask(key_padding_mask, x.shape[0], x.shape[1], x.device)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[1])
    if lengths is not None and lengths.shape != (x.shape[0],):
        raise ValueError(f"lengths must have shape [B] = [{x.shape[0]}], got {list(lengths.shape)}")


def check_cache(causal: bool, cu_seqlens: Tensor | None, return_details: bool, impl: str) -> None:
    """Raise where a cache would be wrong, or of no use."""
    check_decodes(impl)
    if not causal:
        raise ValueError("cache needs causal=True: later tokens change earlier ones else")
    if cu_seqlens is not None or return_details:
        raise ValueError("cache goes with neither cu_seqlens nor return_details")
