from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, StaticCache

import polyscale as ps
from polyscale.inject import injected_layers, load_injected, save_injected
from polyscale.inject.storage import FILE
from tests.inject.models import gpt2, llama, logits, mistral, qwen2, text

DECODERS = {"gpt2": gpt2, "llama": llama, "qwen2": qwen2}
SMALL: dict[str, Any] = {
    "block": 8, "key_block": 4, "near": 4, "sinks": 2, "heavy": 8, "sample": 4, "dense": 0
}  # fmt: skip
ALL: dict[str, Any] = {**SMALL, "heavy": 200}  # opens everything
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


def exactly(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """Injected so that everything is opened and read exactly."""
    return ps.inject_opened(model, prompt=ALL, cache={"near": 200, "dense": 0}, **options)


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_of_which_everything_is_opened_is_read_as_by_softmax(name: str) -> None:
    model = DECODERS[name]()
    expected = logits(model, input_ids=text(2, 70))
    found = logits(exactly(model), input_ids=text(2, 70))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_prompts_are_read_by_opened_attention_with_the_options_given() -> None:
    model = llama()
    expected = logits(model, input_ids=text(1, 90))
    off = [
        float((logits(injected, input_ids=text(1, 90)) - expected).abs().max())
        for heavy in (0, 24, 96)
        for injected in [ps.inject_opened(ps.restore(model), prompt={**SMALL, "heavy": heavy})]
    ]
    assert off[0] > 0.1
    assert off[2] < 1e-9


def test_short_prompts_are_read_densely_bit_for_bit() -> None:
    model = llama()
    expected = logits(model, input_ids=text(2, 40))
    ps.inject_opened(model, prompt={**SMALL, "dense": 40})
    assert torch.equal(logits(model, input_ids=text(2, 40)), expected)
    assert not torch.equal(logits(model, input_ids=text(2, 41))[:, :40], expected)


def test_restore_brings_the_model_back_bit_for_bit() -> None:
    model = llama()
    expected = logits(model, input_ids=text(2, 60))
    names = set(vars(model))
    ps.inject_opened(model, prompt=SMALL)
    assert injected_layers(model) == [0, 1, 2]
    assert not torch.equal(logits(model, input_ids=text(2, 60)), expected)
    ps.restore(model)
    assert injected_layers(model) == []
    assert torch.equal(logits(model, input_ids=text(2, 60)), expected)
    assert set(vars(model)) == names
    output = model(text(1, 5))
    assert type(output.past_key_values) is DynamicCache


def test_some_layers_alone_are_injected_and_decode_beside_dense_ones() -> None:
    model = llama()
    expected = model.generate(text(1, 30), max_new_tokens=12, **GREEDY)
    exactly(model, layers=[0, -1])
    assert injected_layers(model) == [0, 2]
    assert torch.equal(model.generate(text(1, 30), max_new_tokens=12, **GREEDY), expected)
    ps.restore(model, layers=[0])
    assert injected_layers(model) == [2]
    assert torch.equal(model.generate(text(1, 30), max_new_tokens=12, **GREEDY), expected)


def test_the_ending_of_a_prompt_is_read_densely_and_nothing_else_is() -> None:
    model = llama(num_hidden_layers=1)
    dense = logits(model, input_ids=text(2, 60))
    opened = logits(ps.inject_opened(model, prompt=SMALL), input_ids=text(2, 60))
    ps.inject_opened(ps.restore(model), prompt={**SMALL, "ending": 9})
    found = logits(model, input_ids=text(2, 60))
    torch.testing.assert_close(found[:, -9:], dense[:, -9:], atol=1e-9, rtol=1e-9)
    assert torch.equal(found[:, :-9], opened[:, :-9])
    assert not torch.equal(opened[:, -9:], found[:, -9:])
    strict = ps.inject_opened(ps.restore(model), prompt={**SMALL, "ending": 9}, strict=True)
    alone = ps.inject_opened(llama(num_hidden_layers=1), prompt=SMALL, strict=True)
    alone.load_state_dict(model.state_dict())
    found, expected = (logits(one, input_ids=text(2, 60)) for one in (strict, alone))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("ending", [0, 5, 40])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_are_read_as_they_are_alone(side: str, ending: int) -> None:
    model = ps.inject_opened(llama(), prompt={**SMALL, "ending": ending})
    texts = [text(1, length, seed=length)[0] for length in (60, 33)]
    ids, mask = torch.zeros(2, 60, dtype=torch.long), torch.zeros(2, 60, dtype=torch.long)
    for row, one in enumerate(texts):
        at = slice(60 - len(one), 60) if side == "left" else slice(0, len(one))
        ids[row, at], mask[row, at] = one, 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions)
    for row, one in enumerate(texts):
        alone = logits(model, input_ids=one[None])[0]
        torch.testing.assert_close(found[row][mask[row].bool()], alone, atol=1e-9, rtol=1e-9)


def test_a_strict_model_is_causal_and_a_serving_one_is_not() -> None:
    ids = text(1, 80)
    other = ids.clone()
    other[0, -3:] = torch.tensor([7, 8, 9])
    changed = {}
    for strict in (True, False):
        model = ps.inject_opened(llama(), prompt=SMALL, strict=strict)
        found = logits(model, input_ids=ids) - logits(model, input_ids=other)
        changed[strict] = float(found[0, :77].abs().max())
    assert changed[True] == 0
    assert changed[False] > 0


def test_a_strict_model_is_trained_with_the_gradients_of_its_own_view() -> None:
    ids = text(2, 60)

    def gradients(model: PreTrainedModel) -> list[torch.Tensor]:
        model.train()(ids, labels=ids).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(0)
    dense = gradients(llama())
    torch.manual_seed(0)
    everything = gradients(ps.inject_opened(llama(), prompt=ALL, strict=True))
    torch.manual_seed(0)
    part = gradients(ps.inject_opened(llama(), prompt=SMALL, strict=True))
    assert all(found is not None and bool(found.isfinite().all()) for found in part)
    for found, expected in zip(everything, dense, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert float((part[1] - dense[1]).abs().max()) > 1e-3


def test_labels_in_the_serving_mode_warn_once() -> None:
    model, ids = ps.inject_opened(llama(), prompt=SMALL), text(1, 20)
    with pytest.warns(UserWarning, match="the loss of the text flatters"):
        model(ids, labels=ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, labels=ids)
        ps.inject_opened(ps.restore(model), prompt=SMALL, strict=True)(ids, labels=ids)


def test_layers_with_a_sliding_window_are_left_alone_and_said_so() -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    sizes = {"use_sliding_window": True, "sliding_window": 8, "layer_types": types}
    model = qwen2(**sizes)
    expected = model.generate(text(1, 30), max_new_tokens=8, **GREEDY)
    with pytest.warns(UserWarning, match="layers 1 attend within a sliding window"):
        exactly(model)
    assert injected_layers(model) == [0, 2]
    assert torch.equal(model.generate(text(1, 30), max_new_tokens=8, **GREEDY), expected)
    with pytest.raises(ValueError, match="got 1, which attends within a sliding window"):
        ps.inject_opened(qwen2(**sizes), layers=[1])
    with (
        pytest.warns(UserWarning, match="layers 0, 1, 2 attend"),
        pytest.raises(ValueError, match="must have a layer that attends to all tokens"),
    ):
        ps.inject_opened(mistral())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"prompt": {"block": 0}}, ValueError, "block must be an integer of at least 1"),
        ({"prompt": {"heavier": 3}}, ValueError, "prompt must be a dict of block, .* got 'heavi"),
        ({"prompt": 3}, TypeError, "prompt must be a dict of options, got int"),
        ({"cache": {"bits": (5, 4)}}, ValueError, "bits"),
        ({"cache": {"at_once": 0}}, ValueError, r"cache\['at_once'\] must be an integer"),
        ({"strict": 1}, TypeError, "strict"),
        ({"layers": [5]}, ValueError, "layers must .*got 5"),
    ],
)
def test_wrong_options_are_named(options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ps.inject_opened(llama(), **options)


def test_what_opened_attention_cannot_serve_is_refused() -> None:
    model = ps.inject_opened(llama(), prompt=SMALL)
    with pytest.raises(ValueError, match="injected already"):
        ps.inject_opened(model)
    with pytest.raises(ValueError, match="injected already"):
        ps.inject_hsa(model)
    with pytest.raises(ValueError, match="output_attentions must be False"):
        model(text(1, 20), output_attentions=True)
    with pytest.raises(ValueError, match="got a StaticCache of StaticLayer"):
        model(text(1, 20), past_key_values=StaticCache(config=model.config, max_cache_len=40))
    other = ps.inject_hsa(llama(), layers=[1])
    with pytest.raises(ValueError, match="got 1, which is injected already"):
        ps.inject_opened(other)


def test_an_injected_model_survives_its_folder(tmp_path: Path) -> None:
    cache = {"near": 32, "bits": (4, 2), "at_once": 16, "dense": 0}
    model = ps.inject_opened(llama(), [0, 2], prompt=SMALL, cache=cache, strict=True)
    save_injected(model, tmp_path)
    again = load_injected(tmp_path).double()
    assert injected_layers(again) == [0, 2]
    assert torch.equal(logits(again, input_ids=text(1, 50)), logits(model, input_ids=text(1, 50)))
    written = [one.generate(text(1, 50), max_new_tokens=9, **GREEDY) for one in (model, again)]
    assert torch.equal(*written)


def test_hsa_and_opened_attention_share_a_model_and_its_folder(tmp_path: Path) -> None:
    model = ps.inject_opened(ps.inject_hsa(llama(), [1], (4, 4)), [0], prompt=SMALL)
    save_injected(model, tmp_path)
    again = load_injected(tmp_path).double()
    assert injected_layers(again) == [0, 1]
    ids = text(1, 50)
    found, expected = (logits(one, input_ids=ids, use_cache=False) for one in (again, model))
    assert torch.equal(found, expected)


def test_folders_with_opened_blocks_are_refused_and_older_ones_without_are_read(
    tmp_path: Path,
) -> None:
    save_injected(ps.inject_hsa(llama(), [1], (4, 4)), tmp_path)
    data = json.loads((tmp_path / FILE).read_text())
    data["version"] = 1
    del data["groups"][0]["kind"]
    data["groups"][0]["settings"]["open_blocks"] = 0
    (tmp_path / FILE).write_text(json.dumps(data))
    assert injected_layers(load_injected(tmp_path)) == [1]
    data["groups"][0]["settings"]["open_blocks"] = 2
    (tmp_path / FILE).write_text(json.dumps(data))
    with pytest.raises(ValueError, match="open_blocks has been removed"):
        load_injected(tmp_path)


def test_a_pickled_model_stays_injected() -> None:
    model = exactly(llama())
    again = pickle.loads(pickle.dumps(model))
    assert injected_layers(again) == [0, 1, 2]
    output = again.generate(text(1, 20), max_new_tokens=3, return_dict_in_generate=True, **GREEDY)
    assert isinstance(output.past_key_values, ps.LevelCache)
