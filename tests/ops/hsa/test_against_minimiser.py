"""The result is the KL-closest matrix under its tie: an independent minimiser finds the same."""

from typing import Any

import numpy as np
import pytest
import torch

from polyscale.ops.hsa import hsa_energy, hsa_matrix, reference
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import KINDS, kind_name, random_inputs, random_tree, settings_of
from tests.ops.hsa.minimiser import minimise
from tests.trees.strategies import deep_chain

TREES_PER_KIND = 210


def assert_minimal(tree: SignalTree, seed: int, kind: dict[str, Any]) -> None:
    inputs = random_inputs(tree, seed, lead=(1,))
    settings = settings_of(tree, inputs, **kind)
    root = reference.from_tree(tree)[0]
    with torch.no_grad():
        scores = reference.flat_scores(inputs.query, inputs.key, root, settings)[0].numpy()
        matrix = hsa_matrix(
            inputs.query, inputs.key, tree, position_scores=inputs.position_scores, **kind
        )[0].numpy()
        kl = hsa_energy(
            inputs.query, inputs.key, tree, position_scores=inputs.position_scores, **kind
        ).kl
    best = minimise(scores, root, kind["tie"])
    np.testing.assert_allclose(matrix, best, atol=1e-9, rtol=0)
    assert kl is not None
    assert kl.item() == pytest.approx(sum_of_kl(best, scores), abs=1e-9)


def sum_of_kl(matrix: np.ndarray, scores: np.ndarray) -> float:
    """Return sum_i KL(theta_i || softmax_i) from its definition."""
    total = 0.0
    for theta, score in zip(matrix, scores, strict=True):
        used = theta > 0
        if used.any():
            flat = score - np.logaddexp.reduce(score[score > -np.inf])
            total += float((theta[used] * (np.log(theta[used]) - flat[used])).sum())
    return total


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_no_matrix_with_the_same_tie_is_closer_to_softmax(kind: dict[str, Any]) -> None:
    for seed in range(TREES_PER_KIND):
        assert_minimal(random_tree(seed), seed, kind)


@pytest.mark.parametrize("kind", KINDS, ids=kind_name)
def test_no_matrix_is_closer_on_a_deep_chain(kind: dict[str, Any]) -> None:
    tree = SignalTree.from_parents(deep_chain(200, family=3, side_leaf_every=50))
    assert_minimal(tree, 0, kind)


def test_the_minimiser_can_tell_the_two_ties_apart() -> None:
    tree = SignalTree.from_parents([-1, 0, 0, 1, 1, 2, 2])
    inputs = random_inputs(tree, 0, lead=(1,))
    settings = settings_of(tree, inputs)
    root = reference.from_tree(tree)[0]
    scores = reference.flat_scores(inputs.query, inputs.key, root, settings)[0].detach().numpy()
    blocks, columns = (minimise(scores, root, tie) for tie in ("blocks", "columns"))
    assert abs(blocks - columns).max() > 1e-2
    assert sum_of_kl(columns, scores) < sum_of_kl(blocks, scores) - 1e-3
