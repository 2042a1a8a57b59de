"""Which implementation packs new tokens."""

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.levels import blocks
from polyscale.ops.levels.native import op
from polyscale.ops.levels.native.build import LIBRARY
from polyscale.ops.native.backend import native_backend

APPEND = Operation(
    "LevelStore.append",
    (
        Backend("reference", blocks.append, "row by row, any dtype and device"),
        native_backend(LIBRARY, op.append, "CPU, float32 and bfloat16", op.why_not_append),
    ),
    preferred=("native", "reference"),
)
