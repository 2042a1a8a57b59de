"""Signal hierarchies: how the rows of a tensor are nested."""

from polyscale.trees.tree import SignalTree

__all__ = ["SignalTree"]
