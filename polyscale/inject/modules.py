"""Finding the attention layers of a Hugging Face model, and refusing those HSA cannot serve."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

# Attributes of attention modules that change the attention, and why they are refused.
REFUSED_ATTRIBUTES = {
    "attn_logit_softcapping": "its scores are soft-capped (softcap), and HSA pools the scores of a "
    "block before any cap",
    "sinks": "it has learned attention sinks (s_aux) in its softmax, which no leaf stands for",
    "has_relative_attention_bias": "it adds a relative position bias to its scores, which a pooled "
    "key has no single value of",
    "relative_attention_bias": "it adds a relative position bias to its scores, which a pooled key "
    "has no single value of",
}


def uses_interface(module: nn.Module) -> bool:
    """Whether a module looks its attention function up by name, as injection needs."""
    forward = inspect.unwrap(type(module).forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "ALL_ATTENTION_FUNCTIONS" in names and hasattr(module, "config")


def attention_layers(model: Any) -> list[nn.Module]:
    """Return the self-attention modules of a model in their order, or say why there are none."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a Hugging Face model (PreTrainedModel), got {type(model).__name__}"
            f"{_inner_model(model)}"
        )
    name = type(model).__name__
    config = model.config
    if getattr(config, "is_encoder_decoder", False) or getattr(
        config, "add_cross_attention", False
    ):
        raise ValueError(
            f"model: {name} has cross-attention, which HSA, a self-attention, cannot replace; "
            "takes encoders and decoders without it"
        )
    found = [module for module in model.modules() if uses_interface(module)]
    if not found and not any("attention" in type(one).__name__.lower() for one in model.modules()):
        raise ValueError(
            f"model: {name} has no attention layers: its tokens are mixed in another way (as by "
            "Fourier transforms in FNet), so there is nothing that HSA could take the place of"
        )
    if not found:
        raise ValueError(
            f"model: {name} does not use the attention interface of transformers (its attention "
            "is written out in its own code, as in Longformer and BigBird), so nothing can be put "
            "in its place"
        )
    return found


def choose_layers(layers: Sequence[int] | None, count: int) -> list[int]:
    """Return layer numbers from 0, negative ones counted from the end; None is all."""
    if layers is None:
        return list(range(count))
    if isinstance(layers, str) or not isinstance(layers, Sequence | set | frozenset | range):
        raise TypeError(f"layers must be a sequence of layer numbers, or None, got {layers!r}")
    chosen = set()
    for number in layers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"layers must be whole numbers, got {number!r}")
        if not -count <= number < count:
            raise ValueError(
                f"layers must be 0..{count - 1} (counted from 0), or -1..-{count} from the end, "
                f"got {number}"
            )
        chosen.add(number % count)
    if not chosen:
        raise ValueError("layers must name at least one layer, or be None for all, got none")
    return sorted(chosen)


def check_module(module: nn.Module, number: int) -> None:
    """Refuse a layer whose attention HSA would change without being asked to."""
    for name, reason in REFUSED_ATTRIBUTES.items():
        value = getattr(module, name, None)
        if value is not None and value is not False:
            raise ValueError(f"layers: layer {number} cannot be served by HSA: {reason}")


def is_causal(module: nn.Module, model: nn.Module) -> bool:
    """Whether the layer attends to earlier tokens only, unless a mask says otherwise.

    Some are told so only when they are called, as in the text model of CLIP: by the masks that the
    next module around them makes.
    """
    if getattr(module, "is_causal", True):
        return True
    around = [one for one in model.modules() if any(part is module for part in one.modules())]
    for one in reversed(around):  # from the inside
        names = getattr(
            getattr(inspect.unwrap(type(one).forward), "__code__", None), "co_names", ()
        )
        makes = "create_causal_mask" in names, "create_bidirectional_mask" in names
        if any(makes):
            return makes == (True, False)
    return False


def _inner_model(model: Any) -> str:
    """Return where in a wrapper, such as a SentenceTransformer, the Hugging Face model is."""
    parts = model.named_modules() if isinstance(model, nn.Module) else ()
    for path, part in parts:
        if isinstance(part, PreTrainedModel):
            return (
                f'; the one in it is model.get_submodule("{path}"), a {type(part).__name__}: pass '
                "that, it is changed in place"
            )
    return ""
