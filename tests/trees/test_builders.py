import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster import hierarchy

from polyscale.trees import SignalTree
from tests.trees.naive import check_breadth_first


def rows_below(tree: SignalTree, node: int) -> list[int]:
    begin, count = int(tree.leaf_begin[node]), int(tree.leaf_count[node])
    return tree.leaf_row[tree.leaf_order[begin : begin + count]].tolist()


# Nested data


def test_lists_dicts_and_sets_become_their_domains() -> None:
    data = {"title": ["a", "b"], "tags": {"y", "x"}, "price": 3.5}
    tree, leaves = SignalTree.from_nested(data, return_leaves=True)
    tree.validate()
    assert leaves == ["a", "b", "x", "y", 3.5]
    assert tree.leaf_row[tree.leaf_order].tolist() == [0, 1, 2, 3, 4]
    assert [tree.DOMAINS[d] for d in tree.domain.tolist() if d >= 0] == ["keyed", "sequence", "set"]
    assert tree.key_names == ("title", "tags", "price")
    assert tree.position.tolist()[4:] == [[0, 0], [1, 0], [0, 0], [0, 0]]


def flatten(nested: object) -> list[object]:
    if isinstance(nested, dict):
        return [leaf for child in nested.values() for leaf in flatten(child)]
    if isinstance(nested, (list, tuple)):
        return [leaf for child in nested for leaf in flatten(child)]
    return [nested]


nested_data = st.recursive(
    st.integers(),
    lambda children: st.one_of(
        st.lists(children, min_size=1, max_size=4),
        st.tuples(children, children),
        st.dictionaries(st.text(max_size=3), children, min_size=1, max_size=3),
    ),
    max_leaves=30,
)


@given(nested_data)
def test_leaves_come_back_in_the_order_of_their_rows(nested: object) -> None:
    tree, leaves = SignalTree.from_nested(nested, return_leaves=True)
    tree.validate()
    assert leaves == flatten(nested)
    assert tree.num_rows == len(leaves)
    assert tree == SignalTree.from_nested(nested)


def test_a_single_value_is_a_single_leaf_and_strings_are_values() -> None:
    for value in ("word", 3.5, True, None, np.float64(2), torch.tensor(2), np.array(2)):
        assert SignalTree.from_nested(value) == SignalTree.from_windows(1)


def test_arrays_are_leaves_or_families_as_the_caller_says() -> None:
    for array in (torch.zeros(2, 3), np.zeros((2, 3))):
        for nested, name in ((array, "nested"), ([1, {"a": array}], r"nested\[1\]\['a'\]")):
            with pytest.raises(TypeError, match=rf"{name} is an array .* \[2, 3\]\): one leaf or"):
                SignalTree.from_nested(nested)
        tree, leaves = SignalTree.from_nested([array, "word"], arrays="leaf", return_leaves=True)
        assert tree.num_leaves == 2
        assert leaves[0] is array
        assert SignalTree.from_nested(array, arrays="sequence").leaf_count.tolist()[:3] == [6, 3, 3]
    with pytest.raises(ValueError, match="arrays must be one of 'leaf', 'sequence', got 'rows'"):
        SignalTree.from_nested([1], arrays="rows")


def test_ranges_are_families_and_iterators_are_refused() -> None:
    assert SignalTree.from_nested(range(4)) == SignalTree.from_nested([0, 1, 2, 3])
    for iterator in ((i for i in range(3)), map(str, [1]), iter([1, 2])):
        with pytest.raises(
            TypeError, match=r"nested\[0\] is an iterator .* pass list\(...\) of it"
        ):
            SignalTree.from_nested([iterator])


def test_data_nested_deeper_than_the_python_stack_is_taken() -> None:
    nested: object = 1
    for _ in range(20_000):
        nested = [nested]
    assert SignalTree.from_nested(nested).max_depth == 20_000
    while isinstance(nested, list):  # lest its deletion recurse
        nested = nested[0]


def test_sets_in_sets_and_of_mixed_types_are_taken() -> None:
    tree = SignalTree.from_nested([{1, "a"}, {frozenset({1, 2}), frozenset({3})}, {(1, 2), 3}])
    tree.validate()
    assert tree.num_leaves == 8


@pytest.mark.parametrize(
    ("nested", "reason"),
    [
        ([], "nested: node 0 is an empty list"),
        ([1, {"a": [2, ()]}], r"nested\[1\]\['a'\]\[1\]: node 5 is an empty tuple"),
        ([1, set()], r"nested\[1\]: node 2 is an empty set"),
    ],
)
def test_empty_containers_are_refused_by_their_place(nested: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SignalTree.from_nested(nested)


def test_a_list_inside_itself_is_refused_but_one_used_twice_is_not() -> None:
    loop: list[object] = [1]
    loop.append([loop])
    with pytest.raises(ValueError, match=r"nested\[1\]\[0\]: node 3 contains itself"):
        SignalTree.from_nested(loop)
    pair = [1, 2]
    assert SignalTree.from_nested([pair, pair]).num_leaves == 4


def test_keys_that_are_no_strings_are_refused() -> None:
    with pytest.raises(TypeError, match=r"keys of nested\['a'\] must be str, got 3"):
        SignalTree.from_nested({"a": {3: 4}})


# Windows


@given(st.integers(1, 400), st.lists(st.integers(2, 20), max_size=6))
def test_windows_group_what_is_below_them_from_the_left(n: int, windows: list[int]) -> None:
    tree = SignalTree.from_windows(n, windows)
    tree.validate()
    check_breadth_first(tree)
    groups = [[row] for row in range(n)]
    levels = [groups]
    for window in windows:
        if len(groups) > 1:
            groups = [
                [row for group in groups[i : i + window] for row in group]
                for i in range(0, len(groups), window)
            ]
            levels.append(groups)
    if len(groups) > 1:
        levels.append([list(range(n))])
    expected = [group for level in reversed(levels) for group in level]
    assert [rows_below(tree, node) for node in range(tree.num_nodes)] == expected
    assert tree == SignalTree.from_parents(tree.parent)


def test_a_million_leaves_take_under_a_second() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            tree = SignalTree.from_windows(1_000_000, (2, 4, 8, 16))
            times.append(time.perf_counter() - begin)
    finally:
        torch.set_num_threads(threads)
    assert tree.num_leaves == 1_000_000
    assert min(times) < 1


@pytest.mark.parametrize(
    ("n", "windows", "kind", "reason"),
    [
        (0, (2,), ValueError, "n must be an integer of at least 1, got 0"),
        (5.0, (2,), TypeError, r"n must be an integer of at least 1, got 5.0"),
        (5, 2, TypeError, r"windows must be a sequence .*, got 2; .* windows=\(4,\)"),
        (10, "44", TypeError, "windows must be a sequence .*, got '44'"),
        (True, (2,), TypeError, "n must be an integer of at least 1, got True"),
        (5, (2, 1), ValueError, r"windows\[1\] must be an integer of at least 2, got 1"),
        (5, (2, 2.5), TypeError, r"windows\[1\] must be an integer of at least 2, got 2.5"),
    ],
)
def test_windows_that_group_nothing_are_refused(
    n: int, windows: tuple[int, ...], kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        SignalTree.from_windows(n, windows)


# Images


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_a_quadtree_holds_every_patch_once_in_solid_blocks(
    height: int, width: int, tall: int, wide: int
) -> None:
    tree = SignalTree.from_image(height, width, (tall, wide))
    tree.validate()
    check_breadth_first(tree)
    rows, columns = -(-height // tall), -(-width // wide)
    assert tree.num_rows == tree.num_leaves == rows * columns
    assert int(tree.child_count.max()) <= 4
    assert not (tree.child_count == 1).any()
    assert tree.max_depth == (max(rows, columns) - 1).bit_length()
    for node in range(tree.num_nodes):
        patches = rows_below(tree, node)
        lines = sorted({patch // columns for patch in patches})
        stacks = sorted({patch % columns for patch in patches})
        assert len(patches) == len(lines) * len(stacks)
        assert lines == list(range(lines[0], lines[-1] + 1))
        assert stacks == list(range(stacks[0], stacks[-1] + 1))


def test_positions_in_a_quadtree_are_those_of_the_quarters() -> None:
    tree = SignalTree.from_image(3, 2)
    assert tree.position.tolist()[1:5] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert rows_below(tree, 1) == [0, 2]
    assert rows_below(tree, 4) == [5]
    assert {tree.DOMAINS[d] for d in tree.domain.tolist() if d >= 0} == {"grid2d"}


def test_images_also_come_as_rows_or_flat() -> None:
    by_rows = SignalTree.from_image(4, 6, 2, layout="rows", modality="image")
    by_rows.validate()
    assert by_rows.child_count.tolist()[:3] == [2, 3, 3]
    assert by_rows.modality_names == ("image",)
    flat = SignalTree.from_image(4, 6, 2, layout="flat")
    assert flat.position.tolist()[1:] == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    assert flat.DOMAINS[int(flat.domain[0])] == "grid2d"
    for tree in (by_rows, flat):
        assert tree.leaf_row[tree.leaf_order].tolist() == list(range(6))


def test_images_of_no_size_and_unknown_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"height must be .*, got 0"):
        SignalTree.from_image(0, 4, 2)
    with pytest.raises(ValueError, match=r"patch must be .*, got 0"):
        SignalTree.from_image(4, 4, 0)
    with pytest.raises(ValueError, match="layout must be quadtree, rows or flat, got 'spiral'"):
        SignalTree.from_image(4, 4, 2, layout="spiral")
    with pytest.raises(ValueError, match=r"patch must be .*, got \(1, 2, 3\)"):
        SignalTree.from_image(4, 4, (1, 2, 3))


# Linkage


@pytest.mark.parametrize("method", ["single", "average", "ward"])
@pytest.mark.parametrize("optimal", [False, True])
def test_a_linkage_matrix_gives_the_clusters_and_leaf_order_of_scipy(
    method: str, optimal: bool
) -> None:
    points = torch.randn(40, 3, generator=torch.Generator().manual_seed(4)).numpy()
    linkage = hierarchy.linkage(points, method, optimal_ordering=optimal)
    tree = SignalTree.from_linkage(linkage)
    tree.validate()
    assert tree.leaf_row[tree.leaf_order].tolist() == hierarchy.leaves_list(linkage).tolist()
    found = {frozenset(rows_below(tree, node)) for node in range(tree.num_nodes)}
    _, nodes = hierarchy.to_tree(linkage, rd=True)
    assert found == {frozenset(node.pre_order()) for node in nodes}
    assert {tree.DOMAINS[d] for d in tree.domain.tolist() if d >= 0} == {"set"}


def test_a_linkage_may_be_a_list_a_sequence_or_a_single_point() -> None:
    tree = SignalTree.from_linkage([[1, 0, 0.5, 2]], domain="sequence")
    assert tree.leaf_row.tolist() == [-1, 1, 0]
    assert tree.position.tolist() == [[0, 0], [0, 0], [1, 0]]
    assert SignalTree.from_linkage(torch.zeros(0, 4)) == SignalTree.from_windows(1)


def test_a_linkage_as_deep_as_it_is_long_is_quick() -> None:
    n = 20_000
    steps = torch.arange(n - 1, dtype=torch.float64)
    left = torch.where(steps > 0, n + steps - 1, 0)
    linkage = torch.stack([left, steps + 1, steps, steps + 2], dim=1)
    assert SignalTree.from_linkage(linkage).max_depth == n - 1


@pytest.mark.parametrize(
    ("linkage", "reason"),
    [
        ([[0, 1, 0.5]], r"linkage must have shape \[n - 1, 4\], got \[1, 3\]"),
        ([[0, 2, 0.5, 2]], r"row 0 of linkage \(node 2\) must join .* 0 to 1, got \[0.0, 2.0\]"),
        ([[0, -1, 0.5, 2]], "row 0 of linkage"),
        ([[0, 0.5, 0.5, 2]], "row 0 of linkage"),
        ([[0, float("nan"), 0.5, 2]], "row 0 of linkage"),
        ([[0, 1, 0.5, 2], [0, 2, 0.6, 3]], "linkage joins node 0 twice"),
        (
            [[0, 1, 0.5, 2], [2, 3, 0.6, 4]],
            r"row 1 of linkage \(node 4\) must count 3 leaves, .* got 4",
        ),
    ],
)
def test_a_matrix_that_is_no_linkage_is_refused_with_the_node(
    linkage: list[list[float]], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        SignalTree.from_linkage(linkage)


def test_a_linkage_takes_only_domains_that_need_nothing_else() -> None:
    with pytest.raises(ValueError, match=r"domain must be .*, got 'keyed'"):
        SignalTree.from_linkage([[0, 1, 0.5, 2]], domain="keyed")
    with pytest.raises(TypeError, match="linkage must be a matrix"):
        SignalTree.from_linkage("matrix")


# Records


def test_a_record_is_keyed_and_its_fields_have_their_own_domains_and_modalities() -> None:
    record = {
        "title": 3,
        "photo": SignalTree.from_image(4, 4, 2),
        "facts": {"price": 1.5, "tags": ["new", "red"]},
        "score": 1,
    }
    tree = SignalTree.from_records(record, modalities={"title": "text", "photo": "image"})
    tree.validate()
    assert tree.num_rows == 3 + 4 + 3 + 1
    assert tree.modality_names == ("text", "image", "facts", "score")
    fields = range(1, 5)
    assert [tree.key_names[int(tree.key[n])] for n in fields] == list(record)
    assert [rows_below(tree, n) for n in fields] == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9], [10]]
    domains = [tree.DOMAINS[int(tree.domain[n])] for n in range(4)]
    assert domains == ["keyed", "sequence", "grid2d", "keyed"]
    names = [tree.modality_names[int(tree.modality[n])] for n in tree.row_node.tolist()]
    assert names == ["text"] * 3 + ["image"] * 4 + ["facts"] * 3 + ["score"]


def test_keys_inside_a_field_keep_their_names_beside_those_of_the_fields() -> None:
    tree = SignalTree.from_records({"b": {"a": 1, "b": 2}, "a": 1})
    named = [tree.key_names[k] if k >= 0 else None for k in tree.key.tolist()]
    assert named == [None, "b", "a", "a", "b"]


def test_several_records_are_a_batch() -> None:
    records = [{"a": 2, "b": 1}, {"b": 3}]
    forest = SignalTree.from_records(records)
    assert forest.unbatch() == [SignalTree.from_records(record) for record in records]


def test_what_is_one_leaf_in_nested_data_is_one_in_a_record_and_an_integer_is_a_size() -> None:
    for value in ("hello world", 3.5, None, True):
        record, nested = {"title": value}, SignalTree.from_nested({"title": value})
        tree = SignalTree.from_records(record)
        assert tree == nested.with_modality("title")
    for size in (3, np.int64(3), torch.tensor(3)):
        assert SignalTree.from_records({"title": size}).num_leaves == 3


@pytest.mark.parametrize(
    ("records", "modalities", "kind", "reason"),
    [
        ({}, None, ValueError, "records must have at least one field, got an empty record"),
        ([{"a": 1}, {}], None, ValueError, r"records\[1\] must have at least one field"),
        ({"a": 0}, None, ValueError, r"records\['a'\] must be .*, got 0"),
        ({"a": []}, None, ValueError, r"records\['a'\] is an empty list; leave the field out"),
        ([{"a": 1}, {"a": [1, {}]}], None, ValueError, r"records\[1\]\['a'\]\[1\]: node 2 is an"),
        ({"a": np.zeros(3)}, None, TypeError, r"records\['a'\] is an array \(ndarray \[3\]\)"),
        ({"a": 1}, {"b": "x"}, ValueError, r"modalities must name fields .* \['a'\], got \['b'\]"),
        ({"a": 1}, "x", TypeError, "modalities must be a dict .*, got 'x'"),
        ({1: 2}, None, TypeError, "names of the fields of records must be str, got 1"),
        ([1], None, TypeError, r"records\[0\] must be a dict, got int"),
        ([], None, TypeError, "records must be a dict or a list of dicts, got list"),
        (
            {"a": SignalTree.batch([SignalTree.from_windows(1)] * 2)},
            None,
            ValueError,
            r"records\['a'\] must be one tree, got a batch of 2 trees",
        ),
        (
            {"a": SignalTree.from_windows(2, modality="x")},
            {"a": "y"},
            ValueError,
            "modalities: 'a' is to be 'y', but its tree already has x",
        ),
    ],
)
def test_records_that_cannot_be_read_are_refused_by_field(
    records: object, modalities: dict[str, str] | None, kind: type[Exception], reason: str
) -> None:
    with pytest.raises(kind, match=reason):
        SignalTree.from_records(records, modalities=modalities)
