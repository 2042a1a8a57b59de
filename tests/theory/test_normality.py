"""Mardia's tests against loops over numpy arrays, and on data of known distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from polyscale.theory import mardia, principal_components, qq_points
from polyscale.theory.normality import chi_square_quantile, chi_square_tail, whiten
from tests.theory.helpers import draw


def mardia_by_loops(points):
    """The definitions, pair by pair, with scipy's distributions."""
    n, p = points.shape
    mean = points.mean(axis=0)
    precision = np.linalg.inv(np.cov(points, rowvar=False, bias=True).reshape(p, p))
    skewness = kurtosis = 0.0
    for i in range(n):
        left = precision @ (points[i] - mean)
        for j in range(n):
            skewness += float(left @ (points[j] - mean)) ** 3
        kurtosis += float(left @ (points[i] - mean)) ** 2
    skewness, kurtosis = skewness / n**2, kurtosis / n
    chi = n * skewness / 6
    if n < 20:
        chi *= (p + 1) * (n + 1) * (n + 3) / (n * ((n + 1) * (p + 1) - 6))
    z = (kurtosis - p * (p + 2)) / np.sqrt(8 * p * (p + 2) / n)
    degrees = p * (p + 1) * (p + 2) / 6
    return skewness, stats.chi2.sf(chi, degrees), kurtosis, 2 * stats.norm.sf(abs(z))


@pytest.mark.parametrize("count", [8, 19, 20, 60])
@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize("skewed", [False, True])
def test_mardia_agrees_with_loops(count, width, skewed):
    points = draw(count, width, seed=count + width) @ draw(width, width, seed=5)
    if skewed:
        points = points.exp()
    found = mardia(points)
    expected = mardia_by_loops(points.numpy())
    ours = (found.skewness, found.skewness_p, found.kurtosis, found.kurtosis_p)
    assert ours == pytest.approx(expected, rel=1e-7, abs=1e-12)
    assert (found.n, found.dimensions) == (count, width)
    assert found.kurtosis_expected == width * (width + 2)


def test_mardia_does_not_change_when_the_space_is_moved_turned_and_stretched():
    points = draw(50, 3).exp()
    moved = 100 * points @ draw(3, 3, seed=2) - 7
    one, other = mardia(points), mardia(moved)
    assert (one.skewness, one.kurtosis) == pytest.approx((other.skewness, other.kurtosis))


def test_gaussian_data_is_rejected_at_the_nominal_rate():
    runs, count, level = 1000, 300, 0.05
    rejected = [0, 0]
    for seed in range(runs):
        found = mardia(draw(count, 2, seed=seed))
        rejected[0] += found.skewness_p < level
        rejected[1] += found.kurtosis_p < level
    # Rejections are binomial: the standard error of the rate is sqrt(0.05 * 0.95 / 1000) = 0.0069,
    # and a rate that differs from 5 % by more than three of them (2.07 points) would be no chance.
    error = math.sqrt(level * (1 - level) / runs)
    assert error == pytest.approx(0.0069, abs=5e-5)
    for number in rejected:
        assert abs(number / runs - level) < 3 * error


def test_skewed_and_heavy_tailed_data_is_rejected():
    skewed = mardia(draw(300, 2).exp())
    assert skewed.skewness_p < 1e-6
    heavy = mardia(draw(300, 2) / draw(300, 1, seed=1).abs().sqrt())
    assert heavy.kurtosis_p < 1e-6
    assert heavy.kurtosis > heavy.kurtosis_expected


def test_whitened_points_have_no_mean_and_covariance_one():
    white = whiten(draw(40, 4) @ draw(4, 4, seed=1) + 3)
    torch.testing.assert_close(white.mean(0), torch.zeros(4).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(white.T @ white / 40, torch.eye(4).double(), atol=1e-12, rtol=0)


class TestPrincipalComponents:
    @pytest.mark.parametrize(("count", "width"), [(30, 6), (6, 30), (20, 20)])
    def test_they_are_those_of_the_singular_value_decomposition(self, count, width):
        points = draw(count, width)
        centred = points - points.mean(0)
        left, values, _ = torch.linalg.svd(centred, full_matrices=False)
        found = principal_components(points, 3)
        expected = (left * values)[:, :3]
        signs = (found * expected).sum(0).sign()
        torch.testing.assert_close(found, expected * signs, atol=1e-9, rtol=0)

    def test_empty_directions_and_too_many_components_are_left_out(self):
        plane = draw(30, 2) @ draw(2, 9, seed=1)
        assert principal_components(plane).shape == (30, 2)
        assert principal_components(draw(5, 9)).shape == (5, 3)
        assert principal_components(torch.ones(10, 4)).shape == (10, 0)
        assert principal_components(draw(1, 4)).shape == (1, 0)


class TestQuantiles:
    @pytest.mark.parametrize("degrees", [1, 2, 5, 35, 200])
    def test_they_are_scipys(self, degrees):
        probability = torch.tensor([1e-6, 0.01, 0.3, 0.5, 0.95, 0.999999], dtype=torch.float64)
        expected = stats.chi2.ppf(probability.numpy(), degrees)
        assert chi_square_quantile(probability, degrees).tolist() == pytest.approx(
            expected, rel=1e-8
        )
        for value in (0.1, degrees / 2, degrees, 3 * degrees):
            tail = chi_square_tail(value, degrees)
            assert tail == pytest.approx(stats.chi2.sf(value, degrees), rel=1e-7)
        assert chi_square_tail(0.0, degrees) == 1
        assert chi_square_tail(1e5, degrees) == 0

    @pytest.mark.parametrize("count", [8, 64, 500])
    def test_points_pair_sorted_distances_with_their_quantiles(self, count):
        points = draw(count, 3)
        found = qq_points(points)
        array = points.numpy()
        precision = np.linalg.inv(np.cov(array, rowvar=False, bias=True))
        centred = array - array.mean(axis=0)
        distances = np.sort(np.einsum("ni,ij,nj->n", centred, precision, centred))
        assert len(found) == min(count, 64)
        assert found[0, 1].item() == pytest.approx(distances[0])
        assert found[-1, 1].item() == pytest.approx(distances[-1])
        assert found[-1, 0].item() == pytest.approx(stats.chi2.ppf((count - 0.5) / count, 3))
        assert (found.diff(dim=0) >= 0).all()
        if count == 64:
            grid = (np.arange(64) + 0.5) / 64
            assert found[:, 0].tolist() == pytest.approx(stats.chi2.ppf(grid, 3))
            assert found[:, 1].tolist() == pytest.approx(distances)

    def test_gaussian_points_lie_on_the_diagonal(self):
        found = qq_points(draw(4000, 3))
        middle = found[8:56]
        assert (middle[:, 1] / middle[:, 0] - 1).abs().max() < 0.1


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="3 points in 4 dimensions"):
        mardia(draw(3, 4))
    with pytest.raises(ValueError, match="singular"):
        mardia(torch.ones(9, 2))
    with pytest.raises(ValueError, match=r"shape \[n, p\].* got \[5\]"):
        mardia(draw(5))
    with pytest.raises(ValueError, match="must be finite"):
        mardia(torch.full((9, 2), torch.nan))
    with pytest.raises(TypeError, match=r"got torch.int64"):
        mardia(torch.ones(9, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="components must be at least 1"):
        principal_components(draw(5, 2), 0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        chi_square_quantile(torch.tensor([1.0]), 2)
