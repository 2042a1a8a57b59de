"""How far the merged scores are from flat attention, and why.

For one query row let `p = softmax(flat scores)`, `A = softmax(merged scores)` and
`delta = flat - merged`. Then exactly `KL(p || A) = E_p[delta] + log E_p[exp(-delta)]`, the cumulant
series of delta: `Var / 2 - c3 / 6 + c4 / 24 - ...`. With keys in blocks of some stride the variance
splits (law of total variance), so that

    KL = resolution + drift + non-Gaussian,
    resolution = E[Var(delta | block)] / 2,    drift = Var(E[delta | block]) / 2,

all under p. The first two are never negative; the third is the remainder, whose first terms are
`-c3 / 6` and `c4 / 24`. For large delta these terms need not be close to it.

By level: `delta = sum_l delta_l` with `delta_l = alpha_l (flat - up_l(S_l))`, and
`Var(delta) / 2 = sum_l Cov(delta_l, delta) / 2` gives the share of each level in the Gaussian part.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyscale.theory.levels import LevelScores, upsample


@dataclass(frozen=True)
class ErrorParts:
    """Per query row `[..., Q]`; a row that sees no key has zeros and `seen` False."""

    kl: Tensor  # resolution + drift + non_gaussian
    resolution: Tensor
    drift: Tensor
    non_gaussian: Tensor
    third_cumulant_term: Tensor  # -c3 / 6, a part of non_gaussian
    fourth_cumulant_term: Tensor  # c4 / 24, a part of non_gaussian
    total_variation: Tensor
    seen: Tensor  # bool


class ErrorAnalysis:
    """The error of merged scores against flat ones; what is the same for all block sizes.

    >>> flat = torch.tensor([[0.0, 1.0, -torch.inf]], dtype=torch.float64)
    >>> parts = ErrorAnalysis(flat, torch.zeros_like(flat).where(flat > -9, flat)).parts(stride=2)
    >>> total = parts.resolution + parts.drift + parts.non_gaussian
    >>> round(parts.kl.item(), 4), bool((total - parts.kl).abs().max() < 1e-15)
    (0.1109, True)
    """

    def __init__(self, flat: Tensor, scores: Tensor) -> None:
        """Take scores `[..., Q, T]`, minus infinity in both where a query may not see a key."""
        _check_scores(flat, scores)
        allowed = flat > -torch.inf
        self.seen = allowed.any(-1)  # [..., Q]
        delta = torch.where(allowed, flat - scores, 0.0)
        self.log_p = _log_softmax(flat, allowed)
        self.p = self.log_p.exp()
        log_a = _log_softmax(scores, allowed)
        self.total_variation = (self.p - log_a.exp()).abs().sum(-1) / 2
        # Centred first, so that the terms below do not suffer from cancellation.
        self.centred = delta - (self.p * delta).sum(-1, keepdim=True)
        square = self.centred.square()
        self.variance = (self.p * square).sum(-1)
        self.third = (self.p * square * self.centred).sum(-1)
        self.fourth = (self.p * square * square).sum(-1) - 3 * self.variance.square()
        generating = torch.logsumexp(self.log_p - self.centred, -1)
        self.kl = torch.where(self.seen, generating, 0.0).clamp(min=0.0)

    def parts(self, stride: int) -> ErrorParts:
        """The decomposition for blocks of `stride` keys, counted from the first."""
        if stride < 1:
            raise ValueError(f"stride must be at least 1, got {stride}")
        within, between = _block_variances(self.p, self.centred, stride)
        return ErrorParts(
            kl=self.kl,
            resolution=within / 2,
            drift=between / 2,
            non_gaussian=self.kl - self.variance / 2,
            third_cumulant_term=-self.third / 6,
            fourth_cumulant_term=self.fourth / 24,
            total_variation=self.total_variation,
            seen=self.seen,
        )

    def covariance(self, part: Tensor) -> Tensor:
        """`Cov_p(part, delta)` per row, for finite `[..., Q, T]`."""
        return (self.p * part * self.centred).sum(-1)


def error_decomposition(flat: Tensor, scores: Tensor, stride: int) -> ErrorParts:
    """Resolution, drift and non-Gaussian part of `KL(softmax(flat) || softmax(scores))` per row.

    Args:
        flat: the scores of flat attention `[..., Q, T]`; minus infinity for what is masked.
        scores: the merged scores; masked where `flat` is.
        stride: keys per block, counted from the first key.

    Example:
        >>> flat = torch.randn(4, 6, dtype=torch.float64)
        >>> parts = error_decomposition(flat, 0.5 * flat, stride=2)
        >>> direct = (flat.softmax(-1) * (flat.log_softmax(-1) - (0.5 * flat).log_softmax(-1)))
        >>> bool((parts.kl - direct.sum(-1)).abs().max() < 1e-12)
        True
    """
    return ErrorAnalysis(flat, scores).parts(stride)


def _check_scores(flat: Tensor, scores: Tensor) -> None:
    for name, tensor in (("flat", flat), ("scores", scores)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise TypeError(f"{name} must be a floating tensor, got {got}")
        if bool((tensor.isnan() | (tensor == torch.inf)).any()):
            raise ValueError(f"{name} must be finite or minus infinity, got nan or infinity")
    if flat.shape != scores.shape or flat.dim() < 1 or not flat.shape[-1]:
        raise ValueError(
            f"flat and scores must have one shape [..., Q, T] with T >= 1, got {list(flat.shape)} "
            f"and {list(scores.shape)}"
        )
    if not torch.equal(flat == -torch.inf, scores == -torch.inf):
        raise ValueError(
            "flat and scores must be minus infinity at the same places (one mask for both)"
        )


def _log_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Log-probabilities; minus infinity for masked keys, and in a row without any key."""
    seen = allowed.any(-1, keepdim=True)
    safe = torch.where(seen, scores, 0.0)
    return torch.where(allowed, safe.log_softmax(-1), -torch.inf)


def _block_variances(p: Tensor, centred: Tensor, stride: int) -> tuple[Tensor, Tensor]:
    """`E[Var(delta | block)]` and `Var(E[delta | block])` under p, delta having mean 0."""
    padding = -p.shape[-1] % stride
    p, centred = (
        torch.nn.functional.pad(part, (0, padding)).unflatten(-1, (-1, stride))
        for part in (p, centred)
    )  # [..., Q, blocks, stride]
    mass = p.sum(-1)
    # A block without mass contributes to neither.
    mean = (p * centred).sum(-1) / torch.where(mass > 0, mass, 1.0)
    within = (p * (centred - mean[..., None]).square()).sum((-2, -1))
    return within, (mass * mean.square()).sum(-1)


def level_contributions(found: LevelScores, levels: int, rows: Tensor | None = None) -> Tensor:
    """`Cov_p(delta_l, delta) / 2` of every level, `[H, levels, Q]`: their sum is `Var(delta) / 2`.

    Level 0 always has 0. A negative value means that the level compensates for others.
    """
    analysis, flat = _against_flat(found, levels, rows)
    weights = found.weights(levels)
    parts = []
    for level in range(levels):
        up = upsample(found.scores[level], level, found.length, rows)
        parts.append(analysis.covariance(weights[:, level, None, None] * (flat - up)) / 2)
    return torch.stack(parts, 1)


def analyse_levels(found: LevelScores, levels: int, rows: Tensor | None = None) -> ErrorAnalysis:
    """The error of the first `levels` levels, merged, against level 0; mask applied."""
    return _against_flat(found, levels, rows)[0]


def _against_flat(
    found: LevelScores, levels: int, rows: Tensor | None
) -> tuple[ErrorAnalysis, Tensor]:
    if not 1 <= levels <= len(found.scores):
        raise ValueError(f"levels must be from 1 to {len(found.scores)}, got {levels}")
    flat = upsample(found.scores[0], 0, found.length, rows)
    hidden = ~found.allowed(rows)
    merged = found.merged(levels, rows)
    analysis = ErrorAnalysis(
        flat.masked_fill(hidden, -torch.inf), merged.masked_fill(hidden, -torch.inf)
    )
    return analysis, flat


@dataclass(frozen=True)
class Tail:
    """Largest contribution of all levels from level l on to a merged score; `[H, L]` each."""

    bound: Tensor  # sum_{m >= l} alpha_m max|S_m|
    measured: Tensor  # max |sum_{m >= l} alpha_m up_m(S_m)|
    terms: Tensor  # alpha_l max|S_l|


def tail_bound(scores: Sequence[Tensor], weights: Tensor, allowed: Tensor | None = None) -> Tail:
    """The bound on the tail from each level on, and the tail itself.

    Args:
        scores: per level `[H, T_l, T_l]`, finite, before the mask; level l has the length T / 2^l,
            rounded up.
        weights: `[H, L]`, finite.
        allowed: bool `[T, T]`: pairs of tokens that count; all if None.

    Example:
        >>> scores = [torch.ones(1, 4, 4), -torch.ones(1, 2, 2)]
        >>> tail = tail_bound(scores, torch.tensor([[0.7, 0.3]]))
        >>> [round(x, 2) for x in tail.bound[0].tolist() + tail.measured[0].tolist()]
        [1.0, 0.3, 0.4, 0.3]
    """
    length = _check_tail(scores, weights, allowed)
    measured: list[Tensor] = []
    terms: list[Tensor] = []
    tail = torch.zeros((), dtype=scores[0].dtype)
    for level in reversed(range(len(scores))):
        up = upsample(weights[:, level, None, None] * scores[level], level, length)
        if allowed is not None:
            up = up.masked_fill(~allowed, 0.0)
        tail = tail + up
        measured.insert(0, tail.abs().amax((-2, -1)))
        terms.insert(0, up.abs().amax((-2, -1)))
    term = torch.stack(terms, -1)
    bound = term.flip(-1).cumsum(-1).flip(-1)
    return Tail(bound, torch.stack(measured, -1), term)


def _check_tail(scores: Sequence[Tensor], weights: Tensor, allowed: Tensor | None) -> int:
    """The length T, after checking that the arguments fit together."""
    named = [(f"scores[{level}]", score) for level, score in enumerate(scores)]
    for name, tensor in [*named, ("weights", weights)]:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            got = getattr(tensor, "dtype", type(tensor).__name__)
            raise TypeError(f"{name} must be a floating tensor, got {got}")
    if weights.dim() != 2 or not len(scores) or weights.shape[1] != len(scores):
        raise ValueError(
            f"weights must have shape [H, L] with one column for each of the {len(scores)} levels, "
            f"got {list(weights.shape)}"
        )
    heads, length = len(weights), scores[0].shape[-1] if scores[0].dim() else 0
    if not length:
        raise ValueError(
            f"scores[0] must have shape [H, T, T] with T >= 1, got {list(scores[0].shape)}"
        )
    for level, score in enumerate(scores):
        size = -(-length // 2**level)
        if score.shape != (heads, size, size):
            raise ValueError(
                f"scores[{level}] must have shape [H, T_l, T_l] = {[heads, size, size]}, for the "
                f"{heads} heads of weights and T = {length}; got {list(score.shape)}"
            )
    for name, tensor in [*named, ("weights", weights)]:
        if not bool(tensor.isfinite().all()):
            advice = "" if name == "weights" else ": pass the scores before the mask"
            raise ValueError(f"{name} must be finite{advice}, got inf or nan")
    if allowed is not None and (
        not isinstance(allowed, Tensor)
        or allowed.dtype != torch.bool
        or allowed.shape != (length, length)
    ):
        got = type(allowed).__name__
        if isinstance(allowed, Tensor):
            got = f"{allowed.dtype} {list(allowed.shape)}"
        raise ValueError(f"allowed must be None or bool [T, T] = {[length, length]}, got {got}")
    return length


def decay_ratio(terms: Tensor) -> list[float | None]:
    """The ratio of successive terms `[H, L]`, by least squares on their logarithms.

    None where no line can be fitted: fewer than two levels, or a term of 0.

    >>> [ratio and round(ratio, 6) for ratio in decay_ratio(torch.tensor([[8.0, 4, 2], [1, 0, 0]]))]
    [0.5, None]
    """
    if terms.dim() != 2 or bool(terms.isnan().any()):
        got = "nan" if terms.dim() == 2 else list(terms.shape)
        raise ValueError(f"terms must be numbers [H, L], got {got}")
    ratios: list[float | None] = []
    for row in terms.double().tolist():
        if len(row) < 2 or min(row) <= 0:
            ratios.append(None)
            continue
        logs = [math.log(term) for term in row]
        middle = (len(row) - 1) / 2
        mean = sum(logs) / len(logs)
        slope = sum((at - middle) * (log - mean) for at, log in enumerate(logs))
        ratios.append(math.exp(slope / sum((at - middle) ** 2 for at in range(len(row)))))
    return ratios
