"""`inject_opened`: texts by opened attention, decoding by a cache with levels of precision."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from polyscale.inject.level_cache import LevelCache
from polyscale.inject.level_layer import LevelLayer
from polyscale.inject.modules import attention_layers, choose_layers, is_causal
from polyscale.inject.opened_attention import NAME, RECORD, OpenedLayer
from polyscale.inject.opened_settings import OpenedSettings
from polyscale.inject.records import write_note

HOOKS = "_polyscale_opened_hooks"  # attribute of an injected model
LISTENER = "_polyscale_opened_audit"  # likewise, while it is audited: hears of its caches
PREPARE = "_prepare_cache_for_generation"  # method of a model that makes the cache of `generate`
SERVED = ("sdpa", "eager")

# Attributes of attention modules that change their scores, so that no view of them is theirs.
REFUSED_ATTRIBUTES = {
    "attn_logit_softcapping": "its scores are soft-capped",
    "sinks": "it has learned attention sinks (s_aux) in its softmax",
    "has_relative_attention_bias": "it adds a relative position bias to its scores",
    "relative_attention_bias": "it adds a relative position bias to its scores",
}


def inject_opened(
    model: PreTrainedModel,
    layers: Sequence[int] | None = None,
    *,
    prompt: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> PreTrainedModel:
    """Let a model read long texts by opened attention, and a decoder decode from coarse levels.

    No weight changes; `restore` takes it out again. Prompts of decoders and the texts of encoders
    are read by `opened_attention`, short ones densely. Tokens are decoded from a `LevelCache`,
    which `generate` and, in eval mode, a call without a cache make themselves; with an ordinary
    `DynamicCache` of the user's they are decoded densely.

    The mode of decoders is *serving*: later tokens of a prompt help to choose what earlier ones
    see. That is right for what follows a prompt, and would flatter the loss of the prompt's own
    tokens: for training and for scoring a given text pass `strict=True`.

    Args:
        model: a decoder or an encoder on the attention interface of transformers; it is changed
            and returned.
        layers: numbers of attention layers from 0, negative ones from the end; None is all but
            those with a sliding window.
        prompt: options of `opened_attention` (`block`, `near`, `heavy`, `mass`, ...), with
            `mass=0.95` if neither that nor `heavy` is given; `dense`: up to so many keys are read
            densely; and `ending`: so many last tokens are, in the serving mode. In encoders
            unseen tokens are pooled (`rest="pool"`), `near` is 32 and the first and the last token
            are `sinks`, if nothing else is asked for; negative positions of sinks count from a
            text's end.
        cache: options of `LevelCache` (`near`, `heavy`, `bits`, `exact`, ...) for the caches that
            are made automatically, and `at_once`: up to so many new tokens over a filled cache
            are decoded, each choosing for itself; more are the next part of a prompt. None for
            encoders.
        strict: whether only a query's own and earlier queries choose for it, for training a
            decoder.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...     num_attention_heads=2,
    ... )
    >>> model = inject_opened(LlamaForCausalLM(config).eval(), prompt={"heavy": 256})
    >>> type(model(input_ids=torch.tensor([[1, 2, 3]])).past_key_values).__name__
    'LevelCache'
    """
    modules = attention_layers(model)
    causal = [is_causal(module, model) for module in modules]
    sliding = sliding_layers(model)
    if layers is None and sliding:
        shown = ", ".join(str(number) for number in sliding)
        warnings.warn(
            f"layers {shown} attend within a sliding window and are left as they are",
            stacklevel=2,
        )
        layers = [at for at in range(len(modules)) if at not in sliding]
        if not layers:
            raise ValueError(
                "model must have a layer that attends to all tokens, got one whose layers all "
                "attend within a sliding window"
            )
    chosen = choose_layers(layers, len(modules))
    settings = {
        kind: OpenedSettings.of(prompt, cache, strict, kind)
        for kind in sorted({causal[number] for number in chosen})
    }
    if True in settings:
        LevelCache(model.config, **settings[True].cache)  # refuses options it does not take
    for number in chosen:
        _check_module(modules[number], causal[number], number, number in sliding)
    for number in chosen:
        _inject(modules[number], number, settings[causal[number]], causal[number])
    _serve(model)
    write_note(model)
    return model


def restore_opened(model: PreTrainedModel, modules: list[nn.Module]) -> None:
    """Take opened attention out of some layers, and what the model itself carries with the last."""
    for module in modules:
        record: OpenedLayer | None = getattr(module, RECORD, None)
        if record is not None:
            module.config = record.config
            for handle in record.handles:
                handle.remove()
            delattr(module, RECORD)
    if hasattr(model, HOOKS) and not _served(model):
        for handle in getattr(model, HOOKS):
            handle.remove()
        delattr(model, HOOKS)
        vars(model).pop(PREPARE, None)


def sliding_layers(model: PreTrainedModel) -> list[int]:
    """Return the numbers of the layers that attend within a sliding window."""
    modules = attention_layers(model)
    kinds: list[Any] = []
    if any(is_causal(module, model) for module in modules):
        kinds = list(DynamicCache(config=model.config).layers)
    return [number for number, module in enumerate(modules) if _slides(module, kinds)]


def opened_settings(model: PreTrainedModel) -> dict[int, OpenedSettings]:
    """Return the settings of each layer with opened attention, by its number."""
    records = [getattr(module, RECORD, None) for module in attention_layers(model)]
    return {record.number: record.settings for record in records if record is not None}


def _number(module: nn.Module) -> int:
    number: Any = getattr(module, "layer_idx", None)
    if number is None:
        raise ValueError(
            "model must have decoder layers with a number (layer_idx), got one without"
        )
    return number


def _slides(module: nn.Module, kinds: list[Any]) -> bool:
    """Whether a layer attends within a sliding window; `kinds` are the layers of a cache."""
    number: Any = getattr(module, "layer_idx", None)
    if number is not None and number < len(kinds):
        return isinstance(kinds[number], DynamicSlidingWindowLayer)
    return not kinds and getattr(module, "sliding_window", None) is not None


def _check_module(module: nn.Module, causal: bool, number: int, slides: bool) -> None:
    """Refuse a layer whose attention would change without being asked to."""
    where = f"layers must be layers that opened attention can serve, got {number}"
    if slides:
        raise ValueError(f"{where}, which attends within a sliding window; leave it out")
    if causal:
        _number(module)
    for name, reason in REFUSED_ATTRIBUTES.items():
        value = getattr(module, name, None)
        if value is not None and value is not False:
            raise ValueError(f"{where}: {reason}")
    implementation = getattr(module.config, "_attn_implementation", None)
    if implementation == NAME:
        raise ValueError(f"{where}, which is injected already; restore(model) first")
    if implementation not in SERVED:
        raise ValueError(
            f"{where}, which is injected already or has another attention ({implementation!r}); "
            'restore(model) first, or model.set_attn_implementation("sdpa")'
        )


def _inject(module: nn.Module, number: int, settings: OpenedSettings, causal: bool) -> None:
    config: Any = module.config
    own = copy.deepcopy(config)
    # Not through the property, which would also set it in configs nested in this one.
    own._attn_implementation_internal = NAME
    record = OpenedLayer(settings, number, config, causal)
    if causal:
        record.handles.append(module.register_forward_pre_hook(_pass_level, with_kwargs=True))
    module.config = own
    setattr(module, RECORD, record)


def _serve(model: PreTrainedModel) -> None:
    """Let calls of the model itself make, check and warn what concerns all layers."""
    if hasattr(model, HOOKS) or not _served(model):
        return
    base = model.base_model
    handles = [base.register_forward_pre_hook(partial(_prepare_call, model), with_kwargs=True)]
    handles.append(model.register_forward_pre_hook(_warn_of_labels, with_kwargs=True))
    setattr(model, HOOKS, handles)
    if hasattr(type(model), PREPARE):
        setattr(model, PREPARE, partial(_prepare_generation, model))


def _pass_level(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tell the attention function which layer of a `LevelCache` is its own."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache) and not isinstance(value, LevelCache):
            layers = getattr(value, "layers", [])[_number(module) :]
            if layers and not isinstance(layers[0], DynamicLayer):
                raise ValueError(
                    "past_key_values must be a LevelCache or a DynamicCache for an injected "
                    f"model, got a {type(value).__name__} of {type(layers[0]).__name__}"
                )
        if isinstance(value, LevelCache):
            layer = value.layers[_number(module)]
            if not isinstance(layer, LevelLayer):
                raise ValueError(
                    "past_key_values must be a LevelCache that was filled with this layer "
                    "injected, got one that was filled without; start with a new one"
                )
            layer.expected = True
            return args, {**kwargs, "level_layer": layer}
    return None


def _prepare_call(
    model: PreTrainedModel, base: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Make a cache if a call has none, and see that a LevelCache fits the injected layers."""
    bound = inspect.signature(base.forward).bind_partial(*args, **kwargs)
    cache = bound.arguments.get("past_key_values")
    if isinstance(cache, LevelCache):
        if not cache.get_seq_length():
            cache.serve(_served(model))
        _announce_cache(model, cache)
        return None
    use_cache = bound.arguments.get("use_cache")
    if use_cache is None:
        use_cache = getattr(base.config, "use_cache", False)
    if cache is not None or not use_cache or base.training:
        return None
    new = _new_cache(model)
    _announce_cache(model, new)
    return args, {**kwargs, "past_key_values": new}


def _prepare_generation(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Give `generate` a LevelCache where it would make an ordinary cache of its own."""
    method = getattr(type(model), PREPARE)
    found = method(model, *args, **kwargs)
    given = inspect.signature(method).bind(model, *args, **kwargs).arguments
    wanted = given["generation_config"].cache_implementation
    cache = given["model_kwargs"].get("past_key_values")
    own = type(cache) is DynamicCache and not getattr(cache, "_is_user_defined", False)
    if own and wanted is None:
        new = _new_cache(model)
        if given["generation_config"].is_assistant:
            new.activate_past_recording()
        given["model_kwargs"]["past_key_values"] = new
    return found


def _served(model: PreTrainedModel) -> dict[int, OpenedSettings]:
    """Return the settings of the injected layers of a decoder, by their number in a cache."""
    return {
        _number(module): getattr(module, RECORD).settings
        for module in attention_layers(model)
        if hasattr(module, RECORD) and getattr(module, RECORD).causal
    }


def _new_cache(model: PreTrainedModel) -> LevelCache:
    served = _served(model)
    options = dict(next(iter(served.values())).cache)
    listener = getattr(model, LISTENER, None)
    if listener is not None:
        options.setdefault("audit_every", listener.every)
    cache = LevelCache(model.config, **options)
    cache.serve(served)
    return cache


def _announce_cache(model: PreTrainedModel, cache: LevelCache) -> None:
    listener = getattr(model, LISTENER, None)
    if listener is not None:
        listener.cache_used(cache)


def _warn_of_labels(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say once that the loss of a text read in the serving mode is no fair figure."""
    if kwargs.get("labels") is None:
        return
    records = [getattr(module, RECORD, None) for module in model.modules()]
    serving = [one for one in records if one is not None and one.causal and not one.settings.strict]
    if not serving or any(one.warned for one in serving):
        return
    for one in serving:
        one.warned = True
    warnings.warn(
        "labels: the model is injected for serving, where later tokens of a text help to choose "
        "what earlier ones see, so the loss of the text flatters; use inject_opened(model, "
        "strict=True) to train or to score a given text, or restore(model)",
        stacklevel=4,
    )
