"""The fast paths against the dense float64 reference: values 1e-9, all gradients 1e-7."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyscale.ops.hsa import hsa_attention, reference
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import (
    KINDS,
    assert_paths_agree,
    bushy_tree,
    kind_name,
    random_inputs,
    random_tree,
)
from tests.trees.strategies import deep_chain, trees

every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)


@every_kind
def test_agrees_on_a_hundred_random_trees_one_by_one(kind: dict[str, Any]) -> None:
    for seed in range(100):
        tree = random_tree(seed)
        assert_paths_agree(random_inputs(tree, seed, lead=(1,)), tree, **kind)


@every_kind
def test_agrees_on_a_hundred_and_twenty_more_in_forests(kind: dict[str, Any]) -> None:
    for first in range(100, 220, 20):
        forest = SignalTree.batch([random_tree(seed) for seed in range(first, first + 20)])
        assert_paths_agree(random_inputs(forest, first, lead=(1,)), forest, **kind)


@every_kind
def test_agrees_on_large_families_and_many_leaves(kind: dict[str, Any]) -> None:
    sizes = []
    for seed in (40,):
        tree = random_tree(seed, max_leaves=60, max_family=40)
        sizes.append(int(tree.child_count.max()))
        assert_paths_agree(random_inputs(tree, seed, lead=(1,)), tree, **kind)
    assert max(sizes) == 40


@every_kind
def test_agrees_on_families_of_every_size_to_forty(kind: dict[str, Any]) -> None:
    for size in range(1, 41):
        # A family of this size whose first children are a pair, a chain and a leaf.
        parents = [-1, *([0] * size), 1, 1]
        if size > 1:
            parents += [2, len(parents)]
        tree = SignalTree.from_parents(parents)
        assert_paths_agree(random_inputs(tree, size, lead=(1,)), tree, **kind)


@every_kind
def test_agrees_on_a_chain_two_hundred_deep(kind: dict[str, Any]) -> None:
    tree = SignalTree.from_parents(deep_chain(200, family=2, side_leaf_every=70))
    assert tree.max_depth == 200
    assert_paths_agree(random_inputs(tree, 0, lead=(1,)), tree, **kind)


@every_kind
def test_agrees_on_window_trees_of_any_length(kind: dict[str, Any]) -> None:
    for rows in (1, 2, 16, 21):
        tree = SignalTree.from_windows(rows, (2, 4))
        assert_paths_agree(random_inputs(tree, rows), tree, **kind)


@every_kind
@settings(max_examples=6, deadline=None)
@given(tree=trees(max_nodes=30), seed=st.integers(0, 99))
def test_agrees_on_trees_that_hypothesis_finds(
    kind: dict[str, Any], tree: SignalTree, seed: int
) -> None:
    assert_paths_agree(random_inputs(tree, seed, lead=(2, 1)), tree, **kind)


@pytest.mark.parametrize("kind", KINDS[:4], ids=kind_name)
@settings(max_examples=6, deadline=None)
@given(tree=trees(max_nodes=30, ordered=False), seed=st.integers(0, 99))
def test_agrees_when_rows_are_in_any_order_and_some_have_no_leaf(
    kind: dict[str, Any], tree: SignalTree, seed: int
) -> None:
    inputs = random_inputs(tree, seed)
    assert_paths_agree(inputs, tree, **kind)
    output = hsa_attention(inputs.query, inputs.key, inputs.value, tree, **kind)
    assert (output[..., tree.row_node < 0, :] == 0).all()


def test_one_position_tensor_serves_both_sides_and_any_number_of_heads() -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0, lead=(2, 3))
    shared = inputs.position_scores[0][0].detach()  # [M, P]
    arguments = (inputs.query, inputs.key, inputs.value, tree)
    expected = hsa_attention(
        *arguments, position_scores=(shared.expand(3, -1, -1), shared.expand(3, -1, -1))
    )
    for given_scores in (shared, shared[None], (shared, shared[None])):
        output = hsa_attention(*arguments, position_scores=given_scores)
        torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    assert not torch.allclose(hsa_attention(*arguments), expected, atol=1e-3)


def test_the_scale_is_one_over_the_root_of_the_width_unless_given() -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0)
    arguments = (inputs.query, inputs.key, inputs.value, tree)
    default = hsa_attention(*arguments)
    torch.testing.assert_close(hsa_attention(*arguments, scale=3**-0.5), default)
    assert not torch.allclose(hsa_attention(*arguments, scale=1.0), default, atol=1e-3)
    for kind in (KINDS[0], KINDS[4]):
        assert_paths_agree(inputs, tree, scale=0.3, **kind)


def test_the_reference_reads_nested_lists_alone() -> None:
    root = reference.from_lists([[0, 1], 2])
    query = torch.zeros(3, 2, dtype=torch.float64)
    result = reference.attention_matrix(query, query, root, reference.Settings(scale=1.0))
    torch.testing.assert_close(result.matrix, torch.full((3, 3), 1 / 3, dtype=torch.float64))
    assert result.phi[0].item() == pytest.approx(-torch.tensor(3.0).log().item(), abs=1e-7)
