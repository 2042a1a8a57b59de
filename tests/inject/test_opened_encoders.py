from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
)

import polyscale as ps
from polyscale.inject import injected_layers, injected_settings, load_injected, save_injected
from tests.inject.models import ENCODERS, MODELS, SIZES, bert, inputs, logits, text

SMALL: dict[str, Any] = {
    "block": 8, "key_block": 4, "near": 4, "heavy": 8, "sample": 4, "dense": 0
}  # fmt: skip
ALL: dict[str, Any] = {**SMALL, "heavy": 200}  # opens everything


def modernbert() -> PreTrainedModel:
    """Layer 0 attends to everything, layers 1 and 2 within a window."""
    config = ModernBertConfig(**SIZES, pad_token_id=0, cls_token_id=1, sep_token_id=2)
    return ModernBertForMaskedLM(config).eval()


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Two texts of 61 and 34 tokens, and their mask."""
    ids, mask = torch.zeros(2, 61, dtype=torch.long), torch.zeros(2, 61, dtype=torch.long)
    for row, length in enumerate((61, 34)):
        at = slice(61 - length, 61) if side == "left" else slice(0, length)
        ids[row, at], mask[row, at] = text(1, length, seed=length)[0], 1
    return ids, mask


@pytest.mark.parametrize("name", [*ENCODERS, "vit"])
def test_an_encoder_of_which_everything_is_opened_is_read_as_by_softmax(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    expected = logits(model, **inputs(name))
    ps.inject_opened(model, prompt=ALL)
    torch.testing.assert_close(logits(model, **inputs(name)), expected, atol=1e-9, rtol=1e-9)
    assert injected_layers(model) == [0, 1, 2]
    assert torch.equal(logits(ps.restore(model), **inputs(name)), expected)


def test_fewer_open_keys_change_an_encoder_more_and_pooling_the_rest_keeps_it_closer() -> None:
    torch.manual_seed(0)
    model, ids = bert(), text(2, 120)
    # Weights that are not so large: broad attention, as in trained encoders.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.4)
    expected = logits(model, input_ids=ids)

    def off(**options: Any) -> float:
        ps.inject_opened(model, prompt={**SMALL, **options})
        found = logits(model, input_ids=ids)
        ps.restore(model)
        return float((found - expected).abs().mean())

    few, many = off(heavy=8), off(heavy=64)
    assert 0 < many < few
    assert off(heavy=8, rest="drop") > 2 * few
    assert off(heavy=200) < 1e-9


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_texts_are_read_as_they_are_alone(side: str) -> None:
    model = ps.inject_opened(bert(max_position_embeddings=130), prompt=SMALL)
    ids, mask = padded(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    for row in range(2):
        alone = logits(model, input_ids=ids[row][mask[row].bool()][None])[0]
        torch.testing.assert_close(found[row][mask[row].bool()], alone, atol=1e-9, rtol=1e-9)


def test_sinks_are_the_first_and_the_last_token_of_each_text() -> None:
    ids, mask = padded("right")
    found = []
    for sinks in (None, (0, -1), (0, 60), (0,)):
        torch.manual_seed(0)
        options = SMALL if sinks is None else {**SMALL, "sinks": sinks}
        model = ps.inject_opened(bert(), prompt={**options, "near": 0, "heavy": 0})
        found.append(logits(model, input_ids=ids, attention_mask=mask))
    usual, edges, last_column, first = found
    assert torch.equal(usual, edges)
    assert torch.equal(usual[0], last_column[0])  # the text without padding ends there
    assert not torch.equal(usual[1], last_column[1])
    assert torch.equal(last_column[1, :34], first[1, :34])  # padding is nobody's sink


def test_short_texts_are_read_densely_bit_for_bit() -> None:
    torch.manual_seed(0)
    model = bert()
    short, long = text(2, 40), text(2, 41)
    expected = logits(model, input_ids=short), logits(model, input_ids=long)
    ps.inject_opened(model, prompt={**SMALL, "dense": 40})
    assert torch.equal(logits(model, input_ids=short), expected[0])
    assert not torch.equal(logits(model, input_ids=long), expected[1])
    settings = injected_settings(ps.inject_opened(bert()))[0]
    assert settings.dense == 384  # type: ignore[union-attr]


def test_layers_of_an_encoder_with_a_sliding_window_are_left_alone_and_said_so() -> None:
    torch.manual_seed(0)
    model = modernbert()
    expected = logits(model, input_ids=text(2, 100))
    with pytest.warns(UserWarning, match="layers 1, 2 attend within a sliding window"):
        ps.inject_opened(model, prompt=ALL)
    assert injected_layers(model) == [0]
    found = logits(model, input_ids=text(2, 100))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="got 1, which attends within a sliding window"):
        ps.inject_opened(modernbert(), layers=[1])


def test_an_encoder_is_trained_with_exact_gradients_and_its_loss_is_no_cause_to_warn() -> None:
    ids = text(2, 60)

    def gradients(prompt: dict[str, Any] | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        if prompt is not None:
            ps.inject_opened(model, prompt=prompt)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.train()(input_ids=ids, labels=ids).loss.backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    dense, everything, part = gradients(None), gradients(ALL), gradients(SMALL)
    for found, expected in zip(everything, dense, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-6)
    assert any(not torch.allclose(one, two) for one, two in zip(part, dense, strict=True))


def test_an_injected_encoder_survives_its_folder(tmp_path: Path) -> None:
    model = ps.inject_opened(bert(), [0, 2], prompt={**SMALL, "sinks": (0, 3, -1)})
    save_injected(model, tmp_path)
    again = load_injected(tmp_path).double()
    assert injected_layers(again) == [0, 2]
    assert injected_settings(again)[0] == injected_settings(model)[0]
    ids, mask = padded("right")
    found, expected = (logits(one, input_ids=ids, attention_mask=mask) for one in (again, model))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_a_model_of_both_kinds_is_refused_where_its_decoder_has_no_cache() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = CLIPConfig(
        text_config={**sizes, "vocab_size": 9, "num_attention_heads": 2},
        vision_config={**sizes, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
    )
    model = CLIPModel(config).eval()
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model.get_image_features(pixel_values=pixels).pooler_output
    with pytest.raises(ValueError, match="must have decoder layers with a number"):
        ps.inject_opened(model)
    ps.inject_opened(model, layers=[1], prompt=ALL)
    with torch.no_grad():
        found = model.get_image_features(pixel_values=pixels).pooler_output
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": {"near": 3}}, r"cache must be None for an encoder, .* got \['near'\]"),
        ({"strict": True}, "strict must be False for an encoder"),
        ({"prompt": {"ending": 3}}, r"prompt\['ending'\] must be 0 for an encoder, .* got 3"),
        ({"prompt": {"rest": "forget"}}, "rest must be one of 'drop', 'pool', got 'forget'"),
    ],
)
def test_what_an_encoder_has_no_use_for_is_refused(options: dict, message: str) -> None:
    model = bert()
    with pytest.raises(ValueError, match=message):
        ps.inject_opened(model, **options)
    assert injected_layers(model) == []
    with pytest.raises(TypeError, match=r"prompt\['sinks'\] must be a sequence of whole numbers"):
        ps.inject_opened(model, prompt={"sinks": 1.5})
