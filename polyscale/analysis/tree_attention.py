"""The attention of HSA layers on one tree, ready to be analyzed: float64, without padding."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from polyscale.analysis.recording import capture, real_columns
from polyscale.layers.hsa import HSAAttention
from polyscale.layers.positions import rotate
from polyscale.trees import SignalTree
from polyscale.trees.editing import tree_of_node


@dataclass(frozen=True)
class TreeAttention:
    """The attention of one layer on one tree, float64; every row of the tree has a leaf."""

    query: Tensor  # [H, N, D]
    key: Tensor  # [H, N, D]
    tree: SignalTree
    tie: str
    causal: bool
    include_self: bool
    alpha: float | Tensor
    positions: Tensor | None  # [H, M, P]
    rows: Tensor  # [N] the data rows that the leaves had


def attention_of_tensors(
    pair: tuple[Tensor, Tensor],
    tree: SignalTree | None,
    tie: str,
    causal: bool,
    include_self: bool,
) -> TreeAttention:
    """The attention of queries and keys `[H, N, D]` over their tree."""
    if len(pair) != 2 or any(not isinstance(part, Tensor) or part.dim() != 3 for part in pair):
        raise ValueError("model must be a module or a pair (query, key) of tensors [H, N, D]")
    if not isinstance(tree, SignalTree):
        raise TypeError(f"tree must be a SignalTree, got {type(tree).__name__}")
    if tree.num_trees != 1:
        raise ValueError(f"tree must be one tree, got {tree.num_trees}: see unbatch")
    if any(part.shape[1] != tree.num_rows for part in pair):
        raise ValueError(
            f"query and key must have the tree's {tree.num_rows} rows, got "
            f"{[list(part.shape) for part in pair]}"
        )
    query, key = (part.detach().double().cpu() for part in pair)
    found = TreeAttention(
        query, key, tree, tie, causal, include_self, 1.0, None, torch.arange(tree.num_rows)
    )
    return _pruned(found, tree.row_node >= 0)


def attention_of_model(model: nn.Module, batch: Any, example: int) -> list[TreeAttention]:
    """The attention of every layer of a model for one entry of the batch."""
    calls = capture(model, batch, HSAAttention)
    active = [(layer, call) for layer, call in calls if layer.attention != "none"]
    if not active:
        raise ValueError("model must have layers that attend, but all have attention='none'")
    real = real_columns(batch, example)
    return [_of_layer(layer, call, example, real) for layer, call in active]


def _of_layer(
    layer: HSAAttention, call: dict[str, Any], example: int, real: Tensor | None
) -> TreeAttention:
    """Queries, keys and options of a layer for one tree, recomputed in float64."""
    forest: SignalTree = call["tree"].to("cpu")
    x: Tensor = call["x"].detach().cpu()
    shared = x.dim() == 3 and forest.num_rows == x.shape[1]
    count = len(x) if shared else forest.num_trees
    if not 0 <= example < count:
        raise ValueError(f"example must be from 0 to {count - 1}, got {example}")
    mask = call["key_padding_mask"]
    positions = call["positions"]
    if shared:
        tree, rows = forest, x[example]
        ignored = None if mask is None else mask[example].cpu()
        if mask is None and real is not None and len(real) == len(rows) and layer.causal:
            # Causal models move their padding to the end, where no token sees it.
            ignored = torch.arange(len(rows)) >= int(real.sum())
        nodes = torch.arange(forest.num_nodes)
    else:
        tree = forest.unbatch()[example]
        low, high = forest.tree_rows[example : example + 2]
        rows = x.reshape(-1, x.shape[-1])[low:high]
        ignored = None if mask is None else mask.reshape(-1)[low:high].cpu()
        nodes = (tree_of_node(forest) == example).nonzero().flatten()
    copy = deepcopy(layer).double().cpu().eval()
    with torch.no_grad():
        query, key, _ = copy._project(rows.double(), tree)  # [1, H, N, D]
        if layer.rotary:
            position = copy._leaf_rank(tree, ignored)
            query, key = rotate(query, position), rotate(key, position)
        embeddings = None
        if positions is not None:
            embeddings = copy._position_scores(tree, positions.detach().double().cpu()[nodes])
        alpha = copy._alpha(tree)
    if isinstance(alpha, Tensor):
        alpha = alpha.detach()
    found = TreeAttention(
        query[0],
        key[0],
        tree,
        layer.tie,
        layer.causal,
        layer.include_self,
        alpha,
        embeddings,
        torch.arange(tree.num_rows),
    )
    kept = tree.row_node >= 0
    return _pruned(found, kept if ignored is None else kept & ~ignored)


def _pruned(one: TreeAttention, kept: Tensor) -> TreeAttention:
    """The same attention over the rows in `kept`, renumbered from 0."""
    if not bool(kept.any()):
        raise ValueError("the example must have at least one leaf, got only padding")
    tree = one.tree
    if bool(kept.all()):
        return one
    pruned = tree.prune(kept)
    before = torch.nn.functional.pad(kept[tree.leaf_row[tree.leaf_order]].cumsum(0), (1, 0))
    left = before[tree.leaf_begin + tree.leaf_count] > before[tree.leaf_begin]  # [M]
    rows = kept.nonzero().flatten()
    number = torch.full_like(one.rows, -1)
    number[rows] = torch.arange(len(rows))
    row = torch.where(pruned.leaf_row >= 0, number[pruned.leaf_row.clamp(min=0)], -1)
    smaller = SignalTree.from_parents(
        pruned.parent,
        rows=row,
        num_rows=len(rows),
        domains=pruned.domain,
        positions=pruned.position,
        keys=pruned.key,
        key_names=pruned.key_names,
        modalities=pruned.modality,
        modality_names=pruned.modality_names,
    )
    alpha = one.alpha
    if isinstance(alpha, Tensor):
        alpha = alpha[: max(1, smaller.max_depth)]
    return replace(
        one,
        query=one.query[:, rows],
        key=one.key[:, rows],
        tree=smaller,
        alpha=alpha,
        positions=None if one.positions is None else one.positions[:, left],
        rows=one.rows[rows],
    )
