"""Reading the mask a model hands to its attention: which tokens are real, and is it causal.

A tree says which tokens are near to each other, not which may not be seen. So a mask is either
padding, or padding and causality, or it is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class MaskInfo:
    """A mask in the only terms a tree has."""

    real: Tensor | None  # [B, keys], None if all tokens are real
    causal: bool


# All layers of a forward pass get the same mask: it is read once.
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def read_mask(
    mask: Tensor | None, batch: int, queries: int, keys: int, causal_without_mask: bool
) -> MaskInfo:
    """Return what a mask means for the last `queries` of `keys` tokens, or raise."""
    if mask is None:
        return MaskInfo(None, causal_without_mask)
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask must be a mask of the sdpa or eager implementation, got "
            f'{type(mask).__name__}; call model.set_attn_implementation("sdpa") before injecting'
        )
    if mask.dim() == 2:  # as flash attention gets it: padding alone
        if mask.shape != (batch, keys):
            raise ValueError(
                f"attention_mask must have shape [{batch}, {keys}], got {list(mask.shape)}"
            )
        return MaskInfo(_some(mask.bool()), causal_without_mask)
    # Tensors made in inference mode do not count their changes, so they are read each time.
    version = None if mask.is_inference() else mask._version
    wanted = (version, batch, queries, keys, causal_without_mask)
    known = _read.get(mask)
    if version is not None and known is not None and known[0] == wanted:
        return known[1]
    found = _read_square(mask, batch, queries, keys, causal_without_mask)
    if version is not None:
        _read[mask] = (wanted, found)
    return found


def _some(real: Tensor) -> Tensor | None:
    return None if bool(real.all()) else real


def _read_square(
    mask: Tensor, batch: int, queries: int, keys: int, prefers_causal: bool
) -> MaskInfo:
    if (
        mask.dim() != 4
        or mask.shape[0] not in (1, batch)
        or mask.shape[2] not in (1, queries)
        or mask.shape[3] != keys
    ):
        raise ValueError(
            f"attention_mask must have shape [{batch}, 1, {queries}, {keys}] or "
            f"[{batch}, 1, 1, {keys}], got {list(mask.shape)}"
        )
    seen = _seen(mask)
    if seen.shape[1] > 1 and not bool((seen == seen[:, :1]).all()):
        raise ValueError(
            "attention_mask: differs from head to head; HSA layers take padding, with or without "
            "causality, the same for all heads"
        )
    seen = seen[:, 0].expand(batch, queries, keys)
    real = seen.any(1)  # [B, keys]
    # What a padding token would see is left to the mask's maker: its row is not used.
    rows = real[:, keys - queries :, None]  # [B, queries, 1]
    place = torch.arange(keys, device=mask.device)
    earlier = place <= place[keys - queries :, None]  # [queries, keys]
    # Few queries whose last ones are padding fit both.
    for causal in (prefers_causal, not prefers_causal):
        expected = real[:, None, :] & earlier if causal else real[:, None, :]
        if bool((seen == expected).logical_or(~rows).all()):
            return MaskInfo(_some(real), causal)
    raise ValueError(
        "attention_mask: is neither padding nor padding with causality (a sliding window, packed "
        "sequences or a custom pattern); HSA layers cannot express it, so they refuse it"
    )


def _seen(mask: Tensor) -> Tensor:
    """Return a mask as bool, True for what is seen; refuse biases."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ValueError(f"attention_mask must be bool or floating point, got {mask.dtype}")
    seen = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((seen | hidden).all()):
        raise ValueError(
            "attention_mask: holds values that are neither 0 nor minus infinity: a position bias "
            "(ALiBi, relative positions) that a pooled key has no single value of, so HSA layers "
            "refuse it"
        )
    return seen
