"""What the HSA tests share: the kinds of attention, random inputs, comparing two paths."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from polyscale.ops.hsa import hsa_attention, reference
from polyscale.trees import SignalTree
from tests.trees.strategies import random_parents

KINDS: list[dict[str, Any]] = [
    {"tie": "blocks", "causal": False, "include_self": True},
    {"tie": "blocks", "causal": False, "include_self": False},
    {"tie": "columns", "causal": False, "include_self": True},
    {"tie": "columns", "causal": False, "include_self": False},
    {"tie": "columns", "causal": True, "include_self": True},
    {"tie": "columns", "causal": True, "include_self": False},
]


def kind_name(kind: dict[str, Any]) -> str:
    causal = "-causal" if kind["causal"] else ""
    return f"{kind['tie']}{causal}{'' if kind['include_self'] else '-without-self'}"


@dataclass
class Inputs:
    """Float64 tensors that require gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    position_scores: tuple[Tensor, Tensor]

    def tensors(self) -> list[Tensor]:
        return [self.query, self.key, self.value, *self.position_scores]


def random_inputs(
    tree: SignalTree, seed: int, *, lead: tuple[int, ...] = (2,), strength: float = 1.0
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        made = strength * torch.randn(*shape, generator=generator, dtype=torch.float64)
        return made.requires_grad_()

    rows, nodes = tree.num_rows, tree.num_nodes
    return Inputs(
        draw(*lead, rows, 3),
        draw(*lead, rows, 3),
        draw(*lead, rows, 4),
        (draw(lead[-1], nodes, 2), draw(lead[-1], nodes, 2)),
    )


def output_and_gradients(
    inputs: Inputs, tree: SignalTree, impl: str, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Return the output and the gradients of a fixed random combination of its entries."""
    output = hsa_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        tree,
        position_scores=inputs.position_scores,
        impl=impl,
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    combination = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    if not output.requires_grad:  # nothing to attend to at all
        return output, [torch.zeros_like(part) for part in inputs.tensors()]
    gradients = torch.autograd.grad(
        output, inputs.tensors(), combination, allow_unused=True, materialize_grads=True
    )
    return output.detach(), list(gradients)


def assert_paths_agree(inputs: Inputs, tree: SignalTree, **options: Any) -> None:
    """Values to 1e-9 and all gradients to 1e-7, fast against reference."""
    fast, fast_gradients = output_and_gradients(inputs, tree, "torch", **options)
    slow, slow_gradients = output_and_gradients(inputs, tree, "reference", **options)
    torch.testing.assert_close(fast, slow, atol=1e-9, rtol=0)
    for name, one, other in zip(
        ("query", "key", "value", "eps_q", "eps_k"), fast_gradients, slow_gradients, strict=True
    ):
        torch.testing.assert_close(
            one, other, atol=1e-7, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


@cache
def random_tree(seed: int, max_leaves: int = 12, max_family: int = 8) -> SignalTree:
    """Draw a tree of uneven depth with one-child chains; deep chains have tests of their own."""
    rng = random.Random(seed)
    while True:
        parents = random_parents(rng, max_leaves=max_leaves, max_family=max_family)
        tree = SignalTree.from_parents(parents)
        if tree.max_depth < 100:
            return tree


def settings_of(tree: SignalTree, inputs: Inputs, **kind: Any) -> reference.Settings:
    return reference.Settings(
        scale=inputs.query.shape[-1] ** -0.5,
        position_query=inputs.position_scores[0],
        position_key=inputs.position_scores[1],
        **kind,
    )


@cache
def bushy_tree() -> SignalTree:
    """Return a tree of ten leaves at depths 1 to 4, families of 1 to 4 and a one-child chain."""
    return SignalTree.from_parents([-1, 0, 0, 0, 0, 1, 1, 1, 3, 4, 4, 5, 5, 5, 8, 9, 9, 14])
