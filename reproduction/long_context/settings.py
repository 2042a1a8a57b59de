"""What is compared: how a prompt is read, and how what follows it is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Options of `inject_opened`: of the prompt and of the cache; None is softmax attention.

    Peers: `read_by` and `decoded_by` are a choice of keys with its options, `held_in` a kind of
    cache with its own, and `chosen_once` options of a `LevelCache` whose exact tokens the prompt
    chose.
    """

    prompt: dict[str, Any] | None = None
    cache: dict[str, Any] | None = None
    read_by: tuple[str, dict[str, Any]] | None = None
    decoded_by: tuple[str, dict[str, Any]] | None = None
    held_in: tuple[str, dict[str, Any]] | None = None
    chosen_once: dict[str, Any] | None = None


DENSE = "dense"
SETTINGS: dict[str, Setting] = {
    DENSE: Setting(),
    # Prompts read opened, the rest dense.
    "opened, heavy 512": Setting(prompt={"heavy": 512}),
    "opened, heavy 256": Setting(prompt={"heavy": 256}),
    "opened, heavy 128": Setting(prompt={"heavy": 128}),
    "opened, mass .95": Setting(prompt={"mass": 0.95}),
    "opened, mass .9": Setting(prompt={"mass": 0.9}),
    "opened, heavy 512, sample 4": Setting(prompt={"heavy": 512, "sample": 4}),
    "opened, heavy 256, sample 4": Setting(prompt={"heavy": 256, "sample": 4}),
    "opened, mass .95, sample 4": Setting(prompt={"mass": 0.95, "sample": 4}),
    "opened, heavy 512, ending 128": Setting(prompt={"heavy": 512, "ending": 128}),
    "opened, mass .95, ending 128": Setting(prompt={"mass": 0.95, "ending": 128}),
    "opened, mass .9, ending 128": Setting(prompt={"mass": 0.9, "ending": 128}),
    "opened, heavy 256, ending 128": Setting(prompt={"heavy": 256, "ending": 128}),
    "streaming, near 624": Setting(prompt={"near": 624, "heavy": 0}),
    "streaming, near 320": Setting(prompt={"near": 320, "heavy": 0}),
    # Prompts read densely, the rest decoded with levels of precision.
    "levels 4,4": Setting(cache={"bits": (4, 4)}),
    "levels 4,2": Setting(cache={"bits": (4, 2)}),
    "levels 4,4 on 8bit": Setting(cache={"bits": (4, 4), "exact": "8bit"}),
    "levels 4,2 on 8bit": Setting(cache={"bits": (4, 2), "exact": "8bit"}),
    "levels 4,4, none heavy": Setting(cache={"bits": (4, 4), "heavy": 0}),
    "levels 4,4, heavy 16": Setting(cache={"bits": (4, 4), "heavy": 16}),
    "levels 4,4, heavy 128": Setting(cache={"bits": (4, 4), "heavy": 128}),
    "levels 4,4, heavy 256": Setting(cache={"bits": (4, 4), "heavy": 256}),
    "levels 4,4, mass .9": Setting(cache={"bits": (4, 4), "mass": 0.9}),
    # Both.
    "opened, heavy 512, levels 4,4": Setting(prompt={"heavy": 512}, cache={"bits": (4, 4)}),
    "opened, heavy 512, levels 4,2": Setting(prompt={"heavy": 512}, cache={"bits": (4, 2)}),
    "opened, heavy 512, levels 4,4 on 8bit": Setting(
        prompt={"heavy": 512}, cache={"bits": (4, 4), "exact": "8bit"}
    ),
    "opened, mass .95, levels 4,4": Setting(prompt={"mass": 0.95}, cache={"bits": (4, 4)}),
    "opened, heavy 256, levels 4,4": Setting(prompt={"heavy": 256}, cache={"bits": (4, 4)}),
}

# Peers. Of prompts at HEAVY, where the share of pairs is that of mass .95; of caches, those that
# drop tokens keep 624 of them, 15 % of 4,096, about the bytes that levels read.
HEAVY = 448
COUNTED = ", pairs counted"  # the same setting, with the share of pairs in its records
SETTINGS |= {
    f"streaming, near {64 + HEAVY}": Setting(prompt={"near": 64 + HEAVY, "heavy": 0}),
    f"opened, heavy {HEAVY}": Setting(prompt={"heavy": HEAVY}),
    **{
        f"{name}{COUNTED}": Setting(read_by=("opened", options))
        for name, options in (
            ("opened, mass .95", {"mass": 0.95}),
            ("opened, mass .9", {"mass": 0.9}),
            ("opened, heavy 512", {"heavy": 512}),
            (f"opened, heavy {HEAVY}", {"heavy": HEAVY}),
            ("opened, heavy 256", {"heavy": 256}),
            ("opened, heavy 128", {"heavy": 128}),
            ("opened, strict, heavy 512", {"heavy": 512, "strict": True}),
            (f"streaming, near {64 + HEAVY}", {"near": 64 + HEAVY, "heavy": 0}),
            ("streaming, near 320", {"near": 320, "heavy": 0}),
        )
    },
    "Quest, heavy 256": Setting(read_by=("min/max bounds (Quest)", {"heavy": 256})),
    "pooled means, heavy 256": Setting(read_by=("pooled means (MInference, MoBA)", {"heavy": 256})),
    **{
        f"{name}, heavy {HEAVY}": Setting(read_by=(chooser, {"heavy": HEAVY}))
        for name, chooser in (
            ("true mass", "true mass (limit)"),
            ("antidiagonal", "antidiagonal sums (XAttention)"),
            ("pooled means", "pooled means (MInference, MoBA)"),
            ("Quest", "min/max bounds (Quest)"),
        )
    },
    "levels 4,4, chosen once": Setting(chosen_once={"heavy": 64}),  # as MiKV chooses
    "cache bfloat16": Setting(held_in=("bfloat16", {})),
    "cache quanto 4 bits": Setting(held_in=("quanto", {"nbits": 4})),
    "cache quanto 2 bits": Setting(held_in=("quanto", {"nbits": 2})),
    "cache fp8": Setting(held_in=("fp8", {})),
    "decoding: streaming, near 608": Setting(decoded_by=("top", {"near": 608})),
    "decoding: top 544, rest dropped": Setting(decoded_by=("top", {"heavy": 544})),
    "decoding: Quest 544": Setting(decoded_by=("pages", {"heavy": 544})),
}


def find_settings(names: list[str]) -> dict[str, Setting]:
    """Return the settings of these names."""
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        raise ValueError(
            f"--settings must be among {', '.join(map(repr, SETTINGS))}, got {unknown[0]!r}"
        )
    return {name: SETTINGS[name] for name in names}
