"""The library of HKT's kernels."""

from pathlib import Path

from polyscale.ops.native.instructions import kernel_library

LIBRARY = kernel_library("hkt", Path(__file__).parent)

load = LIBRARY.load
why_not_built = LIBRARY.why_not_built


def availability() -> tuple[bool, str]:
    """Whether the kernel is there or may be expected, without building it."""
    return LIBRARY.availability("fused, CPU, float32 and bfloat16")
