"""What the papers claim, as functions on tensors and layers.

`analyze` and the other functions for whole models come from `polyscale.analysis`.

>>> import torch
>>> import polyscale.theory as theory
>>> flat = torch.randn(5, 8, dtype=torch.float64)
>>> parts = theory.error_decomposition(flat, 0.9 * flat, stride=2)
>>> bool((parts.kl - parts.resolution - parts.drift - parts.non_gaussian).abs().max() < 1e-12)
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polyscale.cost.hkt import attention_cost
from polyscale.theory.error import decay_ratio, error_decomposition, tail_bound
from polyscale.theory.kernel import bilinear_forms, product_spectrum, spectrum
from polyscale.theory.levels import level_scores, with_levels
from polyscale.theory.normality import mardia, principal_components, qq_points
from polyscale.theory.symmetry import downsampling_matrix, energy_shares, split
from polyscale.theory.trees import (
    family_dilution,
    family_losses,
    finer_tree,
    flat_scores,
    open_family,
)

if TYPE_CHECKING:
    from polyscale.analysis import (
        analyze,
        analyze_attention,
        analyze_hkt,
        analyze_hsa,
        analyze_snapshots,
        capture,
    )

__all__ = [
    "analyze",
    "analyze_attention",
    "analyze_hkt",
    "analyze_hsa",
    "analyze_snapshots",
    "attention_cost",
    "bilinear_forms",
    "capture",
    "decay_ratio",
    "downsampling_matrix",
    "energy_shares",
    "error_decomposition",
    "family_dilution",
    "family_losses",
    "finer_tree",
    "flat_scores",
    "level_scores",
    "mardia",
    "open_family",
    "principal_components",
    "product_spectrum",
    "qq_points",
    "spectrum",
    "split",
    "tail_bound",
    "with_levels",
]

# The analysis imports this package, so it is imported on first use.
_OF_ANALYSIS = (
    "analyze",
    "analyze_attention",
    "analyze_hkt",
    "analyze_hsa",
    "analyze_snapshots",
    "capture",
)


def __getattr__(name: str) -> Any:
    if name not in _OF_ANALYSIS:
        raise AttributeError(f"module 'polyscale.theory' has no attribute {name!r}")
    return getattr(import_module("polyscale.analysis"), name)


def __dir__() -> list[str]:
    return list(__all__)
