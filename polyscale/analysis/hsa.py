"""The analysis of HSA: what it loses to its tree, for a model or for given queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from polyscale.analysis.builder import AnalysisBuilder
from polyscale.analysis.entries import Entry
from polyscale.analysis.maps import MapCollection
from polyscale.analysis.recording import real_columns
from polyscale.analysis.schema import Analysis
from polyscale.analysis.tree_attention import (
    TreeAttention,
    attention_of_model,
    attention_of_tensors,
)
from polyscale.ops.hsa import hsa_energy, hsa_matrix
from polyscale.theory.trees import family_dilution, family_losses, finer_tree, flat_scores
from polyscale.trees import SignalTree

OPENED = 5  # worst families per head for which a finer tree is tried
SHOWN_FAMILIES = 64  # per head, worst first
LABEL_TOKENS = 8

FAMILY_NOTE = (
    "kl of a family: its exact part of the sum over rows of KL(HSA || softmax); the parts are not "
    "negative and add up to kl_total. Levels, kernel, error and normality do not apply to trees."
)


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
) -> Analysis:
    """Energy and loss of every family, dilution, what a finer tree would buy, and attention maps.

    Args:
        model: any module with `HSAAttention` layers; or a pair (query, key) of `[H, N, D]`.
        batch: what the model takes; not needed with (query, key).
        tree: with (query, key), their tree; a model brings its own.
        tie: with (query, key), as in `hsa_attention`; the layers of a model have their own.
        causal: with (query, key), as in `hsa_attention`.
        include_self: with (query, key), as in `hsa_attention`.
        tokens: names of the example's rows.
        text: the text of the example.
        title: of the report.
        example: the entry of the batch (the tree of a packed forest) that is analyzed.
        max_leaves: trees with more leaves are refused: the matrices are dense.
        maps: whether to add attention matrices for display.

    Example:
        >>> import torch
        >>> tree = SignalTree.from_windows(12, (3,))
        >>> query, key = torch.randn(2, 2, 12, 8)
        >>> found = analyze_hsa((query, key), tree=tree)
        >>> families = found["hsa"]["layers"][0]["families"]
        >>> round(sum(one["kl"] for one in families) / found["hsa"]["layers"][0]["kl_total"], 4)
        1.0
    """
    if isinstance(model, tuple):
        builder = AnalysisBuilder("hsa", "HSA attention", title)
        found = [attention_of_tensors(model, tree, tie, causal, include_self)]
    else:
        if tree is not None:
            raise ValueError("tree goes with (query, key): a model brings its own")
        builder = AnalysisBuilder("hsa", type(model).__name__, title)
        found = attention_of_model(model, batch, example)
    _check_size(found, max_leaves)
    first = found[0]
    heads, leaves = first.query.shape[0], first.tree.num_leaves
    builder.meta |= {"layers": len(found), "heads": heads, "rows_used": leaves}
    names = _leaf_names(tokens, first, real_columns(batch, example))
    builder.set_example(leaves, names, text, None)
    collection = MapCollection(len(found), [leaves] * heads if maps else [], [])
    layers = _layers(found, names, collection if maps else None, builder)
    builder.notes += [*collection.notes, FAMILY_NOTE]
    section = {"layers": layers, "tree": _tree_entry(first.tree, names)}
    return builder.build({"hsa": section, "attention": collection.attention})


def _check_size(found: list[TreeAttention], max_leaves: int) -> None:
    size = max(one.tree.num_leaves for one in found)
    if size > max_leaves:
        raise ValueError(
            f"max_leaves: the tree has {size} leaves, takes at most {max_leaves} (matrices are "
            "dense): cut the example or raise it"
        )


def _layers(
    found: list[TreeAttention],
    names: list[str] | None,
    collection: MapCollection | None,
    builder: AnalysisBuilder,
) -> list[Entry]:
    """The entries of every layer; their matrices go into the collection of maps, if any."""
    first = found[0]
    if any(one.tree != first.tree for one in found):
        builder.notes.append(
            "Layers have different trees (pooling); the tree shown is the first layer's."
        )
    layers: list[Entry] = []
    for number, one in enumerate(found):
        own_names = names if one.tree == first.tree else None
        matrix, entries = _layer_entries(number, one, own_names, builder)
        layers += entries
        if collection is not None:
            collection.add(number, 0, matrix, None)
    return layers


def _layer_entries(
    number: int, one: TreeAttention, names: Sequence[str] | None, builder: AnalysisBuilder
) -> tuple[Tensor, list[Entry]]:
    """The attention matrices `[H, N, N]` of a layer, and what each head loses in which family."""
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
        builder.note_once("Entmax families: no finer tree is tried, the bound holds for softmax.")
    if len(inner) > SHOWN_FAMILIES:
        builder.note_once(f"Of each head the {SHOWN_FAMILIES} families that lose most are listed.")
    entries = []
    for head, loss in enumerate(losses):
        worst = inner[loss[inner].argsort(descending=True, stable=True)].tolist()
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
        # A family that loses nothing has nothing to gain.
        tried = [node for node in worst[:OPENED] if softmax and loss[node] > 1e-12]
        entries.append(
            {
                "layer": number,
                "head": head,
                "kl_total": loss.sum(),
                "families": families,
                "kl_unlisted": loss[worst[SHOWN_FAMILIES:]].sum(),
                "finer": _opened_entries(scores[head], tree, tried, one.tie) if tried else [],
            }
        )
    return matrix, entries


def _opened_entries(scores: Tensor, tree: SignalTree, nodes: list[int], tie: str) -> list[Entry]:
    """What opening each of these families would change, the best first."""
    entries = [vars(opened) for opened in finer_tree(scores, tree, nodes, tie)]
    return sorted(entries, key=lambda entry: float(entry["kl_after"]))


def _label(tree: SignalTree, node: int, names: Sequence[str] | None) -> str:
    """The key of a node, or its first leaves."""
    key = int(tree.key[node])
    if key >= 0:
        return tree.key_names[key]
    begin, count = int(tree.leaf_begin[node]), int(tree.leaf_count[node])
    leaves = tree.leaf_order[begin : begin + min(count, LABEL_TOKENS)]
    rows = tree.leaf_row[leaves].tolist()
    words = [str(row) if names is None else names[row] for row in rows]
    # Single characters are joined without spaces, so that they read as words.
    shown = ("" if names is not None and max(map(len, words)) == 1 else " ").join(words)
    return shown if count <= LABEL_TOKENS else shown + " …"


def _leaf_names(
    tokens: Sequence[str] | None, one: TreeAttention, real: Tensor | None
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
