"""The inputs of attention layers, recorded while a model runs on a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyscale._extras import require
from polyscale.layers.hkt import HKTAttention
from polyscale.layers.hsa import HSAAttention

RECORDER = "polyscale_recorder"  # name of the attention function that records its arguments


def _run(model: nn.Module, batch: Any) -> Any:
    """Call a model on a tensor, a tuple of arguments, or a dict of named ones; no gradients."""
    with torch.no_grad():
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, (tuple, list)):
            return model(*batch)
        if isinstance(batch, Tensor):
            return model(batch)
    raise TypeError(
        f"batch must be a tensor, a tuple of arguments or a dict of them, got "
        f"{type(batch).__name__}"
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode; every module's mode is restored afterwards."""
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in training:
            module.training = mode


def capture(
    model: nn.Module,
    batch: Any,
    kind: type[nn.Module] | tuple[type[nn.Module], ...] = (HKTAttention, HSAAttention),
) -> list[tuple[Any, dict[str, Any]]]:
    """Run a model and return its attention layers with the arguments each was called with.

    The model runs in evaluation mode, without gradients, and is left as it was.

    Args:
        model: a module that contains such layers, or one such layer.
        batch: what the model takes: a tensor, a tuple of arguments, or a dict of named ones.
        kind: the class of the layers, or several.

    Returns:
        Pairs of a layer and its arguments by name, defaults included, in the order of the calls.

    Example:
        >>> layer = HKTAttention(16, num_heads=2, levels=2)
        >>> [(found, arguments)] = capture(layer, torch.zeros(1, 5, 16))
        >>> found is layer, arguments["x"].shape, arguments["key_padding_mask"]
        (True, torch.Size([1, 5, 16]), None)
    """
    calls: list[tuple[Any, dict[str, Any]]] = []
    seen: set[int] = set()

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(module) in seen:
            raise ValueError("model must call every attention layer once per batch, got it twice")
        seen.add(id(module))
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append((module, dict(bound.arguments)))

    layers = [module for module in model.modules() if isinstance(module, kind)]
    if not layers:
        names = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"model must have {names} layers, got {type(model).__name__}")
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        with _evaluating(model):
            _run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@dataclass(frozen=True)
class AttentionCall:
    """One call of the attention function of a Hugging Face model, one example."""

    module: nn.Module
    query: Tensor  # [H, T, D], after rotation where there is any
    key: Tensor  # [H, T, D], repeated for grouped queries
    scale: float
    mask: Tensor | None  # [H or 1, T, T], added to the scores
    groups: int  # query heads per key head
    weights: Tensor | None = None  # [H, T, T], where they are not the softmax of the scores

    def scores(self) -> Tensor:
        """Before the mask, float64: `[H, T, T]`."""
        return self.query.double() @ self.key.double().mT * self.scale

    def attention(self) -> Tensor:
        """The attention matrix, float64: `[H, T, T]`."""
        if self.weights is not None:
            return self.weights.double()
        scores = self.scores()
        return (scores if self.mask is None else scores + self.mask.double()).softmax(-1)


class _Recorder:
    """An attention function for transformers that keeps the queries and keys it was given."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.cross_attentions = 0

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        for name in ("softcap", "s_aux", "position_bias"):
            if options.get(name) is not None:
                raise ValueError(f"model must attend by a plain softmax, but it passes {name!r}")
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.mT * scale
        if attention_mask is None and options.get("is_causal"):
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            attention_mask = torch.zeros_like(scores[:1, :1]).masked_fill(later, -torch.inf)
        if attention_mask is not None:
            attention_mask = attention_mask[..., : key.shape[2]]
            scores = scores + attention_mask
        weights = scores.float().softmax(-1).to(query.dtype)
        if query.shape[2] == key.shape[2]:
            mask = None if attention_mask is None else attention_mask[0].detach().cpu()
            one_query, one_key = query[0].detach().cpu(), key[0].detach().cpu()
            self.calls.append(AttentionCall(module, one_query, one_key, scale, mask, groups))
        else:
            self.cross_attentions += 1
        return (weights @ value).transpose(1, 2).contiguous(), weights


def attention_calls(model: nn.Module, batch: Mapping[str, Any]) -> tuple[list[AttentionCall], int]:
    """Self-attention calls of a Hugging Face model on one example; the number of cross-attentions.

    The model runs with an attention function that records its arguments, registered for the time
    of the call.
    """
    transformers = require("transformers", "hf", "analyze_attention")
    masking = require("transformers.masking_utils", "hf", "analyze_attention")
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model must be a Hugging Face model, got {type(model).__name__}")
    recorder = _Recorder()
    transformers.AttentionInterface.register(RECORDER, recorder)
    transformers.AttentionMaskInterface.register(RECORDER, masking.eager_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(RECORDER)
    try:
        with _evaluating(model), _injected_calls(model, recorder.calls):
            _run(model, batch)
    finally:
        model.set_attn_implementation(before)
    if not recorder.calls:
        raise ValueError(
            f"model must attend through the attention interface of transformers, which "
            f"{type(model).__name__} does not"
        )
    return recorder.calls, recorder.cross_attentions


@contextmanager
def _injected_calls(model: nn.Module, calls: list[AttentionCall]) -> Iterator[None]:
    """Layers with HSA injected keep it, and their calls are added with the weights it applies."""
    if not any(hasattr(module, "_polyscale_hsa") for module in model.modules()):
        yield
        return
    injection: Any = require("polyscale.inject.attention", "hf", "analyze_attention")
    records = [
        (module, getattr(module, injection.RECORD))
        for module in model.modules()
        if hasattr(module, injection.RECORD)
    ]

    def watch(module: nn.Module, record: Any) -> Callable[[Any], None]:
        def probe(seen: Any) -> None:
            weights = injection.applied_weights(record.settings, seen)[0].detach().cpu()
            query, key = seen.query[0].detach().cpu(), seen.key[0].detach().cpu()
            calls.append(AttentionCall(module, query, key, seen.scale, None, seen.groups, weights))

        return probe

    before = [record.probe for _, record in records]
    for module, record in records:
        record.probe = watch(module, record)
    try:
        yield
    finally:
        for (_, record), probe in zip(records, before, strict=True):
            record.probe = probe


def projection_weights(module: nn.Module, heads: int, groups: int) -> tuple[Tensor, ...] | None:
    """Query weight and key weight `[H, C, D]` and biases `[H, 1, D]` (or none) of an attention.

    Separate projections (`query`/`key`, `q_proj`/`k_proj`, `q_lin`/`k_lin`) and the fused one of
    GPT-2 (`c_attn`) are supported; None for others.
    """
    fused = getattr(module, "c_attn", None)
    if fused is not None and hasattr(fused, "nf"):
        width = fused.weight.shape[1] // 3
        weights = [fused.weight[:, :width], fused.weight[:, width : 2 * width]]  # [C, H D]
        biases = [fused.bias[:width], fused.bias[width : 2 * width]]
        return _heads(weights, biases, heads, groups)
    for query_name, key_name in (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin")):
        query, key = getattr(module, query_name, None), getattr(module, key_name, None)
        if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
            pair = (query, key)
            biases = [one.bias for one in pair]
            return _heads([one.weight.T for one in pair], biases, heads, groups)
    return None


def _heads(weights: list[Tensor], biases: list[Any], heads: int, groups: int) -> tuple[Tensor, ...]:
    """Weights `[C, H D]` and biases `[H D]` by head, keys repeated for grouped queries."""

    def by_head(part: Tensor, repeats: int) -> Tensor:
        split = part.detach().double().unflatten(-1, (heads // repeats, -1)).movedim(-2, 0)
        return split.repeat_interleave(repeats, 0)

    found = tuple(by_head(w, n) for w, n in zip(weights, (1, groups), strict=True))
    if any(bias is None for bias in biases):
        return found
    return found + tuple(
        by_head(bias[None], n) for bias, n in zip(biases, (1, groups), strict=True)
    )


def real_columns(batch: Any, example: int) -> Tensor | None:
    """Which columns of a batch entry hold tokens, where the batch has a mask: `[T]`."""
    if not isinstance(batch, Mapping):
        return None
    for name, padding in (("attention_mask", 0), ("key_padding_mask", 1)):
        mask = batch.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2 and 0 <= example < len(mask):
            return (mask[example] != padding).cpu()
    return None


def forward_names(model: nn.Module) -> list[str]:
    """The names of the arguments that a model's forward takes."""
    forward: Callable[..., Any] = model.forward
    return list(inspect.signature(forward).parameters)
