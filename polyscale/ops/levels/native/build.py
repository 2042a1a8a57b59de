"""The library of the kernel for stores of levels."""

from pathlib import Path

from polyscale.ops.native.instructions import kernel_library

LIBRARY = kernel_library("levels", Path(__file__).parent)


def availability() -> tuple[bool, str]:
    """Whether the kernel is there or may be expected, without building it."""
    return LIBRARY.availability("fused, CPU, float32 and bfloat16")
