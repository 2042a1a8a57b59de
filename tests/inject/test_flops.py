from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polyscale.inject import attention_flops, inject_hsa
from polyscale.ops.hsa import hsa_attention
from polyscale.trees import SignalTree
from tests.inject.models import bert, text


@pytest.mark.parametrize("tie", ["columns", "blocks"])
@pytest.mark.parametrize("windows", [(16,), (4, 4), (2, 4, 8)])
def test_matrix_products_of_hsa_are_those_that_torch_counts(windows: tuple, tie: str) -> None:
    part = torch.randn(1, 3, 64, 8)
    tree = SignalTree.from_windows(64, windows)
    with FlopCounterMode(display=False) as counter:
        hsa_attention(part, part, part, tree, tie=tie)
    found = attention_flops(64, 3, 8, windows, tie)
    assert found.scores + found.mixing == counter.get_total_flops()


def test_softmax_attention_is_counted_as_torch_counts_it() -> None:
    part = torch.randn(1, 3, 64, 8)
    with FlopCounterMode(display=False) as counter:
        torch.softmax(part @ part.mT, -1) @ part
    assert attention_flops(64, 3, 8).total == counter.get_total_flops()


def test_exact_sinks_cost_their_rows() -> None:
    tied = attention_flops(66, 3, 8, (4, 4), sinks=2, sink_queries="tied")
    exact = attention_flops(66, 3, 8, (4, 4), sinks=2)
    assert exact.total - tied.total == 2 * (2 * 3 * 2 * 66 * 8)


def test_a_whole_injected_model_saves_what_is_counted() -> None:
    ids = text(1, 64)
    model = bert().float()
    model.set_attn_implementation("eager")  # torch does not count the fused kernel of CPUs
    with FlopCounterMode(display=False) as before:
        model(ids)
    inject_hsa(model, layers=[0, 2], hierarchy=(4, 4), sinks=None)
    with FlopCounterMode(display=False) as after:
        model(ids)
    softmax, found = attention_flops(64, 4, 8), attention_flops(64, 4, 8, (4, 4))
    saved = 2 * (softmax.total - found.scores - found.mixing)
    assert before.get_total_flops() - after.get_total_flops() == saved


def test_pooling_is_small_and_grows_with_the_length() -> None:
    found = attention_flops(4096, 12, 64, (4, 4, 4, 4))
    assert 0 < found.pooling < 0.1 * found.total
    assert found.total < 0.01 * attention_flops(4096, 12, 64).total


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), "length must .*got 0"),
        ((4, 1, 1, "sentences"), "depends on the text"),
        ((4, 1, 1, (2,), "rows"), "tie must .*got 'rows'"),
        ((4, 1, 1, SignalTree.from_windows(5)), "must have 4 rows, got a SignalTree of 5"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_flops(*arguments)


def test_more_sinks_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sinks must .*a number of tokens, 0..4.*got 5"):
        attention_flops(4, 1, 1, (2,), sinks=5)
