import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyscale.trees import SignalTree
from tests.trees.naive import check_breadth_first
from tests.trees.strategies import random_parents, trees


@given(st.lists(st.one_of(trees(), trees(ordered=False)), min_size=1, max_size=5))
def test_a_batch_is_a_valid_forest_and_comes_apart_as_it_was_joined(
    parts: list[SignalTree],
) -> None:
    forest = SignalTree.batch(parts)
    forest.validate()
    check_breadth_first(forest)
    assert forest.num_trees == len(parts)
    assert forest.num_rows == sum(part.num_rows for part in parts)
    assert forest.unbatch() == parts


def test_rows_of_a_batch_follow_each_other() -> None:
    a, b = SignalTree.from_windows(4, (2,)), SignalTree.from_windows(3)
    forest = SignalTree.batch([a, b])
    assert forest.tree_rows == (0, 4, 7)
    assert forest.leaf_row[forest.leaf_order].tolist() == list(range(7))
    assert forest.leaf_count[:2].tolist() == [4, 3]


def test_batches_join_into_larger_batches() -> None:
    a, b, c = (SignalTree.from_windows(n, (3,)) for n in (1, 5, 9))
    assert SignalTree.batch([SignalTree.batch([a, b]), c]) == SignalTree.batch([a, b, c])


def test_a_batch_merges_names_and_each_node_keeps_its_own() -> None:
    a = SignalTree.from_records({"x": 2, "y": 1})
    b = SignalTree.from_records({"y": 1, "z": 3})
    forest = SignalTree.batch([a, b])
    assert forest.key_names == ("x", "y", "z")
    names = [forest.key_names[k] for k in forest.key.tolist() if k >= 0]
    assert names == ["x", "y", "y", "z"]
    assert forest.unbatch() == [a, b]


def test_batch_refuses_nothing_and_what_is_no_tree() -> None:
    with pytest.raises(ValueError, match=r"trees must hold .*, got none"):
        SignalTree.batch([])
    with pytest.raises(TypeError, match="trees must be SignalTrees, got int as number 1"):
        SignalTree.batch([SignalTree.from_windows(2), 3])
    with pytest.raises(ValueError, match="tree 1 is on meta"):
        SignalTree.batch([SignalTree.from_windows(2), SignalTree.from_windows(2).to("meta")])


def pruned_by_hand(tree: SignalTree, keep: list[bool]) -> list[tuple[int, int, int]]:
    """Return (depth, leaves left, row) of the nodes that stay, in order."""
    parent, left = tree.parent.tolist(), [0] * tree.num_nodes
    for row, node in enumerate(tree.row_node.tolist()):
        while node >= 0 and keep[row]:
            left[node] += 1
            node = parent[node]
    return [
        (int(tree.depth[n]), left[n], int(tree.leaf_row[n]))
        for n in range(tree.num_nodes)
        if left[n]
    ]


@given(trees(ordered=False), st.data())
def test_pruning_leaves_out_rows_and_the_nodes_above_nothing(
    tree: SignalTree, data: st.DataObject
) -> None:
    rows = tree.num_rows
    keep = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    must_stay = data.draw(st.sampled_from(tree.leaf_row[tree.leaf_order].tolist()))
    keep[must_stay] = True
    pruned = tree.prune(torch.tensor(keep))
    pruned.validate()
    assert pruned.num_rows == tree.num_rows
    expected = pruned_by_hand(tree, keep)
    columns = (pruned.depth, pruned.leaf_count, pruned.leaf_row)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected


def test_pruned_nodes_keep_their_positions_and_one_child_nodes_stay() -> None:
    tree = SignalTree.from_windows(6, (3,)).prune(
        torch.tensor([False, True, True, False, False, True])
    )
    assert tree.child_count.tolist() == [2, 2, 1, 0, 0, 0]
    assert tree.position[:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert tree.row_node.tolist() == [-1, 3, 4, -1, -1, 5]


def test_pruning_refuses_what_is_no_mask_and_trees_left_empty() -> None:
    forest = SignalTree.batch([SignalTree.from_windows(2), SignalTree.from_windows(3)])
    with pytest.raises(ValueError, match=r"tree 1 .* loses all its leaves"):
        forest.prune(torch.tensor([True, True, False, False, False]))
    with pytest.raises(
        ValueError, match=r"keep must be a bool tensor \[5\], .*, got torch.int64 \[5\]"
    ):
        forest.prune(torch.ones(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"keep must be .*, got torch.bool \[4\]"):
        forest.prune(torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"keep must be .*, got list"):
        forest.prune([True] * 5)


@given(st.one_of(trees(), trees(ordered=False)))
def test_collapsing_takes_out_the_one_child_nodes_and_nothing_else(tree: SignalTree) -> None:
    flat = tree.collapse()
    flat.validate()
    assert not (flat.child_count == 1).any()
    assert flat.leaf_row[flat.leaf_order].tolist() == tree.leaf_row[tree.leaf_order].tolist()

    def leaf_sets(one: SignalTree) -> list[tuple[int, int]]:
        return sorted(zip(one.leaf_begin.tolist(), one.leaf_count.tolist(), strict=True))

    branching = tree.child_count != 1
    assert leaf_sets(flat) == sorted(
        zip(tree.leaf_begin[branching].tolist(), tree.leaf_count[branching].tolist(), strict=True)
    )
    assert flat.collapse() == flat


def test_a_child_that_moves_up_takes_the_key_and_position_of_the_place() -> None:
    tree = SignalTree.from_nested({"a": [[1]], "b": [[2, 3]]}).collapse()
    assert tree == SignalTree.from_nested({"a": 1, "b": [2, 3]})


def test_collapsing_a_batch_collapses_each_tree() -> None:
    parts = [SignalTree.from_parents(random_parents(random.Random(seed))) for seed in range(20)]
    collapsed = SignalTree.batch(parts).collapse()
    assert collapsed == SignalTree.batch([part.collapse() for part in parts])


def test_a_batch_of_256_trees_is_joined_in_well_under_a_second() -> None:
    parts = [SignalTree.from_windows(200 + n % 100, (5, 7)) for n in range(256)]
    begin = time.perf_counter()
    forest = SignalTree.batch(parts)
    assert time.perf_counter() - begin < 0.5
    forest.validate()
