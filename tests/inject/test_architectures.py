"""Models whose attention modules do more than attend once, or are told late what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AfmoeConfig,
    AfmoeModel,
    CLIPTextConfig,
    CLIPTextModel,
    DiffLlamaConfig,
    DiffLlamaModel,
    DynamicCache,
    FNetConfig,
    FNetModel,
    HrmTextConfig,
    HrmTextModel,
    JetMoeConfig,
    JetMoeModel,
    LayoutLMConfig,
    LayoutLMModel,
    PreTrainedModel,
)

from polyscale.inject import inject_hsa, injected_layers
from tests.inject.models import SIZES, bert, llama, logits, text

SMALL: dict[str, Any] = {**SIZES, "num_hidden_layers": 2}


def diff_llama() -> PreTrainedModel:
    """Attends twice to the same keys, with halves of the values."""
    return DiffLlamaModel(DiffLlamaConfig(**SMALL, num_key_value_heads=2))


def hrm_text() -> PreTrainedModel:
    """Its layers run again and again, each time with another layer of the cache."""
    config = {**SIZES, "num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 2}
    return HrmTextModel(HrmTextConfig(**{**config, "num_hidden_layers": 6}, head_dim=8))


def jet_moe() -> PreTrainedModel:
    return JetMoeModel(
        JetMoeConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=2, num_key_value_heads=2,
            kv_channels=8, intermediate_size=40, num_local_experts=4, num_experts_per_tok=2,
        )
    )  # fmt: skip


def afmoe() -> PreTrainedModel:
    return AfmoeModel(
        AfmoeConfig(
            **SMALL, head_dim=8, num_key_value_heads=2, moe_intermediate_size=40, num_experts=4,
            num_experts_per_tok=2, num_dense_layers=1, layer_types=["full_attention"] * 2,
        )
    )  # fmt: skip


def hidden(model: PreTrainedModel, *pieces: torch.Tensor, cached: bool) -> torch.Tensor:
    """The last hidden states of a text given in pieces."""
    cache = DynamicCache(config=model.config) if cached else None
    with torch.no_grad():
        found = [
            model(piece, past_key_values=cache, use_cache=cached).last_hidden_state
            for piece in pieces
        ]
    return torch.cat(found, 1)


@pytest.mark.parametrize("make", [diff_llama, hrm_text, jet_moe, afmoe])
def test_with_the_cache_as_without(make: Callable[[], PreTrainedModel]) -> None:
    double = make is not afmoe  # whose experts take single precision at most
    model = make().eval()
    inject_hsa(model.double() if double else model, hierarchy=(2, 3), sinks=(0,))
    ids, tolerance = text(2, 21), 1e-9 if double else 1e-4
    full = hidden(model, ids, cached=False)
    for pieces in ([21], [13, 8], [5, 1, 1, 14]):
        found = hidden(model, *ids.split(pieces, dim=1), cached=True)
        torch.testing.assert_close(found, full, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("make", [diff_llama, hrm_text])
def test_no_token_of_a_prompt_sees_a_later_one(make: Callable[[], PreTrainedModel]) -> None:
    model = inject_hsa(make().eval().double(), hierarchy=(2, 3), sinks=(0,))
    ids = text(2, 21)
    changed = ids.clone()
    changed[:, 12:] = text(2, 9, seed=5)
    one, other = (hidden(model, given, cached=True) for given in (ids, changed))
    assert torch.equal(one[:, :12], other[:, :12])


def test_states_of_a_module_that_attends_twice_follow_the_beams() -> None:
    model = inject_hsa(diff_llama().eval().double(), hierarchy=(2, 3), sinks=(0,))
    ids, order = text(3, 14), torch.tensor([2, 0, 0])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :9], past_key_values=cache)
        cache.reorder_cache(order)
        found = model(ids[:, 9:], past_key_values=cache).last_hidden_state
        again = torch.cat([ids[order, :9], ids[:, 9:]], 1)
        expected = model(again, use_cache=False).last_hidden_state[:, 9:]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_a_cache_filled_before_the_injection_is_refused_where_values_are_remade() -> None:
    model = diff_llama().eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(text(1, 9), past_key_values=cache)
        inject_hsa(model, hierarchy=(2, 3))
        with pytest.raises(ValueError, match="something made of its keys and values"):
            model(text(1, 1), past_key_values=cache)


def test_keys_that_are_not_those_just_cached_are_refused() -> None:
    model = inject_hsa(llama(), hierarchy=(2, 3))
    attention = model.model.layers[0].self_attn
    forward = attention.forward

    def without_update(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return forward(*args, past_key_values=None, **kwargs)

    attention.forward = without_update
    with pytest.raises(ValueError, match="other keys than those it has just cached"):
        logits(model, input_ids=text(1, 5), use_cache=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padding_mask_may_have_one_row_for_all_queries(side: str) -> None:
    config = {**SMALL, "max_2d_position_embeddings": 8}
    model = inject_hsa(LayoutLMModel(LayoutLMConfig(**config)).eval().double(), hierarchy=(2, 2))
    ids, mask = text(2, 13), torch.ones(2, 13, dtype=torch.long)
    at = slice(0, 9) if side == "right" else slice(4, 13)
    mask[1], mask[1, at] = 0, 1
    place = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(ids, attention_mask=mask, position_ids=place).last_hidden_state
        alone = model(ids[1:, at]).last_hidden_state
    torch.testing.assert_close(found[1:, at], alone, atol=1e-9, rtol=1e-9)


def test_a_model_that_is_told_late_to_be_causal_is_checked_at_injection() -> None:
    def clip() -> PreTrainedModel:
        return CLIPTextModel(CLIPTextConfig(**SMALL)).eval().double()

    for wrong, message in (
        ({"sinks": (0, -1)}, "sinks must be the first tokens in a causal layer"),
        ({"tie": "blocks"}, 'for a causal layer, got "blocks"'),
    ):
        model = clip()
        with pytest.raises(ValueError, match=message):
            inject_hsa(model, hierarchy=(2, 2), **wrong)
        assert injected_layers(model) == []
    model = inject_hsa(clip(), hierarchy=(2, 2))
    ids = text(1, 12)
    with torch.no_grad():
        whole = model(ids).last_hidden_state
        part = model(ids[:, :7]).last_hidden_state
    torch.testing.assert_close(whole[:, :7], part, atol=1e-9, rtol=1e-9)


def test_a_model_without_attention_is_told_so() -> None:
    model = FNetModel(
        FNetConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, intermediate_size=40)
    )
    with pytest.raises(ValueError, match="FNetModel has no attention layers"):
        inject_hsa(model)


def test_a_wrapper_is_told_which_model_is_in_it() -> None:
    inner = bert().base_model
    transformer = nn.Module()
    transformer.auto_model = inner  # as in a SentenceTransformer
    wrapper = nn.Sequential(transformer, nn.Identity())
    with pytest.raises(TypeError, match=r'model\.get_submodule\("0\.auto_model"\), a BertModel'):
        inject_hsa(wrapper)  # type: ignore[arg-type]
    inject_hsa(wrapper.get_submodule("0.auto_model"))
    assert injected_layers(inner) == [0, 1, 2]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("longest", [14, 30, 90])
@pytest.mark.parametrize(
    "case",
    [
        {"tie": "blocks"},
        {"tie": "blocks", "sink_queries": "tied"},
        {"tie": "columns", "sink_queries": "tied"},
        {"tie": "blocks", "sinks": (0, 1, 2, -1)},
        {"tie": "blocks", "sink_ids": tuple(range(5, 12))},
    ],
)
def test_a_text_gives_in_any_batch_what_it_gives_alone(case: dict, longest: int, side: str) -> None:
    model = inject_hsa(bert(), hierarchy=(2, 3, 2), **case)
    lengths = [1, 2, 3, 4, 5, 6, 7, 9, 13, longest]
    ids, mask = text(len(lengths), longest), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
        if side == "right":
            mask[row] = mask[row].flip(0)
    place = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, input_ids=ids, attention_mask=mask, position_ids=place)
    for row, kept in enumerate(mask.bool()):
        alone = logits(model, input_ids=ids[row : row + 1, kept])
        torch.testing.assert_close(found[row, kept], alone[0], atol=1e-9, rtol=1e-9)
