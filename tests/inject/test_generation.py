from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from polyscale.inject import inject_hsa, restore
from polyscale.inject.hierarchical_cache import HierarchicalLayer
from polyscale.trees import SignalTree
from tests.inject.models import DECODERS, MODELS, bert, gpt2, llama, logits, text

SETTINGS: list[dict[str, Any]] = [
    {"hierarchy": (2, 3)},
    {"hierarchy": (2, 2, 2), "sinks": None},
    {"hierarchy": (4,), "sinks": (0, 1, 2)},
    {"hierarchy": ()},
    {"hierarchy": "sentences", "sentence_ends": tuple(range(5, 20))},
    {"hierarchy": (3, 2), "layers": [1]},
]


def step_by_step(model: PreTrainedModel, ids: Tensor, prompt: int, sizes: list[int]) -> Tensor:
    """Logits of the tokens after the prompt, fed in pieces through one cache."""
    cache = DynamicCache(config=model.config)
    found = []
    with torch.no_grad():
        found.append(model(ids[:, :prompt], past_key_values=cache).logits)
        at = prompt
        for size in sizes:
            found.append(model(ids[:, at : at + size], past_key_values=cache).logits)
            at += size
    return torch.cat(found, 1)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_with_the_cache_equals_the_full_forward(name: str, settings: dict) -> None:
    model = inject_hsa(MODELS[name](), **settings)
    ids = text(2, 30)
    full = logits(model, input_ids=ids, use_cache=False)
    stepped = step_by_step(model, ids, 7, [1] * 23)
    torch.testing.assert_close(stepped, full, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("prompt", [1, 2, 3, 5, 12])
def test_prompts_of_any_length_and_several_tokens_at_once_go_on_as_one_text(prompt: int) -> None:
    model = inject_hsa(llama(), hierarchy=(2, 3), sinks=(0, 1))
    ids = text(2, 24)
    full = logits(model, input_ids=ids, use_cache=False)
    stepped = step_by_step(model, ids, prompt, [5, 1, 3, 24 - prompt - 9])
    torch.testing.assert_close(stepped, full, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_padded_prompts_continue_as_they_do_alone(settings: dict, side: str) -> None:
    model = inject_hsa(llama(), **settings)
    lengths, new = (11, 4, 1), 9
    texts = [text(1, length + new, seed=length)[0] for length in lengths]
    ids = torch.zeros(3, 11 + new, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (length, whole) in enumerate(zip(lengths, texts, strict=True)):
        at = slice(11 - length, 11) if side == "left" else slice(0, length)
        ids[row, at], mask[row, at] = whole[:length], 1
        ids[row, 11:], mask[row, 11:] = whole[length:], 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    found = []
    with torch.no_grad():
        for low, high in [(0, 11), *((at, at + 1) for at in range(11, 11 + new))]:
            output = model(
                ids[:, low:high],
                attention_mask=mask[:, :high],
                position_ids=positions[:, low:high],
                past_key_values=cache,
            )
            found.append(output.logits[:, -1])
    for row, whole in enumerate(texts):
        alone = logits(model, input_ids=whole[None], use_cache=False)[0, -new:]
        batched = torch.stack(found[1:], 1)[row]
        torch.testing.assert_close(batched, alone, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", DECODERS)
def test_generate_writes_what_repeated_full_forwards_write(name: str) -> None:
    model = inject_hsa(MODELS[name](), hierarchy=(2, 2))
    ids = text(2, 6)
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=15,
        do_sample=False,
        eos_token_id=-1,
    )
    whole = ids
    for _ in range(15):
        best = logits(model, input_ids=whole, use_cache=False)[:, -1].argmax(-1)
        whole = torch.cat([whole, best[:, None]], 1)
    assert torch.equal(written, whole)


def test_beam_search_with_the_cache_equals_beam_search_without() -> None:
    model = inject_hsa(llama(), hierarchy=(2, 2))
    ids = text(2, 6)
    options = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "eos_token_id": -1}
    mask = torch.ones_like(ids)
    with_cache = model.generate(ids, attention_mask=mask, **options)
    without = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(with_cache, without)


def test_the_cache_of_an_injected_layer_keeps_windows_not_tokens() -> None:
    model = inject_hsa(llama(), layers=[0, 2], hierarchy=(4, 4))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text(1, 100), past_key_values=cache)
    first, second = cache.layers[0], cache.layers[1]
    assert isinstance(first, HierarchicalLayer)
    # 99 tokens after the sink: 6 closed nodes of 16, none of 4 in the open one, 3 tokens.
    assert first.state.size == 1 + 6 + 0 + 3
    assert second.keys.shape[2] == 100
    assert cache.get_seq_length() == 100


def test_a_cache_filled_before_the_injection_goes_on_as_if_injected_from_the_start() -> None:
    model, ids = llama(), text(2, 20)
    inject_hsa(model, layers=[1], hierarchy=(2, 2))
    full = logits(model, input_ids=ids, use_cache=False)
    injected = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :13], past_key_values=injected)
    restore(model)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :13], past_key_values=cache)
    inject_hsa(model, layers=[1], hierarchy=(2, 2))
    # Layer 1's keys come from layer 0, which is not injected: they are the same in both caches.
    with torch.no_grad():
        cache.layers[2] = injected.layers[2]
        on = model(ids[:, 13:], past_key_values=cache).logits
    torch.testing.assert_close(on, full[:, 13:], atol=1e-9, rtol=1e-9)


def test_a_decoder_made_of_bert_generates_with_the_cache() -> None:
    model = inject_hsa(bert(is_decoder=True), hierarchy=(2, 2))
    ids = text(2, 16)
    full = logits(model, input_ids=ids, use_cache=False)
    stepped = step_by_step(model, ids, 5, [1] * 11)
    torch.testing.assert_close(stepped, full, atol=1e-9, rtol=1e-9)


def test_a_static_cache_is_refused() -> None:
    model = inject_hsa(llama())
    cache = StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(
        ValueError,
        match="must be a DynamicCache for injected layers, got a StaticCache of StaticLayer",
    ):
        model(text(), past_key_values=cache)


def test_cropping_is_refused() -> None:
    model = inject_hsa(llama(), hierarchy=(2, 2))
    cache = DynamicCache(config=model.config)
    model(text(), past_key_values=cache)
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        cache.crop(-3)


def test_a_given_tree_goes_without_a_cache() -> None:
    model = inject_hsa(gpt2(), hierarchy=SignalTree.from_windows(21, (4,)))
    with pytest.raises(ValueError, match="does not say how it grows"):
        model(text(), use_cache=True)
    assert logits(model, input_ids=text(), use_cache=False).shape == (2, 21, 60)


def test_weights_on_tokens_are_refused_while_decoding() -> None:
    model = inject_hsa(llama(), hierarchy=(2, 2))
    cache = DynamicCache(config=model.config)
    model(text(), past_key_values=cache)
    with pytest.raises(ValueError, match="keeps blocks, not tokens"):
        model(text(2, 1), past_key_values=cache, output_attentions=True)


def test_a_cache_filled_by_other_layers_is_refused() -> None:
    model = inject_hsa(llama(), hierarchy=(2, 2))
    cache = DynamicCache(config=model.config)
    model(text(), past_key_values=cache)
    restore(model)
    with pytest.raises(ValueError, match="was filled by an injected layer"):
        model(text(2, 1), past_key_values=cache)
    inject_hsa(model, hierarchy=(4, 2))
    with pytest.raises(ValueError, match="injected with other settings"):
        model(text(2, 1), past_key_values=cache)
