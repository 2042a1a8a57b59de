import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from polyscale.training.statistics import (
    PairedDifference,
    accuracy_standard_error,
    paired,
    smallest_wilcoxon_p,
    summarise,
    t_p_value,
    t_quantile,
    wilcoxon_p,
)

numbers = st.floats(-100, 100, allow_nan=False).map(lambda x: round(x, 3))
pairs = st.lists(st.tuples(numbers, numbers), min_size=2, max_size=20)


@pytest.mark.parametrize("t", [0.0, 0.01, 0.3, 1.0, 4.3, 100.0, 1e4])
def test_t_probabilities_are_those_of_closed_forms(t):
    one = 2 * math.atan2(1, t) / math.pi  # Cauchy's distribution
    root = math.sqrt(2 + t * t)
    two = 2 / (root * (root + t))  # 1 - t / root without cancellation
    for degrees, expected in ((1, one), (2, two)):
        assert t_p_value(t, degrees) == pytest.approx(expected, rel=1e-11)
        assert t_p_value(-t, degrees) == t_p_value(t, degrees)


def test_t_quantiles_are_those_of_tables():
    for degrees, expected in ((1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (99, 1.984)):
        assert t_quantile(0.95, degrees) == pytest.approx(expected, abs=5e-4)
    for confidence in (0.01, 0.5, 0.9999):
        assert t_p_value(t_quantile(confidence, 4), 4) == pytest.approx(1 - confidence)


@settings(deadline=None, max_examples=200)
@given(pairs)
def test_paired_differences_agree_with_scipy(values):
    a, b = zip(*values, strict=True)
    found = paired(a, b)
    differences = [round(x - y, 6) for x, y in values]
    assert found.mean == pytest.approx(math.fsum(differences) / len(differences), abs=1e-9)
    if len(set(differences)) == 1:
        assert (found.low, found.high, found.t, found.t_p) == (None, None, None, None)
        return
    expected = stats.ttest_1samp(differences, 0.0)
    interval = expected.confidence_interval(0.95)
    assert found.t == pytest.approx(expected.statistic, rel=1e-7, abs=1e-9)
    assert found.t_p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert found.low == pytest.approx(interval.low, rel=1e-7, abs=1e-7)
    assert found.high == pytest.approx(interval.high, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 10, 25, 50])
def test_wilcoxon_without_ties_agrees_with_the_exact_test_of_scipy(count):
    for start in range(4):
        differences = [(-1.0) ** (k * k // (start + 2)) * (k + 1.5 + start) for k in range(count)]
        expected = stats.wilcoxon(differences, method="exact").pvalue
        assert wilcoxon_p(differences) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_wilcoxon_with_ties_counts_every_pattern_of_signs(differences):
    """Zeros are left out, equal sizes share the mean of their ranks; then all signs are tried."""
    sizes = [abs(d) for d in differences if d]
    ranks = stats.rankdata(sizes)
    centre = ranks.sum() / 2
    seen = abs(
        sum(r for r, d in zip(ranks, filter(None, differences), strict=True) if d > 0) - centre
    )
    as_far = [
        abs(sum(r for r, sign in zip(ranks, signs, strict=True) if sign) - centre) >= seen
        for signs in itertools.product((False, True), repeat=len(sizes))
    ]
    assert wilcoxon_p(differences) == pytest.approx(sum(as_far) / len(as_far))


def test_wilcoxon_with_ties_agrees_with_the_permutations_of_scipy():
    differences = [1.0, 1.0, 2.0, -2.0, 3.0, 3.0]
    expected = stats.wilcoxon(differences, method=stats.PermutationMethod(n_resamples=10**6))
    assert wilcoxon_p(differences) == pytest.approx(expected.pvalue)


def test_three_pairs_cannot_give_wilcoxon_less_than_a_quarter():
    assert wilcoxon_p([10.0, 20.0, 30.0]) == smallest_wilcoxon_p(3) == 0.25
    assert smallest_wilcoxon_p(5) > 0.05 > smallest_wilcoxon_p(6)


def test_a_single_pair_has_a_difference_and_nothing_more():
    assert paired([3.0], [1.0]) == PairedDifference(2.0, None, None, None, None, None, 1)
    assert summarise([3.0]).standard_deviation is None


def test_equal_differences_have_no_interval_even_if_their_last_digits_differ():
    found = paired([0.3, 0.2, 0.7], [0.2, 0.1, 0.6])
    assert 0.3 - 0.2 != 0.2 - 0.1
    assert found == PairedDifference(0.1, None, None, None, None, 0.25, 3)
    same = paired([0.5, 0.6], [0.5, 0.6])
    assert (same.mean, same.t_p, same.wilcoxon_p) == (0.0, None, 1.0)


def test_ties_are_found_though_their_last_digits_differ():
    found = paired([0.3, 0.2, 0.0, 0.9], [0.2, 0.1, 0.1, 0.2])
    assert found.wilcoxon_p == wilcoxon_p([1, 1, -1, 7])


def test_the_standard_deviation_is_that_of_a_sample():
    values = [61.2, 60.4, 62.9]
    assert summarise(values).standard_deviation == pytest.approx(stats.tstd(values))
    assert summarise(values).mean == pytest.approx(61.5)


def test_a_wider_confidence_gives_a_wider_interval():
    narrow, wide = (paired([1, 2, 4], [0, 0, 0], confidence=c) for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.mean < narrow.high < wide.high


def test_the_binomial_error_is_the_spread_of_many_draws():
    expected = stats.binom(400, 0.3).std() / 400
    assert accuracy_standard_error(0.3, 400) == pytest.approx(expected)
    assert accuracy_standard_error(1.0, 10) == 0.0


def test_bad_input_is_refused_by_name():
    for call, name in (
        (lambda: summarise([]), "values"),
        (lambda: summarise([1.0, float("nan")]), "values"),
        (lambda: paired([1.0], [1.0, 2.0]), "a and b"),
        (lambda: paired([1.0], [float("inf")]), "b must be finite"),
        (lambda: paired([1.0], [1.0], confidence=95), "confidence"),
        (lambda: accuracy_standard_error(61.0, 10), "accuracy"),
        (lambda: accuracy_standard_error(0.5, 0), "count"),
        (lambda: smallest_wilcoxon_p(0), "count"),
    ):
        with pytest.raises(ValueError, match=name):
            call()
