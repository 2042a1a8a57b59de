"""HSA and opened attention inside pretrained Hugging Face transformers, with no training."""

from polyscale.inject.api import inject_hsa, restore
from polyscale.inject.audit import LayerAudit, OpenedAudit, opened_audit
from polyscale.inject.exact import exact_decoding
from polyscale.inject.flops import AttentionFlops, attention_flops
from polyscale.inject.level_cache import LevelCache
from polyscale.inject.opened import inject_opened
from polyscale.inject.opened_settings import OpenedSettings
from polyscale.inject.plan import InjectionPlan, Trial
from polyscale.inject.records import injected_layers, injected_settings
from polyscale.inject.search import plan_injection
from polyscale.inject.settings import HSASettings
from polyscale.inject.storage import load_injected, save_injected

__all__ = [
    "AttentionFlops",
    "HSASettings",
    "InjectionPlan",
    "LayerAudit",
    "LevelCache",
    "OpenedAudit",
    "OpenedSettings",
    "Trial",
    "attention_flops",
    "exact_decoding",
    "inject_hsa",
    "inject_opened",
    "injected_layers",
    "injected_settings",
    "load_injected",
    "opened_audit",
    "plan_injection",
    "restore",
    "save_injected",
]
