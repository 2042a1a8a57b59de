"""ListOps: nested list operations over the digits, generated.

An expression such as `[MAX 2 9 [MIN 4 7 ] 0 ]` has a value from 0 to 9, which is its class.
Its length is its number of tokens: an operator with its bracket is one, a digit is one, a closing
bracket is one. This is the linear form of the Long Range Arena (LRA) task, whose files also have
round parentheses that its readers remove.

Trees follow the rule of LRA's published generator: a node is an operator with probability 0.25
and otherwise a digit; an operator takes 2 to `max_args` arguments, all counts equally likely; the
root has depth 1 and a node of depth `max_depth` is a digit. Expressions of the wrong length are
drawn again.

MED of an even number of values is the mean of the middle two, rounded down (as LRA has it); SM is
the sum modulo 10.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polyscale._extras import require
from polyscale.checks import check_integer
from polyscale.data.splits import PAD_ID, TokenSplit, collate, flatten

__all__ = [
    "DEMO",
    "LRA",
    "NUM_CLASSES",
    "OPERATORS",
    "PAD_ID",
    "PRESETS",
    "T512",
    "VOCABULARY",
    "ListOps",
    "ListOpsConfig",
    "ListOpsDataset",
    "collate",
    "decode",
    "encode",
    "evaluate",
    "make_listops",
    "nesting_depth",
]

OPERATORS = ("MIN", "MAX", "MED", "SM")
# Index = token id: padding, the ten digits (id = digit + 1), the operators, the closing bracket.
VOCABULARY = ("<pad>", *"0123456789", *(f"[{name}" for name in OPERATORS), "]")
NUM_CLASSES = 10

_TOKEN_ID = {token: index for index, token in enumerate(VOCABULARY)}
_FIRST_OPERATOR = _TOKEN_ID["[MIN"]
_CLOSE = _TOKEN_ID["]"]
_SHORTEST = 4  # an operator, two digits, a closing bracket
# Consecutive draws that may fail before the limits are reported as impossible.
_MAX_MISSES = 200_000
_MAX_DUPLICATES = 10_000
_CHUNK = 4_096  # expressions whose depth is computed at once, to bound the memory


@dataclass(frozen=True)
class ListOpsConfig:
    """What to generate: limits of one expression, sizes of the splits, and the seed.

    `min_length` and `max_length` are inclusive token counts.

    >>> ListOpsConfig(min_length=4, max_length=20, train=100, validation=10, test=10).total
    120
    """

    min_length: int = 501
    max_length: int = 1999
    max_depth: int = 10
    max_args: int = 10
    operators: tuple[str, ...] = OPERATORS
    operator_probability: float = 0.25
    train: int = 96_000
    validation: int = 2_000
    test: int = 2_000
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"train": 1, "validation": 1, "test": 1, "max_depth": 2, "max_args": 2}
        for name in ("min_length", "max_length", "seed", *least):
            check_integer(name, getattr(self, name), least=least.get(name, 0))
        is_names = isinstance(self.operators, tuple | list | set)
        if not is_names or any(name not in OPERATORS for name in self.operators):
            raise ValueError(f"operators must be names out of {OPERATORS}, got {self.operators!r}")
        if not self.operators:
            raise ValueError(f"operators must have at least one of {OPERATORS}, got none")
        # One order, so that the same set of operators always gives the same data.
        ordered = tuple(name for name in OPERATORS if name in self.operators)
        object.__setattr__(self, "operators", ordered)
        if not 0.0 < self.operator_probability <= 1.0:
            raise ValueError(
                f"operator_probability must be in (0, 1], got {self.operator_probability}"
            )
        if self.max_length < max(_SHORTEST, self.min_length):
            raise ValueError(
                f"max_length must be at least min_length ({self.min_length}) and {_SHORTEST}, the "
                f"shortest expression, got {self.max_length}"
            )
        longest = self.longest_possible
        if self.min_length > longest:
            raise ValueError(
                f"min_length must be at most {longest}, the longest expression with "
                f"max_depth={self.max_depth} and max_args={self.max_args}, got {self.min_length}"
            )

    @property
    def total(self) -> int:
        return self.train + self.validation + self.test

    @property
    def longest_possible(self) -> int:
        """Tokens of the complete tree within max_depth and max_args."""
        length = 1
        for _ in range(self.max_depth - 1):
            length = 2 + self.max_args * length
        return length


# LRA's generator compares lengths strictly with 500 and 2,000, hence 501 and 1,999.
LRA = ListOpsConfig()
# The same trees in at most 512 tokens; the lower limit is a quarter of the upper one, as in LRA.
T512 = replace(LRA, min_length=128, max_length=512)
# Short expressions that a small model learns within minutes on a CPU. There is no SM: a sum modulo
# 10 takes much longer to learn.
DEMO = ListOpsConfig(
    min_length=6,
    max_length=32,
    max_depth=3,
    max_args=8,
    operators=("MIN", "MAX", "MED"),
    train=40_000,
    validation=1_000,
    test=2_000,
)
PRESETS = {"lra": LRA, "t512": T512, "demo": DEMO}


class ListOpsDataset(TokenSplit):
    """One split of expressions, one byte for each token, grouped by length and nesting depth.

    >>> split = ListOpsDataset.from_expressions(["[MAX 2 9 ]", "[MIN 4 [MAX 7 1 ] ]"])
    >>> split[0]["input_ids"].tolist(), split[0]["labels"].item(), split.groups["depth"].tolist()
    ([12, 3, 10, 15], 9, [1, 2])
    """

    def __init__(self, tokens: Tensor, offsets: Tensor, labels: Tensor) -> None:
        depth = nesting_depth(tokens, offsets)
        super().__init__(tokens, offsets, labels, decode=decode, groups={"depth": depth})

    @classmethod
    def from_expressions(cls, expressions: Sequence[str]) -> ListOpsDataset:
        """Encode and evaluate expressions given as text."""
        coded = [bytes(encode(text)) for text in expressions]
        return cls.from_samples([(ids, evaluate(ids)) for ids in coded])

    @classmethod
    def from_samples(cls, samples: Sequence[tuple[bytes, int]]) -> ListOpsDataset:
        """Concatenate (token ids, value) pairs."""
        tokens, offsets = flatten([ids for ids, _ in samples])
        return cls(tokens, offsets, torch.tensor([value for _, value in samples]).long())


def nesting_depth(tokens: Tensor, offsets: Tensor) -> Tensor:
    """The largest number of open operators in each expression: `[N]`, int64.

    >>> nesting_depth(torch.tensor(encode("[MAX 2 [MIN 4 7 ] ]")), torch.tensor([0, 7])).tolist()
    [2]
    """
    depths = [torch.zeros(0, dtype=torch.int64)]
    for start in range(0, len(offsets) - 1, _CHUNK):
        bounds = offsets[start : start + _CHUNK + 1]
        part = tokens[bounds[0] : bounds[-1]]
        steps = (part >= _FIRST_OPERATOR).int() - 2 * (part == _CLOSE).int()
        # Every expression ends at depth 0, so one cumulative sum serves all.
        open_operators = steps.cumsum(0, dtype=torch.int32)
        rows = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())
        deepest = torch.zeros(len(bounds) - 1, dtype=torch.int32)
        depths.append(deepest.scatter_reduce(0, rows, open_operators, "amax").long())
    return torch.cat(depths)


@dataclass(frozen=True)
class ListOps:
    """The three splits and the configuration that made them."""

    train: ListOpsDataset
    validation: ListOpsDataset
    test: ListOpsDataset
    config: ListOpsConfig


def make_listops(config: ListOpsConfig = DEMO, *, progress: bool = False) -> ListOps:
    """Generate the splits: no expression occurs twice, within a split or across splits.

    The same config gives the same data in every process and on every version of Python.
    `progress` shows a bar (the LRA preset takes a few minutes).

    >>> data = make_listops(ListOpsConfig(4, 12, 3, 4, train=50, validation=5, test=5))
    >>> len(data.train), len(data.test)
    (50, 5)
    """
    generator = random.Random(config.seed)
    samples: dict[bytes, int] = {}  # keeps the order of generation
    duplicates = 0
    with _progress_bar(config.total, shown=progress) as advance:
        while len(samples) < config.total:
            ids, value = _draw_expression(generator, config)
            if ids in samples:
                duplicates += 1
                if duplicates > _MAX_DUPLICATES:
                    raise ValueError(
                        "train + validation + test must be at most the number of distinct "
                        f"expressions, got {config.total}: after {len(samples)}, the last "
                        f"{_MAX_DUPLICATES} draws were repeats; ask for fewer, or raise "
                        "max_length, max_depth or max_args"
                    )
                continue
            duplicates = 0
            samples[ids] = value
            advance()
    # Frequent (short) expressions are drawn early; a shuffle gives the splits one distribution.
    keys = [generator.random() for _ in range(config.total)]
    drawn = list(samples.items())
    order = sorted(range(config.total), key=keys.__getitem__)
    shuffled = [drawn[index] for index in order]
    first, second = config.train, config.train + config.validation
    return ListOps(
        train=ListOpsDataset.from_samples(shuffled[:first]),
        validation=ListOpsDataset.from_samples(shuffled[first:second]),
        test=ListOpsDataset.from_samples(shuffled[second:]),
        config=config,
    )


def encode(text: str) -> list[int]:
    """Token ids of an expression.

    >>> encode("[MAX 2 9 ]")
    [12, 3, 10, 15]
    """
    unknown = [token for token in text.split() if token not in _TOKEN_ID]
    if unknown:
        raise ValueError(f"text must have tokens out of {VOCABULARY[1:]}, got {unknown[0]!r}")
    return [_TOKEN_ID[token] for token in text.split()]


def decode(ids: Sequence[int]) -> str:
    """Text of token ids without padding; the inverse of `encode`."""
    for index in ids:
        if not 0 <= index < len(VOCABULARY):
            raise ValueError(f"ids must be from 0 to {len(VOCABULARY) - 1}, got {index}")
    return " ".join(VOCABULARY[index] for index in ids if index != PAD_ID)


def evaluate(expression: str | Sequence[int]) -> int:
    """The value of an expression given as text or as token ids.

    >>> evaluate("[MAX 2 9 [MIN 4 7 ] 0 ]"), evaluate("[MED 1 2 ]"), evaluate("[SM 8 7 ]")
    (9, 1, 5)
    """
    ids = encode(expression) if isinstance(expression, str) else expression
    pending: list[tuple[str, list[int]]] = []  # operators not closed yet, with their values
    result: list[int] = []
    for position, token in enumerate(ids):
        values = pending[-1][1] if pending else result
        if 1 <= token <= NUM_CLASSES:
            values.append(token - 1)
        elif _FIRST_OPERATOR <= token < _CLOSE:
            pending.append((OPERATORS[token - _FIRST_OPERATOR], []))
        elif token == _CLOSE and pending and values:
            name, arguments = pending.pop()
            (pending[-1][1] if pending else result).append(_apply(name, arguments))
        elif token != PAD_ID:
            raise ValueError(f"expression must not have token {token} at position {position}")
    if pending or len(result) != 1:
        raise ValueError(
            f"expression must be one complete expression, got {len(pending)} open brackets and "
            f"{len(result)} values"
        )
    return result[0]


def _apply(operator: str, values: list[int]) -> int:
    if operator == "MIN":
        return min(values)
    if operator == "MAX":
        return max(values)
    if operator == "SM":
        return sum(values) % 10
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) // 2


def _draw_expression(generator: random.Random, config: ListOpsConfig) -> tuple[bytes, int]:
    """Token ids and value of one expression within the limits."""
    for _ in range(_MAX_MISSES):
        shape = _draw_shape(generator, config)
        if shape is not None:
            tokens = bytearray()
            value = _fill(generator, config.operators, [iter(level) for level in shape], 0, tokens)
            return bytes(tokens), value
    raise ValueError(
        f"min_length and max_length must be lengths that occur with max_depth={config.max_depth} "
        f"and max_args={config.max_args}, got {config.min_length} and {config.max_length}: none of "
        f"{_MAX_MISSES} trees had such a length"
    )


def _draw_shape(generator: random.Random, config: ListOpsConfig) -> list[list[int]] | None:
    """Number of arguments of every node, depth by depth (0 for a digit); None if it does not fit.

    Most trees are too short or too long, so shapes are drawn first and filled only when they fit.
    All draws use `random()`, the only method whose sequence Python guarantees across versions.
    """
    draw = generator.random
    counts = config.max_args - 1  # 2 .. max_args arguments
    probability = config.operator_probability
    arguments = 2 + int(draw() * counts)  # the root is an operator
    levels = [[arguments]]
    length = 2 + arguments
    for depth in range(2, config.max_depth + 1):
        if depth == config.max_depth:
            levels.append([0] * arguments)
            break
        level = [2 + int(draw() * counts) if draw() < probability else 0 for _ in range(arguments)]
        levels.append(level)
        arguments = sum(level)
        if not arguments:
            break
        operators = len(level) - level.count(0)
        # The node of an operator becomes two tokens around its arguments.
        length += operators + arguments
        if length > config.max_length:
            return None
    return levels if config.min_length <= length <= config.max_length else None


def _fill(
    generator: random.Random,
    operators: tuple[str, ...],
    levels: list[Iterator[int]],
    depth: int,
    tokens: bytearray,
) -> int:
    """Write the tokens under the next node of this depth and return its value.

    A depth-first traversal visits the nodes of one depth from left to right, as they are stored.
    """
    arguments = next(levels[depth])
    if not arguments:
        digit = int(generator.random() * 10)
        tokens.append(digit + 1)
        return digit
    name = operators[int(generator.random() * len(operators))]
    tokens.append(_FIRST_OPERATOR + OPERATORS.index(name))
    values = [_fill(generator, operators, levels, depth + 1, tokens) for _ in range(arguments)]
    tokens.append(_CLOSE)
    return _apply(name, values)


@contextmanager
def _progress_bar(total: int, shown: bool) -> Iterator[Callable[[], None]]:
    """Yield what to call after each expression."""
    if not shown:
        yield lambda: None
        return
    progress = require("rich.progress", "train", "a progress bar")
    with progress.Progress() as bar:
        task = bar.add_task("ListOps expressions", total=total)
        yield lambda: bar.advance(task)
