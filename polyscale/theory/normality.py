"""Are the scores Gaussian? Mardia's tests, principal components, QQ points.

Definitions are those of R's package MVN. With n points in p dimensions, the covariance taken over n
and `g_ij = (x_i - m)^T C^-1 (x_j - m)`:

    skewness  b1 = sum_ij g_ij^3 / n^2,   n b1 / 6 is chi-square with p (p+1) (p+2) / 6 degrees,
    kurtosis  b2 = sum_i g_ii^2 / n,      (b2 - p (p+2)) / sqrt(8 p (p+2) / n) is standard normal,

if the points are independent and Gaussian. Below 20 points the skewness statistic is multiplied by
`k = (p+1) (n+1) (n+3) / (n ((n+1) (p+1) - 6))`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL = 20  # points; fewer take the corrected skewness statistic


@dataclass(frozen=True)
class Mardia:
    """What `mardia` returns."""

    n: int
    dimensions: int
    skewness: float  # b1
    skewness_statistic: float
    skewness_p: float
    kurtosis: float  # b2
    kurtosis_expected: float  # p (p + 2), of a Gaussian
    kurtosis_statistic: float
    kurtosis_p: float  # two-sided


def mardia(points: Tensor) -> Mardia:
    """Mardia's skewness and kurtosis of points `[n, p]`, with p-values.

    Needs more points than dimensions, and a covariance of full rank (see `principal_components`).

    >>> found = mardia(torch.randn(500, 3, generator=torch.Generator().manual_seed(1)))
    >>> found.dimensions, found.skewness_p > 0.01, found.kurtosis_p > 0.01
    (3, True, True)
    """
    white = whiten(points)
    count, width = white.shape
    inner = white @ white.mT  # g_ij, [n, n]
    skewness = float((inner * inner * inner).sum()) / count**2
    kurtosis = float(inner.diagonal().square().sum()) / count
    statistic = count * skewness / 6
    if count < SMALL:
        correction = (width + 1) * (count + 1) * (count + 3)
        statistic *= correction / (count * ((count + 1) * (width + 1) - 6))
    expected = float(width * (width + 2))
    standard = (kurtosis - expected) / math.sqrt(8 * expected / count)
    return Mardia(
        n=count,
        dimensions=width,
        skewness=skewness,
        skewness_statistic=statistic,
        skewness_p=chi_square_tail(statistic, width * (width + 1) * (width + 2) / 6),
        kurtosis=kurtosis,
        kurtosis_expected=expected,
        kurtosis_statistic=standard,
        kurtosis_p=math.erfc(abs(standard) / math.sqrt(2)),
    )


def whiten(points: Tensor) -> Tensor:
    """Points `[n, p]` whitened: their mean is 0 and their covariance (over n) is I.

    The squared length of a row is then its squared Mahalanobis distance.
    """
    _check_points(points)
    count, width = points.shape
    if count <= width:
        raise ValueError(
            f"points must be more than their dimensions, got {count} points in {width} dimensions"
        )
    centred = points.detach().double()
    centred = centred - centred.mean(0)
    # An SVD of the points, not of their covariance, which would lose half the digits.
    left, values, _ = torch.linalg.svd(centred, full_matrices=False)
    if not bool(values[-1] > values[0] * torch.finfo(values.dtype).eps * count):
        raise ValueError(
            "points must have a covariance of full rank, got one that is singular: "
            "take their principal_components"
        )
    return left * math.sqrt(count)


def principal_components(points: Tensor, components: int = 5) -> Tensor:
    """The leading principal components of points `[n, p]`: `[n, k]`, `k <= components`.

    Components whose standard deviation is below 1e-6 of the first are left out, and no more are
    taken than a test can use (`k <= n - 2`); `k` may be 0.

    >>> line = torch.linspace(0, 1, 9, dtype=torch.float64)[:, None] * torch.ones(9, 4)
    >>> principal_components(line).shape
    torch.Size([9, 1])
    """
    _check_points(points)
    if components < 1:
        raise ValueError(f"components must be at least 1, got {components}")
    centred = points.detach().double()
    centred = centred - centred.mean(0)
    count, width = centred.shape
    most = max(0, min(components, count - 2, width))
    if count <= width:
        # The Gram matrix of the points has the same components and is smaller.
        values, vectors = torch.linalg.eigh(centred @ centred.mT)
        coordinates = vectors * values.clamp(min=0).sqrt()
    else:
        values, vectors = torch.linalg.eigh(centred.mT @ centred)
        coordinates = centred @ vectors
    values, coordinates = values.flip(0), coordinates.flip(1)
    kept = int(((values > 0) & (values > 1e-12 * values[0])).sum())
    return coordinates[:, : min(most, kept)]


def qq_points(points: Tensor, count: int = 64) -> Tensor:
    """Quantiles of chi-square against those of the squared Mahalanobis distances, `[k, 2]`.

    Point i of n stands at the probability `(i - 1/2) / n`; of more than `count` points evenly
    spaced ones are taken, the first and the last among them.

    >>> qq_points(torch.randn(200, 3), count=10).shape
    torch.Size([10, 2])
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    white = whiten(points)
    distance = white.square().sum(1).sort().values
    total = len(distance)
    chosen = torch.linspace(0, total - 1, min(count, total), dtype=torch.float64).round().long()
    probability = (chosen.double() + 0.5) / total
    return torch.stack((chi_square_quantile(probability, white.shape[1]), distance[chosen]), 1)


def chi_square_tail(statistic: float, degrees: float) -> float:
    """The probability that chi-square exceeds `statistic`.

    >>> round(chi_square_tail(3.841459, 1), 4)
    0.05
    """
    if statistic <= 0:
        return 1.0
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def chi_square_quantile(probability: Tensor, degrees: float) -> Tensor:
    """The quantiles of chi-square at probabilities in (0, 1).

    >>> round(chi_square_quantile(torch.tensor([0.95], dtype=torch.float64), 1).item(), 4)
    3.8415
    """
    if not bool(((probability > 0) & (probability < 1)).all()):
        raise ValueError("probability must lie between 0 and 1")
    probability = probability.double()
    shape = torch.full_like(probability, degrees / 2)
    low, high = torch.zeros_like(probability), torch.full_like(probability, degrees + 10.0)
    while bool((torch.special.gammainc(shape, high / 2) < probability).any()):
        high = 2 * high
    for _ in range(200):  # bisection to the precision of float64
        middle = (low + high) / 2
        below = torch.special.gammainc(shape, middle / 2) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _check_points(points: Tensor) -> None:
    if not isinstance(points, Tensor) or not points.is_floating_point():
        got = getattr(points, "dtype", type(points).__name__)
        raise TypeError(f"points must be a floating tensor [n, p], got {got}")
    if points.dim() != 2 or 0 in points.shape:
        raise ValueError(f"points must have shape [n, p], n and p >= 1, got {list(points.shape)}")
    if not bool(points.isfinite().all()):
        raise ValueError("points must be finite, got inf or nan")
