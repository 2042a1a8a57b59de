"""What to run: HSA and its baselines on documents and records, and HSA over other trees."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from polyscale.training.compare import PlannedRun
from polyscale.training.presets import preset_config

# What `preset_config` calls the size of each preset.
PRESETS = {"cpu": "small", "paper": "paper"}
SEEDS = (0, 1, 2)
EMBEDDINGS = ("word2vec", "minilm")
# The paper's own first; the other two replace Elec, which is not available.
DOCUMENTS = ("imdb-words", "agnews-words", "sst2-words")
RECORDS = "coco18"
FLAT_TOKENS = 512  # the paper's length; trees are not truncated


@dataclass(frozen=True)
class Variant:
    """A row of a table: a model, and what differs from the preset."""

    model: str
    task: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


Variants = dict[str, Variant]

_DOCUMENT_MODELS: Variants = {
    "fsa": Variant("fsa", {"max_tokens": FLAT_TOKENS}),
    "hsa": Variant("hsa"),
}
# Other explanations of a difference: the shape of the tree, the tie, or attention as such.
_QUESTIONS: Variants = {
    "hsa-windows": Variant("hsa", {"tree": "windows"}),
    "hsa-random": Variant("hsa", {"tree": "random"}),
    "hsa-columns": Variant("hsa", options={"tie": "columns"}),
    "deepset": Variant("deepset"),
}
_RECORD_MODELS: Variants = {
    "fsa": Variant("fsa"),
    "hsa": Variant("hsa"),
    "deepset": Variant("deepset"),
    "hsa-image-only": Variant("hsa", {"fields": "image"}),
    "hsa-text-only": Variant("hsa", {"fields": "text"}),
    # Sixty-four patches outnumber ten words; with tree pooling both fields have the same weight.
    "fsa-tree-pooling": Variant("fsa", options={"pooling": "tree"}),
    "hsa-tree-pooling": Variant("hsa", options={"pooling": "tree"}),
}


def document_table(task: str, embedding: str) -> str:
    """The name of the table, and of its folder.

    >>> document_table("imdb-words", "word2vec")
    'imdb-word2vec'
    """
    return f"{task.removesuffix('-words')}-{embedding}"


def plan_hsa(size: str) -> list[PlannedRun]:
    """All runs, IMDB first: flat and hierarchical attention with both kinds of word vectors.

    `size` names a preset of `preset_config`: "small" takes parts of the data and a budget for one
    core; "paper" takes all of the data, and the paper's epochs, batch and learning rate.

    >>> len(plan_hsa("small"))
    69
    """
    first, *others = DOCUMENTS
    planned = _document_runs(first, EMBEDDINGS[0], size, _DOCUMENT_MODELS)
    planned += _document_runs(first, EMBEDDINGS[0], size, _QUESTIONS)
    planned += _document_runs(first, EMBEDDINGS[1], size, _DOCUMENT_MODELS)
    planned += _runs(RECORDS, RECORDS, size, {"embedding": "minilm"}, _RECORD_MODELS)
    for task in others:
        for embedding in EMBEDDINGS:
            planned += _document_runs(task, embedding, size, _DOCUMENT_MODELS)
    return planned


def _document_runs(task: str, embedding: str, size: str, variants: Variants) -> list[PlannedRun]:
    return _runs(document_table(task, embedding), task, size, {"embedding": embedding}, variants)


def _runs(
    table: str,
    task: str,
    size: str,
    options: dict[str, Any],
    variants: Variants,
) -> list[PlannedRun]:
    planned = []
    for seed in SEEDS:
        for name, variant in variants.items():
            config = preset_config(task, variant.model, size, seed=seed)
            config = replace(
                config,
                name=name,
                task_options=config.task_options | options | variant.task,
                model_options=config.model_options | variant.options,
            )
            planned.append(PlannedRun(table, config))
    return planned
