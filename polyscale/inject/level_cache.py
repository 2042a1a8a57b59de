"""A cache with levels of precision: every token in few bits, the exact ones behind them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from polyscale._files import follow_umask
from polyscale.inject.level_layer import DENSE, LevelLayer, LevelOptions

FORMAT = "polyscale.level_cache"
VERSION = 2


class LevelCache(Cache):
    """The cache of a model that `inject_opened` changed: a hierarchy in precision.

    Every token's key and value is kept in few bits, the exact ones behind them. A query reads the
    coarse level whole, opens the near, first and heaviest tokens, and drops nothing. Layers that
    attend within a sliding window keep their usual cache.

    Args:
        config: of the model, `model.config`.
        near: so many newest tokens are read exactly.
        sinks: so many first tokens are read exactly.
        heavy: so many other tokens are read exactly, those with the greatest coarse mass.
        mass: in place of `heavy`, as few tokens as hold this share of the coarse mass.
        bits: of the coarse level: keys 4, values 4 or 2.
        exact: the exact level: `"model"`, keys and values as they came, or `"8bit"`.
        dense: up to so many tokens keys and values are kept whole and read so, which is as fast.
        audit_every: every so-manieth decoded token of a layer also reads everything exactly, and
            `report` says what was lost; 0 is never.
        impl: which implementation of `level_attention` runs.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    >>> cache = LevelCache(config, heavy=128, exact="8bit")
    >>> cache.get_seq_length(), len(cache)
    (0, 2)
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        near: int = 64,
        sinks: int = 16,
        heavy: int = 64,
        mass: float | None = None,
        bits: tuple[int, int] = (4, 4),
        exact: str = "model",
        audit_every: int = 0,
        dense: int = DENSE,
        impl: str = "auto",
    ) -> None:
        self.options = LevelOptions(near, sinks, heavy, mass, bits, exact, audit_every, dense, impl)
        layers = DynamicCache(config=config).layers
        super().__init__(
            layers=[
                LevelLayer(self.options) if type(layer) is DynamicLayer else layer
                for layer in layers
            ]
        )

    @classmethod
    def from_cache(
        cls,
        cache: DynamicCache,
        config: PreTrainedConfig,
        *,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> LevelCache:
        """Return a cache with levels of what an ordinary cache holds, which is left as it is.

        `attention_mask` `[B, N]` is 0 for the padding of a batch; the options are those of the
        class.
        """
        found = cls(config, **options)
        real = None
        if attention_mask is not None and not bool(attention_mask.all()):
            real = attention_mask.bool()
        for number, (layer, own) in enumerate(zip(cache.layers, found.layers, strict=True)):
            if not isinstance(own, LevelLayer):
                found.layers[number] = layer
            elif layer.get_seq_length():
                own.append(layer.keys, layer.values, real)
        return found

    def serve(self, layers: Mapping[int, Any]) -> None:
        """Keep levels for these layers of a model and whole keys for the others."""
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LevelLayer) and number not in layers:
                if layer.get_seq_length():
                    raise ValueError(
                        f"past_key_values must be a LevelCache of the injected layers, got one "
                        f"that holds levels of layer {number}, which is not injected; start with "
                        "a new one"
                    )
                self.layers[number] = DynamicLayer()
            elif type(layer) is DynamicLayer and number in layers and not layer.get_seq_length():
                self.layers[number] = LevelLayer(self.options)

    def _levels(self) -> list[LevelLayer]:
        return [
            layer
            for layer in self.layers
            if isinstance(layer, LevelLayer) and layer.batch is not None
        ]

    def report(self) -> dict[str, Any]:
        """Return what the layers with levels hold and read, and what the audit saw.

        `bytes_held` are those of all rows. `bytes_read_per_token` and `dense_bytes_per_token` are
        those that a decoded token of one row reads, here and with whole keys. `share_opened` is
        the share of tokens read exactly; None, with the reason in `share_opened_why`, if there is
        none: with `mass` only audited tokens (`audit_every`) are counted, and without any the bytes
        read are None, too. The audit's `kl` and `output_error` are means over the audited `rows` of
        the heads.
        """
        layers = self._levels()
        decoded = max((layer.decoded for layer in layers), default=0)
        seen = sum(layer.seen for layer in layers)
        opened = sum(layer.opened for layer in layers)
        sizes = [layer.bytes() for layer in layers]
        read = [size["read"] for size in sizes]
        return {
            "tokens": self.get_seq_length(),
            "decoded": decoded,
            "bytes_held": _total(sizes, "held"),
            "bytes_allocated": _total(sizes, "allocated"),
            "bytes_read_per_token": None if None in read else _total(sizes, "read"),
            "dense_bytes_per_token": _total(sizes, "dense"),
            "share_opened": opened / seen if seen else None,
            "share_opened_why": None if seen else self._why_unknown(decoded),
            "audit": self._audited(),
        }

    def _why_unknown(self, decoded: int) -> str:
        if not decoded:
            return "no token was decoded from levels yet"
        return (
            f"mass={self.options.mass} opens what each query needs, which is counted in audited "
            f"tokens alone, and there is none yet; pass audit_every (it is "
            f"{self.options.audit_every})"
        )

    def _audited(self) -> dict[str, Any] | None:
        audits = [one for layer in self._levels() for one in layer.audits]
        count = sum(rows for _, _, rows in audits)
        if not count:
            return None
        return {
            "rows": max(len(layer.audits) for layer in self._levels()),
            "kl": sum(kl for kl, _, _ in audits) / count,
            "output_error": sum(error for _, error, _ in audits) / count,
            "by_layer": [
                sum(kl for kl, _, _ in layer.audits) / max(sum(n for _, _, n in layer.audits), 1)
                for layer in self._levels()
            ],
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the cache as safetensors, so that a long prompt is read once; return the path.

        >>> cache.save("prompt.safetensors")  # doctest: +SKIP
        """
        tensors: dict[str, Tensor] = {}
        kinds = []
        for number, layer in enumerate(self.layers):
            if isinstance(layer, LevelLayer):
                kinds.append("levels")
                state = layer.state()
            else:
                kinds.append(type(layer).__name__)
                state = _whole_keys(layer, number)
            tensors.update({f"{number}.{name}": part.contiguous() for name, part in state.items()})
        about = {
            "format": FORMAT,
            "version": VERSION,
            "options": self.options.as_dict(),
            "layers": kinds,
        }
        save_file(tensors, path, {"polyscale": json.dumps(about)})
        follow_umask(Path(path))
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: PreTrainedConfig) -> LevelCache:
        """Load what `save` saved, for a model of this config.

        >>> cache = LevelCache.load("prompt.safetensors", model.config)  # doctest: +SKIP
        """
        about, states = _read(path)
        found = cls(config, **{**about["options"], "bits": tuple(about["options"]["bits"])})
        if len(found.layers) != len(about["layers"]):
            raise ValueError(
                f"config must be of a model with {len(about['layers'])} layers like the saved "
                f"cache, got {len(found.layers)}"
            )
        for number, kind in enumerate(about["layers"]):
            layer: Any = found.layers[number]
            state = states.get(number, {})
            if kind == "levels":
                if not isinstance(layer, LevelLayer):
                    layer = found.layers[number] = LevelLayer(found.options)
                try:
                    layer.load_state(state)
                except ValueError as error:
                    raise ValueError(
                        f"path must be a whole file that LevelCache.save wrote, got {path}, whose "
                        f"layer {number} is damaged: {error}"
                    ) from error
            elif state:
                if isinstance(layer, LevelLayer):
                    layer = found.layers[number] = DynamicLayer()
                layer.update(state["keys"], state["values"])
        return found


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[int, dict[str, Tensor]]]:
    """Return what a saved cache says about itself, and the tensors of each layer."""
    wrong = f"path must be a whole file that LevelCache.save wrote, got {path}"
    states: dict[int, dict[str, Tensor]] = {}
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("polyscale", "{}"))
            if about.get("format") != FORMAT:
                raise ValueError(wrong)
            if about.get("version") != VERSION:
                raise ValueError(
                    f"{wrong}, of version {about.get('version')} where this one reads {VERSION}; "
                    "read the prompt again and save it"
                )
            for name in file.keys():  # noqa: SIM118  # not a dict
                number, _, part = name.partition(".")
                states.setdefault(int(number), {})[part] = file.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{wrong}, which cannot be read: {error}") from error
    return about, states


def _whole_keys(layer: Any, number: int) -> dict[str, Tensor]:
    """Return what an ordinary layer holds."""
    if not layer.get_seq_length():
        return {}
    if layer.get_seq_length() != layer.keys.shape[2]:
        raise ValueError(
            f"cache must hold whole keys to be saved, got layer {number} with a sliding window, "
            "which forgets tokens"
        )
    return {"keys": layer.keys, "values": layer.values}


def _total(sizes: list[dict[str, int | None]], name: str) -> int:
    return sum(size[name] or 0 for size in sizes)
