import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polyscale.cost.hsa import hsa_flops, softmax_flops
from polyscale.ops.hsa import hsa_attention
from polyscale.trees import SignalTree


@pytest.mark.parametrize("tie", ["columns", "blocks"])
@pytest.mark.parametrize("windows", [(16,), (4, 4), (2, 4, 8)])
def test_matrix_products_are_those_that_torch_counts(windows, tie):
    part = torch.randn(1, 3, 64, 8)
    tree = SignalTree.from_windows(64, windows)
    with FlopCounterMode(display=False) as counter:
        hsa_attention(part, part, part, tree, tie=tie)
    found = hsa_flops(tree, 3, 8, tie)
    assert found.scores + found.mixing == counter.get_total_flops()


def test_softmax_attention_is_counted_as_torch_counts_it():
    part = torch.randn(1, 3, 64, 8)
    with FlopCounterMode(display=False) as counter:
        torch.softmax(part @ part.mT, -1) @ part
    assert softmax_flops(64, 3, 8).total == counter.get_total_flops()


def test_a_tree_of_one_family_costs_what_softmax_does():
    tree = SignalTree.from_windows(32, (32,))
    for tie in ("columns", "blocks"):
        assert hsa_flops(tree, 2, 4, tie) == softmax_flops(32, 2, 4)


def test_extra_pairs_cost_a_score_and_a_mixing_each():
    tree = SignalTree.from_windows(32, (4,))
    more, less = (hsa_flops(tree, 2, 4, "blocks", extra_pairs=n) for n in (10, 0))
    assert more.total - less.total == 2 * (2 * 2 * 10 * 4)
    assert more.pooling == less.pooling


def test_a_forest_costs_what_its_trees_do():
    trees = [SignalTree.from_windows(size, (4,)) for size in (16, 9)]
    together = hsa_flops(SignalTree.batch(trees), 2, 4, "columns")
    assert together.total == sum(hsa_flops(tree, 2, 4, "columns").total for tree in trees)
