"""The FLOPs of attention for the settings of an injection; the formulas are in `cost.hsa`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyscale.cost.hsa import AttentionFlops, hsa_flops, softmax_flops
from polyscale.inject.layout import window_tree
from polyscale.inject.settings import SINK_QUERIES, TIES, HSASettings, check_hierarchy
from polyscale.trees import SignalTree


def attention_flops(
    length: int,
    heads: int,
    dim: int,
    hierarchy: Sequence[int] | SignalTree | None = None,
    tie: str = "columns",
    *,
    sinks: int = 0,
    sink_queries: str = "exact",
) -> AttentionFlops:
    """Count the operations of softmax attention (hierarchy None) or HSA over `length` tokens.

    Projections are not counted, nor exponentials and sums of weights. `dim` is the width of a
    head; `sinks` how many tokens hang right under the root of a window hierarchy. Causal layers
    are counted like others: masked scores are computed too, in both kinds of attention.

    >>> attention_flops(512, 12, 64).total
    805306368
    >>> attention_flops(512, 12, 64, (16, 16)).total / attention_flops(512, 12, 64).total < 0.08
    True
    """
    for name, number in (("length", length), ("heads", heads), ("dim", dim)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more, got {number!r}")
    if tie not in TIES:
        raise ValueError(f'tie must be "columns" or "blocks", got {tie!r}')
    if sink_queries not in SINK_QUERIES:
        raise ValueError(f'sink_queries must be "exact" or "tied", got {sink_queries!r}')
    if hierarchy is None:
        return softmax_flops(length, heads, dim)
    if isinstance(sinks, bool) or not isinstance(sinks, int) or not 0 <= sinks <= length:
        raise ValueError(f"sinks must be a number of tokens, 0..{length}, got {sinks!r}")
    tree = check_hierarchy(hierarchy)
    if isinstance(tree, str):
        raise ValueError(
            'hierarchy must be windows or the tree of one text, got "sentences", whose cost '
            "depends on the text"
        )
    if isinstance(tree, tuple):
        tree = window_tree(sinks, length - sinks, tree, torch.device("cpu"))
    elif sinks:
        raise ValueError("sinks: a given SignalTree says itself which leaves hang under its root")
    if tree.num_rows != length:
        raise ValueError(f"hierarchy must have {length} rows, got a SignalTree of {tree.num_rows}")
    settings = HSASettings(tree, tie)
    exact = sinks * length if sink_queries == "exact" else 0
    return tree_flops(tree, heads, dim, settings, exact)


def tree_flops(
    tree: SignalTree, heads: int, dim: int, settings: HSASettings, exact_pairs: int = 0
) -> AttentionFlops:
    """Count the operations of HSA over a tree or a forest, and of some rows that are not tied.

    Of the settings, only the tie counts.
    """
    return hsa_flops(tree, heads, dim, settings.tie, exact_pairs)
