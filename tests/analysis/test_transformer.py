"""The analysis of Hugging Face models, against what they say of themselves."""

from typing import Any

import pytest
import torch
import transformers

from polyscale.analysis import analyze_attention, analyze_snapshots
from tests.analysis.properties import assert_sound
from tests.theory.helpers import randomise

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 32, "vocab_size": 100, "max_position_embeddings": 64}


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL))


def roberta():
    return transformers.RobertaForSequenceClassification(transformers.RobertaConfig(**SMALL))


def distilbert():
    config = transformers.DistilBertConfig(
        dim=32, n_layers=2, n_heads=4, hidden_dim=32, vocab_size=100
    )
    return transformers.DistilBertModel(config)


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def opt():
    config = transformers.OPTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=32,
        vocab_size=100,
        word_embed_proj_dim=32,
    )
    return transformers.OPTModel(config)


MODELS = [bert, roberta, distilbert, gpt2, llama, opt]
every_model = pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)


def ids(*shape):
    return torch.randint(5, 100, shape)


@every_model
def test_maps_are_the_attention_that_the_model_reports(make):
    model = randomise(make(), 0.2).eval()
    batch = {"input_ids": ids(1, 12), "attention_mask": torch.ones(1, 12, dtype=torch.int64)}
    found = analyze_attention(model, batch)
    assert_sound(found)
    meta = found["meta"]
    assert (meta["kind"], meta["layers"], meta["heads"]) == ("transformer", 2, 4)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(**batch, output_attentions=True).attentions
    for one in found["attention"]:
        expected = attentions[one["layer"]][0, one["head"]]
        torch.testing.assert_close(torch.tensor(one["map"]), expected, atol=2e-4, rtol=1e-3)


@every_model
def test_every_head_has_its_form_and_its_scores(make):
    model = randomise(make(), 0.2)
    found = analyze_attention(model, ids(2, 9), example=1)
    forms = found["kernel"]["forms"]
    assert [(form["layer"], form["head"]) for form in forms] == [
        (layer, head) for layer in range(2) for head in range(4)
    ]
    # 8 channels of 32 a head: as many negative as positive eigenvalues.
    assert all(len(form["eigenvalues"]) == 16 for form in forms)
    assert all(form["fraction_negative"] == 0.5 for form in forms)
    assert ("psd_with_bias" in forms[0]) == (make is not llama)
    assert len(found["kernel"]["scores"]) == len(found["symmetry"]["parts"]) == 8
    assert "levels" not in found
    assert any("do not apply" in note for note in found["meta"]["notes"])


def test_forms_are_those_of_the_weights():
    model = randomise(gpt2(), 0.2)
    weight = model.transformer.h[1].attn.c_attn.weight.detach().double()  # [C, 3 C]
    query, key = weight[:, 8:16], weight[:, 40:48]
    form = query @ key.T
    expected = torch.linalg.eigvalsh((form + form.T) / 2).flip(-1)
    shown = analyze_attention(model, ids(1, 6))["kernel"]["forms"][4 + 1]["eigenvalues"]
    assert shown[:8] == pytest.approx(expected[:8].tolist(), rel=1e-4)
    assert shown[8:] == pytest.approx(expected[-8:].tolist(), rel=1e-4)
    grouped = randomise(llama(), 0.2)
    attention = grouped.model.layers[0].self_attn
    query = attention.q_proj.weight.detach().double()[16:24].T  # head 2 shares the second key head
    key = attention.k_proj.weight.detach().double()[8:16].T
    form = query @ key.T
    expected = torch.linalg.eigvalsh((form + form.T) / 2)
    shown = analyze_attention(grouped, ids(1, 6))["kernel"]["forms"][2]
    assert shown["smallest"] == pytest.approx(expected[0].item(), rel=1e-4)


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out(make, side):
    model = randomise(make(), 0.2)
    mask = torch.ones(1, 10, dtype=torch.int64)
    mask[:, : 3 if side == "left" else 0] = 0
    mask[:, 10 if side == "left" else 7 :] = 0
    found = analyze_attention(
        model, {"input_ids": ids(1, 10), "attention_mask": mask}, tokens=list("abcdefghij")
    )
    assert_sound(found)
    assert found["meta"]["length"] == 7
    assert found["meta"]["tokens"] == list("defghij" if side == "left" else "abcdefg")
    for one in found["attention"]:
        assert [sum(row) for row in one["map"]] == pytest.approx([1] * 7, abs=2e-3)


@pytest.mark.parametrize("make", [gpt2, llama, opt], ids=lambda make: make.__name__)
def test_decoders_see_nothing_later_also_without_a_mask(make):
    for one in analyze_attention(randomise(make(), 0.2), ids(1, 9))["attention"]:
        assert torch.tensor(one["map"]).triu(1).abs().max() == 0


def test_scores_that_are_more_than_products_are_refused():
    config = transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8)
    with pytest.raises(ValueError, match="plain softmax, but it passes 'softcap'"):
        analyze_attention(transformers.Gemma2Model(config), ids(1, 5))


def test_images_work_too():
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
    )
    model = randomise(transformers.ViTModel(config), 0.2)
    found = analyze_attention(model, {"pixel_values": torch.rand(1, 3, 16, 16)})
    assert_sound(found)
    assert found["meta"]["length"] == 17
    assert len(found["kernel"]["forms"]) == 4


def test_cross_attention_is_left_out_and_the_notes_say_so():
    config = transformers.BartConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        vocab_size=100,
    )
    model = randomise(transformers.BartModel(config), 0.2)
    batch = {"input_ids": ids(1, 9), "decoder_input_ids": ids(1, 5)}
    notes = " ".join(analyze_attention(model, batch)["meta"]["notes"])
    assert "1 cross-attention layers are left out" in notes
    assert "another length than the first" in notes


def test_the_model_is_left_as_it_was():
    model = randomise(bert(), 0.2).train()
    before = model.config._attn_implementation
    analyze_attention(model, ids(1, 5))
    assert model.config._attn_implementation == before
    assert model.training
    with pytest.raises(IndexError):
        analyze_attention(model, ids(1, 5) + 1000)
    assert model.config._attn_implementation == before


def test_long_inputs_are_cut_and_the_notes_say_so():
    found = analyze_attention(randomise(bert(), 0.2), ids(1, 40), max_length=30)
    assert found["meta"]["length"] == 30
    assert "first 30 (of 40)" in " ".join(found["meta"]["notes"])
    assert_sound(found)


def test_a_single_token():
    assert_sound(analyze_attention(randomise(gpt2(), 0.2), ids(1, 1)))


def test_snapshots_of_any_model_give_normality_over_training():
    models = [(step, randomise(bert(), 0.2, seed=step)) for step in (0, 5)]
    found = analyze_snapshots(models, ids(1, 40))
    assert_sound(found)
    history = found["normality"]["over_training"]
    assert [(entry["step"], entry["layer"]) for entry in history] == [
        (0, 0),
        (0, 1),
        (5, 0),
        (5, 1),
    ]


def test_bad_input_is_named():
    model = bert()
    with pytest.raises(TypeError, match="model must be a Hugging Face model, got Linear"):
        analyze_attention(torch.nn.Linear(2, 2), ids(1, 4))
    with pytest.raises(ValueError, match="example must be from 0 to 0, got 2"):
        analyze_attention(model, ids(1, 4), example=2)
    with pytest.raises(TypeError, match="batch must be a dict or input_ids, got list"):
        analyze_attention(model, [1, 2])
    with pytest.raises(ValueError, match="at least one tensor"):
        analyze_attention(model, {})
    with pytest.raises(ValueError, match="only padding"):
        analyze_attention(model, {"input_ids": ids(1, 4), "attention_mask": torch.zeros(1, 4)})
    with pytest.raises(ValueError, match="max_length must be an integer of at least 1"):
        analyze_attention(model, ids(1, 4), max_length=0)
