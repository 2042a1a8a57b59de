"""Multi-scale attention for PyTorch: HKT and HSA.

Everything a user needs is here: `import polyscale as ps`. What needs only torch is imported
at once; what needs an optional extra is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polyscale.layers.hkt import HKTAttention
from polyscale.layers.hsa import HSAAttention, HTELayer
from polyscale.ops.hkt.api import hkt_attention
from polyscale.ops.hsa import hsa_attention, hsa_energy, hsa_matrix
from polyscale.ops.implementations import implementations
from polyscale.trees import SignalTree

if TYPE_CHECKING:
    from polyscale.models import (
        HKTConfig,
        HKTForCausalLM,
        HKTForSequenceClassification,
        HKTForTokenClassification,
        HKTModel,
        HSAConfig,
        HSAForCausalLM,
        HSAModel,
        HTEConfig,
        HTEForClassification,
        HTEModel,
        collate_trees,
    )

__version__ = "0.1.0"

# Hugging Face models: imported on first use, so that `import polyscale` needs torch alone.
_MODELS = (
    "HKTConfig",
    "HKTForCausalLM",
    "HKTForSequenceClassification",
    "HKTForTokenClassification",
    "HKTModel",
    "HSAConfig",
    "HSAForCausalLM",
    "HSAModel",
    "HTEConfig",
    "HTEForClassification",
    "HTEModel",
    "collate_trees",
)

__all__ = [
    "HKTAttention",
    "HKTConfig",
    "HKTForCausalLM",
    "HKTForSequenceClassification",
    "HKTForTokenClassification",
    "HKTModel",
    "HSAAttention",
    "HSAConfig",
    "HSAForCausalLM",
    "HSAModel",
    "HTEConfig",
    "HTEForClassification",
    "HTELayer",
    "HTEModel",
    "SignalTree",
    "collate_trees",
    "hkt_attention",
    "hsa_attention",
    "hsa_energy",
    "hsa_matrix",
    "implementations",
]


def __getattr__(name: str) -> Any:
    if name in _MODELS:
        return getattr(import_module("polyscale.models"), name)
    raise AttributeError(f"module 'polyscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODELS])
