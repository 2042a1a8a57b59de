"""Texts, or batches of inputs, as what a planner runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from polyscale.checks import check_integer
from polyscale.inject.measure import make_batches
from polyscale.inject.modules import attention_layers, is_causal
from polyscale.inject.workload import Continuations, Passes, Workload

SHORTEST = 32  # tokens of a text that is a prompt and what follows
UNLIMITED = 1 << 20  # tokens; what tokenizers call their limit when they have none


def workload_of(
    model: PreTrainedModel,
    texts: Sequence[Any],
    tokenizer: Any,
    new_tokens: int,
    batch_size: int,
    max_length: int | None,
) -> Workload:
    """Return prompts and what follows for a model that writes, or else batches."""
    batch_size = check_integer("batch_size", batch_size, least=1)
    limit = limit_of(model, tokenizer)
    if max_length is not None:
        limit = min(limit, check_integer("max_length", max_length, least=1))
    causal = any(is_causal(module, model) for module in attention_layers(model))
    if not (causal and model.can_generate()):
        return Passes(model, make_batches(texts, tokenizer, batch_size, limit))
    rows = [ids for batch in make_batches(texts, tokenizer, 1, limit) for ids in _rows(batch)]
    short = [ids.shape[1] for ids in rows if ids.shape[1] < SHORTEST]
    if short:
        raise ValueError(
            f"texts must have at least {SHORTEST} tokens each, a prompt and what follows, got one "
            f"of {min(short)}"
        )
    return Continuations(model, [ids.to(model.device) for ids in rows], new_tokens)


def limit_of(model: PreTrainedModel, tokenizer: Any) -> int:
    """How many tokens the model takes."""
    numbers = [
        getattr(tokenizer, "model_max_length", None),
        getattr(model.config, "max_position_embeddings", None),
    ]
    known = [one for one in numbers if isinstance(one, int) and 0 < one < UNLIMITED]
    return min(known, default=UNLIMITED)


def _rows(batch: Mapping[str, Any]) -> list[Tensor]:
    """Return the token ids `[1, N]` of each text of a batch, without padding."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise ValueError(
            "texts must be batches with input_ids [B, N] for a model that writes, got "
            f"{sorted(batch)}"
        )
    real = torch.ones_like(ids) if mask is None else mask
    return [row[there.bool()][None] for row, there in zip(ids, real, strict=True)]
