"""Means, paired differences and their tests, for results over a few seeds.

Small enough to need the standard library alone; the tests hold every figure against scipy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """Mean and spread of a sample."""

    mean: float
    standard_deviation: float | None  # with n - 1; None for a single value
    count: int


@dataclass(frozen=True)
class PairedDifference:
    """How two samples differ, pair by pair; what they cannot tell is None."""

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

    The interval and the t-test measure the mean by the spread of the differences, so a single pair
    has neither, nor have differences that are all equal.

    >>> difference = paired([71.0, 74.0, 72.0], [70.0, 71.0, 70.0])
    >>> difference.mean, round(difference.t, 3), round(difference.t_p, 3), difference.wilcoxon_p
    (2.0, 3.464, 0.074, 0.25)
    """
    first, second = _finite("a", a), _finite("b", b)
    if len(first) != len(second):
        raise ValueError(
            f"a and b take one value for each pair, got {len(first)} and {len(second)}"
        )
    if not 0 < confidence < 1:
        raise ValueError(f"confidence takes a number between 0 and 1, got {confidence}")
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
    """Rounded to what doubles of this size can tell apart: 0.3 - 0.2 and 0.2 - 0.1 are one."""
    size = max(abs(x) for x in (*a, *b))
    digits = 14 - math.ceil(math.log10(size)) if size > 0 else 0
    return [round(x - y, digits) for x, y in zip(a, b, strict=True)]


def accuracy_standard_error(accuracy: float, count: int) -> float:
    """Standard error of a share of right answers among `count` test samples (binomial).

    >>> accuracy_standard_error(0.5, 100)
    0.05
    """
    if not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy takes a share between 0 and 1, got {accuracy}")
    if count < 1:
        raise ValueError(f"count takes at least 1 sample, got {count}")
    return math.sqrt(accuracy * (1 - accuracy) / count)


def smallest_wilcoxon_p(count: int) -> float:
    """The least p-value that `count` pairs can give, however clear they are.

    >>> smallest_wilcoxon_p(3), smallest_wilcoxon_p(6)
    (0.25, 0.03125)
    """
    if count < 1:
        raise ValueError(f"count takes at least 1 pair, got {count}")
    return 2.0 ** (1 - count)


def wilcoxon_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's signed-rank test, exact with ties, too.

    Differences of zero are left out (Wilcoxon's own rule). Under the hypothesis every sign is a
    fair coin, so the distribution of the rank sum is counted rank by rank; equal sizes share the
    mean of their ranks.

    >>> wilcoxon_p([1.0, 2.0, 3.0])
    0.25
    """
    signed = sorted((x for x in _finite("differences", differences) if x), key=abs)
    sizes = [abs(x) for x in signed]
    if not sizes:
        return 1.0
    # Twice the mean rank is a whole number: places are counted from 1, first + last of the equals.
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
    return _incomplete_beta(
        degrees / 2, 0.5, degrees / (degrees + t * t), t * t / (degrees + t * t)
    )


def t_quantile(confidence: float, degrees: int) -> float:
    """The `t` within which Student's distribution has this share, on both sides of 0."""
    low, high = 0.0, 1.0
    while t_p_value(high, degrees) > 1 - confidence:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:  # until no number lies between
        if t_p_value(middle, degrees) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """The regularised incomplete beta function at x; `rest` is 1 - x without cancellation.

    Its continued fraction, evaluated from the front by the method of Lentz.
    """
    if x <= 0 or rest <= 0:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # where it converges slowly
        return 1 - _incomplete_beta(b, a, rest, x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(logarithm + a * math.log(x) + b * math.log(rest)) / a
    fraction = numerator = 1.0
    denominator = 0.0
    for step in range(10_000):
        half = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        else:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        denominator = 1 / (1 + term * denominator)
        numerator = 1 + term / numerator
        fraction *= numerator * denominator
        if step and abs(1 - numerator * denominator) < 1e-15:
            break
    return front * (fraction - 1)


def _finite(name: str, values: Sequence[float]) -> list[float]:
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError(f"{name} takes at least one number, got none")
    if not all(math.isfinite(number) for number in numbers):
        raise ValueError(f"{name} takes finite numbers, got {numbers}")
    return numbers
