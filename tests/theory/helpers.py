"""Layers and models with random weights, for the tests of the theory."""

from typing import Any

import torch
from torch import Tensor, nn

from polyscale.layers.hkt import HKTAttention

# Every option that changes the scores.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"shared_projections": False},
    {"kernel": "psd"},
    {"kernel": "psd", "rotary": True, "causal": False},
    {"kernel": "psd", "shared_projections": False},
    {"values": "merged"},
    {"filter_width": 3},
    {"rotary": True},
    {"relative_positions": 3},
    {"downsampling": "dense", "downsampling_width": 3},
    {"downsampling": "mean", "bias": False},
    {"level_weights": (0.5, 0.2, 0.3)},
    {"level_weights": (0.0, 0.0, 1.0)},
]


def option_name(options: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}" for name, value in options.items()) or "default"


def randomise(module: nn.Module, std: float = 0.5, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(std * noise)
    return module


def random_layer(levels: int = 3, width: int = 16, heads: int = 2, **options: Any) -> HKTAttention:
    layer = HKTAttention(width, heads, levels, impl="reference", **options)
    return randomise(layer).double()


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
