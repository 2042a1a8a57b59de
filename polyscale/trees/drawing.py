"""A tree as a picture."""

import os
from pathlib import Path
from typing import Any

import torch

from polyscale._extras import require
from polyscale.checks import check_integer
from polyscale.trees.outline import Labels, label_of_row
from polyscale.trees.tree import SignalTree

# The palette of Okabe and Ito, distinguishable for colour-blind readers.
DOMAIN_COLOURS = {
    "sequence": "#0072B2",
    "grid2d": "#009E73",
    "set": "#E69F00",
    "keyed": "#CC79A7",
    "graph": "#D55E00",
}
MODALITY_COLOURS = ("#444444", "#56B4E9", "#B8860B", "#8B3A62", "#2E8B57", "#A0522D")


def draw(
    tree: SignalTree,
    path_or_ax: Any,
    labels: Labels,
    max_nodes: int,
) -> Any:
    """See `SignalTree.draw`."""
    max_nodes = check_integer("max_nodes", max_nodes, least=1)
    path = Path(path_or_ax) if isinstance(path_or_ax, (str, os.PathLike)) else None
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"path_or_ax must end in .png, .svg or .pdf, got {str(path)!r}")
    if path is None and path_or_ax is not None and not hasattr(path_or_ax, "scatter"):
        raise TypeError(f"path_or_ax must be a path or an Axes, got {type(path_or_ax).__name__}")
    name = label_of_row(labels, tree.num_rows) if labels is not None else str

    levels = _levels_shown(tree, max_nodes)
    nodes = tree.depth_offsets[levels]
    place, slots = _places(tree, levels)
    if path_or_ax is None or path is not None:
        # A figure without pyplot, which keeps global state and opens windows.
        figure_class = require("matplotlib.figure", "train", "drawing a tree").Figure
        size = (min(40.0, max(4.5, 0.26 * slots + 0.8)), min(40.0, max(1.6, 0.8 * levels + 0.8)))
        axes = figure_class(figsize=size, layout="constrained").add_subplot()
    else:
        axes = path_or_ax
    _edges(axes, tree, nodes, place)
    _inner_nodes(axes, tree, nodes, place)
    _leaves(axes, tree, nodes, place, name)
    _hidden(axes, tree, nodes, place)
    axes.set_ylim(-levels + 0.1, 0.3)
    axes.set_xlim(-0.8, max(slots - 0.2, 0.8))
    axes.axis("off")
    whole = levels > tree.max_depth
    title = repr(tree) if whole else f"{tree!r}, {levels} of {tree.max_depth + 1} levels"
    axes.set_title(title, fontsize=8, color="#444444")
    handles, _ = axes.get_legend_handles_labels()
    if len(handles) > 1:
        axes.legend(
            loc="upper center",
            bbox_to_anchor=(0.5, 0.02),
            ncols=min(len(handles), max(2, slots // 4)),
            frameon=False,
            fontsize=7,
        )
    if path is not None:
        axes.figure.savefig(path, dpi=150)
    return axes


def _levels_shown(tree: SignalTree, max_nodes: int) -> int:
    """Return how many whole levels of the tree fit; at least the roots."""
    for levels in range(1, tree.max_depth + 1):
        if tree.depth_offsets[levels + 1] > max_nodes:
            return levels
    return tree.max_depth + 1


def _places(tree: SignalTree, levels: int) -> tuple[torch.Tensor, int]:
    """Return x and y of the nodes shown and the number of columns they take.

    Ends (leaves, or nodes whose children are hidden) take one column each, from left to right;
    the others stand above the middle of what is below them.
    """
    nodes = tree.depth_offsets[levels]
    begin, size = tree.leaf_begin[:nodes], tree.leaf_count[:nodes]
    is_end = (tree.child_count[:nodes] == 0) | (tree.depth[:nodes] == levels - 1)
    starts = torch.sort(begin[is_end]).values
    left = torch.searchsorted(starts, begin)
    right = torch.searchsorted(starts, begin + size) - 1
    x = (left + right).double() / 2
    return torch.stack([x, -tree.depth[:nodes].double()], dim=1).cpu(), int(is_end.sum())


def _edges(axes: Any, tree: SignalTree, nodes: int, place: torch.Tensor) -> None:
    collections = require("matplotlib.collections", "train", "drawing a tree")
    children = torch.arange(tree.num_trees, nodes)
    parent = tree.parent[tree.num_trees : nodes].cpu()
    lines = torch.stack([place[parent], place[children]], dim=1)  # [edges, 2, 2]
    axes.add_collection(
        collections.LineCollection(lines.tolist(), colors="#BBBBBB", linewidths=0.9, zorder=1)
    )


def _inner_nodes(axes: Any, tree: SignalTree, nodes: int, place: torch.Tensor) -> None:
    domain = tree.domain[:nodes].cpu()
    for number, domain_name in enumerate(tree.DOMAINS):
        chosen = place[domain == number]
        if len(chosen):
            axes.scatter(
                chosen[:, 0].tolist(),
                chosen[:, 1].tolist(),
                s=42,
                color=DOMAIN_COLOURS[domain_name],
                label=domain_name,
                zorder=2,
            )
    key = tree.key[:nodes].cpu()
    for node in (key >= 0).nonzero().flatten().tolist():
        x, y = place[node].tolist()
        axes.annotate(
            tree.key_names[int(key[node])],
            (x, y),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=7,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
            zorder=3,
        )


def _leaves(axes: Any, tree: SignalTree, nodes: int, place: torch.Tensor, name: Any) -> None:
    modality = tree.modality[:nodes].cpu()
    for number, modality_name in enumerate(tree.modality_names):
        chosen = place[modality == number]
        if len(chosen):
            axes.scatter(
                chosen[:, 0].tolist(),
                chosen[:, 1].tolist(),
                s=22,
                marker="s",
                color=MODALITY_COLOURS[number % len(MODALITY_COLOURS)],
                label="leaf" if len(tree.modality_names) == 1 else modality_name,
                zorder=2,
            )
    row = tree.leaf_row[:nodes].cpu()
    texts = {node: name(int(row[node])) for node in (row >= 0).nonzero().flatten().tolist()}
    turned = 90 if any(len(text) > 3 for text in texts.values()) else 0
    for node, text in texts.items():
        x, y = place[node].tolist()
        axes.annotate(
            text if len(text) <= 16 else text[:15] + "…",
            (x, y),
            xytext=(0, -6),
            textcoords="offset points",
            ha="center",
            va="top",
            rotation=turned,
            fontsize=7,
            parse_math=False,
        )


def _hidden(axes: Any, tree: SignalTree, nodes: int, place: torch.Tensor) -> None:
    hides = (tree.child_count[:nodes] > 0) & (tree.first_child[:nodes] >= nodes)
    for node in hides.nonzero().flatten().tolist():
        x, y = place[node].tolist()
        axes.annotate(
            f"+{int(tree.leaf_count[node]):,}",
            (x, y),
            xytext=(0, -7),
            textcoords="offset points",
            ha="center",
            va="top",
            rotation=90,
            fontsize=7,
            color="#666666",
        )
