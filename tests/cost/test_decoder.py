import pytest
import torch

from polyscale.cost.decoder import (
    DecoderSizes,
    bytes_per_token,
    causal_attention_flops,
    downsampling_bytes,
    step_flops_by_part,
)
from polyscale.cost.forward import count_forward_flops
from polyscale.models import HKTConfig, HKTForCausalLM

SIZES = DecoderSizes(width=32, heads=4, layers=2, vocabulary=50)


def model(levels):
    config = HKTConfig(
        vocab_size=SIZES.vocabulary,
        hidden_size=SIZES.width,
        num_hidden_layers=SIZES.layers,
        num_attention_heads=SIZES.heads,
        intermediate_size=4 * SIZES.width,
        levels=levels,
    )
    return HKTForCausalLM(config)


@pytest.mark.parametrize("levels", [1, 3])
def test_the_formula_gives_what_a_forward_pass_is_counted_to_cost(levels):
    """The counter has no mask, so its scores and values are twice the causal ones."""
    parts = step_flops_by_part(SIZES, batch=1, length=64, levels=levels)
    forward = 2 * parts["attention forward"] + parts["matrix products"] / 3
    ids = {"input_ids": torch.ones(1, 64, dtype=torch.long)}
    assert count_forward_flops(model(levels), ids) == forward


def test_the_backward_pass_takes_two_and_a_half_times_the_products():
    shape = (2, 4, 64, 8)
    forward, both = (causal_attention_flops(shape, 1, backward=b) for b in (False, True))
    assert forward == 2 * 4 * 64 * 64 * 8 * 2
    assert both == 3.5 * forward
    assert causal_attention_flops(shape, 3) / forward == (1.3125 + 1) / 2


def test_one_level_needs_no_downsampling():
    assert downsampling_bytes(SIZES, 2, 64, levels=1) == 0
    assert downsampling_bytes(SIZES, 2, 64, levels=3) == 4 * 2 * 2 * (4 * 64 + 3 * 48) * 32


def test_a_token_reads_all_weights_and_the_keys_and_values_of_the_context():
    flat = model(1)
    weights = sum(parameter.numel() for parameter in flat.parameters())
    assert bytes_per_token(flat, 128) == 4 * (weights + SIZES.layers * 2 * 128 * SIZES.width)
    coarse = bytes_per_token(model(3), 128) - bytes_per_token(model(3), 0)
    keys = 128 + 64 // 2 + 32 // 4
    assert coarse == 4 * SIZES.layers * ((128 + keys) * SIZES.width + SIZES.heads * 64)
