"""The theory applied to whole models: measured, and collected into one dict that JSON can hold.

>>> import torch
>>> from polyscale.analysis import analyze
>>> from polyscale.layers.hkt import HKTAttention
>>> found = analyze(HKTAttention(16, num_heads=2, levels=2), torch.randn(1, 12, 16))
>>> sorted(found)[:4]
['attention', 'cost', 'error', 'format']
"""

from polyscale.analysis.dispatch import analyze
from polyscale.analysis.hkt import analyze_hkt
from polyscale.analysis.hsa import analyze_hsa
from polyscale.analysis.recording import capture
from polyscale.analysis.schema import Analysis, check_schema
from polyscale.analysis.snapshots import analyze_snapshots
from polyscale.analysis.transformer import analyze_attention

__all__ = [
    "Analysis",
    "analyze",
    "analyze_attention",
    "analyze_hkt",
    "analyze_hsa",
    "analyze_snapshots",
    "capture",
    "check_schema",
]
