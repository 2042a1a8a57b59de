"""Which implementation packs new tokens."""

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.levels import blocks
from polyscale.ops.levels.native import op

APPEND = Operation(
    "LevelStore.append",
    (
        Backend("reference", blocks.append, "row by row, any dtype and device"),
        Backend(
            "native", op.append, "CPU, float32 and bfloat16", why_unsupported=op.why_not_append
        ),
    ),
    preferred=("native", "reference"),
)
