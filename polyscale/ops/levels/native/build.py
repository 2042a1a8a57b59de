"""The library of the kernel for stores of levels."""

from pathlib import Path

from polyscale.ops.native.instructions import kernel_library

LIBRARY = kernel_library("levels", Path(__file__).parent)
