"""alpha-entmax over a family whose entries stand for several equal ones each.

With `u = alpha - 1` the weight of an entry is `w(s) = [1 + u (s - t)]_+ ^ (1 / u)`, where t makes
`sum_j m_j w(s_j) = 1` for multiplicities m_j; u -> 0 gives `exp(s - t)`, that is softmax with
t the log-sum-exp. The value is the convex conjugate `max_w sum_j m_j (w_j s_j - tsallis(w_j))`,
which at the maximiser is `t / alpha + (1 - 1 / alpha) sum_j m_j w_j s_j`. See docs/hsa-math.md.

The `entmax` package has no multiplicities; writing each entry down m_j times would cost what the
hierarchy saves. The reference does exactly that, and the tests compare.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

SERIES = 1e-2  # below this, differences of nearly equal terms are summed as series


class _Entmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, counts: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        u = alpha - 1
        counts = counts.expand_as(scores)
        counts = counts.masked_fill(scores == -torch.inf, 0.0)
        empty = counts.sum(-1, keepdim=True) == 0
        top = scores.amax(-1, keepdim=True).masked_fill(empty, 0.0)
        shifted = (scores - top).masked_fill(counts == 0, -torch.inf)
        threshold = _threshold(shifted, counts, u)
        gap = shifted - threshold
        weights = counts * _power(gap, u)
        weights = weights / weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
        inner = (weights * shifted.masked_fill(weights == 0, 0.0)).sum(-1, keepdim=True)
        value = top + threshold / alpha + (1 - 1 / alpha) * inner
        value = value.masked_fill(empty, -torch.inf).squeeze(-1)
        ctx.save_for_backward(weights, gap, alpha)
        return weights, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor | None]:
        to_weights, to_value = gradients
        weights, gap, alpha = ctx.saved_tensors
        u = alpha - 1
        support = weights > 0
        y = gap.masked_fill(~support, 0.0)
        slope = (weights / (1 + u * y)).masked_fill(~support, 0.0)  # dw/ds at fixed t
        total = slope.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        mean = (to_weights * slope).sum(-1, keepdim=True) / total
        to_value = to_value.masked_fill(~support.any(-1), 0.0).unsqueeze(-1)
        to_scores = slope * (to_weights - mean) + to_value * weights
        to_alpha = None
        if ctx.needs_input_grad[2]:
            h = u * y
            direct = weights * y.square() * _series_exponent(h)  # dw/du at fixed t
            log_weight = _log_power(y, u)
            change = y.square() * _series_logarithm(h) + log_weight * (1 + alpha * y) - 2 * y
            parts = (to_weights - mean) * direct - to_value * weights * change / alpha.square()
            to_alpha = parts.sum()
        return to_scores, None, to_alpha


def normalise_entmax(scores: Tensor, counts: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mass on each entry [..., n] and the conjugate [...].

    `scores` [..., n] may hold minus infinity, `counts` (broadcast to it) are multiplicities, and
    `alpha` >= 1 is a tensor without dimensions; 1 is softmax. Differentiable in scores and alpha.

    >>> mass, _ = normalise_entmax(torch.tensor([1.0, 0.0]), torch.ones(2), torch.tensor(2.0))
    >>> mass.tolist()
    [1.0, 0.0]
    """
    return _Entmax.apply(scores, counts, alpha)


def _threshold(shifted: Tensor, counts: Tensor, u: Tensor) -> Tensor:
    """Return t by bisection; the largest score is 0, so t is between 0 and that of equal scores."""
    members = counts.sum(-1, keepdim=True).clamp(min=1).log()
    low = torch.zeros_like(members)
    width = members if float(u) == 0 else -torch.expm1(-u * members) / u
    steps = 60 if shifted.dtype == torch.float64 else 30
    if not bool((width > 0).any()):
        return low  # one entry in each row
    for _ in range(steps):
        width = width / 2
        middle = low + width
        mass = (counts * _power(shifted - middle, u)).sum(-1, keepdim=True)
        low = torch.where(mass >= 1, middle, low)
    return low


def _log_power(y: Tensor, u: Tensor) -> Tensor:
    return y if float(u) == 0 else torch.log1p((u * y).clamp(min=-1.0)) / u


def _power(y: Tensor, u: Tensor) -> Tensor:
    """Return [1 + u y]_+ ^ (1 / u), and exp(y) at u = 0."""
    return _log_power(y, u).exp()


def _series_exponent(h: Tensor) -> Tensor:
    """Return (h / (1 + h) - log(1 + h)) / h^2."""
    series = torch.zeros_like(h)
    for n in reversed(range(10)):
        series = series * -h - (n + 1) / (n + 2)
    safe = torch.where(h.abs() < SERIES, 1.0, h)
    exact = (safe / (1 + safe) - torch.log1p(safe)) / safe.square()
    return torch.where(h.abs() < SERIES, series, exact)


def _series_logarithm(h: Tensor) -> Tensor:
    """Return (log(1 + h) - h) / h^2."""
    series = torch.zeros_like(h)
    for n in reversed(range(10)):
        series = series * -h - 1 / (n + 2)
    safe = torch.where(h.abs() < SERIES, 1.0, h)
    exact = (torch.log1p(safe) - safe) / safe.square()
    return torch.where(h.abs() < SERIES, series, exact)
