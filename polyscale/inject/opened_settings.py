"""What a layer with opened attention is told: how texts are read, and how tokens are decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyscale.checks import check_flag, check_integer
from polyscale.inject.settings import whole_numbers
from polyscale.ops.opened import opened_attention

DENSE = 1024  # up to so many keys reading a prompt densely is faster
DENSE_ENCODER = 384  # likewise in an encoder, which attends to both sides
NEAR_ENCODER = 32  # before and after a block; 64 on both sides of short texts are most of them
EDGES = (0, -1)  # the sinks of an encoder, [CLS] and [SEP]
MASS = 0.95  # the share of attention that a prompt's blocks keep, unless a number is asked for
ENDING = 0  # so many last tokens of a prompt are read densely
AT_ONCE = 64  # up to so many tokens at once over a filled cache are decoded, more are a prompt
PROMPT = ("block", "key_block", "near", "heavy", "mass", "sinks", "sample", "rest", "impl")
CACHE = ("near", "sinks", "heavy", "mass", "bits", "exact", "audit_every", "dense", "impl")


@dataclass(frozen=True)
class OpenedSettings:
    """The settings of layers that `inject_opened` changed.

    In encoders every text is a prompt. Sinks that are positions count a text's own tokens, negative
    ones from its end.

    >>> OpenedSettings.of({"heavy": 256}, {"bits": (4, 2)}).as_dict()["prompt"]
    {'heavy': 256}
    """

    prompt: Mapping[str, Any] = field(default_factory=dict)  # options of `opened_attention`
    cache: Mapping[str, Any] = field(default_factory=dict)  # options of `LevelCache`
    dense: int = DENSE
    ending: int = ENDING
    at_once: int = AT_ONCE
    strict: bool = False

    @classmethod
    def of(
        cls,
        prompt: Mapping[str, Any] | None = None,
        cache: Mapping[str, Any] | None = None,
        strict: bool = False,
        causal: bool = True,
    ) -> OpenedSettings:
        """Return checked settings from the arguments of `inject_opened`, for a decoder or not."""
        check_flag("strict", strict)
        prompt = _plain("prompt", prompt, (*PROMPT, "dense", "ending"))
        cache = _plain("cache", cache, (*CACHE, "at_once"))
        if "heavy" not in prompt and "mass" not in prompt:
            prompt["mass"] = MASS
        if not causal:
            _check_encoder(prompt, cache, strict)
            prompt = {"rest": "pool", "near": NEAR_ENCODER, "sinks": EDGES, **prompt}
        usual = DENSE if causal else DENSE_ENCODER
        dense = check_integer("prompt['dense']", prompt.pop("dense", usual), least=0)
        ending = check_integer("prompt['ending']", prompt.pop("ending", ENDING), least=0)
        at_once = check_integer("cache['at_once']", cache.pop("at_once", AT_ONCE), least=1)
        if not isinstance(prompt.get("sinks", 0), int):
            prompt["sinks"] = whole_numbers("prompt['sinks']", prompt["sinks"])
        found = cls(prompt, cache, dense, ending, at_once, strict)
        tiny = torch.zeros(1, 1, 1, 8)
        options = found.reading(torch.ones(1, dtype=torch.long))
        opened_attention(tiny, tiny, tiny, causal=causal, strict=strict, **options)
        return found

    def reading(self, lengths: Tensor) -> dict[str, Any]:
        """Return the options of `opened_attention` for texts of so many tokens `[B]`."""
        sinks = self.prompt.get("sinks", 0)
        if isinstance(sinks, int):
            return dict(self.prompt)
        places = torch.tensor(sinks, dtype=torch.long, device=lengths.device).expand(
            len(lengths), -1
        )
        places = torch.where(places < 0, places + lengths[:, None], places)  # [B, P]
        return {**self.prompt, "sinks": places.clamp(min=-1)}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "prompt": _listed(self.prompt),
            "cache": _listed(self.cache),
            "dense": self.dense,
            "ending": self.ending,
            "at_once": self.at_once,
            "strict": self.strict,
        }

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `inject_opened` that make these settings."""
        return arguments_of(self.as_dict())


def arguments_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `inject_opened` that make the settings of `as_dict`."""
    cache = dict(data["cache"])
    if isinstance(cache.get("bits"), list):
        cache["bits"] = tuple(cache["bits"])
    if data["at_once"] != AT_ONCE:
        cache["at_once"] = data["at_once"]
    return {
        "prompt": {**data["prompt"], "dense": data["dense"], "ending": data["ending"]},
        "cache": cache,
        "strict": data["strict"],
    }


def _listed(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in options.items()
    }


def _check_encoder(prompt: dict[str, Any], cache: dict[str, Any], strict: bool) -> None:
    """Refuse what encoders have no use for."""
    if cache:
        raise ValueError(
            f"cache must be None for an encoder, which decodes no tokens, got {sorted(cache)}"
        )
    if strict:
        raise ValueError(
            "strict must be False for an encoder, where every token sees the later ones anyway, "
            "got True"
        )
    if prompt.get("ending"):
        raise ValueError(
            "prompt['ending'] must be 0 for an encoder, whose texts have no following tokens, got "
            f"{prompt['ending']!r}"
        )


def _plain(name: str, options: Any, names: tuple[str, ...]) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(f"{name} must be a dict of options, got {type(options).__name__}")
    for key in options:
        if key not in names:
            raise ValueError(f"{name} must be a dict of {', '.join(names)}, got {key!r}")
    return dict(options)
