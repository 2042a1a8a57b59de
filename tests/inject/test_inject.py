from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

from polyscale.inject import inject_hsa, injected_layers, injected_settings, restore
from polyscale.inject.masks import read_mask
from polyscale.ops.hsa import hsa_matrix
from polyscale.trees import SignalTree
from tests.inject.models import (
    DECODERS,
    ENCODERS,
    MODELS,
    VOCABULARY,
    bert,
    gpt2,
    inputs,
    llama,
    logits,
    text,
    vit,
)

TEXT_MODELS = (*ENCODERS, *DECODERS)


class Tokenizer:
    def get_vocab(self) -> dict[str, int]:
        return {"a": 5, ".": 7, "Ġ?": 8, "##!": 9, "e.g": 10, "#": 11}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("hierarchy", [(512,), ()])
def test_one_family_gives_the_original_logits(
    name: str, implementation: str, hierarchy: tuple
) -> None:
    model = MODELS[name]()
    model.set_attn_implementation(implementation)
    original = logits(model, **inputs(name))
    inject_hsa(model, hierarchy=hierarchy)
    # Llama's own eager softmax is in single precision; all others agree to 1e-12.
    torch.testing.assert_close(logits(model, **inputs(name)), original, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_one_family_gives_the_original_logits_in_single_precision(name: str) -> None:
    model = MODELS[name]().float()
    given = {
        key: part.float() if key == "pixel_values" else part for key, part in inputs(name).items()
    }
    original = logits(model, **given)
    inject_hsa(model, hierarchy=(512,))
    # Logits of these weights reach 10, so 1e-5 of them is what single precision holds.
    assert (logits(model, **given) - original).abs().max() < 1e-5 * original.abs().max()


@pytest.mark.parametrize("name", ENCODERS)
def test_blocks_of_one_family_give_the_original_logits(name: str) -> None:
    model = MODELS[name]()
    original = logits(model, **inputs(name))
    inject_hsa(model, hierarchy=(512,), tie="blocks")
    torch.testing.assert_close(logits(model, **inputs(name)), original, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_restored_is_the_original_bit_for_bit(name: str) -> None:
    model = MODELS[name]()
    before, state = logits(model, **inputs(name)), copy.deepcopy(model.state_dict())
    attributes = {path: sorted(vars(module)) for path, module in model.named_modules()}
    configs = {path: getattr(module, "config", None) for path, module in model.named_modules()}
    inject_hsa(model, hierarchy=(2, 2))
    assert (logits(model, **inputs(name)) - before).abs().max() > 1e-3
    assert restore(model) is model
    assert torch.equal(logits(model, **inputs(name)), before)
    assert all(torch.equal(part, state[key]) for key, part in model.state_dict().items())
    for path, module in model.named_modules():
        assert sorted(vars(module)) == attributes[path]
        assert getattr(module, "config", None) is configs[path]
        assert not module._forward_pre_hooks


def pad(ids: Tensor, width: int, side: str) -> tuple[Tensor, Tensor]:
    """One text of `ids` with padding on a side, under a longer one."""
    batch = torch.cat([text(1, width, seed=9), torch.zeros(1, width, dtype=torch.long)])
    mask = torch.ones_like(batch)
    at = slice(0, ids.shape[1]) if side == "right" else slice(width - ids.shape[1], None)
    batch[1, at], mask[1], mask[1, at] = ids[0], 0, 1
    return batch, mask


CASES: list[dict[str, Any]] = [
    {"hierarchy": (2, 3)},
    {"hierarchy": (4,), "sinks": None},
    {"hierarchy": (2, 2), "tie": "blocks"},
    {"hierarchy": (2, 2), "tie": "blocks", "sinks": (0, 1, -1), "sink_queries": "tied"},
    {"hierarchy": (3,), "sink_ids": tuple(range(5, 12))},
    {"hierarchy": "sentences", "sentence_ends": tuple(range(5, 15))},
    {"hierarchy": "sentences", "sentence_ends": tuple(range(5, 15)), "tie": "blocks"},
]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_padded_equals_unpadded(name: str, case: dict, side: str, implementation: str) -> None:
    if name in DECODERS and (case.get("tie") == "blocks" or "sink_ids" in case):
        case = {"hierarchy": (2, 2, 2), "sinks": (0, 1)}
    model = MODELS[name]()
    model.set_attn_implementation(implementation)
    inject_hsa(model, **case)
    alone = text(1, 13, seed=4)
    batch, mask = pad(alone, 21, side)
    given: dict[str, Any] = {"input_ids": batch, "attention_mask": mask}
    start = 1 if name == "roberta" else 0  # the row of its padding id, 0, is skipped
    given["position_ids"] = (mask.cumsum(1) - 1 + start).clamp(min=0)
    found = logits(model, **given)[1][mask[1].bool()]
    torch.testing.assert_close(found, logits(model, input_ids=alone)[0], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", DECODERS)
def test_a_later_token_changes_nothing_before_it(name: str) -> None:
    model = inject_hsa(MODELS[name](), hierarchy=(2, 3))
    ids = text()
    other = ids.clone()
    other[:, 15] = (other[:, 15] + 1 - 5) % (VOCABULARY - 5) + 5
    one, two = logits(model, input_ids=ids), logits(model, input_ids=other)
    torch.testing.assert_close(one[:, :15], two[:, :15], atol=1e-12, rtol=1e-12)
    assert (one[:, 15:] - two[:, 15:]).abs().amax((0, 2)).min() > 1e-6


def test_only_the_chosen_layers_are_injected() -> None:
    model = bert()
    inject_hsa(model, layers=[0, -1], hierarchy=(2, 2))
    assert injected_layers(model) == [0, 2]
    implementations = [
        layer.attention.self.config._attn_implementation for layer in model.bert.encoder.layer
    ]
    assert implementations == ["polyscale_hsa", "sdpa", "polyscale_hsa"]
    assert model.config._attn_implementation == "sdpa"
    inject_hsa(model, layers=[1], hierarchy=(8,))
    assert injected_settings(model)[1].hierarchy == (8,)
    assert injected_layers(restore(model, layers=[0])) == [1, 2]


def test_a_layer_of_one_family_among_others_changes_nothing() -> None:
    model, ids = bert(), text()
    inject_hsa(model, layers=[1], hierarchy=(2, 2))
    found = logits(model, input_ids=ids)
    inject_hsa(model, layers=[0, 2], hierarchy=())
    torch.testing.assert_close(logits(model, input_ids=ids), found, atol=1e-9, rtol=1e-9)


def test_a_copy_of_an_injected_model_is_injected_and_restored_on_its_own() -> None:
    model, ids = bert(), text()
    original = logits(model, input_ids=ids)
    inject_hsa(model, hierarchy="sentences", sentence_ends=(7, 8, 9))
    found = logits(model, input_ids=ids)
    other = copy.deepcopy(model)
    assert torch.equal(logits(other, input_ids=ids), found)
    assert torch.equal(logits(restore(other), input_ids=ids), original)
    assert torch.equal(logits(model, input_ids=ids), found)


def test_bfloat16_models_run_and_stay_near_their_single_precision() -> None:
    for model in (bert(initializer_range=0.1).float(), llama(initializer_range=0.1).float()):
        inject_hsa(model, hierarchy=(2, 4))
        wide = logits(model, input_ids=text())
        narrow = logits(model.bfloat16(), input_ids=text())
        assert narrow.dtype == torch.bfloat16
        assert (narrow - wide).abs().max() < 0.05 * wide.abs().max()


def test_autocast_of_an_injected_model_runs() -> None:
    model = inject_hsa(llama(initializer_range=0.1).float(), hierarchy=(2, 4))
    wide = logits(model, input_ids=text())
    cache = DynamicCache(config=model.config)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        narrow = logits(model, input_ids=text())
        first = model(text()[:, :9], past_key_values=cache).logits
        second = model(text()[:, 9:], past_key_values=cache).logits
    assert (narrow - wide).abs().max() < 0.05 * wide.abs().max()
    assert (torch.cat([first, second], 1) - wide).abs().max() < 0.05 * wide.abs().max()


def test_grouped_query_heads_equal_the_same_heads_written_out() -> None:
    model = inject_hsa(llama(), hierarchy=(2, 2))
    wide = inject_hsa(llama(num_key_value_heads=4), hierarchy=(2, 2))
    weights = model.state_dict()
    for name, part in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = part.view(2, 8, 32).repeat_interleave(2, 0).reshape(32, 32)
    wide.load_state_dict(weights)
    ids = text()
    torch.testing.assert_close(
        logits(wide, input_ids=ids), logits(model, input_ids=ids), atol=1e-9, rtol=1e-9
    )


def test_gradients_reach_all_weights() -> None:
    model = inject_hsa(bert(), hierarchy=(2, 2))
    model(text()).logits.square().mean().backward()
    missing = [name for name, part in model.named_parameters() if part.grad is None]
    assert missing == []
    key = model.bert.encoder.layer[0].attention.self.key.weight
    assert key.grad.abs().max() > 0


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    ids = text()
    found = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = bert(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        inject_hsa(model, hierarchy="sentences", sentence_ends=(7, 8, 9))
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()
        model(ids).logits.square().mean().backward()
        found.append(model.bert.encoder.layer[0].attention.self.query.weight.grad)
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=1e-12)


def capture(model: Any, ids: Tensor, **given: Any) -> tuple[Tensor, ...]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(input_ids=ids, output_attentions=True, **given).attentions


@pytest.mark.parametrize("case", CASES)
def test_output_attentions_are_the_weights_that_are_applied(case: dict) -> None:
    model = inject_hsa(bert(), layers=[0], **case)
    batch, mask = pad(text(1, 13), 21, "left")
    weights = capture(model, batch, attention_mask=mask)
    assert len(weights) == 3
    assert weights[0].shape == (2, 4, 21, 21)
    real = mask.bool()[:, None]
    sums = weights[0].sum(-1)
    torch.testing.assert_close(sums, real.expand_as(sums).to(sums.dtype), atol=1e-9, rtol=0)
    assert (weights[0].masked_fill(real[:, :, None], 0.0) == 0).all()
    attention = model.bert.encoder.layer[0].attention
    hidden = model.bert.embeddings(input_ids=batch)
    value = attention.self.value(hidden).view(2, 21, 4, 8).transpose(1, 2)
    expected = (weights[0] @ value).transpose(1, 2).flatten(2)
    with torch.no_grad():
        square = real[:, None].expand(2, 1, 21, 21)
        tokens = {}
        if injected_settings(model)[0].needs_tokens:
            from polyscale.inject.layout import Tokens

            tokens = {"hsa_tokens": Tokens(batch)}
        found = attention.self(hidden, attention_mask=square, **tokens)[0]
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", DECODERS)
def test_output_attentions_of_decoders_are_causal(name: str) -> None:
    model = inject_hsa(MODELS[name](), hierarchy=(2, 2))
    weights = capture(model, text())
    assert len(weights) == 3
    for part in weights:
        assert (part.triu(1) == 0).all()
        torch.testing.assert_close(part.sum(-1), torch.ones_like(part[..., 0]))


def test_output_attentions_without_eager_are_refused_unless_all_layers_are_injected() -> None:
    model = inject_hsa(bert(), layers=[0], hierarchy=(2, 2))
    with pytest.raises(ValueError, match=r'use "sdpa", which returns no weights'):
        model(text(), output_attentions=True)
    inject_hsa(model, layers=[1, 2], hierarchy=(2, 2))
    assert len(model(text(), output_attentions=True).attentions) == 3


def test_sinks_are_leaves_under_the_root_and_see_everything() -> None:
    ids = text(1, 21)
    model = inject_hsa(bert(), layers=[0], hierarchy=(4,), sinks=(0, -1))
    eager = bert()
    eager.load_state_dict(model.state_dict())
    weights, flat = capture(model, ids)[0], capture(eager, ids)[0]
    torch.testing.assert_close(weights[:, :, [0, 20]], flat[:, :, [0, 20]])
    # Tokens of other windows share a weight, the two sinks have their own.
    window = weights[0, 0, 1, 5:9]
    torch.testing.assert_close(window, window[:1].expand(4))
    assert (weights[0, :, 1:-1, 0] != weights[0, :, 1:-1, -1]).all()


def test_sinks_by_token_id_are_found_in_each_text_by_itself() -> None:
    ids = torch.tensor([[7, 20, 21, 7, 22, 23, 24], [20, 21, 22, 23, 24, 25, 26]])
    model = inject_hsa(bert(), layers=[0], hierarchy=(2,), sinks=None, sink_ids=(7,))
    weights = capture(model, ids)[0]
    attention = model.bert.encoder.layer[0].attention.self
    hidden = model.bert.embeddings(input_ids=ids)
    query, key = (
        part(hidden).view(2, 7, 4, 8).transpose(1, 2) for part in (attention.query, attention.key)
    )
    order = [0, 3, 1, 2, 4, 5, 6]  # of the first text: its sinks come first
    tree = SignalTree.from_nested([0, 1, [2, 3], [4, 5], [6]])
    found = weights[0][:, order][:, :, order]
    expected = hsa_matrix(query[:1, :, order], key[:1, :, order], tree, tie="columns")[0]
    torch.testing.assert_close(found[:, 2:], expected[:, 2:], atol=1e-12, rtol=1e-9)
    tree = SignalTree.from_windows(7, (2,))
    expected = hsa_matrix(query[1:], key[1:], tree, tie="columns")[0]
    torch.testing.assert_close(weights[1], expected, atol=1e-12, rtol=1e-9)


def test_given_trees_are_used_as_they_are() -> None:
    ids = text(2, 12)
    tree = SignalTree.from_nested([[0, 1, [2, 3]], [4], [5, [6, 7, 8, 9], 10], 11])
    model = inject_hsa(bert(), layers=[0], hierarchy=tree)
    attention = model.bert.encoder.layer[0].attention.self
    hidden = model.bert.embeddings(input_ids=ids)
    query, key = (
        part(hidden).view(2, 12, 4, 8).transpose(1, 2) for part in (attention.query, attention.key)
    )
    expected = hsa_matrix(query, key, tree, tie="columns")
    torch.testing.assert_close(capture(model, ids)[0], expected, atol=1e-12, rtol=1e-9)
    # One tree for each text, given with the call.
    other = SignalTree.from_windows(12, (3,))
    both = capture(model, ids, hsa_tree=SignalTree.batch([tree, other]))[0]
    torch.testing.assert_close(both[0], expected[0], atol=1e-12, rtol=1e-9)
    second = hsa_matrix(query, key, other, tie="columns")[1]
    torch.testing.assert_close(both[1], second, atol=1e-12, rtol=1e-9)


def test_sentences_end_where_the_tokenizer_has_full_stops() -> None:
    model = inject_hsa(bert(), layers=[0], hierarchy="sentences", tokenizer=Tokenizer(), sinks=None)
    assert injected_settings(model)[0].sentence_ends == (7, 8, 9)
    ids = torch.tensor([[20, 21, 7, 22, 23, 24, 8, 25]])
    weights = capture(model, ids)[0]
    tree = SignalTree.from_nested([[0, 1, 2], [3, 4, 5, 6], [7]])
    attention = model.bert.encoder.layer[0].attention.self
    hidden = model.bert.embeddings(input_ids=ids)
    query, key = (
        part(hidden).view(1, 8, 4, 8).transpose(1, 2) for part in (attention.query, attention.key)
    )
    expected = hsa_matrix(query, key, tree, tie="columns")
    torch.testing.assert_close(weights, expected, atol=1e-12, rtol=1e-9)


def test_texts_of_padding_alone_give_no_nan() -> None:
    mask = torch.ones(2, 21, dtype=torch.long)
    mask[1] = 0
    for case in CASES:
        found = logits(inject_hsa(bert(), **case), input_ids=text(), attention_mask=mask)
        assert found.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_single_tokens_and_short_texts_work(name: str) -> None:
    if name == "vit":
        return
    model = inject_hsa(MODELS[name](), hierarchy=(2, 2))
    for length in (1, 2, 3):
        ids = text(2, length)
        original = logits(restore(copy.deepcopy(model)), input_ids=ids)
        found = logits(model, input_ids=ids)
        torch.testing.assert_close(found, original, atol=1e-9, rtol=1e-9)


def test_inference_mode_reads_each_mask_anew() -> None:
    model = inject_hsa(bert(), hierarchy=(2, 2))
    batch, mask = pad(text(1, 13), 21, "left")
    expected = logits(model, input_ids=batch, attention_mask=mask)
    with torch.inference_mode():
        found = model(input_ids=batch, attention_mask=mask).logits
        square = mask.bool()[:, None, None].expand(2, 1, 21, 21).clone()
        own = model(input_ids=batch, attention_mask=square).logits
        square.fill_(True)
        full = model(input_ids=batch, attention_mask=square).logits
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own[mask.bool()], expected[mask.bool()])
    torch.testing.assert_close(full, logits(model, input_ids=batch))


def test_a_causal_mask_makes_an_encoder_causal() -> None:
    model = inject_hsa(bert(), hierarchy=(2, 2), sinks=(0,))
    causal = torch.ones(21, 21, dtype=torch.bool).tril()[None, None].expand(2, 1, 21, 21)
    ids = text()
    other = ids.clone()
    other[:, -1] = 5
    one = logits(model, input_ids=ids, attention_mask=causal)
    two = logits(model, input_ids=other, attention_mask=causal)
    torch.testing.assert_close(one[:, :-1], two[:, :-1], atol=1e-12, rtol=1e-12)


def test_gpt2_and_vit_take_their_own_scale() -> None:
    ids = text()
    model = gpt2(scale_attn_by_inverse_layer_idx=True)
    original = logits(model, input_ids=ids)
    found = logits(inject_hsa(model, hierarchy=()), input_ids=ids)
    torch.testing.assert_close(found, original, atol=1e-9, rtol=1e-9)
    assert injected_settings(inject_hsa(vit()))[0].sinks == (0,)


def test_masks_made_under_the_name_keep_padding_and_causality() -> None:
    # A name without a mask function gets no mask at all: every token would see all others.
    config = copy.deepcopy(llama().config)
    config._attn_implementation = "polyscale_hsa"
    padding = torch.ones(2, 6, dtype=torch.long)
    padding[1, :2] = 0
    embedded = torch.zeros(2, 6, 32)
    mask = create_causal_mask(config, embedded, padding, past_key_values=None)
    found = read_mask(mask, 2, 6, 6, causal_without_mask=False)
    assert found.causal
    assert found.real is not None
    assert torch.equal(found.real, padding.bool())
