"""Hierarchical Self-Attention."""

from polyscale.ops.hsa.api import hsa_attention, hsa_matrix
from polyscale.ops.hsa.checks import IMPLEMENTATIONS, TIES, PositionScores, check_request
from polyscale.ops.hsa.decode import OpenFamily, hsa_decode
from polyscale.ops.hsa.energy import HSAEnergy, hsa_energy

__all__ = [
    "IMPLEMENTATIONS",
    "TIES",
    "HSAEnergy",
    "OpenFamily",
    "PositionScores",
    "check_request",
    "hsa_attention",
    "hsa_decode",
    "hsa_energy",
    "hsa_matrix",
]
