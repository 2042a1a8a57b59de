from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartModel,
    BigBirdConfig,
    BigBirdModel,
    BloomConfig,
    BloomModel,
    Gemma2Config,
    Gemma2Model,
    GptOssConfig,
    GptOssModel,
    LongformerConfig,
    LongformerModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5EncoderModel,
)

from polyscale.inject import inject_hsa, injected_layers
from polyscale.trees import SignalTree
from tests.inject.models import SIZES, bert, gpt2, llama, logits, text, vit

SMALL: dict[str, Any] = {**SIZES, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    "model",
    [
        LongformerModel(LongformerConfig(**SMALL, attention_window=4)),
        BigBirdModel(BigBirdConfig(**SMALL)),
        BloomModel(BloomConfig(vocab_size=60, hidden_size=32, n_layer=1, n_head=4)),
    ],
)
def test_models_that_do_not_use_the_interface_are_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="does not use the attention interface"):
        inject_hsa(model)


def test_models_with_cross_attention_are_refused() -> None:
    bart = BartModel(
        BartConfig(
            vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=8, decoder_ffn_dim=8,
        )
    )  # fmt: skip
    crossed = bert(is_decoder=True, add_cross_attention=True)
    for model in (bart, crossed):
        with pytest.raises(ValueError, match="has cross-attention"):
            inject_hsa(model)


def test_soft_capped_scores_are_refused() -> None:
    model = Gemma2Model(Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8))
    with pytest.raises(
        ValueError, match="layer 0 cannot be served by HSA: its scores are soft-cap"
    ):
        inject_hsa(model)
    with pytest.raises(ValueError, match="soft-capped"):
        inject_hsa(llama())(text(), softcap=30.0)


def test_learned_sinks_in_the_softmax_are_refused() -> None:
    config = GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    )
    with pytest.raises(ValueError, match=r"learned attention sinks \(s_aux\)"):
        inject_hsa(GptOssModel(config))
    with pytest.raises(ValueError, match=r"learned attention sinks \(s_aux\)"):
        inject_hsa(llama())(text(), s_aux=torch.zeros(4))


def test_position_biases_are_refused() -> None:
    config = T5Config(vocab_size=60, d_model=32, d_kv=8, num_heads=4, num_layers=1, d_ff=8)
    config.is_encoder_decoder = False
    with pytest.raises(ValueError, match="adds a relative position bias"):
        inject_hsa(T5EncoderModel(config))
    with pytest.raises(ValueError, match="adds a position bias"):
        inject_hsa(llama())(text(), position_bias=torch.zeros(1, 4, 21, 21))
    alibi = torch.arange(21.0)[None, None, None].expand(2, 1, 21, 21).double()
    with pytest.raises(ValueError, match="neither 0 nor minus infinity: a position bias"):
        inject_hsa(bert())(text(), attention_mask=alibi)


def test_sliding_windows_are_refused_where_they_matter() -> None:
    model = MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=16))
    model = model.eval().double()
    ids = text(2, 12)
    original = logits(model, input_ids=ids)
    inject_hsa(model, hierarchy=())
    torch.testing.assert_close(logits(model, input_ids=ids), original, atol=1e-9, rtol=1e-9)
    written = model.generate(ids, max_new_tokens=3, eos_token_id=-1, do_sample=False)
    assert written.shape == (2, 15)
    for options in ({}, {"use_cache": False}):
        with pytest.raises(ValueError, match="sliding window of 16 tokens and got 21"):
            model(text(2, 21), **options)
    with pytest.raises(ValueError, match="sliding window of 16 tokens and got 17"):
        model.generate(ids, max_new_tokens=8, eos_token_id=-1, do_sample=False)


def test_packed_sequences_are_refused() -> None:
    positions = torch.cat([torch.arange(10), torch.arange(11)])[None]
    with pytest.raises(ValueError, match="neither padding nor padding with causality"):
        inject_hsa(llama())(text(1, 21), position_ids=positions, use_cache=False)
    with pytest.raises(ValueError, match="packed sequences are not supported"):
        inject_hsa(llama())(text(1, 21), cu_seq_lens_q=torch.tensor([0, 10, 21]))


def test_masks_that_are_not_padding_are_refused() -> None:
    model = inject_hsa(bert(), hierarchy=(2, 2))
    mask = torch.ones(2, 1, 21, 21, dtype=torch.bool)
    mask[:, :, 3, 4] = False
    with pytest.raises(ValueError, match="neither padding nor padding with causality"):
        model(text(), attention_mask=mask)
    heads = torch.ones(2, 4, 21, 21, dtype=torch.bool)
    heads[:, 2, :, 4] = False
    with pytest.raises(ValueError, match="differs from head to head"):
        model(text(), attention_mask=heads)
    with pytest.raises(ValueError, match=r"must be bool or floating point, got torch\.int64"):
        model(text(), attention_mask=mask.long())
    with pytest.raises(ValueError, match=r"got \[2, 1, 2, 21\]"):
        model(text(), attention_mask=mask[:, :, :2])


def test_a_bidirectional_mask_with_a_cache_is_refused() -> None:
    model = inject_hsa(llama(), hierarchy=(2, 2))
    mask = torch.ones(2, 1, 21, 21, dtype=torch.bool)
    with pytest.raises(ValueError, match="a layer that is not causal cannot use a cache"):
        model(text(), attention_mask=mask, use_cache=True)


def test_attention_dropout_in_training_is_refused_or_switched_off() -> None:
    model = inject_hsa(bert(attention_probs_dropout_prob=0.1)).train()
    with pytest.raises(ValueError, match=r"in training with attention dropout 0.1"):
        model(text())
    inject_hsa(bert(attention_probs_dropout_prob=0.1), dropout="off").train()(text())
    inject_hsa(bert(attention_probs_dropout_prob=0.0)).train()(text())


def test_blocks_in_causal_layers_are_refused() -> None:
    for model in (gpt2(), llama()):
        with pytest.raises(ValueError, match=r'tie must .* for a causal layer, got "blocks"'):
            inject_hsa(model, tie="blocks")
    causal = torch.ones(21, 21, dtype=torch.bool).tril()[None, None].expand(2, 1, 21, 21)
    with pytest.raises(ValueError, match='is causal and takes tie="columns"'):
        inject_hsa(bert(), tie="blocks")(text(), attention_mask=causal)


@pytest.mark.parametrize("sinks", [(-1,), (0, 2), (1,)])
def test_sinks_of_causal_layers_are_their_first_tokens(sinks: tuple) -> None:
    with pytest.raises(ValueError, match="must be the first tokens in a causal layer"):
        inject_hsa(gpt2(), sinks=sinks)
    with pytest.raises(ValueError, match=r"in a causal layer, .*got sink_ids \(7,\)"):
        inject_hsa(gpt2(), sinks=None, sink_ids=(7,))


def test_sentences_need_token_ids() -> None:
    model = inject_hsa(bert(), hierarchy="sentences", sentence_ends=(7,))
    embedded = model.get_input_embeddings()(text())
    with pytest.raises(ValueError, match=r"pass input_ids \(not inputs_embeds\)"):
        model(inputs_embeds=embedded)
    with pytest.raises(ValueError, match="which has no input_ids"):
        inject_hsa(vit(), hierarchy="sentences", sentence_ends=(7,))


def test_the_name_alone_cannot_be_chosen() -> None:
    inject_hsa(bert())
    model = bert()
    model.set_attn_implementation("polyscale_hsa")
    with pytest.raises(ValueError, match=r"is set by polyscale.inject_hsa"):
        model(text())


def test_trees_of_the_wrong_size_are_refused() -> None:
    model = inject_hsa(bert(), hierarchy=SignalTree.from_windows(20, (4,)))
    with pytest.raises(ValueError, match=r"one tree of 21 rows, .*got 1 trees and 20 rows"):
        model(text())
    with pytest.raises(TypeError, match=r"hsa_tree must .*a SignalTree.*got tuple"):
        model(text(), hsa_tree=(2, 2))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"layers": [3]}, ValueError, r"layers must .*0..2 \(counted from 0\).*got 3"),
        ({"layers": []}, ValueError, "layers must .*got none"),
        ({"layers": "all"}, TypeError, "layers must .*got 'all'"),
        ({"layers": [1.0]}, TypeError, "layers must .*got 1.0"),
        ({"hierarchy": (1, 2)}, ValueError, r"hierarchy must .*windows of 2.*got \(1, 2\)"),
        ({"hierarchy": "words"}, ValueError, "hierarchy must .*got 'words'"),
        ({"hierarchy": 4}, TypeError, "hierarchy must .*got int"),
        ({"hierarchy": (2, 2.5)}, TypeError, "hierarchy must .*got 2.5"),
        ({"hierarchy": "sentences"}, ValueError, "needs to know which tokens end a sentence"),
        ({"tie": "rows"}, ValueError, "tie must .*got 'rows'"),
        ({"sinks": "first"}, ValueError, "sinks must .*got 'first'"),
        ({"sinks": 0}, TypeError, "sinks must .*got 0"),
        ({"sink_ids": (-3,)}, ValueError, "sink_ids must be token ids"),
        ({"sink_queries": "all"}, ValueError, "sink_queries must .*got 'all'"),
        ({"dropout": 0.1}, ValueError, "dropout must .*got 0.1"),
        (
            {"hierarchy": SignalTree.from_windows(4), "sinks": (0,)},
            ValueError,
            "a given SignalTree says itself",
        ),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_injected(
    arguments: dict, kind: type[Exception], message: str
) -> None:
    model = bert()
    with pytest.raises(kind, match=message):
        inject_hsa(model, **arguments)
    assert injected_layers(model) == []


def test_injecting_twice_is_refused() -> None:
    model = inject_hsa(bert(), layers=[1])
    with pytest.raises(ValueError, match="layer 1 is injected already"):
        inject_hsa(model)
    assert injected_layers(model) == [1]


def test_anything_but_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"model must .*a Hugging Face model.*got Linear"):
        inject_hsa(nn.Linear(2, 2))  # type: ignore[arg-type]
