"""Reading prompts and scoring what follows, by softmax or as a setting says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import polyscale as ps
from benchmarks.levels_peers import accumulated_cache
from reproduction.long_context.peers import AT_ONCE as PEERS_AT_ONCE
from reproduction.long_context.peers import attended_by, peer_cache, peer_of
from reproduction.long_context.settings import SETTINGS, Setting

AT_ONCE = 1 << 20  # tokens after a prompt that are decoded in one call, each choosing for itself


def load_model(folder: Path, dtype: str) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@contextmanager
def injected(model: Any, prompt: dict[str, Any] | None, cache: Any = None) -> Iterator[Any]:
    """The model with opened attention inside the block; as it is if there is nothing to inject.

    Without a prompt of its own everything is read densely; a prompt is opened at any length,
    unless `dense` in it says otherwise.
    """
    if prompt is None and cache is None:
        yield model
        return
    prompt = {"dense": AT_ONCE} if prompt is None else {"dense": 0, **prompt}
    ps.inject_opened(model, prompt=prompt, cache={"dense": 0, **(cache or {}), "at_once": AT_ONCE})
    try:
        yield model
    finally:
        ps.restore(model)


class Reader:
    """Prompts read by one model; what softmax attention made of them is kept on disk.

    `reading` names a setting that reads them in softmax attention's place, for prompts so long that
    it would take too long; what follows is then compared over the cache which that left.
    """

    def __init__(self, model: Any, work_dir: Path | None, reading: str | None = None) -> None:
        self.model = model
        self.work_dir = work_dir
        self.reading = reading
        self.prompt: Tensor | None = None  # that was read last
        self.share: float | None = None  # of its pairs, where they were counted

    def read(self, name: str, ids: Tensor, setting: Setting) -> tuple[DynamicCache, Tensor]:
        """Return the cache a prompt `[1, N]` leaves, and the logits `[1, V]` of its last token."""
        dense = setting.prompt is None and setting.read_by is None
        if dense and self.reading is not None:
            name, setting = f"{name}-{self.reading}", SETTINGS[self.reading]
        path = None if self.work_dir is None else self.work_dir / f"{name}.safetensors"
        self.prompt, self.share = ids, None
        if dense and path is not None and path.is_file():
            return _unpack(load_file(path))
        cache = DynamicCache(config=self.model.config)
        peer = peer_of(setting.read_by)
        with (
            torch.no_grad(),
            injected(self.model, setting.prompt),
            attended_by(self.model, peer),
        ):
            logits = self.model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        if peer is not None:
            self.share = sum(peer.shares) / len(peer.shares)
        if dense and path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {"logits": logits}
            for number, layer in enumerate(cache.layers):
                tensors[f"key{number}"] = layer.keys
                tensors[f"value{number}"] = layer.values
            save_file({key: part.contiguous() for key, part in tensors.items()}, path)
        return cache, logits

    def losses(self, cache: DynamicCache, ids: Tensor, setting: Setting) -> tuple[Tensor, Any]:
        """Return the loss `[T]` of tokens `ids[1:]` after a read prompt, and the cache's report."""
        if setting.decoded_by is not None or setting.held_in is not None:
            return self._losses_by_peer(cache, ids, setting), None
        past: Any = cache
        if setting.chosen_once is not None:  # by a model that is not injected
            assert self.prompt is not None
            past = accumulated_cache(self.model, self.prompt, cache, **setting.chosen_once)
        options = setting.cache if setting.chosen_once is None else {}
        with torch.no_grad(), injected(self.model, None, options):
            if setting.cache is not None:
                past = ps.LevelCache.from_cache(
                    cache, self.model.config, **{"dense": 0, **setting.cache}
                )
            logits = self.model(ids[:, :-1], past_key_values=past).logits[0]
            report = past.report() if isinstance(past, ps.LevelCache) else None
        return F.cross_entropy(logits.float(), ids[0, 1:], reduction="none"), report

    def _losses_by_peer(self, cache: DynamicCache, ids: Tensor, setting: Setting) -> Tensor:
        """Return the losses with a peer's cache or attention.

        Quantized caches keep so many newest tokens whole as go in one call here, so that each token
        sees what it would see if they came one by one.
        """
        past: Any = cache
        if setting.held_in is not None:
            kind, options = setting.held_in
            past = peer_cache(kind, cache, self.model.config, options)
        logits = []
        with torch.no_grad(), attended_by(self.model, peer_of(setting.decoded_by)):
            for part in ids[:, :-1].split(PEERS_AT_ONCE, dim=1):
                logits.append(self.model(part, past_key_values=past).logits[0])
        return F.cross_entropy(torch.cat(logits).float(), ids[0, 1:], reduction="none")

    def greedy(
        self, cache: DynamicCache, logits: Tensor, count: int, setting: Setting
    ) -> tuple[list[int], list[float]]:
        """Return `count` tokens decoded greedily, and the gap of the logits at each."""
        if setting.decoded_by or setting.held_in or setting.chosen_once:
            raise ValueError(
                "--settings must decode densely or from levels for needles and continuations, got "
                "a peer's cache; measure perplexity of it"
            )
        with torch.no_grad(), injected(self.model, None, setting.cache):
            past: Any = cache
            if setting.cache is not None:
                past = ps.LevelCache.from_cache(
                    cache, self.model.config, **{"dense": 0, **setting.cache}
                )
            tokens, gaps = [], []
            for step in range(count):
                best = logits[0].float().topk(2)
                tokens.append(int(best.indices[0]))
                gaps.append(float(best.values[0] - best.values[1]))
                if step + 1 < count:
                    new = best.indices[None, :1]
                    logits = self.model(new, past_key_values=past).logits[:, -1]
        return tokens, gaps


def _unpack(tensors: dict[str, Tensor]) -> tuple[DynamicCache, Tensor]:
    cache = DynamicCache()
    for number in range(len(tensors) // 2):
        cache.update(tensors[f"key{number}"], tensors[f"value{number}"], number)
    return cache, tensors["logits"]
