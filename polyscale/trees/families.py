"""Large families in windows, because the cost of a family is the square of its size."""

import warnings

import torch
from torch import Tensor

from polyscale.checks import check_integer
from polyscale.trees.assembly import assemble
from polyscale.trees.checks import DOMAINS, KEYED, SET
from polyscale.trees.structure import breadth_first_order, index_in_family, renumber
from polyscale.trees.tree import SignalTree

SEQUENCE = DOMAINS.index("sequence")
MAX_FAMILY = 1024
WINDOW = 64


def split_families(
    tree: SignalTree, max_family: int | None = MAX_FAMILY
) -> tuple[SignalTree, Tensor]:
    """Split families of more than `max_family` members into windows of 64, with a warning.

    Members of grids and graphs stay together: their places are relative to each other. Returns the
    tree and, for each of its nodes, the node of the old tree, -1 for a window.

    >>> tree = SignalTree.from_windows(100)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     split, node_before = split_families(tree, 50)
    >>> split.leaf_count.tolist()[:3], node_before.tolist()[:4]
    ([100, 50, 50], [0, -1, -1, 1])
    """
    node_before = torch.arange(tree.num_nodes, device=tree.device)
    if max_family is None:
        return tree, node_before
    max_family = check_integer("max_family", max_family, least=2, hint="None splits no family")
    largest = 0
    while True:
        splits = (tree.domain == SEQUENCE) | (tree.domain == SET) | (tree.domain == KEYED)
        large = splits & (tree.child_count > max_family)  # [M]
        if not large.any():
            break
        largest = largest or int(tree.child_count[large].max())
        tree, before = _split_once(tree, large, min(WINDOW, max_family))
        node_before = torch.where(before >= 0, node_before[before.clamp(min=0)], -1)
    if largest:
        warnings.warn(
            f"a family of {largest:,} members is split into windows of {min(WINDOW, max_family)}, "
            f"because max_family is {max_family:,}; a missing sentence or paragraph break is the "
            "usual reason",
            stacklevel=4,
        )
    return tree, node_before


def _split_once(tree: SignalTree, large: Tensor, window: int) -> tuple[SignalTree, Tensor]:
    """Put windows between the nodes `large` and their children."""
    nodes = tree.num_nodes
    windows = torch.where(large, (tree.child_count + window - 1) // window, 0)  # [M]
    before = windows.cumsum(0) - windows
    above = tree.parent.clamp(min=0)
    moves = (tree.parent >= 0) & large[above]
    index = index_in_family(tree.parent)
    owner = torch.repeat_interleave(windows)  # the large node of each window
    parent = torch.where(moves, nodes + before[above] + index // window, tree.parent)
    position = tree.position.clone()
    moved = moves & (tree.domain[above] != SET)
    position[moved, 0] = index[moved] % window
    place = torch.arange(len(owner), device=tree.device) - before[owner]
    place = torch.where(tree.domain[owner] == SET, 0, place)

    parent = torch.cat([parent, owner])
    order = breadth_first_order(parent)
    # Windows are keyed, not the family of the windows.
    domain = torch.where(large & (tree.domain == KEYED), SEQUENCE, tree.domain)

    def with_windows(values: Tensor, of_windows: Tensor) -> Tensor:
        return torch.cat([values, of_windows])[order]

    none = torch.full_like(owner, -1)
    split = assemble(
        renumber(parent, order),
        with_windows(tree.leaf_row, none),
        domain=with_windows(domain, tree.domain[owner]),
        position=with_windows(position, torch.stack([place, torch.zeros_like(place)], dim=1)),
        key=with_windows(tree.key, none),
        modality=with_windows(tree.modality, none),
        key_names=tree.key_names,
        modality_names=tree.modality_names,
        tree_rows=tree.tree_rows,
        source_offsets=tree.source_offsets,
    )
    return split, torch.where(order < nodes, order, -1)
