"""`downsample`: a sequence at every coarse level, by causal filters between the levels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.downsample.native.library import LIBRARY
from polyscale.ops.downsample.native.op import downsample_native
from polyscale.ops.downsample.reference import (
    FilterTaps,
    downsample_reference,
    filter_at,
    filter_sequence,
    filter_slide,
)
from polyscale.ops.layout import PackedLayout
from polyscale.ops.native.backend import native_backend
from polyscale.ops.native.derivatives import transformed

__all__ = ["FilterTaps", "downsample", "filter_at", "filter_sequence", "filter_slide"]


def downsample(
    x: Tensor,
    filters: Sequence[FilterTaps],
    packed: PackedLayout | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`x` itself, and at every coarse level, one after the other: `[B, T_1 + T_2 + .., C]`.

    Whoever also uses `x` takes the first of the two: gradients of both are added up in one pass.

    Args:
        x: `[B, T, C]`.
        filters: of each level above 0, at least one.
        packed: where sequences are packed in one row; each starts anew.
        impl: `"auto"`, or a name that `polyscale.implementations()` lists.

    Example:
        >>> import torch
        >>> downsample(torch.ones(1, 5, 2), [FilterTaps(2, None)] * 2)[1].shape  # 3 + 2 entries
        torch.Size([1, 5, 2])
    """
    return DOWNSAMPLE.run(impl, x, filters, packed)


def _why_unsupported(
    x: Tensor, filters: Sequence[FilterTaps], packed: PackedLayout | None
) -> str | None:
    if packed is not None:
        return "it takes no packed sequences"
    weights = [taps.weight for taps in filters if taps.weight is not None]
    if any(weight.dim() == 3 for weight in weights):
        return "it takes one weight per tap and channel, got a matrix per tap (dense filters)"
    if len({taps.width for taps in filters}) > 1:
        return f"it takes filters of one width, got {[taps.width for taps in filters]}"
    if x.device.type != "cpu":
        return f"it runs on the CPU, got a tensor on {x.device}"
    for tensor in (x, *weights):
        if tensor.dtype != torch.float32:
            return f"it takes float32, got {tensor.dtype}"
    if transformed((x, *weights)):
        return "it has reverse-mode gradients only: no torch.func transforms, no forward mode"
    return None


def _run_native(x: Tensor, filters: Sequence[FilterTaps], packed: None) -> tuple[Tensor, Tensor]:
    channels = x.shape[2]
    weights = [
        x.new_full((taps.width, channels), 1.0 / taps.width) if taps.weight is None else taps.weight
        for taps in filters
    ]
    return downsample_native(x, torch.stack(weights))


DOWNSAMPLE = Operation(
    "downsample",
    (
        Backend("reference", downsample_reference, "a sum of strided slices per level"),
        native_backend(
            LIBRARY, _run_native, "all levels in one pass; CPU, float32", _why_unsupported
        ),
    ),
    preferred=("native", "reference"),
)
OPERATIONS = (DOWNSAMPLE,)
