"""Opened attention: softmax over what matters, and what the rest would have changed."""

from polyscale.ops.opened.api import opened_attention
from polyscale.ops.opened.audit import Audit

__all__ = ["Audit", "opened_attention"]
