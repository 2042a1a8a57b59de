"""When are the scores a kernel? The eigenvalues of symmetric parts.

Scores are `S = X M X^T` with `M = W_Q W_K^T`. If `M_s = (M + M^T) / 2` is positive semidefinite,
so is `(S + S^T) / 2 = X M_s X^T`, whatever the input; downsampling replaces X by another input, and
the merge repeats rows and columns alike (`U S_l U^T`) and takes a sum with positive weights, so the
same holds at every level and for the merged scores.

How often can that be? W_Q and W_K of one head are `[C, D]`. Then
`M_s = [W_Q W_K] J [W_Q W_K]^T` with `J = [[0, I], [I, 0]] / 2`, which has D eigenvalues 1/2 and
D eigenvalues -1/2. Where the 2 D columns are independent (`C >= 2 D`: any model with two heads or
more, whose weights do not happen to be dependent) Sylvester's law of inertia leaves `M_s` exactly D
positive and D negative eigenvalues: the condition fails in every such head, and half of the nonzero
eigenvalues are negative. Training can only change their size, `negative_share` here.

With biases the scores are `X' M' X'^T` for inputs with a one appended, and `M'` of the weights with
the biases appended decides.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyscale.layers.hkt import HKTAttention


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of a symmetric matrix and figures derived from them, per leading dimension."""

    eigenvalues: Tensor  # [..., k], descending; what is not among them is zero
    size: int  # of the matrix: size - k further eigenvalues are zero
    fraction_negative: Tensor  # of the eigenvalues that are not zero to rounding
    negative_share: Tensor  # sum of |negative| over sum of |all|; 1/2 if there is no preference
    smallest: Tensor
    margin: Tensor  # the smallest over the largest in size: >= 0 up to rounding if semidefinite
    psd: Tensor  # bool: semidefinite to rounding


def spectrum(matrix: Tensor) -> Spectrum:
    """Eigenvalues of the symmetric part of `[..., n, n]`.

    They are computed in float64. What counts as zero follows from the precision of `matrix`, whose
    entries are rounded: a Gram matrix in float32 has negative eigenvalues far above float64's.

    >>> found = spectrum(torch.tensor([[2.0, 1.0], [-1.0, -1.0]]))
    >>> found.eigenvalues.tolist(), bool(found.psd), found.fraction_negative.item()
    ([2.0, -1.0], False, 0.5)
    """
    if not isinstance(matrix, Tensor) or matrix.dim() < 2 or matrix.shape[-1] != matrix.shape[-2]:
        got = list(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"matrix must be square [..., n, n], got {got}")
    if matrix.shape[-1] == 0:
        raise ValueError("matrix must have at least one row, got n = 0")
    if not bool(matrix.isfinite().all()):
        raise ValueError("matrix must be finite: pass the scores before the mask, got inf or nan")
    precision = _precision(matrix)
    matrix = matrix.detach().double()
    # Rounding is that of the whole matrix, even where its symmetric part is small.
    scale = torch.linalg.matrix_norm(matrix)
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    return _spectrum_of(values, matrix.shape[-1], precision * scale)


def product_spectrum(left: Tensor, right: Tensor) -> Spectrum:
    """Eigenvalues of `(L R^T + R L^T) / 2` for `[..., n, d]`, at most `2 d` of them not zero.

    Costs `n d^2`: the matrix itself is never made.

    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> product_spectrum(x, x).eigenvalues.shape, bool(product_spectrum(x, x).psd)
    (torch.Size([2]), True)
    """
    if left.shape != right.shape or left.dim() < 2:
        raise ValueError(
            f"left and right must have one shape [..., n, d], got {list(left.shape)} and "
            f"{list(right.shape)}"
        )
    precision = max(_precision(left), _precision(right))
    left, right = left.detach().double(), right.detach().double()
    size, width = left.shape[-2:]
    scale = torch.linalg.matrix_norm(left) * torch.linalg.matrix_norm(right)
    if size > 2 * width:
        # Q R = [L R]: the orthogonal factor changes no eigenvalue.
        factor = torch.linalg.qr(torch.cat((left, right), -1), mode="r").R  # [..., 2d, 2d]
        left, right = factor[..., :width], factor[..., width:]
    product = left @ right.mT
    return _spectrum_of(torch.linalg.eigvalsh((product + product.mT) / 2), size, precision * scale)


def gram_spectrum(factor: Tensor) -> Spectrum:
    """Eigenvalues of `F F^T` for `[..., n, d]`: squared singular values, never negative."""
    if factor.dim() < 2:
        raise ValueError(f"factor must have shape [..., n, d], got {list(factor.shape)}")
    precision = _precision(factor)
    factor = factor.detach().double()
    values = torch.linalg.svdvals(factor).square().flip(-1)
    return _spectrum_of(
        values, factor.shape[-2], precision * torch.linalg.matrix_norm(factor).square()
    )


def _precision(given: Tensor) -> float:
    """The rounding of the given numbers; integers become float64 exactly."""
    return torch.finfo(given.dtype if given.is_floating_point() else torch.float64).eps


def _spectrum_of(ascending: Tensor, size: int, rounding: Tensor) -> Spectrum:
    """A spectrum from ascending eigenvalues; `rounding` is that of the whole matrix."""
    values = ascending.flip(-1)
    zero = max(values.shape[-1], 8) * rounding  # what rounding may turn a zero into, [...]
    negative = values < -zero[..., None]
    present = values.abs() > zero[..., None]
    magnitude = values.abs().sum(-1)
    smallest = values[..., -1]
    if values.shape[-1] < size:
        smallest = smallest.clamp(max=0.0)
    largest = values.abs().amax(-1)
    lost = values.clamp(max=0.0).abs().sum(-1)
    return Spectrum(
        eigenvalues=values,
        size=size,
        fraction_negative=negative.sum(-1) / present.sum(-1).clamp(min=1),
        negative_share=torch.where(magnitude > 0, lost / magnitude.clamp(min=1e-300), 0.0),
        smallest=smallest,
        margin=torch.where(largest > 0, smallest / largest.clamp(min=1e-300), 0.0),
        psd=~negative.any(-1),
    )


@dataclass(frozen=True)
class Form:
    """The bilinear form of one head (and level, where projections are per level)."""

    head: int
    level: int | None
    form: Spectrum  # of M_s, from the weights only, as the condition is stated
    with_bias: Spectrum | None  # of the form that decides where the projections have biases


def bilinear_forms(layer: HKTAttention) -> list[Form]:
    """The eigenvalues of `M_s` of every head of a layer, and level if each has its projections.

    Covered: the weights, and the biases in `with_bias`. Not covered: rotary positions (`M_s` is
    then the form at distance 0; only for `kernel="psd"` does the condition carry over) and relative
    terms, which add a matrix of their own. The scores on data include both.

    >>> forms = bilinear_forms(HKTAttention(32, num_heads=2, levels=3))
    >>> len(forms), forms[0].form.fraction_negative.item(), bool(forms[0].form.psd)
    (2, 0.5, False)
    """
    if not isinstance(layer, HKTAttention):
        raise TypeError(f"layer must be an HKTAttention, got {type(layer).__name__}")
    found = []
    for number in range(len(layer.q_proj)):
        level = None if layer.shared_projections else number
        query, query_biased = _by_head(layer.q_proj[number], layer.num_heads)  # [H, C, D]
        if layer.kernel == "psd":
            own = layer.head_dim // 2  # the part a of (a, b, c)
            form = gram_spectrum(query[..., :own])
            biased = None
            if query_biased is not None:
                biased = gram_spectrum(query_biased[..., :own])
        else:
            key, key_biased = _by_head(layer.k_proj[number], layer.num_heads)
            form = product_spectrum(query, key)
            biased = None
            if query_biased is not None and key_biased is not None:
                biased = product_spectrum(query_biased, key_biased)
        found += [
            Form(head, level, pick(form, head), None if biased is None else pick(biased, head))
            for head in range(layer.num_heads)
        ]
    return found


def _by_head(projection: Any, heads: int) -> tuple[Tensor, Tensor | None]:
    """A linear layer's weight `[H, C, D]`, and with its bias as one more row `[H, C + 1, D]`."""
    weight = projection.weight.detach().double().unflatten(0, (heads, -1)).mT
    if projection.bias is None:
        return weight, None
    bias = projection.bias.detach().double().view(heads, 1, -1)
    return weight, torch.cat((weight, bias), 1)


def pick(found: Spectrum, *index: int) -> Spectrum:
    """One entry of a spectrum with leading dimensions."""
    return Spectrum(
        eigenvalues=found.eigenvalues[index],
        size=found.size,
        fraction_negative=found.fraction_negative[index],
        negative_share=found.negative_share[index],
        smallest=found.smallest[index],
        margin=found.margin[index],
        psd=found.psd[index],
    )
