"""What the papers claim, as functions: on tensors, on layers, and gathered for whole models.

>>> import torch
>>> import polyscale.theory as theory
>>> flat = torch.randn(5, 8, dtype=torch.float64)
>>> parts = theory.error_decomposition(flat, 0.9 * flat, stride=2)
>>> bool((parts.kl - parts.resolution - parts.drift - parts.non_gaussian).abs().max() < 1e-12)
True
"""

from polyscale.cost.hkt import attention_cost
from polyscale.theory.analyze import (
    analyze_attention,
    analyze_hkt,
    analyze_hsa,
    analyze_snapshots,
)
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

__all__ = [
    "analyze_attention",
    "analyze_hkt",
    "analyze_hsa",
    "analyze_snapshots",
    "attention_cost",
    "bilinear_forms",
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
