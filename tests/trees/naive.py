"""A tree in plain Python, one step at a time, to hold SignalTree against."""

from collections import deque
from itertools import pairwise

from polyscale.trees import SignalTree


def describe(parents: list[int]) -> dict[str, list[int]]:
    """Return what SignalTree should hold for these parents, by walking the tree."""
    children: dict[int, list[int]] = {node: [] for node in range(len(parents))}
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    order = []
    queue = deque([parents.index(-1)])
    while queue:
        order.append(queue.popleft())
        queue.extend(children[order[-1]])
    number = {node: index for index, node in enumerate(order)}

    depth = {order[0]: 0}
    for node in order[1:]:
        depth[node] = depth[parents[node]] + 1
    left_to_right = []
    stack = [order[0]]
    while stack:
        node = stack.pop()
        if not children[node]:
            left_to_right.append(node)
        stack.extend(reversed(children[node]))
    under: dict[int, list[int]] = {node: [] for node in order}
    for rank, leaf in enumerate(left_to_right):
        node = leaf
        while node >= 0:
            under[node].append(rank)
            node = parents[node]
    return {
        "parent": [-1 if parents[n] < 0 else number[parents[n]] for n in order],
        "depth": [depth[n] for n in order],
        "first_child": [number[children[n][0]] if children[n] else 0 for n in order],
        "child_count": [len(children[n]) for n in order],
        "leaf_count": [len(under[n]) for n in order],
        "leaf_begin": [min(under[n]) for n in order],
        "leaf_order": [number[n] for n in left_to_right],
        "leaf_row": [left_to_right.index(n) if not children[n] else -1 for n in order],
    }


def dilution(tree: SignalTree) -> float:
    """Average, over ordered pairs of leaves, the leaves under j's highest ancestor apart from i."""
    parent, counts = tree.parent.tolist(), tree.leaf_count.tolist()

    def path(node: int) -> list[int]:
        nodes = [node]
        while parent[nodes[-1]] >= 0:
            nodes.append(parent[nodes[-1]])
        return nodes[::-1]

    paths = [path(leaf) for leaf in tree.leaf_order.tolist()]
    found = [
        next(counts[b] for a, b in zip(i, j, strict=False) if a != b)
        for i in paths
        for j in paths
        if i != j and i[0] == j[0]
    ]
    return sum(found) / len(found) if found else 1.0


def check_breadth_first(tree: SignalTree) -> None:
    """Assert the numbering that the attention code relies on, node by node."""
    parent, depth = tree.parent.tolist(), tree.depth.tolist()
    assert parent[: tree.num_trees] == [-1] * tree.num_trees
    assert all(a <= b for a, b in pairwise(parent))
    assert depth == sorted(depth)
    for level, (begin, end) in enumerate(pairwise(tree.depth_offsets)):
        assert set(depth[begin:end]) == {level}
    for node in range(tree.num_nodes):
        first, count = int(tree.first_child[node]), int(tree.child_count[node])
        assert all(parent[child] == node for child in range(first, first + count))
        begin, leaves = int(tree.leaf_begin[node]), int(tree.leaf_count[node])
        for leaf in tree.leaf_order[begin : begin + leaves].tolist():
            above = leaf
            while above >= 0 and above != node:
                above = parent[above]
            assert above == node
