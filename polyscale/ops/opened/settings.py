"""What a view consists of, as numbers, and the check of each."""

from dataclasses import dataclass
from typing import Any

from polyscale.checks import check_choice, check_flag, check_integer, check_number


@dataclass(frozen=True)
class Settings:
    """The numbers that say which keys a query block sees; `opened_attention` explains each.

    Sinks are positions, so they stand in `Places`.
    """

    causal: bool
    block: int
    key_block: int
    near: int
    heavy: int
    mass: float | None
    sample: int
    rest: str
    strict: bool
    scale: float

    @property
    def unit(self) -> int:
        """Positions that share one view: a query block, or in strict mode a group of it."""
        return self.sample if self.strict else self.block

    @property
    def samples(self) -> int:
        """How many sampled rows choose for one unit."""
        return self.block // self.sample


def check_settings(
    *,
    causal: bool,
    block: int,
    key_block: int,
    near: int,
    heavy: int,
    mass: float | None,
    sample: int,
    rest: str,
    strict: bool,
    scale: float,
) -> Settings:
    """The settings with plain numbers; an error names the first that is wrong."""
    check_flag("causal", causal)
    check_flag("strict", strict)
    block = check_integer("block", block, least=1)
    key_block = check_integer("key_block", key_block, least=1)
    sample = check_integer("sample", sample, least=1)
    near = check_integer("near", near, least=0)
    heavy = check_integer("heavy", heavy, least=0)
    _check_multiple("block", block, "key_block", key_block)
    _check_multiple("block", block, "sample", sample)
    if mass is None:
        _check_multiple("heavy", heavy, "key_block", key_block)
    else:
        mass = check_number("mass", mass, least=0, most=1, hint="mass=None opens heavy keys")
    check_choice("rest", rest, ("drop", "pool"))
    if strict and not causal:
        raise ValueError(
            "strict must be False if causal is False, got True; strict=True is about what earlier "
            "queries may know of later ones"
        )
    return Settings(
        causal=causal,
        block=block,
        key_block=key_block,
        near=near,
        heavy=heavy,
        mass=mass,
        sample=sample,
        rest=rest,
        strict=strict,
        scale=scale,
    )


def _check_multiple(name: str, value: int, of: str, divisor: int) -> None:
    if value % divisor:
        nearest: Any = (value // divisor * divisor or divisor, (value // divisor + 1) * divisor)
        choices = " or ".join(str(x) for x in dict.fromkeys(nearest))
        raise ValueError(
            f"{name} must be a multiple of {of}={divisor}, got {value}; use {name}={choices}"
        )
