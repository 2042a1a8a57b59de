"""Energies of all nodes, and the certificate of the distance to flat softmax."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polyscale.ops.hsa import hsa_energy, hsa_matrix, reference
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import (
    KINDS,
    Inputs,
    bushy_tree,
    kind_name,
    random_inputs,
    random_tree,
    settings_of,
)

every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)


def kl_by_definition(matrix: Tensor, scores: Tensor) -> Tensor:
    """Return sum_i KL(theta_i || softmax_i) for matrices [..., N, N]."""
    flat = scores - scores.logsumexp(-1, keepdim=True)
    terms = torch.where(matrix > 0, matrix * (matrix.clamp(min=1e-300).log() - flat), 0.0)
    return terms.sum((-1, -2))


def energy_of(inputs: Inputs, tree: SignalTree, **options: Any) -> Any:
    return hsa_energy(
        inputs.query, inputs.key, tree, position_scores=inputs.position_scores, **options
    )


@every_kind
def test_every_node_has_the_energy_of_the_reference(kind: dict[str, Any]) -> None:
    for seed in range(40):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed)
        root = reference.from_tree(tree)[0]
        result = reference.attention_matrix(
            inputs.query, inputs.key, root, settings_of(tree, inputs, **kind)
        )
        expected = torch.stack([result.phi[node] for node in range(tree.num_nodes)], -1)
        energy = energy_of(inputs, tree, **kind)
        torch.testing.assert_close(energy.phi, expected, atol=1e-9, rtol=0)


@every_kind
def test_the_certificate_is_the_exact_divergence(kind: dict[str, Any]) -> None:
    for seed in range(40):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed)
        root = reference.from_tree(tree)[0]
        settings = settings_of(tree, inputs, **kind)
        scores = reference.flat_scores(inputs.query, inputs.key, root, settings)
        matrix = hsa_matrix(
            inputs.query, inputs.key, tree, position_scores=inputs.position_scores, **kind
        )
        energy = energy_of(inputs, tree, **kind)
        torch.testing.assert_close(energy.log_partition, scores.logsumexp(-1), atol=1e-9, rtol=0)
        torch.testing.assert_close(
            energy.kl[:, 0], kl_by_definition(matrix, scores), atol=1e-9, rtol=0
        )


def test_the_certificate_is_rows_times_root_energy_plus_the_log_partitions() -> None:
    for kind in (KINDS[0], KINDS[2], KINDS[4]):
        for seed in range(30):
            tree = random_tree(seed)
            energy = energy_of(random_inputs(tree, seed), tree, **kind)
            by_hand = tree.num_leaves * energy.phi[:, 0] + energy.log_partition.sum(-1)
            torch.testing.assert_close(energy.kl[:, 0], by_hand, atol=1e-9, rtol=0)


def test_columns_are_never_further_from_softmax_than_blocks() -> None:
    strictly = 0
    for seed in range(100):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed, strength=1.5)
        for include_self in (True, False):
            blocks = energy_of(inputs, tree, tie="blocks", include_self=include_self).kl
            columns = energy_of(inputs, tree, tie="columns", include_self=include_self).kl
            assert (columns >= -1e-9).all()
            assert (columns <= blocks + 1e-9).all()
            strictly += int((columns < blocks - 1e-3).sum())
    assert strictly > 100


def test_a_known_log_partition_is_taken_as_it_is() -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0)
    energy = energy_of(inputs, tree)
    again = energy_of(inputs, tree, log_partition=energy.log_partition)
    torch.testing.assert_close(again.kl, energy.kl)
    shifted = energy_of(inputs, tree, log_partition=energy.log_partition + 1)
    torch.testing.assert_close(shifted.kl, energy.kl + tree.num_leaves)


def test_the_certificate_can_be_left_out() -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0)
    energy = energy_of(inputs, tree, certificate=False)
    assert energy.kl is None
    assert energy.log_partition is None
    torch.testing.assert_close(energy.phi, energy_of(inputs, tree).phi)


@every_kind
def test_a_forest_has_a_divergence_per_tree(kind: dict[str, Any]) -> None:
    trees = [random_tree(seed) for seed in (2, 5, 8)] + [SignalTree.from_parents([-1])]
    forest = SignalTree.batch(trees)
    inputs = random_inputs(forest, 0)
    energy = hsa_energy(inputs.query, inputs.key, forest, **kind)
    assert energy.kl is not None
    assert energy.kl.shape == (2, 4)
    for at, tree in enumerate(trees):
        rows = slice(forest.tree_rows[at], forest.tree_rows[at + 1])
        alone = hsa_energy(inputs.query[:, rows], inputs.key[:, rows], tree, **kind)
        torch.testing.assert_close(energy.kl[:, at], alone.kl[:, 0], atol=1e-9, rtol=0)
        torch.testing.assert_close(energy.phi[:, at], alone.phi[:, 0], atol=1e-9, rtol=0)


@every_kind
def test_masked_rows_have_no_part_in_the_divergence(kind: dict[str, Any]) -> None:
    for seed in range(20):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed, lead=(1, 2))
        ignored = torch.rand(1, tree.num_rows, generator=torch.manual_seed(seed)) < 0.4
        ignored[0, 0] = False
        masked = energy_of(inputs, tree, key_padding_mask=ignored, **kind)
        pruned = tree.prune(~ignored[0])
        kept = hsa_energy(inputs.query, inputs.key, pruned, **kind)
        again = hsa_energy(inputs.query, inputs.key, tree, key_padding_mask=ignored, **kind)
        torch.testing.assert_close(again.kl, kept.kl, atol=1e-9, rtol=0)
        torch.testing.assert_close(again.phi[..., 0], kept.phi[..., 0], atol=1e-9, rtol=0)
        assert torch.isfinite(masked.kl).all()


def test_energy_differentiates() -> None:
    tree = bushy_tree()
    for kind in KINDS:
        inputs = random_inputs(tree, 0)
        gradients = torch.autograd.grad(
            energy_of(inputs, tree, **kind).kl.sum(), inputs.tensors()[:2]
        )
        step = 1e-6
        moved = Inputs(
            inputs.query.detach() + step * gradients[0],
            inputs.key.detach() + step * gradients[1],
            inputs.value,
            inputs.position_scores,
        )
        grown = (energy_of(moved, tree, **kind).kl - energy_of(inputs, tree, **kind).kl).sum()
        steepness = sum(float(part.square().sum()) for part in gradients)
        assert grown.item() / step == pytest.approx(steepness, rel=1e-4)


def test_a_lone_leaf_without_itself_is_at_no_distance_from_nothing() -> None:
    tree = SignalTree.from_parents([-1, 0, 1])
    query = torch.randn(1, 1, 4, dtype=torch.float64)
    energy = hsa_energy(query, query, tree, include_self=False)
    assert energy.kl is not None
    assert energy.kl.item() == 0.0
    assert (energy.phi == torch.inf).all()
