"""One function for every kind of model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polyscale.analysis.hkt import analyze_hkt
from polyscale.analysis.hsa import analyze_hsa
from polyscale.analysis.schema import Analysis
from polyscale.analysis.transformer import analyze_attention
from polyscale.layers.hkt import HKTAttention
from polyscale.layers.hsa import HSAAttention


def analyze(
    model: nn.Module | tuple[Tensor, Tensor], batch: Any = None, **options: Any
) -> Analysis:
    """The analysis of a model by the layers it has: HKT, HSA, or any transformer.

    Args:
        model: a module with `HKTAttention` or with `HSAAttention` layers, a pair (query, key) for
            HSA, or a Hugging Face model.
        batch: what the model takes.
        **options: of `analyze_hkt`, `analyze_hsa` or `analyze_attention`.

    Example:
        >>> import torch
        >>> layer = HKTAttention(16, num_heads=2, levels=2)
        >>> found = analyze(layer, torch.randn(1, 12, 16))
        >>> found["meta"]["kind"], found["meta"]["length"]
        ('hkt', 12)
    """
    if isinstance(model, tuple):
        return analyze_hsa(model, batch, **options)
    modules = list(model.modules())
    if any(isinstance(module, HKTAttention) for module in modules):
        return analyze_hkt(model, batch, **options)
    if any(isinstance(module, HSAAttention) for module in modules):
        return analyze_hsa(model, batch, **options)
    return analyze_attention(model, batch, **options)
