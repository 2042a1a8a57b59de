"""Trees from nested data, windows, images, linkage matrices and records."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from polyscale.checks import check_integer
from polyscale.trees.assembly import assemble
from polyscale.trees.checks import DOMAINS, GRID2D, KEYED, first
from polyscale.trees.editing import batch
from polyscale.trees.structure import breadth_first_order, index_in_family, renumber
from polyscale.trees.tree import SignalTree


def from_nested(nested: Any) -> tuple[SignalTree, list[Any]]:
    """Return the tree of `nested` and its leaves in row order; see `SignalTree.from_nested`."""
    parents: list[int] = [-1]
    domains: list[str | None] = [_domain(nested)]
    keys: list[str | None] = [None]
    leaves: list[Any] = []
    # A stack of open containers, not recursion: data may be nested deeper than Python's stack.
    stack: list[tuple[int, Any, Iterator[tuple[str, str | None, Any]]]] = []
    path: list[str] = ["nested"]
    inside: set[int] = set()

    def enter(node: int, value: Any) -> None:
        if domains[node] is None:
            leaves.append(value)
            path.pop()
            return
        if id(value) in inside:
            raise ValueError(f"{''.join(path)}: node {node} contains itself; a tree has no cycles")
        if not len(value):
            raise ValueError(
                f"{''.join(path)}: node {node} is an empty {type(value).__name__}: "
                "it has no children and carries no row"
            )
        inside.add(id(value))
        stack.append((node, value, _members(value, path)))

    enter(0, nested)
    while stack:
        node, value, members = stack[-1]
        member = next(members, None)
        if member is None:
            stack.pop()
            inside.discard(id(value))
            path.pop()
            continue
        label, key, child = member
        parents.append(node)
        domains.append(_domain(child))
        keys.append(key)
        path.append(label)
        enter(len(parents) - 1, child)
    return SignalTree.from_parents(parents, domains=domains, keys=keys), leaves


def _domain(value: Any) -> str | None:
    if isinstance(value, Mapping):
        return "keyed"
    if isinstance(value, AbstractSet):
        return "set"
    return "sequence" if isinstance(value, (list, tuple)) else None


def _members(value: Any, path: list[str]) -> Iterator[tuple[str, str | None, Any]]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the keys of {''.join(path)} must be str, got {key!r}")
            yield f"[{key!r}]", key, child
    elif isinstance(value, AbstractSet):
        for child in _steady_order(value):
            yield "{...}", None, child
    else:
        for index, child in enumerate(value):
            yield f"[{index}]", None, child


def _steady_order(members: AbstractSet[Any]) -> list[Any]:
    # Strings hash differently in every process; sorting gives a set the same rows each time.
    try:
        if not any(isinstance(member, (AbstractSet, tuple)) for member in members):
            return sorted(members)
    except TypeError:
        pass
    return sorted(members, key=repr)


def from_windows(n: int, windows: Sequence[int], modality: str = "default") -> SignalTree:
    """See `SignalTree.from_windows`."""
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
    sides = patch if isinstance(patch, tuple) else (patch, patch)
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


def from_records(records: Any, modalities: Mapping[str, str] | None) -> SignalTree:
    """See `SignalTree.from_records`."""
    if isinstance(records, Mapping):
        return _record(records, modalities or {}, "records")
    if not isinstance(records, Sequence) or isinstance(records, (str, bytes)) or not records:
        raise TypeError(f"records must be a dict or a list of dicts, got {type(records).__name__}")
    for place, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise TypeError(f"records[{place}] must be a dict, got {type(record).__name__}")
    return batch(
        [_record(record, modalities or {}, f"records[{i}]") for i, record in enumerate(records)]
    )


def _record(record: Mapping[str, Any], modalities: Mapping[str, str], where: str) -> SignalTree:
    if not record:
        raise ValueError(f"{where} must have at least one field, got an empty record")
    fields = []
    for name, value in record.items():
        if not isinstance(name, str):
            raise TypeError(f"the names of the fields of {where} must be str, got {name!r}")
        fields.append(_field(value, name, modalities.get(name), f"{where}[{name!r}]"))
    forest = batch(fields)
    names = tuple(record)
    key_names = tuple(dict.fromkeys((*names, *forest.key_names)))
    number = forest.key.new_tensor([*(key_names.index(n) for n in forest.key_names), -1])
    roots = len(names)
    place = torch.arange(roots, device=forest.device)
    key = torch.cat([place, number[forest.key[roots:]]])
    position = forest.position.clone()
    position[:roots, 0] = place

    def with_root(values: Tensor, root: int) -> Tensor:
        return torch.cat([values.new_full((1, *values.shape[1:]), root), values])

    return assemble(
        with_root(forest.parent + 1, -1),  # the former roots, -1, are now children of node 0
        with_root(forest.leaf_row, -1),
        domain=with_root(forest.domain, KEYED),
        position=with_root(position, 0),
        key=with_root(key, -1),
        modality=with_root(forest.modality, -1),
        key_names=key_names,
        modality_names=forest.modality_names,
        tree_rows=(0, forest.num_rows),
    )


def _field(value: Any, name: str, modality: str | None, where: str) -> SignalTree:
    if isinstance(value, SignalTree):
        tree = value
        if tree.num_trees != 1:
            raise ValueError(f"{where} must be one tree, got a batch of {tree.num_trees} trees")
    elif isinstance(value, int) and not isinstance(value, bool):
        tree = from_windows(check_integer(where, value, least=1), ())
    elif _domain(value) is not None:
        tree = from_nested(value)[0]
    else:
        raise TypeError(
            f"{where} must be a number of rows, a SignalTree, or nested lists, dicts and sets, "
            f"got {type(value).__name__}"
        )
    if tree.modality_names == ("default",):
        return tree.with_modality(modality or name)
    if modality is not None and tree.modality_names != (modality,):
        raise ValueError(
            f"modalities: {name!r} is to be {modality!r}, but its tree already has "
            f"{', '.join(tree.modality_names)}"
        )
    return tree
