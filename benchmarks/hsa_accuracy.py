"""How exact HSA's native kernel is: random problems of every kind against float64.

`python -m benchmarks.hsa_accuracy --problems 10000 --output FILE` writes the worst errors, relative
to the largest entry of what is compared, per kind of problem.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyscale.ops.hsa import hsa_attention
from polyscale.ops.hsa.native.library import best_instructions
from polyscale.ops.native.instructions import wanted
from polyscale.trees import SignalTree

VALUES_BAR, GRADIENTS_BAR = 2e-6, 2e-5
KINDS = [
    ("blocks", False, True),
    ("blocks", False, False),
    *product(("columns",), (False, True), (True, False)),
]


@dataclass
class RandomProblem:
    """Float32 inputs and the options of a call."""

    name: str
    tree: SignalTree
    tensors: list[Tensor]  # query, key, value and perhaps position embeddings, twice
    options: dict[str, Any]


def random_problem(seed: int) -> RandomProblem:
    """One of every kind of tree, mask, position, width and number of heads."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tree = _random_tree(rng)
    tie, causal, include_self = KINDS[seed % len(KINDS)]
    batch, key_heads, groups = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 1, 2))
    heads, rows = key_heads * groups, tree.num_rows
    width, value_width = rng.choice((3, 8, 16, 33, 64)), rng.choice((1, 5, 16, 64))
    tensors = [
        draw(batch, heads, rows, width),
        draw(batch, key_heads, rows, width),
        draw(batch, key_heads, rows, value_width),
    ]
    options: dict[str, Any] = {
        "tie": tie,
        "causal": causal,
        "include_self": include_self,
        "enable_gqa": groups > 1,
    }
    if rng.random() < 0.4:
        size = (rng.choice((1, heads)), tree.num_nodes, rng.choice((2, 8)))
        tensors += [0.5 * draw(*size), 0.5 * draw(*size)]
    if rng.random() < 0.4:
        options["key_padding_mask"] = torch.rand(batch, rows, generator=generator) < 0.3
    name = f"{tie}{', causal' if causal else ''}{'' if include_self else ', without self'}"
    return RandomProblem(name, tree, tensors, options)


def _random_tree(rng: random.Random) -> SignalTree:
    kind = rng.randrange(5)
    if kind == 0:
        windows = rng.choice(((2, 4, 8, 16), (3, 5), (16, 16), (2,), ()))
        return SignalTree.from_windows(rng.randint(1, 400), windows)
    if kind == 1:
        return SignalTree.batch([_grown(rng, rng.randint(1, 40)) for _ in range(rng.randint(2, 6))])
    if kind == 2:  # a family so large that it alone fills several vectors
        return SignalTree.from_parents([-1, *[0] * rng.randint(17, 90), 1, 1, 2])
    return _grown(rng, rng.randint(1, 120))


def _grown(rng: random.Random, nodes: int) -> SignalTree:
    """Uneven families, chains of only children, leaves at any depth."""
    parents = [-1]
    while len(parents) < nodes:
        parent = rng.randrange(max(0, len(parents) - 12), len(parents))
        parents += [parent] * rng.choice((1, 1, 2, 3, 4, rng.randint(5, 20)))
    return SignalTree.from_parents(parents)


def worst_errors(problem: RandomProblem) -> tuple[float, float]:
    """Of output and log-sums, and of all gradients, relative to the largest entry of each."""
    found, gradients = _run(problem, torch.float32, "native")
    known, expected = _run(problem, torch.float64, "torch")
    return _worst(found, known), _worst(gradients, expected)


def _run(
    problem: RandomProblem, dtype: torch.dtype, impl: str
) -> tuple[list[Tensor], list[Tensor]]:
    tensors = [x.to(dtype).requires_grad_() for x in problem.tensors]
    places = (tensors[3], tensors[4]) if len(tensors) > 3 else None
    query, key, value = tensors[:3]
    output, lse = hsa_attention(
        query,
        key,
        value,
        problem.tree,
        position_scores=places,
        return_lse=True,
        impl=impl,
        **problem.options,
    )
    lse = torch.where(lse.isfinite(), lse, 0.0)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator).to(dtype) for x in (output, lse)]
    total = (output * weights[0]).sum() + (lse * weights[1]).sum()
    gradients = torch.autograd.grad(total, tensors, allow_unused=True, materialize_grads=True)
    return [output.detach(), lse.detach()], list(gradients)


def _worst(found: list[Tensor], known: list[Tensor]) -> float:
    errors = [0.0]
    for one, other in zip(found, known, strict=True):
        largest = float(other.abs().max()) if other.numel() else 0.0
        if not largest:
            errors.append(float(one.abs().max()) if one.numel() else 0.0)
            continue
        errors.append(float((one.double() - other).abs().max()) / largest)
    return max(errors)


def run(problems: int) -> dict[str, Any]:
    """The worst errors per kind of problem, and which problems they were."""
    kinds: dict[str, dict[str, Any]] = {}
    for seed in range(problems):
        problem = random_problem(seed)
        values, gradients = worst_errors(problem)
        worst = kinds.setdefault(
            problem.name, {"problems": 0, "values": 0.0, "gradients": 0.0, "above": []}
        )
        worst["problems"] += 1
        if values > VALUES_BAR or gradients > GRADIENTS_BAR:
            worst["above"].append({"seed": seed, "values": values, "gradients": gradients})
        worst["values"] = max(worst["values"], values)
        worst["gradients"] = max(worst["gradients"], gradients)
    return {
        "benchmark": "hsa_accuracy",
        "problems": problems,
        "instructions": wanted or best_instructions(),
        "values_bar": VALUES_BAR,
        "gradients_bar": GRADIENTS_BAR,
        "kinds": kinds,
    }


def main() -> None:
    """Run and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=10_000)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = run(options.problems)
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result["kinds"], indent=2))


if __name__ == "__main__":
    main()
