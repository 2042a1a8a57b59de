"""HSA trained from scratch: documents as trees, records of images and texts, and which tree."""

from polyscale.experiments.hsa.plan import plan_hsa
from polyscale.experiments.hsa.reproduce import reproduce
from polyscale.experiments.hsa.tables import write_tables

__all__ = ["plan_hsa", "reproduce", "write_tables"]
