from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import polyscale as ps
from polyscale.inject.exact import DRAFTS
from tests.inject.models import gpt2, llama, qwen2, text

SMALL: dict[str, Any] = {
    "block": 8, "key_block": 4, "near": 4, "sinks": 2, "heavy": 8, "sample": 4, "dense": 0
}  # fmt: skip
COARSE: dict[str, Any] = {"near": 2, "heavy": 2, "sinks": 2, "bits": (4, 2), "dense": 0}
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


def written(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    return model.generate(ids, **{**GREEDY, "max_new_tokens": 50, **options})


def exactly(model: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    return written(model, ids, custom_generate=ps.exact_decoding, **options)


@pytest.mark.parametrize("make", [llama, gpt2, qwen2])
def test_exact_decoding_writes_what_the_original_writes(make: Any) -> None:
    torch.manual_seed(0)
    model, ids = make(), text(1, 70)
    expected = written(model, ids)
    ps.inject_opened(model, prompt=SMALL, cache=COARSE)
    assert not torch.equal(written(model, ids), expected)  # by levels alone it is another text
    assert torch.equal(exactly(model, ids), expected)


def test_tokens_are_verified_several_at_once() -> None:
    torch.manual_seed(0)
    model, ids = llama(), text(1, 70)
    # With everything read exactly all drafts are right: one pass verifies each row of drafts.
    ps.inject_opened(model, prompt=SMALL, cache={**COARSE, "near": 200})
    sizes: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    exactly(model, ids, max_new_tokens=2 * (DRAFTS + 1) + 1)
    hook.remove()
    assert sizes == [70, *2 * [*DRAFTS * [1], DRAFTS + 1]]


def test_it_stops_and_processes_logits_as_generate_does() -> None:
    torch.manual_seed(0)
    model, ids = llama(), text(1, 70)
    rules: dict[str, Any] = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    expected = written(model, ids, **rules)
    end = int(expected[0, 80])
    short = written(model, ids, eos_token_id=end, **rules)
    ps.inject_opened(model, prompt=SMALL, cache=COARSE)
    assert torch.equal(exactly(model, ids, **rules), expected)
    assert torch.equal(exactly(model, ids, eos_token_id=end, **rules), short)
    assert short.shape[1] <= 81
    one = exactly(model, ids, max_new_tokens=1, **rules)
    assert torch.equal(one, expected[:, :71])


def test_the_model_serves_as_before_afterwards() -> None:
    torch.manual_seed(0)
    model, ids = ps.inject_opened(llama(), prompt=SMALL, cache=COARSE), text(1, 70)
    before = written(model, ids)
    exactly(model, ids)
    assert torch.equal(written(model, ids), before)
    with pytest.raises(RuntimeError, match="stop"):
        exactly(model, ids, stopping_criteria=[_stop])
    assert torch.equal(written(model, ids), before)


def _stop(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "do_sample must be False and num_beams 1 .* got True and 1"),
        ({"num_beams": 2}, "do_sample must be False and num_beams 1 .* got False and 2"),
        ({"inputs": text(2, 40)}, "input_ids must be one row .* got 2"),
        ({"attention_mask": torch.tensor([[0] + 39 * [1]])}, "attention_mask must hide nothing"),
        ({"use_cache": False}, "past_key_values must be a LevelCache, .* got NoneType"),
        ({"cache_implementation": "dynamic"}, "past_key_values must be a LevelCache"),
    ],
)
def test_what_is_not_greedy_decoding_of_one_text_is_refused(options: dict, message: str) -> None:
    model = ps.inject_opened(llama(), prompt=SMALL, cache=COARSE)
    options = {**GREEDY, "inputs": text(1, 40), "max_new_tokens": 3, **options}
    with pytest.raises(ValueError, match=message):
        model.generate(custom_generate=ps.exact_decoding, **options)


def test_models_and_caches_that_know_nothing_exactly_are_refused() -> None:
    model, ids = llama(), text(1, 40)
    with pytest.raises(ValueError, match=r"got a model without; call polyscale\.inject_opened"):
        exactly(model, ids)
    ps.inject_opened(model, prompt=SMALL, cache={**COARSE, "exact": "8bit"})
    with pytest.raises(ValueError, match=r"exact must be .model. .* got '8bit'"):
        exactly(model, ids)
    cache = ps.LevelCache(model.config, **COARSE)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values must be empty"):
        exactly(model, ids, past_key_values=cache)
