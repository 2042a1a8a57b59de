"""What holds for every tree: softmax for one family, stochastic rows, ties, symmetry."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from polyscale.ops.hsa import hsa_attention, hsa_matrix, reference
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import KINDS, bushy_tree, kind_name, random_inputs, random_tree
from tests.ops.hsa.minimiser import tied_pairs

every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[4]], ids=kind_name)
@pytest.mark.parametrize("rows", [1, 2, 9, 40])
def test_one_family_is_softmax_attention(kind: dict[str, Any], rows: int) -> None:
    tree = SignalTree.from_parents([-1, *([0] * rows)])
    inputs = random_inputs(tree, 0, lead=(2, 3))
    tensors = inputs.tensors()[:3]
    output = hsa_attention(*tensors, tree, **kind)
    expected = scaled_dot_product_attention(*tensors, is_causal=kind["causal"])
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    combination = torch.randn_like(output)
    ours = torch.autograd.grad(output, tensors, combination)
    theirs = torch.autograd.grad(expected, tensors, combination)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


@every_kind
def test_rows_are_stochastic(kind: dict[str, Any]) -> None:
    for seed in range(60):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed)
        matrix = hsa_matrix(inputs.query, inputs.key, tree, **kind)
        assert (matrix >= 0).all()
        sums = matrix.sum(-1)
        seen = torch.ones(tree.num_rows, dtype=torch.float64)
        if not kind["include_self"]:
            seen[0] = 0.0 if kind["causal"] or tree.num_rows == 1 else 1.0
        torch.testing.assert_close(sums, seen.expand_as(sums), atol=1e-12, rtol=0)
        if not kind["include_self"]:
            assert (matrix.diagonal(dim1=-2, dim2=-1) == 0).all()


@every_kind
def test_tied_weights_are_equal(kind: dict[str, Any]) -> None:
    for seed in range(40):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed, lead=(1,))
        matrix = hsa_matrix(
            inputs.query, inputs.key, tree, position_scores=inputs.position_scores, **kind
        )[0]
        groups: dict[tuple[int, ...], list[float]] = {}
        for (i, j), tied in tied_pairs(reference.from_tree(tree)[0], kind["tie"]).items():
            groups.setdefault(tied, []).append(matrix[i, j].item())
        for weights in groups.values():
            assert max(weights) - min(weights) < 1e-13


@every_kind
def test_the_matrix_is_what_attention_applies(kind: dict[str, Any]) -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 3, lead=(2, 2))
    for impl in ("torch", "reference"):
        matrix = hsa_matrix(inputs.query, inputs.key, tree, impl=impl, **kind)
        assert matrix.shape == (2, 2, tree.num_rows, tree.num_rows)
        output = hsa_attention(inputs.query, inputs.key, inputs.value, tree, **kind)
        torch.testing.assert_close(matrix @ inputs.value, output, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS[:4], ids=kind_name)
def test_permuting_siblings_permutes_the_output_and_nothing_else(kind: dict[str, Any]) -> None:
    generator = torch.manual_seed(0)
    for seed in range(40):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed)
        # The same tree and rows, with the siblings of every family in another order.
        order = torch.randperm(tree.num_nodes, generator=generator)
        place = order.argsort()
        parents = torch.where(tree.parent >= 0, place[tree.parent], -1)[order]
        other = SignalTree.from_parents(parents, rows=tree.leaf_row[order])
        arguments = (inputs.query, inputs.key, inputs.value)
        one = hsa_attention(*arguments, tree, **kind)
        two = hsa_attention(*arguments, other, **kind)
        torch.testing.assert_close(one, two, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS[:4], ids=kind_name)
def test_permuting_the_leaves_of_a_family_permutes_their_rows(kind: dict[str, Any]) -> None:
    tree = SignalTree.from_parents([-1, 0, 0, 0, 1, 1, 1, 2, 2], domains="set")
    inputs = random_inputs(tree, 1)
    order = torch.tensor([2, 0, 1, 4, 3, 5])  # within the families of nodes 1 and 2
    arguments = (inputs.query, inputs.key, inputs.value)
    one = hsa_attention(*arguments, tree, **kind)
    two = hsa_attention(*(part[:, order] for part in arguments), tree, **kind)
    torch.testing.assert_close(two, one[:, order], atol=1e-12, rtol=0)


@every_kind
def test_a_one_child_node_changes_nothing(kind: dict[str, Any]) -> None:
    plain = SignalTree.from_parents([-1, 0, 0, 1, 1])
    chained = SignalTree.from_parents([-1, 0, 1, 1, 2, 4, 4, 3])  # above, between and below
    inputs = random_inputs(plain, 2)
    arguments = (inputs.query, inputs.key, inputs.value)
    torch.testing.assert_close(
        hsa_attention(*arguments, chained, **kind), hsa_attention(*arguments, plain, **kind)
    )


def test_a_lone_leaf_attends_to_itself_or_gets_exactly_zero() -> None:
    for parents in ([-1], [-1, 0], [-1, 0, 1]):
        tree = SignalTree.from_parents(parents)
        inputs = random_inputs(tree, 0)
        for kind in KINDS:
            output = hsa_attention(inputs.query, inputs.key, inputs.value, tree, **kind)
            if kind["include_self"]:
                torch.testing.assert_close(output, inputs.value)
            else:
                assert (output == 0).all()
