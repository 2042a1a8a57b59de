"""Reciprocal and directional attention: the symmetric and the antisymmetric part of scores.

`S = (S + S^T) / 2 + (S - S^T) / 2` is the only way to write S as a symmetric and an antisymmetric
matrix, and the two are orthogonal: their squared entries (energies) add up to those of S.

The split commutes with downsampling. Every level's input is linear in the finest, so with
`S_l = X_l M X_l^T` the parts of `S_l` are `X_l M_s X_l^T` and `X_l M_a X_l^T`: splitting the form
once splits every level. Where all channels share their filter (`downsampling="mean"`, or depthwise
taps that do not differ) `X_l = P_l X` with the matrix of `downsampling_matrix`, so

    S_l = P_l S P_l^T,    sym(S_l) = P_l sym(S) P_l^T,    anti(S_l) = P_l anti(S) P_l^T,

and where channel c has a filter of its own, with `S^(cd) = x_c M_cd x_d^T`,
`S_l = sum_cd P_l^(c) S^(cd) P_l^(d)^T`. Repeating blocks is a congruence as well: `U S_l U^T`.
This holds for the linear part. Biases of the projections are not downsampled, so they add
`X_l W_Q b_K 1^T + 1 b_Q^T W_K^T X_l^T + b_Q . b_K` at each level instead of `P_l (...) P_l^T`.
The split of `S_l` itself holds with biases as well.
"""

import torch
from torch import Tensor

from polyscale.layers.hierarchy import Hierarchy
from polyscale.ops.layout import level_length


def split(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric and the antisymmetric part of `[..., n, n]`.

    >>> symmetric, antisymmetric = split(torch.tensor([[1.0, 4.0], [2.0, 3.0]]))
    >>> symmetric.tolist(), antisymmetric.tolist()
    ([[1.0, 3.0], [3.0, 3.0]], [[0.0, 1.0], [-1.0, 0.0]])
    """
    _check(scores)
    return (scores + scores.mT) / 2, (scores - scores.mT) / 2


def energy_shares(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Reciprocal share, directional share and energy (sum of squares) of `[..., n, n]`.

    The shares add up to 1; both are 0 where there is no energy.

    >>> reciprocal, directional, energy = energy_shares(torch.tensor([[1.0, 4.0], [2.0, 3.0]]))
    >>> round(reciprocal.item(), 3), round(directional.item(), 3), energy.item()
    (0.933, 0.067, 30.0)
    """
    symmetric, antisymmetric = (part.square().sum((-2, -1)) for part in split(scores))
    energy = symmetric + antisymmetric
    some = energy.clamp(min=torch.finfo(energy.dtype).tiny)
    return symmetric / some, antisymmetric / some, energy


def downsampling_matrix(hierarchy: Hierarchy, length: int, level: int) -> Tensor:
    """`P_l` of each channel, `[C, T_l, T]`: the level's input is `x_l[:, c] = P_l[c] x[:, c]`.

    For depthwise and mean filters; dense ones mix the channels and have no such matrix.

    >>> downsampling_matrix(Hierarchy(1, 2, "mean"), 4, 1)[0].tolist()
    [[0.5, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]]
    """
    if not 0 <= level < hierarchy.levels:
        raise ValueError(f"level must be from 0 to {hierarchy.levels - 1}, got {level}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    filters = [hierarchy.input_filter, *hierarchy.downsamplers]
    present = [one for one in filters if one is not None]
    if any(one.mode == "dense" for one in present):
        raise ValueError("hierarchy must have depthwise or mean filters, got dense ones")
    weights = [one.weight for one in present if one.weight is not None]
    dtype = weights[0].dtype if weights else torch.float64
    channels = present[0].channels if present else 1
    # Batch entry t holds an impulse at position t in every channel.
    impulses = torch.eye(length, dtype=dtype)[..., None].expand(-1, -1, channels)
    with torch.no_grad():
        responses = hierarchy(impulses)[level]  # [T, T_l, C]
    assert responses.shape[1] == level_length(length, level)
    return responses.permute(2, 1, 0)


def _check(scores: Tensor) -> None:
    if not isinstance(scores, Tensor) or scores.dim() < 2 or scores.shape[-1] != scores.shape[-2]:
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must be square [..., n, n], got {got}")
    if not bool(scores.isfinite().all()):
        raise ValueError("scores must be finite: pass them before the mask, got inf or nan")
