import dataclasses
import random
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyscale.trees import SignalTree
from tests.trees.naive import check_breadth_first, describe
from tests.trees.strategies import deep_chain, parents, random_parents, shuffled, trees


def assert_as_described(tree: SignalTree, parents: list[int]) -> None:
    for name, expected in describe(parents).items():
        assert getattr(tree, name).tolist() == expected, name


@pytest.mark.parametrize("seed", range(60))
def test_random_trees_in_any_numbering_are_as_a_walk_finds_them(seed: int) -> None:
    parents = random_parents(random.Random(seed), shuffle=seed % 2 == 0)
    tree = SignalTree.from_parents(parents)
    assert_as_described(tree, parents)
    check_breadth_first(tree)
    tree.validate()


@given(parents(), st.randoms(use_true_random=False))
def test_drawn_trees_are_as_a_walk_finds_them(drawn: list[int], rng: random.Random) -> None:
    assert_as_described(SignalTree.from_parents(drawn), drawn)
    mixed = shuffled(rng, drawn)
    assert_as_described(SignalTree.from_parents(mixed), mixed)


def test_the_random_trees_hold_every_odd_shape() -> None:
    trees = [SignalTree.from_parents(random_parents(random.Random(seed))) for seed in range(200)]
    sizes = {size for tree in trees for size in tree.child_count.tolist()}
    assert any(tree.num_nodes == 1 for tree in trees)
    assert any(tree.max_depth == 200 for tree in trees)
    assert {1, 2, 3, 20} <= sizes
    assert max(sizes) > 35
    leaf_depths = [set(tree.depth[tree.leaf_order].tolist()) for tree in trees]
    assert sum(len(depths) > 2 for depths in leaf_depths) > 50
    assert any(
        ((tree.child_count == 1) & (tree.child_count[tree.parent.clamp(min=0)] == 1)).any()
        for tree in trees
    )


@given(trees(ordered=False))
def test_rows_and_their_nodes_are_inverse_to_each_other(tree: SignalTree) -> None:
    for row, node in enumerate(tree.row_node.tolist()):
        assert node == -1 or tree.leaf_row[node] == row
    assert (tree.row_node >= 0).sum() == tree.num_leaves
    assert tree.leaf_row[tree.leaf_order].min() >= 0
    tree.validate()


def test_a_single_leaf_is_a_tree() -> None:
    tree = SignalTree.from_parents([-1])
    assert (tree.num_nodes, tree.num_leaves, tree.num_rows, tree.max_depth) == (1, 1, 1, 0)
    assert tree.depth_offsets == (0, 1)
    assert tree.domain.tolist() == [-1]
    assert tree.modality.tolist() == [0]
    tree.validate()


@pytest.mark.parametrize("depth", [63, 64, 65, 200, 5_000])
def test_deep_chains_with_leaves_beside_them_are_as_a_walk_finds_them(depth: int) -> None:
    every = 1 if depth < 1_000 else 100
    parents = deep_chain(depth, family=3, side_leaf_every=every)
    assert_as_described(SignalTree.from_parents(parents), parents)


def test_a_chain_of_100_000_nodes_takes_seconds_and_no_recursion() -> None:
    begin = time.perf_counter()
    tree = SignalTree.from_parents(torch.arange(-1, 99_999))
    tree.validate()
    assert tree.max_depth == 99_999
    assert tree.collapse().num_nodes == 1
    assert tree.prune(torch.tensor([True])) == tree
    assert SignalTree.batch([tree, tree]).unbatch()[1] == tree
    assert time.perf_counter() - begin < 30


def test_siblings_keep_the_order_of_their_numbers_and_positions_count_them() -> None:
    tree = SignalTree.from_parents([3, 3, 3, -1], rows=[2, 0, 1, -1])
    assert tree.leaf_row.tolist() == [-1, 2, 0, 1]
    assert tree.position.tolist() == [[0, 0], [0, 0], [1, 0], [2, 0]]


def test_domains_keys_and_modalities_follow_their_nodes_through_renumbering() -> None:
    tree = SignalTree.from_parents(
        [4, 3, 3, 4, -1],
        domains=[None, None, None, "set", "keyed"],
        keys=["title", None, None, "tags", None],
        modalities=["text", "tag", "tag", None, None],
    )
    assert [tree.DOMAINS[d] for d in tree.domain.tolist() if d >= 0] == ["keyed", "set"]
    assert tree.key_names == ("title", "tags")
    assert tree.key.tolist() == [-1, 0, 1, -1, -1]
    assert tree.modality_names == ("text", "tag")
    assert tree.modality.tolist() == [-1, 0, -1, 1, 1]
    assert tree.position.tolist() == [[0, 0], [0, 0], [1, 0], [0, 0], [0, 0]]


def test_indices_with_names_do_what_names_do() -> None:
    by_name = SignalTree.from_parents(
        [-1, 0, 0], domains="keyed", keys=[None, "a", "b"], modalities=[None, "x", "y"]
    )
    by_index = SignalTree.from_parents(
        [-1, 0, 0],
        domains=torch.tensor([3, -1, -1]),
        keys=torch.tensor([-1, 0, 1]),
        key_names=("a", "b"),
        modalities=[-1, 0, 1],
        modality_names=("x", "y"),
    )
    assert by_name == by_index


@pytest.mark.parametrize(
    ("parents", "options", "reason"),
    [
        ([], {}, "at least one node"),
        ([[-1, 0]], {}, r"parent must have one dimension .*, got shape \[1, 2\]"),
        ([-1, -1], {}, "nodes 0, 1 are 2 roots"),
        ([1, 0], {}, r"node 0 is its own ancestor \(cycle 0 -> 1 -> 0\)"),
        ([-1, 1], {}, r"node 1 is its own ancestor \(cycle 1 -> 1\)"),
        ([-1, 0, 3, 4, 2, 4], {}, r"node 2 is its own ancestor \(cycle 2 -> 3 -> 4 -> 2\)"),
        ([-1, 0, 7], {}, r"parent of node 2 must be .* got 7"),
        ([-1, 0, -2], {}, r"parent of node 2 must be .* got -2"),
        ([-1, 0, 0], {"rows": [-1, 0, 0]}, "duplicate leaves: nodes 1 and 2 both carry row 0"),
        ([-1, 0, 0], {"rows": [-1, 0, -1]}, "node 2 has no children and carries no row"),
        ([-1, 0, 0], {"rows": [2, 0, 1]}, "node 0 has children and cannot carry row 2"),
        ([-1, 0, 0], {"rows": [-1, 0, -7]}, r"rows of node 2 must be .* got -7"),
        (
            [-1, 0, 0],
            {"rows": [-1, 0, 5], "num_rows": 4},
            "rows of node 2 must be from 0 to 3, got 5",
        ),
        ([-1, 0, 0], {"rows": [0, 1]}, r"rows must have .*, got shape \[2\]"),
        ([-1, 0, 0], {"num_rows": 1}, "num_rows must be at least the 2 leaves, got 1"),
        ([-1, 0, 0], {"num_rows": 0}, r"num_rows must be .*, got 0"),
        ([-1, 0, 0], {"domains": "circle"}, r"domains of every node must be .* got 'circle'"),
        ([-1, 0, 0], {"domains": [None, None, None]}, r"domain of node 0 must be .* got -1"),
        ([-1, 0, 0], {"domains": ["set", "set", None]}, r"domain of node 1 must be -1, .* got 2"),
        ([-1, 0, 0], {"domains": ["set"]}, "domains must have a name for each of 3 nodes, got 1"),
        ([-1, 0, 0], {"domains": "grid2d"}, "positions: node 1 is in a grid2d"),
        (
            [-1, 0, 0],
            {"domains": "set", "positions": [0, 0, 1]},
            r"position of node 2 must be .* got \[1, 0\]",
        ),
        ([-1, 0, 0], {"positions": [0, 0, -1]}, r"position of node 2 must be .* got \[-1, 0\]"),
        ([-1, 0, 0], {"positions": [[0, 0, 0]] * 3}, r"positions must have .*, got \[3, 3\]"),
        (
            [-1, 0, 0],
            {"domains": "keyed", "keys": [None, "a", None]},
            r"key of node 2 must be .* got -1",
        ),
        ([-1, 0, 0], {"keys": [None, "a", None]}, r"key of node 1 must be -1.* got 0"),
        ([-1, 0, 0], {"keys": [-1, -1, -1]}, "keys must be names, got indices without the names"),
        ([-1, 0, 0], {"modalities": ["x", "x", "x"]}, r"modality of node 0 must be -1, .* got 0"),
        ([-1, 0, 0], {"modalities": [None, "x", None]}, r"modality of node 2 must be .* got -1"),
        (
            [-1, 0, 0],
            {"modalities": [None, "x", "y"], "modality_names": ("x",)},
            "modalities of node 2 must be one of x, got 'y'",
        ),
        (
            [-1, 0, 0],
            {"modalities": [-1, 0, 1], "modality_names": ("x", "x")},
            "modality_names must be unique, got",
        ),
    ],
)
def test_what_is_no_tree_is_refused_with_the_node(
    parents: list[int], options: dict[str, object], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        SignalTree.from_parents(parents, **options)


@pytest.mark.parametrize(
    ("parents", "options", "reason"),
    [
        ([-1.0, 0.0], {}, r"parent must be integers, got dtype torch.float32"),
        (torch.tensor([True, False]), {}, r"parent must be integers, got dtype torch.bool"),
        ("tree", {}, "parent must be integers, got str"),
        ([-1, 0], {"rows": [-1, 0.5]}, r"rows must be integers, got dtype torch.float32"),
        ([-1, 0], {"num_rows": 1.0}, r"num_rows must be .*, got 1.0"),
    ],
)
def test_what_is_not_whole_numbers_is_refused(
    parents: object, options: dict[str, object], reason: str
) -> None:
    with pytest.raises(TypeError, match=reason):
        SignalTree.from_parents(parents, **options)


@given(parents(), st.data())
def test_one_wrong_number_in_the_parents_never_gives_a_broken_tree(
    drawn: list[int], data: st.DataObject
) -> None:
    node = data.draw(st.integers(0, len(drawn) - 1))
    drawn[node] = data.draw(st.integers(-3, len(drawn) + 1))
    tree, reason = None, ""
    try:
        tree = SignalTree.from_parents(drawn)
    except ValueError as error:
        reason = str(error)
    if tree is None:
        assert "node" in reason
    else:
        assert_as_described(tree, drawn)


def sample() -> SignalTree:
    first = SignalTree.from_parents([-1, 0, 0, 1, 1, 2, 2, 2])
    second = SignalTree.from_nested({"a": [1, 2], "b": {3, 4}})
    return SignalTree.batch([first, second])


@pytest.mark.parametrize(
    ("name", "place", "value", "reason"),
    [
        ("leaf_count", 2, 5, "leaf_count: node 2 has 5, but the tree gives 2"),
        ("child_count", 3, 1, "child_count: node 3 has 1, but the tree gives 3"),
        ("first_child", 4, 0, "first_child: node 4 has 0, but the tree gives 11"),
        ("depth", 5, 7, "depth: node 5 has 7, but the tree gives 1"),
        ("leaf_begin", 3, 0, "leaf_begin: node 3 has 0, but the tree gives 2"),
        ("leaf_order", 1, 6, "leaf_order: leaf 1 has 6, but the tree gives 7"),
        ("row_node", 0, 7, "row_node: row 0 has 7, but the tree gives 6"),
        ("leaf_row", 7, 0, "duplicate leaves: nodes 6 and 7 both carry row 0"),
        ("leaf_row", 7, -1, "node 7 has no children and carries no row"),
        ("leaf_row", 2, 1, "node 2 has children and cannot carry row 1"),
        ("parent", 1, 0, "2 roots, one for each tree, got 1"),
        ("parent", 3, -1, "nodes 0, 1, 3 are 3 roots; 2 trees have 2"),
        ("parent", 3, 8, "node 3 is its own ancestor"),
        ("parent", 3, 1, "child_count: node 0 has 2, but the tree gives 1"),
        ("parent", 4, 99, "parent of node 4 must be"),
        ("parent", 5, 0, "node 5 has parent 0 and comes after the children of 1"),
        ("domain", 6, 0, r"domain of node 6 must be -1, .* got 0"),
        ("domain", 2, 9, r"domain of node 2 must be .* got 9"),
        ("key", 4, -1, r"key of node 4 must be .* got -1"),
        ("key", 2, 0, r"key of node 2 must be -1.* got 0"),
        ("modality", 6, 1, r"modality of node 6 must be .* got 1"),
        ("modality", 0, 0, r"modality of node 0 must be -1, .* got 0"),
        ("position", 13, 1, "position of node 13 must be"),
    ],
)
def test_a_number_changed_in_place_is_found_and_its_node_named(
    name: str, place: int, value: int, reason: str
) -> None:
    tree = sample()
    tree.validate()
    getattr(tree, name)[place] = value
    with pytest.raises(ValueError, match=reason):
        tree.validate()


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        (
            {"depth": torch.zeros(14, dtype=torch.int32)},
            TypeError,
            r"depth must be .*, got torch.int32",
        ),
        (
            {"depth": torch.zeros(3, dtype=torch.int64)},
            ValueError,
            r"depth must have .*, got \[3\]",
        ),
        ({"position": torch.zeros(14, dtype=torch.int64)}, ValueError, "position must have shape"),
        ({"leaf_order": torch.zeros(2, dtype=torch.int64)}, ValueError, "as parent has, got 2"),
        (
            {"row_node": torch.zeros(1, 9, dtype=torch.int64)},
            ValueError,
            "row_node must have one dimension",
        ),
        ({"key": [1, 2]}, TypeError, r"key must be .*, got list"),
        ({"tree_rows": (0, 5, 8)}, ValueError, "tree_rows must go from 0 to 9, got"),
        ({"tree_rows": (0, 9, 9)}, ValueError, "tree 1 has no rows"),
        ({"tree_rows": (0, 4, 9)}, ValueError, "of tree 0 carries row 4, outside the rows 0..3"),
        ({"tree_rows": [0, 5, 9]}, TypeError, "tree_rows must be a tuple"),
        ({"depth_offsets": (0, 2, 5, 14)}, ValueError, r"depth_offsets must be .* got"),
        ({"key_names": ("a",)}, ValueError, r"key of node 5 must be .* got 1"),
        ({"key_names": ["a", "b"]}, TypeError, r"key_names must be .* got"),
    ],
)
def test_a_field_that_disagrees_with_the_others_is_refused(
    changes: dict[str, object], kind: type[Exception], reason: str
) -> None:
    tree = dataclasses.replace(sample(), **changes)
    with pytest.raises(kind, match=reason):
        tree.validate()


@given(trees(), st.data())
def test_any_one_changed_number_is_found(tree: SignalTree, data: st.DataObject) -> None:
    counted = ("parent", "depth", "first_child", "child_count", "leaf_count", "leaf_begin")
    name = data.draw(st.sampled_from((*counted, "leaf_order", "leaf_row", "row_node", "domain")))
    tensor = getattr(tree, name)
    place = data.draw(st.integers(0, len(tensor) - 1))
    low = 4 if name == "domain" else 0  # another valid domain would be another valid tree
    change = data.draw(st.integers(low + 1, 90)) * data.draw(st.sampled_from((-1, 1)))
    tensor[place] += change
    with pytest.raises(ValueError, match=r"node|row|leaf|root"):
        tree.validate()


def test_trees_are_frozen() -> None:
    tree = SignalTree.from_windows(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tree.parent = torch.zeros(1)


def test_equality_goes_by_structure_rows_and_names() -> None:
    tree = SignalTree.from_parents([-1, 0, 0])
    assert tree == SignalTree.from_parents([2, 2, -1])
    assert hash(tree) == hash(SignalTree.from_parents([2, 2, -1]))
    assert tree != SignalTree.from_parents([-1, 0, 0], rows=[-1, 1, 0])
    assert tree != SignalTree.from_parents([-1, 0, 0], domains="set")
    assert tree != SignalTree.from_parents([-1, 0, 0], modalities="text")
    assert tree != SignalTree.from_parents([-1, 0, 0], num_rows=3)
    assert tree != SignalTree.from_parents([-1, 0, 0, 0])
    assert tree != "tree"
    renamed = {"domains": "keyed", "key_names": ("z", "b", "a")}
    one = SignalTree.from_parents([-1, 0, 0], keys=[None, "a", "b"], **renamed)
    other = SignalTree.from_nested({"a": 0, "b": 0})
    assert one == other


def test_a_tree_moves_to_another_device_whole() -> None:
    tree = sample()
    assert tree.to("cpu") is tree
    moved = tree.to("meta")
    assert {moved.device.type, moved.row_node.device.type, moved.position.device.type} == {"meta"}
    assert moved.tree_rows == tree.tree_rows
    assert tree.device.type == "cpu"


def test_the_short_form_says_how_large_a_tree_is() -> None:
    assert repr(SignalTree.from_windows(4, (2,))) == "SignalTree(leaves=4, nodes=7, depth=2)"
    padded = SignalTree.from_windows(4, (2,)).prune(torch.tensor([True, True, True, False]))
    assert repr(padded) == "SignalTree(leaves=3, nodes=6, depth=2, rows=4)"
    assert repr(sample()).startswith("SignalTree(trees=2, leaves=9")


def test_printing_a_tree_shows_its_outline() -> None:
    tree = SignalTree.from_nested({"a": [1, 2], "b": 3})
    assert str(tree) == tree.outline()
    assert str(tree).splitlines()[0] == "keyed of 2 (3 leaves)"
    assert str(SignalTree.from_windows(1000, (4,))).endswith("more nodes")
