import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyscale.trees import SignalTree
from polyscale.trees.reshaping import nodes_left
from tests.trees.naive import check_breadth_first
from tests.trees.strategies import deep_chain, random_parents, trees

forests = st.lists(st.one_of(trees(), trees(ordered=False)), min_size=1, max_size=4).map(
    SignalTree.batch
)


def children_of(tree: SignalTree, node: int) -> list[int]:
    return [n for n, above in enumerate(tree.parent.tolist()) if above == node]


def rows_left_to_right(tree: SignalTree) -> list[list[int]]:
    """Return the rows under each root, by walking the tree."""
    found = []
    for root in range(tree.num_trees):
        rows, stack = [], [root]
        while stack:
            node = stack.pop()
            children = children_of(tree, node)
            stack.extend(reversed(children))
            if not children:
                rows.append(int(tree.leaf_row[node]))
        found.append(rows)
    return found


@given(forests)
def test_a_flat_tree_has_the_same_leaves_in_one_family_each(tree: SignalTree) -> None:
    flat = tree.flatten()
    flat.validate()
    check_breadth_first(flat)
    assert flat.tree_rows == tree.tree_rows
    assert flat.max_depth <= 1
    assert torch.equal(flat.row_node >= 0, tree.row_node >= 0)
    assert rows_left_to_right(flat) == rows_left_to_right(tree)
    for root in range(tree.num_trees):
        family = flat.position[children_of(flat, root)].tolist()
        assert family == [[place, 0] for place in range(len(family))]
        assert (int(flat.child_count[root]) == 0) == (int(tree.child_count[root]) == 0)
    assert flat.flatten() == flat


def test_flatten_makes_sequences_and_keeps_modalities() -> None:
    record = {"title": 2, "photo": SignalTree.from_image(2, 2, 1)}
    tree = SignalTree.batch([SignalTree.from_records(record), SignalTree.from_windows(1)])
    flat = tree.flatten()
    names = [flat.modality_names[m] for m in flat.modality[flat.row_node].tolist()]
    assert names == ["title"] * 2 + ["photo"] * 4 + ["default"]
    assert flat.domain.tolist()[:2] == [SignalTree.DOMAINS.index("sequence"), -1]
    assert flat.key.tolist() == [-1] * flat.num_nodes
    assert flat.leaf_row[1] == 6  # the tree of one node stays one


def pooled_by_hand(tree: SignalTree) -> tuple[list[list[list[int]]], dict[int, int]]:
    """Return, per tree, the old rows of each new leaf from left to right, and new parents."""
    result = []
    merged_into = {}
    for root in range(tree.num_trees):
        groups, stack = [], [root]
        while stack:
            node = stack.pop()
            children = children_of(tree, node)
            if not children:
                groups.append([int(tree.leaf_row[node])])
            elif all(not children_of(tree, child) for child in children):
                groups.append([int(tree.leaf_row[child]) for child in children])
                merged_into.update(dict.fromkeys(children, node))
            else:
                stack.extend(reversed(children))
        result.append(groups)
    return result, merged_into


@given(forests)
def test_pooling_merges_the_families_that_hold_leaves_alone(tree: SignalTree) -> None:
    smaller, row_of_row = tree.pool_leaves()
    smaller.validate()
    check_breadth_first(smaller)
    groups, merged_into = pooled_by_hand(tree)
    expected = [-1] * tree.num_rows
    number = 0
    for one_tree in groups:
        for group in one_tree:
            for row in group:
                expected[row] = number
            number += 1
    assert row_of_row.tolist() == expected
    sizes = [b - a for a, b in zip(smaller.tree_rows, smaller.tree_rows[1:], strict=False)]
    assert sizes == [len(one_tree) for one_tree in groups]
    assert rows_left_to_right(smaller) == [
        list(range(a, b)) for a, b in zip(smaller.tree_rows, smaller.tree_rows[1:], strict=False)
    ]
    left = [node for node in range(tree.num_nodes) if node not in merged_into]
    assert nodes_left(tree).tolist() == left
    assert smaller.position.tolist() == tree.position[left].tolist()
    above = [left.index(p) if p >= 0 else -1 for p in tree.parent[left].tolist()]
    assert smaller.parent.tolist() == above


def test_a_new_leaf_has_the_place_of_its_family_and_the_modality_of_its_leftmost_leaf() -> None:
    tree = SignalTree.from_parents(
        [-1, 0, 0, 1, 1],
        rows=[-1, -1, 0, 2, 1],
        domains=["keyed", "set", None, None, None],
        keys=[None, "tags", "price", None, None],
        modalities=[None, None, "number", "word", "number"],
    )
    smaller, row_of_row = tree.pool_leaves()
    assert row_of_row.tolist() == [1, 0, 0]
    assert [smaller.key_names[k] for k in smaller.key[1:].tolist()] == ["tags", "price"]
    assert [smaller.modality_names[m] for m in smaller.modality[1:].tolist()] == ["word", "number"]
    assert smaller.domain.tolist() == [SignalTree.DOMAINS.index("keyed"), -1, -1]


def test_a_chain_is_not_a_family_of_leaves_until_its_end() -> None:
    tree = SignalTree.from_parents([-1, 0, 1])
    once, _ = tree.pool_leaves()
    assert once.parent.tolist() == [-1, 0]
    twice, _ = once.pool_leaves()
    assert twice.parent.tolist() == [-1]
    thrice, row_of_row = twice.pool_leaves()
    assert thrice == twice
    assert row_of_row.tolist() == [0]


def test_pooling_windows_gives_the_windows_above() -> None:
    tree, _ = SignalTree.from_windows(24, (2, 3)).pool_leaves()
    assert tree == SignalTree.from_windows(12, (3,))


@pytest.mark.parametrize("seed", range(20))
def test_pooling_again_and_again_ends_at_one_leaf_per_tree(seed: int) -> None:
    rng = random.Random(seed)
    tree = SignalTree.batch([SignalTree.from_parents(random_parents(rng)) for _ in range(3)])
    for _ in range(tree.max_depth):
        tree, _ = tree.pool_leaves()
    assert tree.parent.tolist() == [-1, -1, -1]


def test_large_and_deep_trees_take_no_loop_over_nodes() -> None:
    wide = SignalTree.from_windows(300_000, (2, 4, 8))
    deep = SignalTree.from_parents(torch.tensor(deep_chain(20_000, family=3, side_leaf_every=2)))
    start = time.perf_counter()
    for tree in (wide, deep):
        assert tree.flatten().num_leaves == tree.num_leaves
        assert tree.pool_leaves()[0].num_leaves < tree.num_leaves
    assert time.perf_counter() - start < 5
