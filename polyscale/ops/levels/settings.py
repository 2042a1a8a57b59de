"""What a store of levels keeps, and in how many bits."""

from dataclasses import dataclass

from polyscale.checks import check_choice, check_integer

EXACT = ("model", "8bit")


@dataclass(frozen=True)
class LevelSettings:
    """How a store rounds.

    Args:
        bits: of the codes of keys and of values. Keys: 2 to 4, each of which takes four bits of
            memory. Values: 4 or 2.
        exact: the level behind the codes: `"model"`, keys and values as they came, or `"8bit"`,
            where the codes are the upper halves of bytes whose lower halves lie apart.
        sinks: first tokens of a row, which queries always read exactly: the scales of keys need not
            span them.

    Example:
        >>> LevelSettings(bits=(4, 2)).value_bits
        2
    """

    bits: tuple[int, int] = (4, 4)
    exact: str = "model"
    sinks: int = 16

    def __post_init__(self) -> None:
        if len(self.bits) != 2:
            raise ValueError(f"bits must be those of keys and of values, got {self.bits!r}")
        object.__setattr__(self, "bits", tuple(self.bits))
        check_choice("exact", self.exact, EXACT)
        check_choice("bits[0]", self.key_bits, (4,) if self.is_8bit else (2, 3, 4))
        check_choice("bits[1]", self.value_bits, (2, 4))
        check_integer("sinks", self.sinks, least=0)

    @property
    def key_bits(self) -> int:
        """Bits of a key's codes."""
        return self.bits[0]

    @property
    def value_bits(self) -> int:
        """Bits of a value's codes."""
        return self.bits[1]

    @property
    def is_8bit(self) -> bool:
        """Whether the exact level is one of bytes."""
        return self.exact == "8bit"
