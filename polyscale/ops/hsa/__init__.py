"""Hierarchical Self-Attention."""

from polyscale.ops.hsa.api import hsa_attention, hsa_matrix
from polyscale.ops.hsa.energy import HSAEnergy, hsa_energy

__all__ = ["HSAEnergy", "hsa_attention", "hsa_energy", "hsa_matrix"]
