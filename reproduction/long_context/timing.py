"""Seconds to the first token, and tokens per second, candidates taking turns in one process."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import polyscale as ps
from reproduction.long_context.peers import attended_by, peer_of
from reproduction.long_context.reading import Reader, injected
from reproduction.long_context.results import Results
from reproduction.long_context.settings import Setting


def measure_first_token(
    reader: Reader, results: Results, settings: dict[str, Setting], ids: Tensor, rounds: int
) -> None:
    """Time `generate` of one token after a prompt, each setting in each round."""
    item = f"first token, {ids.shape[1]} tokens"
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for _ in range(rounds):
        for name, setting in settings.items():
            with (
                torch.no_grad(),
                injected(reader.model, setting.prompt, setting.cache),
                attended_by(reader.model, peer_of(setting.read_by)),
            ):
                begin = time.perf_counter()
                reader.model.generate(ids, max_new_tokens=1, do_sample=False)
                seconds[name].append(time.perf_counter() - begin)
    for name, taken in seconds.items():
        results.add(name, item, seconds=min(taken), rounds=taken)


def measure_decoding(
    reader: Reader,
    results: Results,
    settings: dict[str, Setting],
    prompt: Tensor,
    batch: int,
    steps: int,
    rounds: int,
) -> None:
    """Time `generate` after a read prompt; a round is `steps` tokens of each setting."""
    model = reader.model
    item = f"decoding, batch {batch}, after {prompt.shape[1]} tokens"
    dense, _ = reader.read(f"timing-{prompt.shape[1]}", prompt, Setting())
    dense.batch_repeat_interleave(batch)
    length = prompt.shape[1]
    ids = torch.cat([prompt, prompt[:, -1:]], 1).expand(batch, -1)  # one token that is not cached
    candidates: dict[str, tuple[Setting, Any]] = {}
    for name, setting in settings.items():
        candidates[name] = setting, _own_cache(model, dense, setting)
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for turn in range(rounds + 1):
        for name, (setting, cache) in candidates.items():
            with torch.no_grad(), injected(model, None, setting.cache):
                begin = time.perf_counter()
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    past_key_values=cache,
                    min_new_tokens=steps,
                    max_new_tokens=steps,
                    do_sample=False,
                )
                if turn:  # the first round warms up
                    seconds[name].append((time.perf_counter() - begin) / steps)
            cache.crop(length - cache.get_seq_length())
    for name, taken in seconds.items():
        per_second = batch / min(taken)
        _, cache = candidates[name]
        held = cache.report()["bytes_held"] if isinstance(cache, ps.LevelCache) else _bytes(cache)
        results.add(
            name, item, tokens_per_second=per_second, step=min(taken), rounds=taken, held=held
        )


def _own_cache(model: Any, dense: DynamicCache, setting: Setting) -> Any:
    if setting.cache is None:
        return copy.deepcopy(dense)
    return ps.LevelCache.from_cache(dense, model.config, **{"dense": 0, **setting.cache})


def _bytes(cache: DynamicCache) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
