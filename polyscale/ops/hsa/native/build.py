"""The library of HSA's kernels."""

from pathlib import Path

from polyscale.ops.native.instructions import kernel_library

LIBRARY = kernel_library("hsa", Path(__file__).parent)
