"""Tokens kept exact by accumulated attention, on the kernel of levels."""

import pytest
import torch
from transformers import DynamicCache

import polyscale as ps
from benchmarks.levels_peers import accumulated_attention, accumulated_cache
from tests.inject.models import llama, text


def test_what_tokens_attract_is_the_sum_of_the_rows_of_softmax():
    model, ids = llama(num_key_value_heads=2), text(2, 50)
    cache, masses = accumulated_attention(model, ids, chunk=16)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(ids, output_attentions=True)
    assert len(masses) == 3
    for mass, weights in zip(masses, output.attentions, strict=True):
        expected = weights.unflatten(1, (2, 2)).sum((2, 3))  # of float32
        torch.testing.assert_close(mass, expected, atol=1e-5, rtol=1e-5)
    expected = output.past_key_values.layers[2].keys
    torch.testing.assert_close(cache.layers[2].keys, expected, atol=1e-4, rtol=1e-4)
    assert model.config._attn_implementation == "eager"


def test_the_tokens_chosen_once_stand_first_and_are_exact():
    model, ids = llama(max_position_embeddings=400), text(1, 200)
    dense, masses = accumulated_attention(model, ids)
    cache = accumulated_cache(model, ids, dense, masses, heavy=20, sinks=4, near=8)
    store = cache.layers[1].store
    assert store.settings.sinks == 24
    for head, mass in enumerate(masses[1][0]):
        heaviest = set((mass[4:].topk(20).indices + 4).tolist())
        expected = [*range(4), *(at for at in range(4, 200) if at in heaviest)]
        expected = dense.layers[1].keys[0, head, expected]
        found = store.keys[0, head, :24]
        assert torch.equal(found.sort(0).values, expected.sort(0).values)


@pytest.mark.parametrize(("heavy", "limit"), [(300, 1e-9), (20, 0.3)])
def test_it_decodes_densely_if_everything_is_kept_and_about_so_otherwise(heavy, limit):
    model, ids = llama(max_position_embeddings=400), text(2, 220)
    with torch.no_grad():
        past = DynamicCache(config=model.config)
        model(ids[:, :200], past_key_values=past)
        expected = model(ids[:, 200:], past_key_values=past).logits
        cache = accumulated_cache(model, ids[:, :200], heavy=heavy, near=64)
        ps.inject_opened(model)
        with pytest.raises(ValueError, match="restore"):
            accumulated_attention(model, ids)
        found = model(ids[:, 200:], past_key_values=cache).logits
    off = (found - expected).abs().mean() / expected.abs().mean()
    assert off < limit
    assert (off > 1e-4) == (heavy == 20)
