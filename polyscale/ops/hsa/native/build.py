"""The library of HSA's kernels."""

from pathlib import Path

from polyscale.ops.native.instructions import kernel_library

LIBRARY = kernel_library("hsa", Path(__file__).parent)

why_not_built = LIBRARY.why_not_built


def availability() -> tuple[bool, str]:
    """Whether the kernel is there or may be expected, without building it."""
    return LIBRARY.availability("any tree, one pass up and one down, CPU, float32 and bfloat16")
