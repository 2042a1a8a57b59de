"""`exact_decoding`: the original's greedy output, drafted from the coarse level of its cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polyscale.inject.level_cache import LevelCache
from polyscale.inject.modules import attention_layers
from polyscale.inject.opened_attention import RECORD, OpenedLayer

DRAFTS = 16  # tokens that are drafted and then verified at once


@torch.no_grad()
def exact_decoding(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    **model_kwargs: Any,
) -> Tensor:
    """Write what the model writes greedily without an injection, faster after long prompts.

    For `generate(..., custom_generate=polyscale.exact_decoding)`. The prompt is read densely into a
    `LevelCache`. Then tokens are drafted with its coarse level, and verified several at once with
    dense attention over its exact one: what differs from the original's choice is written anew.
    Only rounding can differ, as it does between one and several tokens at once of any model.

    >>> model.generate(ids, custom_generate=exact_decoding, max_new_tokens=64)  # doctest: +SKIP
    """
    records = _records(model)
    cache = _check(input_ids, generation_config, model_kwargs)
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if keeps else {}  # those of a whole prompt would cost seconds

    def choose(ids: Tensor, logits: Tensor) -> Tensor:
        """The next token `[1, 1]` after `ids`, from its logits `[1, V]`."""
        return logits_processor(ids, logits.float()).argmax(-1, keepdim=True)

    with _read_exactly(records):
        logits = model(input_ids, past_key_values=cache, use_cache=True, **last).logits
    ids = torch.cat([input_ids, choose(input_ids, logits[:, -1])], 1)
    while not bool(stopping_criteria(ids, None).all()):
        drafted = ids
        for _ in range(DRAFTS):
            logits = model(drafted[:, -1:], past_key_values=cache, use_cache=True).logits
            drafted = torch.cat([drafted, choose(drafted, logits[:, -1])], 1)
        cache.crop(-DRAFTS)
        start = ids.shape[1]
        with _read_exactly(records):
            new = drafted[:, start - 1 :]
            logits = model(new, past_key_values=cache, use_cache=True).logits  # [1, DRAFTS + 1, V]
        for number in range(DRAFTS + 1):
            ids = torch.cat([ids, choose(ids, logits[:, number])], 1)
            wrong = number < DRAFTS and int(ids[0, -1]) != int(drafted[0, start + number])
            if wrong or bool(stopping_criteria(ids, None).all()):
                break
        seen = ids.shape[1] - 1  # the last token is yet to be read
        if cache.get_seq_length() > seen:
            cache.crop(seen - cache.get_seq_length())
    return ids


def _records(model: PreTrainedModel) -> list[OpenedLayer]:
    found = [getattr(module, RECORD, None) for module in attention_layers(model)]
    records = [one for one in found if one is not None and one.causal]
    if not records:
        raise ValueError(
            "custom_generate must be exact_decoding for a decoder with opened attention alone, got "
            "a model without; call polyscale.inject_opened(model) first"
        )
    return records


def _check(input_ids: Tensor, config: Any, options: dict[str, Any]) -> LevelCache:
    """Refuse what is not greedy decoding of one text; return the cache."""
    if config.do_sample or config.num_beams > 1:
        raise ValueError(
            "do_sample must be False and num_beams 1 for exact_decoding, which is greedy, got "
            f"{config.do_sample} and {config.num_beams}"
        )
    if len(input_ids) > 1:
        raise ValueError(
            f"input_ids must be one row for exact_decoding, got {len(input_ids)}; rows would "
            "accept different numbers of tokens"
        )
    mask = options.get("attention_mask")
    if mask is not None and not bool(mask.bool().all()):
        raise ValueError("attention_mask must hide nothing for exact_decoding, got padding")
    cache = options.get("past_key_values")
    if not isinstance(cache, LevelCache):
        raise ValueError(
            "past_key_values must be a LevelCache, or be left out, for exact_decoding, got "
            f"{type(cache).__name__}"
        )
    if cache.options.exact != "model":
        raise ValueError(
            'exact must be "model" in the cache of exact_decoding, which verifies with the keys '
            f"and values as they came, got {cache.options.exact!r}"
        )
    if cache.get_seq_length():
        raise ValueError(
            "past_key_values must be empty for exact_decoding, got a cache that opened attention "
            "may have filled"
        )
    return cache


@contextmanager
def _read_exactly(records: list[OpenedLayer]) -> Iterator[None]:
    """Read densely, and over the exact level of the cache."""
    for record in records:
        record.exact = True
    try:
        yield
    finally:
        for record in records:
            record.exact = False
