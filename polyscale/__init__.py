"""Multi-scale attention for PyTorch: HKT and HSA.

Everything a user needs is here: `import polyscale as ps`. What needs only torch is imported
at once; what needs an optional extra is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from polyscale._import_hook import once_imported
from polyscale._injection_note import warn_of_lost_injections
from polyscale.layers.hkt import HKTAttention
from polyscale.layers.hsa import HSAAttention, HTELayer
from polyscale.ops.hkt.api import hkt_attention
from polyscale.ops.hsa import hsa_attention, hsa_energy, hsa_matrix
from polyscale.ops.implementations import implementations
from polyscale.ops.levels import LevelSettings, LevelStore, level_attention
from polyscale.ops.opened import opened_attention
from polyscale.trees import SignalTree

if TYPE_CHECKING:
    from polyscale import theory
    from polyscale.data import load_task
    from polyscale.inject import (
        LevelCache,
        exact_decoding,
        inject_hsa,
        inject_opened,
        load_injected,
        opened_audit,
        plan_injection,
        restore,
        save_injected,
    )
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
        HTEProcessor,
        byte_tokenizer,
        collate_trees,
    )

__version__ = "0.1.0"

# Imported on first use, so that `import polyscale` is quick and needs torch alone.
_LATER = {
    "polyscale.models": (
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
        "HTEProcessor",
        "byte_tokenizer",
        "collate_trees",
    ),
    "polyscale.inject": (
        "LevelCache",
        "exact_decoding",
        "inject_hsa",
        "inject_opened",
        "load_injected",
        "opened_audit",
        "plan_injection",
        "restore",
        "save_injected",
    ),
    "polyscale.data": ("load_task",),
    "polyscale": ("theory",),
}
_MODULE_OF = {name: module for module, names in _LATER.items() for name in names}

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
    "HTEProcessor",
    "LevelCache",
    "LevelSettings",
    "LevelStore",
    "SignalTree",
    "byte_tokenizer",
    "collate_trees",
    "exact_decoding",
    "hkt_attention",
    "hsa_attention",
    "hsa_energy",
    "hsa_matrix",
    "implementations",
    "inject_hsa",
    "inject_opened",
    "level_attention",
    "load_injected",
    "load_task",
    "opened_attention",
    "opened_audit",
    "plan_injection",
    "restore",
    "save_injected",
    "theory",
]

once_imported("transformers.modeling_utils", warn_of_lost_injections)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'polyscale' has no attribute {name!r}")
    if module == "polyscale":
        return import_module(f"polyscale.{name}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    """Public and dunder names, without what this module imports for its own use."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
