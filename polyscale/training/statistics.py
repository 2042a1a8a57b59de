"""Means, paired differences and their tests, for results over a few seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

from polyscale.checks import check_integer, check_number


@dataclass(frozen=True)
class Summary:
    """Mean and spread of a sample."""

    mean: float
    standard_deviation: float | None  # with n - 1; None for a single value
    count: int


@dataclass(frozen=True)
class PairedDifference:
    """How two samples differ, pair by pair; None where there are too few pairs."""

    mean: float
    low: float | None  # confidence interval of the mean, by the t distribution
    high: float | None
    t: float | None
    t_p: float | None  # two-sided
    wilcoxon_p: float | None  # two-sided, exact; None for a single pair
    count: int
    confidence: float = 0.95


def summarise(values: Sequence[float]) -> Summary:
    """Mean, standard deviation and count.

    >>> summarise([1.0, 2.0, 3.0])
    Summary(mean=2.0, standard_deviation=1.0, count=3)
    """
    numbers = _finite("values", values)
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return Summary(mean, None, 1)
    squares = math.fsum((number - mean) ** 2 for number in numbers)
    return Summary(mean, math.sqrt(squares / (len(numbers) - 1)), len(numbers))


def paired(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> PairedDifference:
    """The differences `a[i] - b[i]`, with a t interval, a paired t-test and Wilcoxon's test.

    The interval and the t-test need the standard deviation of the differences: with a single pair,
    or with differences that are all equal, they are None.

    >>> difference = paired([71.0, 74.0, 72.0], [70.0, 71.0, 70.0])
    >>> difference.mean, round(difference.t, 3), round(difference.t_p, 3), difference.wilcoxon_p
    (2.0, 3.464, 0.074, 0.25)
    """
    first, second = _finite("a", a), _finite("b", b)
    if len(first) != len(second):
        raise ValueError(
            f"a and b must have the same number of values, got {len(first)} and {len(second)}"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, got {confidence}; use 0.95 for 95 %")
    differences = _differences(first, second)
    summary = summarise(differences)
    mean, spread, count = summary.mean, summary.standard_deviation, summary.count
    if spread is None:
        return PairedDifference(mean, None, None, None, None, None, count, confidence)
    wilcoxon = wilcoxon_p(differences)
    if len(set(differences)) == 1:
        return PairedDifference(differences[0], None, None, None, None, wilcoxon, count, confidence)
    error = spread / math.sqrt(count)
    t, reach = mean / error, t_quantile(confidence, count - 1) * error
    return PairedDifference(
        mean, mean - reach, mean + reach, t, t_p_value(t, count - 1), wilcoxon, count, confidence
    )


def _differences(a: list[float], b: list[float]) -> list[float]:
    """`a - b`, rounded to the precision of doubles of this size: 0.3 - 0.2 equals 0.2 - 0.1."""
    size = max(abs(x) for x in (*a, *b))
    digits = 14 - math.ceil(math.log10(size)) if size > 0 else 0
    return [round(x - y, digits) for x, y in zip(a, b, strict=True)]


def accuracy_standard_error(accuracy: float, count: int) -> float:
    """Standard error of an accuracy, between 0 and 1, on `count` test samples (binomial).

    >>> accuracy_standard_error(0.5, 100)
    0.05
    """
    check_number("accuracy", accuracy, least=0, most=1)
    check_integer("count", count, least=1)
    return math.sqrt(accuracy * (1 - accuracy) / count)


def smallest_wilcoxon_p(count: int) -> float:
    """The smallest p-value that `count` pairs can give.

    >>> smallest_wilcoxon_p(3), smallest_wilcoxon_p(6)
    (0.25, 0.03125)
    """
    check_integer("count", count, least=1)
    return 2.0 ** (1 - count)


def wilcoxon_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test, exact even with ties.

    scipy's exact test has no ties. Zeros are dropped (Wilcoxon's rule), and equal sizes share the
    mean of their ranks. Under the null hypothesis all patterns of signs are equally likely, so the
    distribution of the rank sum is counted one rank at a time.

    >>> wilcoxon_p([1.0, 2.0, 3.0])
    0.25
    """
    signed = sorted((x for x in _finite("differences", differences) if x), key=abs)
    sizes = [abs(x) for x in signed]
    if not sizes:
        return 1.0
    # Twice the mean rank is an integer: the first plus the last rank of equal sizes.
    doubled = [2 * sizes.index(s) + sizes.count(s) + 1 for s in sizes]
    ways = [1]  # ways[r]: sign patterns whose positive ranks sum to r
    for rank in doubled:
        grown = ways + [0] * rank
        for total, number in enumerate(ways):
            grown[total + rank] += number
        ways = grown
    positive = sum(rank for rank, x in zip(doubled, signed, strict=True) if x > 0)
    nearer_tail = sum(ways[: min(positive, sum(doubled) - positive) + 1])
    return min(1.0, 2 * nearer_tail / 2 ** len(sizes))


def t_p_value(t: float, degrees: int) -> float:
    """Probability of a value beyond `t` on either side under Student's distribution."""
    return float(2 * stdtr(degrees, -abs(t)))


def t_quantile(confidence: float, degrees: int) -> float:
    """The `t` within which Student's distribution has this share, on both sides of 0."""
    return float(stdtrit(degrees, 0.5 + confidence / 2))


def _finite(name: str, values: Sequence[float]) -> list[float]:
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError(f"{name} must have at least one number, got none")
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"{name} must be finite numbers, got {numbers}")
    return numbers
