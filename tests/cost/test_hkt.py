"""Counted costs."""

import pytest

from polyscale.cost.hkt import attention_cost, score_flop_ratio


@pytest.mark.parametrize("levels", range(1, 7))
def test_powers_of_two_cost_the_partial_sums_of_four_thirds(levels):
    found = attention_cost(levels, 1024, 16)
    assert found.ratio == sum(4.0**-level for level in range(levels))
    assert found.ratio < 4 / 3
    # The values cost what the scores of level 0 cost.
    assert found.whole_ratio == (1 + found.ratio) / 2


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_every_level_has_the_flops_and_bytes_of_its_products(length):
    found = attention_cost(4, length, head_dim=8, heads=3)
    for level, cost in enumerate(found.levels):
        size = -(-length // 2**level)
        assert cost.flops == 3 * 2 * size * size * 8
        assert cost.bytes == 3 * 4 * (2 * size * 8 + size * size)
    assert found.ratio == score_flop_ratio(4, length)
    values = 3 * 4 * (length * length + 2 * length * 8)
    assert found.standard_whole.bytes == found.standard.bytes + values


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="levels must be an integer of at least 1, got 0"):
        attention_cost(0, 8, 8)
    with pytest.raises(TypeError, match=r"length must be an integer of at least 1, got 2\.5"):
        attention_cost(1, 2.5, 8)
