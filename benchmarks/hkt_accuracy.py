"""Errors of HKT in float32 on ordinary and on hard inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polyscale.ops.hkt.api import hkt_attention
from polyscale.ops.layout import level_length

LEVELS, LENGTH, HEADS, WIDTH = 3, 512, 4, 64
VALUE_BAR, GRADIENT_BAR = 2e-6, 2e-5  # of the largest entry
IMPLEMENTATIONS = ("native", "sdpa", "reference")
HALF_AN_ULP = 2.0**-25  # the mean relative error of rounding an input to float32

Inputs = list[Tensor]  # queries, keys, value, weights


def make_inputs(case: str, seed: int = 0) -> Inputs:
    """Inputs of one case in float32."""
    generator = torch.Generator().manual_seed(seed)
    counts = [level_length(LENGTH, level) for level in range(LEVELS)]
    queries, keys = (
        [torch.randn(1, HEADS, count, WIDTH, generator=generator) for count in counts]
        for _ in range(2)
    )
    value = torch.randn(1, HEADS, LENGTH, WIDTH, generator=generator)
    weights = torch.softmax(torch.randn(HEADS, LEVELS, generator=generator), -1)
    _CASES[case](queries, keys)
    return [*queries, *keys, value, weights]


def _equal_keys(queries: Inputs, keys: Inputs) -> None:
    for level, key in enumerate(keys):
        key[:, :, : (LENGTH // 2) >> level] = key[:, :, :1]


def _dominant_key(queries: Inputs, keys: Inputs) -> None:
    keys[0][:, :, LENGTH // 4] *= 80


def _sharp_attention(queries: Inputs, keys: Inputs) -> None:
    """One key scores 17 more than the others, which keep about 1e-5 of the attention."""
    for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
        query[..., 0] = 4.0
        key *= 0.1
        key[..., 0] = 0.0
        key[:, :, (LENGTH // 4) >> level, 0] = 17 * WIDTH**0.5 / 4


def _huge_scores(queries: Inputs, keys: Inputs) -> None:
    for query in queries:
        query *= 1e4


_CASES: dict[str, Callable[[Inputs, Inputs], None]] = {
    "random": lambda queries, keys: None,
    "long runs of equal keys": _equal_keys,
    "one key 80 times as long": _dominant_key,
    "one key with all but 1e-5 of the attention": _sharp_attention,
    "scores of ±10,000": _huge_scores,
}


def compare_accuracy(seeds: int) -> list[dict[str, Any]]:
    """A row for each case: causal errors relative to the largest entry, the worst of all seeds."""
    rows = []
    for case in _CASES:
        found = [_errors_of_all(case, seed) for seed in range(seeds)]
        row: dict[str, Any] = {"case": case}
        for name in found[0]:
            row[name] = {
                part: max(one[name][part] for one in found) for part in ("values", "gradients")
            }
        rows.append(row)
    return rows


def _errors_of_all(case: str, seed: int) -> dict[str, dict[str, float]]:
    inputs = make_inputs(case, seed)
    exact = _answers(_hkt("reference"), [one.double() for one in inputs])
    generator = torch.Generator().manual_seed(1)
    moved = [
        one.double()
        * (1 + HALF_AN_ULP * (2 * torch.rand(one.shape, generator=generator).double() - 1))
        for one in inputs
    ]
    found = {"inputs": _errors(_answers(_hkt("reference"), moved), exact)}
    for impl in IMPLEMENTATIONS:
        found[impl] = _errors(_answers(_hkt(impl), inputs), exact)
    flat = [inputs[0], inputs[LEVELS], inputs[2 * LEVELS]]
    flat_exact = _answers(_standard, [one.double() for one in flat])
    found["standard attention"] = _errors(_answers(_standard, flat), flat_exact)
    return found


def _hkt(impl: str) -> Callable[[Inputs], Tensor]:
    def attend(inputs: Inputs) -> Tensor:
        queries, keys = inputs[:LEVELS], inputs[LEVELS : 2 * LEVELS]
        return hkt_attention(queries, keys, *inputs[2 * LEVELS :], causal=True, impl=impl)

    return attend


def _standard(inputs: Inputs) -> Tensor:
    query, key, value = inputs
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def _answers(attend: Callable[[Inputs], Tensor], inputs: Inputs) -> list[Tensor]:
    """The output, and the gradients of a fixed function of it."""
    inputs = [one.detach().requires_grad_() for one in inputs]
    output = attend(inputs)
    generator = torch.Generator().manual_seed(2)
    cotangent = torch.randn(output.shape, generator=generator).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, cotangent)]


def _errors(found: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    values, *gradients = (
        float((one.double() - other).abs().max() / other.abs().max())
        for one, other in zip(found, exact, strict=True)
    )
    return {"values": values, "gradients": max(gradients)}


def accuracy_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table in Markdown."""
    columns = [name for name in rows[0] if name not in ("case", "inputs")]
    lines = [
        "## Accuracy in float32",
        "",
        "Largest error relative to the largest entry, values / gradients (of queries, keys, values "
        "and level weights, each by its own largest entry, the worst of them), against the "
        f"reference in float64 (T = {LENGTH}, D = {WIDTH}, causal). Target: {VALUE_BAR:.0e} / "
        f"{GRADIENT_BAR:.0e}. *Inputs*: how far the exact answer moves if every input moves by "
        "less than half a unit in its last place, for a sense of how hard a case is.",
        "",
        "| inputs | " + " | ".join(["*inputs*", *columns]) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for row in rows:
        cells = (row[name] for name in ("inputs", *columns))
        shown = " | ".join(f"{one['values']:.1e} / {one['gradients']:.1e}" for one in cells)
        lines.append(f"| {row['case']} | {shown} |")
    return [*lines, ""]
