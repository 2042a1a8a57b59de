"""Random inputs for HKT attention, and its definition once more, in plain loops."""

import math

import torch
from torch import Tensor

import polyscale as ps
from polyscale.ops.layout import level_length

LENGTHS = (1, 2, 3, 5, 7, 8, 63, 64, 100, 257)
# What the native kernel may err by in float32, relative to the largest entry.
VALUES, GRADIENTS = 2e-6, 2e-5

Case = tuple[list[Tensor], list[Tensor], Tensor, Tensor]


def random_case(
    length: int,
    levels: int,
    *,
    batch: int = 2,
    heads: int = 2,
    head_dim: int = 4,
    value_dim: int = 3,
    dtype: torch.dtype = torch.float64,
    sequences: list[int] | None = None,
    seed: int = 0,
) -> Case:
    """Queries, keys, value and level weights, all with gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        tensor = torch.randn(*shape, dtype=torch.float64, generator=generator)
        return tensor.to(dtype).requires_grad_()

    lengths = [length] if sequences is None else sequences
    blocks = [sum(level_length(n, level) for n in lengths) for level in range(levels)]
    queries = [normal(batch, heads, count, head_dim) for count in blocks]
    keys = [normal(batch, heads, count, head_dim) for count in blocks]
    value = normal(batch, heads, length, value_dim)
    weights = torch.softmax(normal(heads, levels).detach().to(torch.float64), -1)
    return queries, keys, value, weights.to(dtype).requires_grad_()


def gradients(output: Tensor, case: Case) -> list:
    """Gradients of a fixed function of the output by everything that went in."""
    queries, keys, value, weights = case
    generator = torch.Generator().manual_seed(1)
    cotangent = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    return list(
        torch.autograd.grad(output, [*queries, *keys, value, weights], cotangent.to(output.dtype))
    )


def by_loops(
    queries: list[Tensor], keys: list[Tensor], value: Tensor, weights: Tensor, causal: bool
) -> Tensor:
    """One unpadded sequence, `[H, T_l, D]` and `[H, T, Dv]`, number by number."""
    queries, keys = [q.detach() for q in queries], [k.detach() for k in keys]
    value, weights = value.detach(), weights.detach()
    heads, length, _ = value.shape
    output = torch.zeros_like(value)
    for head in range(heads):
        for t in range(length):
            seen = range(t + 1) if causal else range(length)
            scores = []
            for u in seen:
                score = 0.0
                for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
                    q, k = query[head, t // 2**level], key[head, u // 2**level]
                    score += float(weights[head, level] * (q @ k)) / math.sqrt(len(q))
                scores.append(score)
            top = max(scores)
            exponentials = [math.exp(score - top) for score in scores]
            for u, exponential in zip(seen, exponentials, strict=True):
                output[head, t] += exponential / sum(exponentials) * value[head, u]
    return output


def close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether the largest difference is within the tolerance."""
    if actual.shape != expected.shape:
        return False
    return actual.numel() == 0 or bool((actual - expected).abs().max() <= tolerance)


def in_double(case: Case) -> Case:
    """The same numbers in float64, with gradients of their own."""
    queries, keys, value, weights = case

    def double(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_()

    return [double(q) for q in queries], [double(k) for k in keys], double(value), double(weights)


def error(actual: Tensor, expected: Tensor, size: float = 0.0) -> float:
    """Largest difference over the largest expected number, or over `size` if that is larger."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    expected = expected.detach()
    scale = max(expected.abs().max().item(), size)
    difference = (actual.detach().double() - expected).abs().max().item()
    return difference / scale if scale else difference


def assert_native_equals_the_reference(case: Case, **options: object) -> None:
    """Values and all gradients, against the reference in float64."""
    actual = ps.hkt_attention(*case, impl="native", **options)
    exact_case = in_double(case)
    expected = ps.hkt_attention(*exact_case, impl="reference", **options)
    assert error(actual, expected) <= VALUES
    exact = gradients(expected, exact_case)
    # Where a gradient cancels to nothing (one token alone) only its terms have a size.
    size = 1e-2 * max(gradient.abs().max().item() for gradient in exact)
    for number, (one, other) in enumerate(zip(gradients(actual, case), exact, strict=True)):
        assert error(one, other, size) <= GRADIENTS, number
