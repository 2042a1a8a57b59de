"""What a layer with opened attention is told: how prompts are read, and how tokens are decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from polyscale.checks import check_flag, check_integer
from polyscale.ops.opened import opened_attention

DENSE = 1024  # up to so many keys reading a prompt densely is faster
MASS = 0.95  # the share of attention that a prompt's blocks keep, unless a number is asked for
ENDING = 0  # so many last tokens of a prompt are read densely
AT_ONCE = 64  # up to so many tokens at once over a filled cache are decoded, more are a prompt
PROMPT = ("block", "key_block", "near", "heavy", "mass", "sinks", "sample", "rest", "impl")
CACHE = ("near", "sinks", "heavy", "mass", "bits", "exact", "audit_every", "dense", "impl")


@dataclass(frozen=True)
class OpenedSettings:
    """The settings of layers that `inject_opened` changed.

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
    ) -> OpenedSettings:
        """Return checked settings from the arguments of `inject_opened`."""
        check_flag("strict", strict)
        prompt = _plain("prompt", prompt, (*PROMPT, "dense", "ending"))
        cache = _plain("cache", cache, (*CACHE, "at_once"))
        if "heavy" not in prompt and "mass" not in prompt:
            prompt["mass"] = MASS
        dense = check_integer("prompt['dense']", prompt.pop("dense", DENSE), least=0)
        ending = check_integer("prompt['ending']", prompt.pop("ending", ENDING), least=0)
        at_once = check_integer("cache['at_once']", cache.pop("at_once", AT_ONCE), least=1)
        found = cls(prompt, cache, dense, ending, at_once, strict)
        tiny = torch.zeros(1, 1, 1, 8)
        opened_attention(tiny, tiny, tiny, causal=True, strict=strict, **prompt)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "prompt": dict(self.prompt),
            "cache": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in self.cache.items()
            },
            "dense": self.dense,
            "ending": self.ending,
            "at_once": self.at_once,
            "strict": self.strict,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> OpenedSettings:
        """Read what `as_dict` gave."""
        cache = dict(data["cache"])
        if isinstance(cache.get("bits"), list):
            cache["bits"] = tuple(cache["bits"])
        prompt = {**data["prompt"], "dense": data["dense"], "ending": data["ending"]}
        return cls.of(prompt, {**cache, "at_once": data["at_once"]}, data["strict"])

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `inject_opened` that make these settings."""
        return {
            "prompt": {**self.prompt, "dense": self.dense, "ending": self.ending},
            "cache": {**self.cache, "at_once": self.at_once},
            "strict": self.strict,
        }


def _plain(name: str, options: Any, takes: tuple[str, ...]) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(f"{name} must be a dict of options, got {type(options).__name__}")
    for key in options:
        if key not in takes:
            raise ValueError(f"{name} must be a dict of {', '.join(takes)}, got {key!r}")
    return dict(options)
