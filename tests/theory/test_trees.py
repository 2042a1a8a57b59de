"""The loss of every family, and what a finer tree would buy."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from polyscale.ops.hsa import hsa_energy, hsa_matrix, reference
from polyscale.theory import family_dilution, family_losses, finer_tree, flat_scores, open_family
from polyscale.theory.tied_softmax import TiedSoftmax
from polyscale.theory.trees import ancestors
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import (
    KINDS,
    bushy_tree,
    kind_name,
    random_inputs,
    random_tree,
    settings_of,
)

every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)
SEEDS = range(25)


def sees(kind: dict[str, Any]) -> dict[str, Any]:
    return {name: kind[name] for name in ("causal", "include_self")}


def case(seed: int, kind: dict[str, Any], positions: bool = True) -> tuple[Any, ...]:
    """Tree, inputs, matrix and flat scores."""
    tree = random_tree(seed)
    inputs = random_inputs(tree, seed, strength=1.5)
    query, key = inputs.query.detach(), inputs.key.detach()
    given = tuple(p.detach() for p in inputs.position_scores) if positions else None
    matrix = hsa_matrix(query, key, tree, position_scores=given, **kind)
    scores = flat_scores(query, key, tree, position_scores=given, **sees(kind))
    return tree, query, key, given, matrix, scores


@every_kind
def test_flat_scores_are_those_of_the_reference(kind):
    for seed in SEEDS:
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed)
        expected = reference.flat_scores(
            inputs.query,
            inputs.key,
            reference.from_tree(tree)[0],
            settings_of(tree, inputs, **kind),
        )
        found = flat_scores(
            inputs.query, inputs.key, tree, position_scores=inputs.position_scores, **sees(kind)
        )
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@every_kind
def test_the_losses_are_not_negative_and_add_up_to_the_certificate(kind):
    for seed in SEEDS:
        tree, query, key, positions, matrix, scores = case(seed, kind)
        losses = family_losses(matrix, scores, tree)
        energy = hsa_energy(query, key, tree, position_scores=positions, **kind)
        torch.testing.assert_close(losses.sum(-1), energy.kl[..., 0], atol=1e-10, rtol=0)
        assert losses.min() > -1e-12
        assert losses[..., tree.child_count == 0].abs().max() == 0


@every_kind
def test_a_family_of_leaves_alone_loses_nothing(kind):
    for seed in SEEDS:
        tree, *_, matrix, scores = case(seed, kind)
        losses = family_losses(matrix, scores, tree)
        for node in range(tree.num_nodes):
            first, count = int(tree.first_child[node]), int(tree.child_count[node])
            children = tree.child_count[first : first + count]
            if count and not children.any():
                assert losses[..., node].abs().max() < 1e-12


@every_kind
def test_a_loss_is_the_choice_among_the_children_and_the_ties_inside_them(kind):
    """The chain rule, written out row by row with Python loops."""
    for seed in range(8):
        tree, *_, matrix, scores = case(seed, kind)
        theta, p = matrix[0], scores[0].softmax(-1)
        levels = ancestors(tree)
        expected = torch.zeros(tree.num_nodes, dtype=torch.float64)
        for row in range(tree.num_rows):
            if not (scores[0, row] > -torch.inf).any():
                continue
            path = [int(nodes[row]) for nodes in levels if int(nodes[row]) >= 0]
            for node, own in pairwise(path):
                inside = leaf_rows(tree, node)
                mass, flat = theta[row, inside].sum(), p[row, inside].sum()
                first = int(tree.first_child[node])
                for child in range(first, first + int(tree.child_count[node])):
                    members = leaf_rows(tree, child)
                    share = theta[row, members].sum()
                    if share == 0:
                        continue
                    flat_share = p[row, members].sum()
                    loss = share * ((share / mass) / (flat_share / flat)).log()
                    if child != own:
                        within = p[row, members] / flat_share
                        loss += share * (-(within * len(members)).log()).mean()
                    expected[node] += loss
        torch.testing.assert_close(
            family_losses(theta, scores[0], tree), expected, atol=1e-10, rtol=0
        )


def leaf_rows(tree: SignalTree, node: int) -> list[int]:
    begin, count = int(tree.leaf_begin[node]), int(tree.leaf_count[node])
    return tree.leaf_row[tree.leaf_order[begin : begin + count]].tolist()


def test_with_tied_blocks_the_losses_split_the_certificate_by_energies():
    for seed in SEEDS:
        tree, query, key, positions, matrix, scores = case(seed, KINDS[0])
        phi = hsa_energy(query, key, tree, position_scores=positions).phi[0]
        certificate = torch.zeros(tree.num_nodes, dtype=torch.float64)
        for node in range(tree.num_nodes):
            rows = leaf_rows(tree, node)
            block = scores[0][rows][:, rows]
            # All rows of a node give its inside the same mass.
            mass = matrix[0][rows[0], rows].sum()
            certificate[node] = mass * (len(rows) * phi[node] + block.logsumexp(-1).sum())
        expected = certificate.clone()
        for node in range(1, tree.num_nodes):
            expected[tree.parent[node]] -= certificate[node]
        expected = expected.masked_fill(tree.child_count == 0, 0.0)
        losses = family_losses(matrix[0], scores[0], tree)
        torch.testing.assert_close(losses, expected, atol=1e-10, rtol=0)


def test_entmax_families_split_the_same_way():
    tree = bushy_tree()
    inputs = random_inputs(tree, 0)
    for tie in ("blocks", "columns"):
        matrix = hsa_matrix(inputs.query, inputs.key, tree, tie=tie, alpha=1.5).detach()
        scores = flat_scores(inputs.query.detach(), inputs.key.detach(), tree)
        flat = scores.log_softmax(-1)
        terms = torch.where(matrix > 0, matrix * (matrix.clamp(min=1e-300).log() - flat), 0.0)
        losses = family_losses(matrix, scores, tree)
        torch.testing.assert_close(losses.sum(-1), terms.sum((-1, -2)), atol=1e-10, rtol=0)
        assert losses.min() > -1e-12


def test_trees_of_a_forest_lose_by_themselves():
    trees = [random_tree(seed) for seed in (2, 5, 8)]
    forest = SignalTree.batch(trees)
    inputs = random_inputs(forest, 0)
    query, key = inputs.query.detach(), inputs.key.detach()
    losses = family_losses(hsa_matrix(query, key, forest), flat_scores(query, key, forest), forest)
    energy = hsa_energy(query, key, forest)
    torch.testing.assert_close(losses.sum(-1), energy.kl.sum(-1), atol=1e-10, rtol=0)


class TestDilution:
    def test_the_mean_over_pairs_is_the_trees_dilution(self):
        for seed in range(40):
            tree = random_tree(seed)
            own = tree.leaf_count.double()
            pairs = torch.zeros(tree.num_nodes, dtype=torch.float64)
            for node in range(1, tree.num_nodes):
                above = int(tree.parent[node])
                pairs[above] += own[node] * (own[above] - own[node])
            if pairs.sum() == 0:
                continue
            mean = (family_dilution(tree) * pairs).sum() / pairs.sum()
            assert mean.item() == pytest.approx(tree.diagnostics().dilution)

    def test_families_without_pairs_are_exact(self):
        assert family_dilution(SignalTree.from_parents([-1])).tolist() == [1]
        assert family_dilution(SignalTree.from_parents([-1, 0, 1])).tolist() == [1, 1, 1]


class TestFinerTrees:
    @every_kind
    def test_the_closest_tied_matrix_is_that_of_hsa(self, kind):
        for seed in SEEDS:
            tree, query, key, positions, _, scores = case(seed, kind)
            expected = hsa_energy(query, key, tree, position_scores=positions, **kind).kl[..., 0]
            found = TiedSoftmax(scores, tree, kind["tie"]).kl()
            torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)

    @every_kind
    def test_opening_a_family_gives_what_the_opened_tree_gives(self, kind):
        for seed in SEEDS:
            tree, query, key, _, _, scores = case(seed, kind, positions=False)
            inner = (tree.child_count > 0).nonzero().flatten().tolist()
            for opened in finer_tree(scores, tree, inner, kind["tie"]):
                finer = open_family(tree, opened.node)
                expected = hsa_energy(query, key, finer, **kind).kl[..., 0]
                torch.testing.assert_close(opened.kl_after, expected, atol=1e-10, rtol=0)
                assert opened.scores_before == tree.diagnostics().cost
                assert opened.scores_after == finer.diagnostics().cost

    @every_kind
    def test_no_opening_makes_it_worse(self, kind):
        for seed in SEEDS:
            tree, *_, scores = case(seed, kind)
            inner = (tree.child_count > 0).nonzero().flatten().tolist()
            for opened in finer_tree(scores, tree, inner, kind["tie"]):
                assert (opened.kl_after <= opened.kl_before + 1e-10).all()

    def test_opening_until_nothing_is_left_to_open_reaches_softmax(self):
        tree = bushy_tree()
        while tree.num_inner > 1:
            tree = open_family(tree, 0)
        assert tree.child_count[0] == tree.num_leaves == 10

    def test_opened_trees_keep_their_rows_in_order(self):
        tree = SignalTree.from_nested([[0, [1, 2]], 3, [[4], 5]])
        opened = open_family(tree, 0)
        opened.validate()
        assert opened.leaf_row[opened.leaf_order].tolist() == [0, 1, 2, 3, 4, 5]
        assert opened.child_count[0] == 5


def test_bad_input_is_named():
    tree = SignalTree.from_windows(4, (2,))
    square = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"scores must have shape .* N = 4"):
        family_losses(square, torch.zeros(3, 3), tree)
    with pytest.raises(ValueError, match="matrix must have shape"):
        family_losses(torch.zeros(3, 3), square, tree)
    with pytest.raises(ValueError, match="node must be an inner node of the tree, got 3"):
        open_family(tree, 3)
    with pytest.raises(ValueError, match="node must be an inner node of the tree, got -1"):
        finer_tree(square, tree, [-1], "blocks")
    with pytest.raises(ValueError, match="tie must be 'blocks' or 'columns', got 'rows'"):
        finer_tree(square, tree, [0], "rows")
    with pytest.raises(ValueError, match="tree must be one tree, got 2"):
        finer_tree(torch.zeros(8, 8), SignalTree.batch([tree, tree]), [0], "blocks")
    with pytest.raises(ValueError, match=r"scores must have shape .* N = 4"):
        finer_tree(torch.zeros(3, 3), tree, [0], "blocks")
