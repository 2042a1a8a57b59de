"""Hierarchical Self-Attention."""

from polyscale.ops.hsa.api import hsa_attention, hsa_matrix
from polyscale.ops.hsa.checks import IMPLEMENTATIONS, TIES, PositionScores, check_request
from polyscale.ops.hsa.decode import OpenFamily, add_token, close_families, hsa_decode, hsa_step
from polyscale.ops.hsa.energy import HSAEnergy, hsa_energy
from polyscale.ops.hsa.extend import hsa_extend

__all__ = [
    "IMPLEMENTATIONS",
    "TIES",
    "HSAEnergy",
    "OpenFamily",
    "PositionScores",
    "add_token",
    "check_request",
    "close_families",
    "hsa_attention",
    "hsa_decode",
    "hsa_energy",
    "hsa_extend",
    "hsa_matrix",
    "hsa_step",
]
