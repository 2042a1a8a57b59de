"""What HSA loses to its tree, for a model or for queries and keys at hand."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyscale.layers.hsa import HSAAttention
from polyscale.layers.positions import rotate
from polyscale.ops.hsa import hsa_energy, hsa_matrix
from polyscale.theory.capture import layer_inputs, real_columns
from polyscale.theory.frame import Frame
from polyscale.theory.sections import Entry, Maps
from polyscale.theory.trees import (
    family_dilution,
    family_losses,
    finer_tree,
    flat_scores,
)
from polyscale.trees import SignalTree
from polyscale.trees.editing import tree_of_node

OPENED = 5  # worst families per head for which a finer tree is tried
SHOWN_FAMILIES = 64  # per head, worst first
LABEL_TOKENS = 8


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


def analyze_hsa(
    model: nn.Module | tuple[Tensor, Tensor],
    batch: Any = None,
    *,
    tree: SignalTree | None = None,
    tie: str = "blocks",
    causal: bool = False,
    include_self: bool = True,
    tokens: Sequence[str] | None = None,
    text: str | None = None,
    title: str | None = None,
    example: int = 0,
    max_leaves: int = 2048,
    maps: bool = True,
) -> dict[str, Any]:
    """Energy and loss of every family, dilution, what a finer tree would buy, and attention maps.

    Args:
        model: any module with `HSAAttention` layers; or a pair (query, key) of `[H, N, D]`.
        batch: what the model takes; not needed with (query, key).
        tree: with (query, key): their tree. A model brings its own.
        tie: with (query, key), as `hsa_attention` takes it; a model's layers know theirs.
        causal: likewise.
        include_self: likewise.
        tokens: names of the example's rows.
        text: the text of the example.
        title: of the report.
        example: the entry of the batch (the tree of a packed forest) that is looked at.
        max_leaves: trees with more leaves are refused: the matrices are dense.
        maps: whether to add attention matrices to look at.

    Example:
        >>> tree = SignalTree.from_windows(12, (3,))
        >>> query, key = torch.randn(2, 2, 12, 8)
        >>> found = analyze_hsa((query, key), tree=tree)
        >>> families = found["hsa"]["layers"][0]["families"]
        >>> round(sum(one["kl"] for one in families) / found["hsa"]["layers"][0]["kl_total"], 4)
        1.0
    """
    if isinstance(model, tuple):
        frame = Frame("hsa", "HSA attention", title)
        found = [_of_tensors(model, tree, tie, causal, include_self)]
    else:
        if tree is not None:
            raise ValueError("tree goes with (query, key): a model brings its own")
        frame = Frame("hsa", type(model).__name__, title)
        found = _of_model(model, batch, example)
    size = max(one.tree.num_leaves for one in found)
    if size > max_leaves:
        raise ValueError(
            f"max_leaves: the tree has {size} leaves, takes at most {max_leaves} (matrices are "
            "dense): cut the example or raise it"
        )
    first = found[0]
    heads = first.query.shape[0]
    leaves = first.tree.num_leaves
    frame.meta |= {"layers": len(found), "heads": heads, "rows_used": leaves}
    names = _leaf_names(tokens, first, real_columns(batch, example), text)
    frame.example(leaves, names, text, None)
    if any(one.tree != first.tree for one in found):
        frame.notes.append(
            "Layers have different trees (pooling); the tree shown is the first layer's."
        )
    layers: list[Entry] = []
    gallery = Maps(len(found), [leaves] * heads if maps else [], [])
    for number, one in enumerate(found):
        matrix, entries = _layer(number, one, names if one.tree == first.tree else None, frame)
        layers += entries
        if maps:
            gallery.add(number, 0, matrix, None)
    frame.notes += gallery.notes
    frame.notes.append(
        "kl of a family: its exact part of the sum over rows of KL(HSA || softmax); the parts are "
        "not negative and add up to kl_total. Levels, kernel, error and normality are not looked "
        "at for trees."
    )
    return frame.finish(
        {
            "hsa": {"layers": layers, "tree": _tree_entry(first.tree, names)},
            "attention": gallery.attention,
        }
    )


def _layer(
    number: int, one: TreeAttention, names: Sequence[str] | None, frame: Frame
) -> tuple[Tensor, list[Entry]]:
    """The attention matrices `[H, N, N]` of a layer, and what its heads lose where."""
    tree = one.tree
    options: dict[str, Any] = {"causal": one.causal, "include_self": one.include_self}
    options["position_scores"] = one.positions
    tied = {**options, "tie": one.tie, "alpha": one.alpha}
    matrix = hsa_matrix(one.query, one.key, tree, **tied)
    energy = hsa_energy(one.query, one.key, tree, certificate=False, **tied).phi  # [H, M]
    scores = flat_scores(one.query, one.key, tree, **options)
    losses = family_losses(matrix, scores, tree)  # [H, M]
    dilution = family_dilution(tree)
    inner = (tree.child_count > 0).nonzero().flatten()
    softmax = not isinstance(one.alpha, Tensor) and one.alpha == 1.0
    if not softmax:
        _note(frame, "Entmax families: no finer tree is tried, the certificate is about softmax.")
    entries = []
    for head, loss in enumerate(losses):
        worst = inner[loss[inner].argsort(descending=True, stable=True)].tolist()
        if len(worst) > SHOWN_FAMILIES:
            _note(frame, f"Of each head the {SHOWN_FAMILIES} families that lose most are listed.")
        families = [
            {
                "node": node,
                "parent": int(tree.parent[node]),
                "depth": int(tree.depth[node]),
                "leaves": int(tree.leaf_count[node]),
                "label": _label(tree, node, names),
                "kl": loss[node],
                "energy": energy[head, node],
                "dilution": dilution[node],
            }
            for node in worst[:SHOWN_FAMILIES]
        ]
        finer: list[Entry] = []
        if softmax:
            # A family that loses nothing has nothing to gain.
            tried = [node for node in worst[:OPENED] if loss[node] > 1e-12]
            finer = [
                {
                    "node": opened.node,
                    "kl_before": opened.kl_before,
                    "kl_after": opened.kl_after,
                    "scores_before": opened.scores_before,
                    "scores_after": opened.scores_after,
                }
                for opened in finer_tree(scores[head], tree, tried, one.tie)
            ]
            finer.sort(key=lambda entry: float(entry["kl_after"]))
        entries.append(
            {
                "layer": number,
                "head": head,
                "kl_total": loss.sum(),
                "families": families,
                "kl_unlisted": loss[worst[SHOWN_FAMILIES:]].sum(),
                "finer": finer,
            }
        )
    return matrix, entries


def _note(frame: Frame, text: str) -> None:
    if text not in frame.notes:
        frame.notes.append(text)


def _label(tree: SignalTree, node: int, names: Sequence[str] | None) -> str:
    """The key of a node, or its first leaves."""
    key = int(tree.key[node])
    if key >= 0:
        return tree.key_names[key]
    begin, count = int(tree.leaf_begin[node]), int(tree.leaf_count[node])
    leaves = tree.leaf_order[begin : begin + min(count, LABEL_TOKENS)]
    rows = tree.leaf_row[leaves].tolist()
    words = [str(row) if names is None else names[row] for row in rows]
    # Single characters read as words only when they stand close.
    shown = ("" if names is not None and max(map(len, words)) == 1 else " ").join(words)
    return shown if count <= LABEL_TOKENS else shown + " …"


def _leaf_names(
    tokens: Sequence[str] | None, one: TreeAttention, real: Tensor | None, text: str | None
) -> list[str] | None:
    """A name for each row of the tree."""
    if tokens is None:
        return None
    count = one.tree.num_rows
    if len(tokens) == count:
        return [str(token) for token in tokens]
    if real is not None and len(tokens) == len(real) and int(real.sum()) == count:
        return [str(token) for token, kept in zip(tokens, real.tolist(), strict=True) if kept]
    if len(tokens) > int(one.rows.max()):
        return [str(tokens[row]) for row in one.rows.tolist()]
    raise ValueError(f"tokens must name each of the {count} rows of the tree, got {len(tokens)}")


def _tree_entry(tree: SignalTree, names: Sequence[str] | None) -> Entry:
    labels = [
        (
            _label(tree, node, names)
            if int(tree.child_count[node])
            else _leaf_label(tree, node, names)
        )
        for node in range(tree.num_nodes)
    ]
    leaves = tree.leaf_row[tree.leaf_order].tolist()
    return {
        "parent": tree.parent,
        "label": labels,
        "leaf_tokens": [str(row) if names is None else names[row] for row in leaves],
        "leaf_nodes": tree.leaf_order,
    }


def _leaf_label(tree: SignalTree, node: int, names: Sequence[str] | None) -> str:
    row = int(tree.leaf_row[node])
    return str(row) if names is None else names[row]


def _of_tensors(
    pair: tuple[Tensor, Tensor],
    tree: SignalTree | None,
    tie: str,
    causal: bool,
    include_self: bool,
) -> TreeAttention:
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


def _of_model(model: nn.Module, batch: Any, example: int) -> list[TreeAttention]:
    calls = layer_inputs(model, batch, HSAAttention)
    active = [(layer, call) for layer, call in calls if layer.attention != "none"]
    if not active:
        raise ValueError("model must attend: its layers have attention='none'")
    real = real_columns(batch, example)
    return [_of_layer(layer, call, example, real) for layer, call in active]


def _of_layer(
    layer: HSAAttention, call: dict[str, Any], example: int, real: Tensor | None
) -> TreeAttention:
    """What a layer attends with, recomputed in float64 for one tree."""
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
            # The model has lined its tokens up: padding comes last, where no token sees it.
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
    """The same over the rows that are left alone, numbered again from 0."""
    if not bool(kept.any()):
        raise ValueError("the example must have at least one leaf, got padding alone")
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
    return TreeAttention(
        one.query[:, rows],
        one.key[:, rows],
        smaller,
        one.tie,
        one.causal,
        one.include_self,
        one.alpha if not isinstance(one.alpha, Tensor) else one.alpha[: max(1, smaller.max_depth)],
        None if one.positions is None else one.positions[:, left],
        one.rows[rows],
    )
