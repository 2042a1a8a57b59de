"""Which implementation packs new tokens."""

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.levels import blocks

APPEND = Operation(
    "LevelStore.append",
    (Backend("reference", blocks.append, "row by row, any dtype and device"),),
    preferred=("reference",),
)
