"""`inject_hsa` and `restore`: HSA in the chosen layers of a pretrained model, and out again."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from polyscale.inject.attention import NAME, RECORD, InjectedLayer
from polyscale.inject.hierarchical_cache import WatchedCache
from polyscale.inject.layout import Tokens, check_prefix
from polyscale.inject.modules import attention_layers, check_module, choose_layers, is_causal
from polyscale.inject.opened import opened_settings, restore_opened
from polyscale.inject.records import write_note
from polyscale.inject.settings import SENTENCES, HSASettings, whole_numbers
from polyscale.trees import SignalTree

TOKENS_HANDLE = "_polyscale_tokens"  # attribute of a model whose layers read token ids
SENTENCE_MARKS = frozenset(".!?\u2026\u3002\uff01\uff1f")
WORD_MARKS = "\u0120\u2581#"  # what tokenizers write for a space, or for the rest of a word


def inject_hsa(
    model: PreTrainedModel,
    layers: Sequence[int] | None = None,
    hierarchy: Sequence[int] | str | SignalTree = (2, 4, 8, 16),
    tie: str = "columns",
    sinks: str | Sequence[int] | None = "auto",
    *,
    sink_ids: Sequence[int] = (),
    sink_queries: str = "exact",
    tokenizer: Any = None,
    sentence_ends: Sequence[int] = (),
    dropout: str = "refuse",
) -> PreTrainedModel:
    """Turn attention layers of a Hugging Face model to HSA, in place; `restore` undoes it.

    No weight changes. Works for models on the attention interface of transformers, encoders and
    decoders; whatever a layer does that HSA would not do is refused, with the reason. Padding
    tokens neither see nor are seen; their outputs are those of zeros. Decoders generate with a
    cache that keeps pooled windows.

    Args:
        model: a `PreTrainedModel`; it is changed and returned.
        layers: numbers of attention layers from 0, negative ones from the end; None is all.
        hierarchy: window sizes from the tokens up, `"sentences"`, or a SignalTree over the
            tokens (one for all, or a forest with one tree for each text of the batch; another
            one can be passed per call as `model(..., hsa_tree=tree)`).
        tie: `"columns"` (each token keeps its query) or `"blocks"` (the paper's; encoders only).
        sinks: positions of tokens that get leaves of their own right under the root, counted
            among the real tokens, negative ones from the end. `"auto"` is the first and last for
            text encoders, the first for decoders and image encoders, none for a given tree.
        sink_ids: token ids that are sinks wherever they stand (encoders only).
        sink_queries: what sinks see: `"exact"`, all tokens, or `"tied"`, nodes as the tree says.
        tokenizer: to find the tokens that end sentences, for `hierarchy="sentences"`.
        sentence_ends: or those tokens' ids themselves.
        dropout: what to do in training with attention dropout, which HSA has no matrix for:
            `"refuse"`, or `"off"` to train without it.

    >>> from transformers import BertConfig, BertModel
    >>> from polyscale.inject import injected_layers
    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    >>> model = inject_hsa(BertModel(config), layers=[1], hierarchy=(4, 4))
    >>> injected_layers(model)
    [1]
    >>> injected_layers(restore(model))
    []
    """
    modules = attention_layers(model)
    chosen = choose_layers(layers, len(modules))
    if hierarchy == SENTENCES and tokenizer is not None:
        if sentence_ends:
            raise ValueError("sentence_ends: given with a tokenizer; pass one of them")
        sentence_ends = sentence_end_ids(tokenizer)
    for number in chosen:
        check_module(modules[number], number)
        if hasattr(modules[number], RECORD) or number in opened_settings(model):
            raise ValueError(f"layers: layer {number} is injected already; restore(model) first")
    causal = [is_causal(modules[number], model) for number in chosen]
    settings = HSASettings(
        hierarchy=hierarchy,  # type: ignore[arg-type]  # checked and made a tuple there
        tie=tie,
        sinks=_choose_sinks(sinks, model, hierarchy, any(causal)),
        sink_ids=whole_numbers("sink_ids", sink_ids),
        sink_queries=sink_queries,
        sentence_ends=whole_numbers("sentence_ends", sentence_ends),
        dropout=dropout,
    )
    if any(causal):
        if tie == "blocks":
            raise ValueError(
                'tie must be "columns" for a causal layer, got "blocks"; the rows of a block share '
                "the mean of their queries, so a later token would change earlier rows"
            )
        check_prefix(settings)
    if settings.needs_tokens and not _takes_ids(model.base_model):
        raise ValueError(
            f"hierarchy must be windows for {type(model).__name__}, which has no input_ids that "
            "sentences and sink_ids could be read from"
        )
    for number in chosen:
        _inject(modules[number], number, settings)
    _update_coverage(modules)
    write_note(model)
    if settings.needs_tokens and not hasattr(model.base_model, TOKENS_HANDLE):
        handle = model.base_model.register_forward_pre_hook(_pass_tokens, with_kwargs=True)
        setattr(model.base_model, TOKENS_HANDLE, handle)
    return model


def restore(model: PreTrainedModel, layers: Sequence[int] | None = None) -> PreTrainedModel:
    """Take out what `inject_hsa` or `inject_opened` put into layers, all or some.

    The model is changed and returned, with every layer as it was.

    >>> from transformers import BertConfig, BertModel
    >>> from polyscale.inject import injected_layers
    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    >>> injected_layers(restore(inject_hsa(BertModel(config)), layers=[0]))
    [1]
    """
    modules = attention_layers(model)
    for number in choose_layers(layers, len(modules)):
        module = modules[number]
        record: InjectedLayer | None = getattr(module, RECORD, None)
        if record is None:
            continue
        module.config = record.config
        for handle in record.handles:
            handle.remove()
        delattr(module, RECORD)
    restore_opened(model, [modules[number] for number in choose_layers(layers, len(modules))])
    _update_coverage(modules)
    write_note(model)
    left = [getattr(module, RECORD) for module in modules if hasattr(module, RECORD)]
    handle = getattr(model.base_model, TOKENS_HANDLE, None)
    if handle is not None and not any(record.settings.needs_tokens for record in left):
        handle.remove()
        delattr(model.base_model, TOKENS_HANDLE)
    return model


def _inject(module: nn.Module, number: int, settings: HSASettings) -> None:
    config: Any = module.config
    own = copy.deepcopy(config)
    # Not through the property, which would also set it in configs nested in this one.
    own._attn_implementation_internal = NAME
    record = InjectedLayer(settings, number, config)
    record.handles.append(module.register_forward_pre_hook(_pass_cache, with_kwargs=True))
    module.config = own
    setattr(module, RECORD, record)


def _update_coverage(modules: list[nn.Module]) -> None:
    """Tell injected layers whether all layers of the model are."""
    everywhere = all(hasattr(module, RECORD) for module in modules)
    for module in modules:
        if hasattr(module, RECORD):
            getattr(module, RECORD).everywhere = everywhere


def _pass_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Watch what an attention module does with the cache it gets, and tell the attention."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Cache):
            watched = WatchedCache(value)
            args = tuple(watched if part is value else part for part in args)
            kwargs = {name: watched if part is value else part for name, part in kwargs.items()}
            return args, {**kwargs, "hsa_cache": watched}
    return None


def _pass_tokens(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let the token ids of a call reach the attention function."""
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    ids = bound.arguments.get("input_ids")
    if ids is None or "hsa_tokens" in kwargs:
        return None
    return args, {**kwargs, "hsa_tokens": Tokens(ids)}


def _takes_ids(model: nn.Module) -> bool:
    return "input_ids" in inspect.signature(model.forward).parameters


def _choose_sinks(sinks: Any, model: PreTrainedModel, hierarchy: Any, causal: bool) -> Any:
    if sinks is None:
        return ()
    if not isinstance(sinks, str):
        return whole_numbers("sinks", sinks)
    if sinks != "auto":
        raise ValueError(f'sinks must be "auto", positions, or None, got {sinks!r}')
    if isinstance(hierarchy, SignalTree):
        return ()
    return (0, -1) if not causal and _takes_ids(model.base_model) else (0,)


def sentence_end_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of the tokens that are nothing but the marks that end sentences.

    >>> class Tokens:
    ...     def get_vocab(self):
    ...         return {"the": 0, ".": 1, "?!": 2, "e.g.": 3}
    >>> sentence_end_ids(Tokens())
    (1, 2)
    """
    if not hasattr(tokenizer, "get_vocab"):
        raise TypeError(f"tokenizer must have get_vocab(), got {type(tokenizer).__name__}")
    found = []
    for token, number in tokenizer.get_vocab().items():
        text = token.strip(WORD_MARKS) if isinstance(token, str) else ""
        if text and set(text) <= SENTENCE_MARKS:
            found.append(number)
    if not found:
        raise ValueError(
            "tokenizer: no token of its vocabulary is a full stop, an exclamation mark or a "
            "question mark; pass sentence_ends=(ids...)"
        )
    return tuple(sorted(found))
