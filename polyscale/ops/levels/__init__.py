"""Attention over a cache with levels of precision."""

from polyscale.ops.levels.api import LevelAudit, level_attention, level_audit
from polyscale.ops.levels.blocks import exact_level
from polyscale.ops.levels.settings import LevelSettings
from polyscale.ops.levels.store import LevelStore

__all__ = [
    "LevelAudit",
    "LevelSettings",
    "LevelStore",
    "exact_level",
    "level_attention",
    "level_audit",
]
