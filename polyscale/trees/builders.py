"""Trees from windows, images and linkage matrices."""

from collections.abc import Iterable
from typing import Any

import torch

from polyscale.checks import check_integer
from polyscale.trees.assembly import assemble
from polyscale.trees.checks import DOMAINS, GRID2D, first
from polyscale.trees.structure import breadth_first_order, index_in_family, renumber
from polyscale.trees.tree import SignalTree


def from_windows(n: int, windows: Iterable[int], modality: str = "default") -> SignalTree:
    """See `SignalTree.from_windows`."""
    if isinstance(windows, str) or not isinstance(windows, Iterable):
        raise TypeError(
            f"windows must be a sequence of window sizes, bottom to top, got {windows!r}; "
            "one level of windows of four is windows=(4,)"
        )
    sizes = [check_integer("n", n, least=1)]  # nodes of each level, bottom to top
    chosen = []
    for place, window in enumerate(windows):
        window = check_integer(f"windows[{place}]", window, least=2)
        if sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // window))
            chosen.append(window)
    if sizes[-1] > 1:
        chosen.append(sizes[-1])
        sizes.append(1)
    parent = torch.full((sum(sizes),), -1)
    index = torch.zeros(sum(sizes), 2, dtype=torch.int64)
    above, begin = 0, 1
    for size, window in zip(sizes[-2::-1], chosen[::-1], strict=True):
        within = torch.arange(size)
        parent[begin : begin + size] = above + within // window
        index[begin : begin + size, 0] = within % window
        above, begin = begin, begin + size
    leaves = parent.numel() - n
    domain = torch.zeros_like(parent)
    domain[leaves:] = -1
    modality_index = -1 - domain  # 0 for leaves, -1 for inner nodes
    return assemble(
        parent,
        domain=domain,
        position=index,
        key=torch.full_like(parent, -1),
        modality=modality_index,
        modality_names=(modality,),
    )


def from_image(
    height: int, width: int, patch: int | tuple[int, int], layout: str, modality: str
) -> SignalTree:
    """See `SignalTree.from_image`."""
    sides = tuple(patch) if isinstance(patch, (tuple, list)) else (patch, patch)
    if len(sides) != 2:
        raise ValueError(f"patch must be an integer or (height, width), got {patch!r}")
    tall, wide = (check_integer("patch", side, least=1) for side in sides)
    rows = -(-check_integer("height", height, least=1) // tall)
    columns = -(-check_integer("width", width, least=1) // wide)
    if rows * columns == 1:
        return from_windows(1, (), modality)
    if layout == "quadtree":
        return _quadtree(rows, columns, modality)
    grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))  # [patches, 2]
    if layout == "flat":
        parent = torch.cat([torch.tensor([-1]), torch.zeros(rows * columns, dtype=torch.int64)])
        position = torch.cat([torch.zeros(1, 2, dtype=torch.int64), grid])
        return SignalTree.from_parents(
            parent, domains="grid2d", positions=position, modalities=modality
        )
    if layout == "rows":
        lines = torch.cat([torch.tensor([-1]), torch.zeros(rows, dtype=torch.int64)])
        return SignalTree.from_parents(
            torch.cat([lines, 1 + grid[:, 0]]), modalities=modality, modality_names=(modality,)
        )
    raise ValueError(f"layout must be quadtree, rows or flat, got {layout!r}")


def _quadtree(rows: int, columns: int, modality: str) -> SignalTree:
    """Halve the grid both ways, top down: no one-child nodes, brothers of about one size."""
    block = torch.tensor([[0, rows, 0, columns]])  # [blocks, 4]: first and last row, then column
    parents, blocks = [torch.tensor([-1])], [block]
    positions = [torch.zeros(1, 2, dtype=torch.int64)]
    begin = 0
    while True:
        tall, wide = block[:, 1] - block[:, 0], block[:, 3] - block[:, 2]
        node = begin + torch.arange(len(block))
        inner = tall * wide > 1
        begin += len(block)
        if not inner.any():
            break
        node, block = node[inner], block[inner]
        middle = torch.stack(
            [block[:, 0] + (tall[inner] + 1) // 2, block[:, 2] + (wide[inner] + 1) // 2], dim=1
        )
        quarters = []
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            row = (middle[:, 0], block[:, 1]) if down else (block[:, 0], middle[:, 0])
            column = (middle[:, 1], block[:, 3]) if right else (block[:, 2], middle[:, 1])
            quarters.append(torch.stack([*row, *column], dim=1))
        block = torch.stack(quarters, dim=1).flatten(0, 1)  # [4 * inner, 4]
        full = (block[:, 1] > block[:, 0]) & (block[:, 3] > block[:, 2])
        place = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]).repeat(len(node), 1)
        parents.append(node.repeat_interleave(4)[full])
        positions.append(place[full])
        block = block[full]
        blocks.append(block)
    parent, block = torch.cat(parents), torch.cat(blocks)
    leaf = (block[:, 1] - block[:, 0]) * (block[:, 3] - block[:, 2]) == 1
    return assemble(
        parent,
        torch.where(leaf, block[:, 0] * columns + block[:, 2], -1),
        domain=torch.where(leaf, -1, GRID2D),
        position=torch.cat(positions),
        key=torch.full_like(parent, -1),
        modality=torch.where(leaf, 0, -1),
        modality_names=(modality,),
        tree_rows=(0, rows * columns),
    )


def from_linkage(linkage: Any, domain: str, modality: str) -> SignalTree:
    """See `SignalTree.from_linkage`."""
    if domain not in DOMAINS or domain in ("grid2d", "keyed"):
        raise ValueError(f"domain must be set, sequence or graph, got {domain!r}")
    try:
        merges = torch.as_tensor(linkage, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"linkage must be a matrix [n - 1, 4] of numbers ({error})") from error
    if merges.dim() != 2 or merges.shape[1] != 4:
        raise ValueError(f"linkage must have shape [n - 1, 4], got {list(merges.shape)}")
    n = len(merges) + 1
    node = n + torch.arange(n - 1)
    children = merges[:, :2]
    wrong = (children != children.round()) | (children < 0) | (children >= node[:, None])
    step = first(wrong.any(1))
    if step is not None:
        raise ValueError(
            f"row {step} of linkage (node {n + step}) must join two integers from 0 to "
            f"{n + step - 1}, got {children[step].tolist()}"
        )
    joined = children.long().flatten()  # [2 (n - 1)]
    double = first(torch.bincount(joined, minlength=2 * n - 1) > 1)
    if double is not None:
        raise ValueError(f"linkage joins node {double} twice; a node has one parent")
    parent = torch.full((2 * n - 1,), -1)
    parent[joined] = node.repeat_interleave(2)
    # Left is the first column, which an optimal ordering may give the larger number.
    rank = torch.zeros_like(parent)
    rank[joined] = torch.arange(2).repeat(n - 1)
    order = breadth_first_order(parent, rank)
    is_leaf = order < n
    in_order = renumber(parent, order)
    position = torch.zeros(len(order), 2, dtype=torch.int64)
    if domain != "set":
        position[:, 0] = index_in_family(in_order)
    tree = assemble(
        in_order,
        torch.where(is_leaf, order, -1),
        domain=torch.where(is_leaf, -1, DOMAINS.index(domain)),
        position=position,
        key=torch.full_like(parent, -1),
        modality=torch.where(is_leaf, 0, -1),
        modality_names=(modality,),
        tree_rows=(0, n),
    )
    counts = torch.zeros(2 * n - 1, dtype=torch.float64)
    counts[order] = tree.leaf_count.double()
    step = first(counts[n:] != merges[:, 3])
    if step is not None:
        raise ValueError(
            f"row {step} of linkage (node {n + step}) must count "
            f"{counts[n + step].item():g} leaves, as its merges do, got {merges[step, 3].item():g}"
        )
    return tree
