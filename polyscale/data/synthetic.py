"""Synthetic language tasks: multi-query associative recall (MQAR), and copying.

Id 0 is padding, which these samples do not need. Id 1 carries no information: the filler of MQAR,
the separator of copying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyscale.checks import check_integer, check_number
from polyscale.data.splits import PAD_ID, SequenceSplit, TaskData, collate

FILLER = SEPARATOR = 1

_FIRST = 2  # the first id of a key, a value or a token to copy
# Rounds of drawing until there must be enough distinct samples; otherwise an error is raised.
_MAX_ROUNDS = 50

_Samples = tuple[Tensor, Tensor]  # tokens (int32), positions with a label (bool), [N, T] each


def load_recall(
    seed: int,
    sizes: dict[str, int],
    vocab: int,
    pairs: int | Sequence[int],
    length: int,
    power: float,
) -> TaskData:
    """Pairs of keys and values, then each key again as a query, whose value is the label.

    Values are the ids from vocab // 2, keys those below. Queries are placed by a power law (Arora
    et al., Zoology, 2023): with `power` near 0 most come soon after the pairs, with 1 all places
    are equally likely. With several numbers of `pairs`, each is equally likely.
    """
    choices = _check_recall(vocab, pairs, length, power)
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> _Samples:
        tokens = torch.full((count, length), FILLER, dtype=torch.int32)
        asked = torch.zeros(count, length, dtype=torch.bool)
        which = torch.randint(len(choices), (count,), generator=generator)
        for choice, number in enumerate(choices):
            rows = (which == choice).nonzero()  # [n, 1]
            keys, values, places = _draw_recall(
                generator, len(rows), number, vocab, length, power
            )  # [n, P] each
            start = 2 * torch.arange(number)  # [P]
            tokens[rows, start], tokens[rows, start + 1] = keys, values
            tokens[rows, places], tokens[rows, places + 1] = keys, values
            asked[rows, places + 1] = True
        return tokens, asked

    tokens, asked = _draw_distinct(draw, sizes, generator)
    groups = {"pairs": asked.sum(1)} if len(choices) > 1 else {}
    return _assemble("mqar", seed, sizes, vocab, tokens, asked, groups)


def load_copy(seed: int, sizes: dict[str, int], vocab: int, length: int) -> TaskData:
    """`length` random tokens, a separator, and the same tokens again, to be predicted."""
    check_integer("length", length, least=1)
    check_integer("vocab", vocab, least=_FIRST + 1)
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> _Samples:
        shape = (count, length)
        first = torch.randint(_FIRST, vocab, shape, generator=generator, dtype=torch.int32)
        separator = torch.full((count, 1), SEPARATOR, dtype=torch.int32)
        tokens = torch.cat([first, separator, first], dim=1)  # [N, 2 length + 1]
        return tokens, (torch.arange(tokens.shape[1]) > length).expand_as(tokens)

    tokens, asked = _draw_distinct(draw, sizes, generator)
    return _assemble("copy", seed, sizes, vocab, tokens, asked, {})


def _check_recall(vocab: Any, pairs: Any, length: Any, power: Any) -> list[int]:
    """The numbers of pairs to choose from."""
    choices = [*pairs] if isinstance(pairs, list | tuple) else [pairs]
    if not choices:
        raise ValueError("pairs must be an integer or a list of integers, got an empty list")
    most = max(check_integer("pairs", number, least=1) for number in choices)
    pairs_text = f"{most} pairs need that"
    check_integer("length", length, least=4 * most, hint=pairs_text)
    check_integer("vocab", vocab, least=2 * (most + _FIRST), hint=pairs_text)
    if not check_number("power", power, least=0, most=1):
        raise ValueError(f"power must be above 0, got {power}; use 1 for uniform places")
    return choices


def _draw_recall(
    generator: torch.Generator, count: int, pairs: int, vocab: int, length: int, power: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, and the places of the queries, [N, pairs] each."""
    half = vocab // 2
    order = torch.rand(count, half - _FIRST, generator=generator, dtype=torch.float64)
    keys = _FIRST + order.argsort(1)[:, :pairs]  # distinct
    values = torch.randint(half, vocab, (count, pairs), generator=generator)
    # A query and its value take two places. The slots with the smallest exponential variables, each
    # with its own rate, are a weighted sample without replacement.
    slots = (length - 2 * pairs) // 2
    rates = torch.arange(1, slots + 1, dtype=torch.float64) ** (power - 1)
    uniform = torch.rand(count, slots, generator=generator, dtype=torch.float64)
    times = -torch.log1p(-uniform) / rates
    return keys.int(), values.int(), 2 * pairs + 2 * times.argsort(1)[:, :pairs]


def _draw_distinct(
    draw: Callable[[int], _Samples], sizes: dict[str, int], generator: torch.Generator
) -> _Samples:
    """As many distinct samples as the splits need, so that none is in two of them."""
    total = sum(check_integer(name, size, least=1) for name, size in sizes.items())
    tokens, asked = draw(total)
    for _ in range(_MAX_ROUNDS):
        first = _first_of_equals(tokens)
        tokens, asked = tokens[first], asked[first]
        if len(tokens) >= total:
            # Frequent samples are drawn early; a shuffle gives the splits one distribution.
            order = torch.randperm(len(tokens), generator=generator)[:total]
            return tokens[order], asked[order]
        more_tokens, more_asked = draw(total)
        tokens, asked = torch.cat([tokens, more_tokens]), torch.cat([asked, more_asked])
    raise ValueError(
        f"train + validation + test must be at most the number of distinct samples, got {total}, "
        f"of which {len(_first_of_equals(tokens))} were found: ask for fewer, or raise vocab or "
        "length"
    )


def _first_of_equals(tokens: Tensor) -> Tensor:
    """Indices of the first row of each set of equal rows, in order."""
    distinct, which = tokens.unique(dim=0, return_inverse=True)
    first = torch.full((len(distinct),), len(tokens))
    first = first.scatter_reduce(0, which, torch.arange(len(tokens)), "amin")
    return first.sort().values


def _assemble(
    name: str,
    seed: int,
    sizes: dict[str, int],
    vocab: int,
    tokens: Tensor,
    asked: Tensor,
    groups: dict[str, Tensor],
) -> TaskData:
    splits = {}
    start = 0
    for part, size in sizes.items():
        rows = slice(start, start + size)
        # Copies, so that sending a split to another process does not send the others.
        properties = {key: values[rows].clone() for key, values in groups.items()}
        splits[part] = SequenceSplit(tokens[rows].clone(), asked[rows].clone(), groups=properties)
        start += size
    return TaskData(
        name=name,
        kind="language",
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        collate=collate,
        vocab_size=vocab,
        input_channels=None,
        num_labels=None,
        max_length=tokens.shape[1],
        pad_token_id=PAD_ID,
        label_names=None,
        source={"seed": seed, "splits": dict(sizes), "notes": []},
        example=f"{splits['test'].text(0)} -> the ids in parentheses",
        tokens=("<pad>", *map(str, range(1, vocab))),
    )
