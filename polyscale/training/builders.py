"""Models for tasks: their class, the sizes that follow from the data, and the collator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from polyscale.data.splits import BYTES
from polyscale.data.tasks import TaskData
from polyscale.models import (
    HKTConfig,
    HKTForCausalLM,
    HKTForSequenceClassification,
    HSAConfig,
    HSAForCausalLM,
    HTEConfig,
    HTEForClassification,
    byte_tokenizer,
    collate_trees,
    word_tokenizer,
)
from polyscale.trees import SignalTree

WINDOWS = (4, 8, 16)
# The hierarchical encoder and its baselines, by what `HTEConfig` calls their attention.
_ATTENTIONS = {"hsa": "hierarchical", "fsa": "flat", "deepset": "none"}


@dataclass(frozen=True)
class ModelForTask:
    """A function that makes the model, and the data in the form that it reads."""

    build: Callable[[], PreTrainedModel]
    data: TaskData


def model_for_task(model: str, options: dict[str, Any], data: TaskData) -> ModelForTask:
    """Choose a model and its sizes; `options` are those of its configuration class.

    `standard` is HKT with one level: the same code with standard attention. `hsa` is the causal HSA
    model for language tasks, and the hierarchical encoder for classification, over the trees of the
    task or over windows of a sequence. `fsa` (flat attention) and `deepset` (no attention) are that
    encoder without the hierarchy.
    """
    options = dict(options)
    if model == "standard":
        if options.get("levels", 1) != 1:
            raise ValueError(f"levels must be 1 for the model 'standard', got {options['levels']}")
        options["levels"] = 1
    if model in ("standard", "hkt"):
        if data.modalities is not None:
            raise ValueError(
                f"model must be one of {', '.join(_ATTENTIONS)} for {data.name}, whose samples are "
                f"trees, got {model!r}"
            )
        return ModelForTask(_hkt(options, data), data)
    if data.kind == "language":
        if model != "hsa":
            raise ValueError(
                f"model must be one of standard, hkt, hsa for {data.name}, a language task, got "
                f"{model!r}"
            )
        return ModelForTask(_hsa(options, data), data)
    attention = _ATTENTIONS[model]
    if options.setdefault("attention", attention) != attention:
        raise ValueError(
            f"attention must be {attention!r} for the model {model!r}, got {options['attention']!r}"
        )
    if data.modalities is not None:
        return ModelForTask(_hte(options, data), data)
    windows = options.pop("windows", WINDOWS)
    trees = replace(data, collate=partial(collate_windows, windows))
    return ModelForTask(_hte(options, data), trees)


def tokenizer_for_task(data: TaskData) -> PreTrainedTokenizerFast | Any | None:
    """What turns texts into inputs, saved with a model: a tokenizer, or the processor of a user's
    own data; None for the pixels and trees of other tasks.
    """
    if data.processor is not None:
        return data.processor
    if data.tokens is None:
        return None
    if data.tokens != BYTES:
        return word_tokenizer(data.tokens, data.max_length)
    # Texts to classify are truncated, prompts are not.
    return byte_tokenizer(data.max_length if data.kind == "classification" else None)


def _hkt(options: dict[str, Any], data: TaskData) -> Callable[[], PreTrainedModel]:
    sizes: dict[str, Any] = {
        "pad_token_id": data.pad_token_id,
        "eos_token_id": None,
        "max_position_embeddings": data.max_length,
    }
    if data.vocab_size is not None:
        sizes["vocab_size"] = data.vocab_size
    else:
        sizes["input_channels"] = data.input_channels
    if data.kind == "language":
        return _builder(HKTForCausalLM, HKTConfig, {**sizes, "causal": True, **options})
    # A class depends on the whole sequence, so attention is bidirectional by default.
    sizes |= {**_labels(data, options), "causal": False}
    return _builder(HKTForSequenceClassification, HKTConfig, {**sizes, **options})


def _hsa(options: dict[str, Any], data: TaskData) -> Callable[[], PreTrainedModel]:
    sizes = {
        "vocab_size": data.vocab_size,
        "pad_token_id": data.pad_token_id,
        "eos_token_id": None,
        "max_position_embeddings": data.max_length,
    }
    return _builder(HSAForCausalLM, HSAConfig, {**sizes, **options})


def _hte(options: dict[str, Any], data: TaskData) -> Callable[[], PreTrainedModel]:
    sizes = _labels(data, options)
    if data.modalities is not None:
        sizes |= {"modalities": data.modalities, "key_names": list(data.key_names)}
    elif data.vocab_size is not None:
        sizes["modalities"] = {"default": {"vocab_size": data.vocab_size}}
    else:
        sizes["modalities"] = {"default": {"width": data.input_channels}}
    return _builder(HTEForClassification, HTEConfig, {**sizes, **options})


def _labels(data: TaskData, options: dict[str, Any]) -> dict[str, Any]:
    """The classes of a task by name; unnamed if `options` have another number of them."""
    names = data.label_names
    if names is None or options.get("num_labels", len(names)) != len(names):
        return {"num_labels": data.num_labels}
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }


def _builder(
    model_class: type[PreTrainedModel],
    config_class: type[PreTrainedConfig],
    options: dict[str, Any],
) -> Callable[[], PreTrainedModel]:
    known = {*config_class.option_names(), "num_labels", "id2label", "label2id"}
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(
            f"names of model_options of {config_class.__name__} must be one of "
            f"{', '.join(sorted(known))}, got {unknown[0]!r}"
        )
    make_config: Any = config_class
    make_model: Any = model_class
    try:
        config = make_config(**options)
    except Exception as error:  # huggingface_hub has its own errors for bad values
        raise ValueError(f"model_options: {error}") from error
    return partial(make_model, config)


def collate_windows(windows: Sequence[int], samples: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Each sequence as the leaves of a tree of windows."""
    return collate_trees(
        [
            {
                "inputs": sample.get("input_ids", sample.get("input_values")),
                "tree": SignalTree.from_windows(len(next(iter(sample.values()))), windows),
                "labels": sample["labels"],
            }
            for sample in samples
        ]
    )
