"""Every task by its name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from polyscale.checks import check_choice, check_integer
from polyscale.data.coco import load_coco
from polyscale.data.images import load_images
from polyscale.data.listops_task import load_listops
from polyscale.data.own.tasks import (
    DOCUMENTS,
    LANGUAGE,
    OWN_TASKS,
    PIXELS,
    TEXTS,
    load_own_documents,
    load_own_images,
    load_own_language,
    load_own_texts,
)
from polyscale.data.splits import Split, TaskData
from polyscale.data.stream import load_stream
from polyscale.data.synthetic import load_copy, load_recall
from polyscale.data.texts import LabelledTexts, TextSplits, load_bytes, load_texts
from polyscale.data.words import load_words

__all__ = [
    "LANGUAGE_TASKS",
    "OWN_TASKS",
    "TASKS",
    "TREE_TASKS",
    "LabelledTexts",
    "Split",
    "TaskData",
    "TextSplits",
    "is_language_task",
    "is_tree_task",
    "load_task",
    "load_texts",
    "task_options",
]

# What all loaders get: the folder of the files, the seed, whether to show progress.
_Common = tuple[Path | str | None, int, bool]


def load_task(
    name: str,
    data_dir: Path | str | None = None,
    *,
    seed: int = 0,
    progress: bool = False,
    **options: Any,
) -> TaskData:
    """The data of a task; `task_options(name)` lists its options.

    Files come from `data_dir`, or the folder in POLYSCALE_DATA, or the Hugging Face Hub; listops,
    mqar and copy are generated; the `OWN_TASKS` read what their option `data` names. `seed` decides
    the generated samples, and which training samples are held out for validation.

    >>> task = load_task("copy", length=4, train=100, validation=10, test=10)
    >>> task.max_length, len(task.train), task.train[0]["labels"][:5].tolist()
    (9, 100, [-100, -100, -100, -100, -100])
    """
    known = task_options(name)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"{unknown[0]} is not an option of {name}, whose options are "
            + ", ".join(f"{option}={default!r}" for option, default in known.items())
        )
    check_integer("seed", seed, least=0)
    data = _LOADERS[name]((data_dir, seed, progress), **options)
    more = dict(data.source)
    resolved = more.pop("resolved", {})  # what was guessed from a user's own data
    source = {"task": name, "options": {**known, **options, **resolved}, **more}
    # Through JSON (no tuples, no paths), so that it equals what is read from a saved result.
    return replace(data, source=json.loads(json.dumps(source, default=str)))


def task_options(name: str) -> dict[str, Any]:
    """The options of a task with their default values.

    >>> task_options("imdb-char")
    {'length': 1024}
    """
    check_choice("name", name, (*TASKS, *OWN_TASKS))
    parameters = inspect.signature(_LOADERS[name]).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def _listops(
    common: _Common,
    *,
    preset: str = "t512",
    min_length: int | None = None,
    max_length: int | None = None,
    max_depth: int | None = None,
    max_args: int | None = None,
    operators: Sequence[str] | None = None,
    train: int | None = None,
    validation: int | None = None,
    test: int | None = None,
    tsv: str | None = None,
) -> TaskData:
    _, seed, progress = common
    return load_listops(
        seed,
        progress,
        preset,
        tsv,
        min_length=min_length,
        max_length=max_length,
        max_depth=max_depth,
        max_args=max_args,
        operators=operators,
        train=train,
        validation=validation,
        test=test,
    )


def _scifar10(common: _Common, *, tokens: bool = False) -> TaskData:
    return load_images(common[0], common[1], tokens)


def _imdb_char(common: _Common, *, length: int = 1024) -> TaskData:
    return load_bytes("imdb-char", common[0], common[1], length)


def _agnews(common: _Common, *, length: int = 512) -> TaskData:
    return load_bytes("agnews", common[0], common[1], length)


def _sst2(common: _Common, *, length: int = 256) -> TaskData:
    return load_bytes("sst2", common[0], common[1], length)


def _enwik8(common: _Common, *, length: int = 1024) -> TaskData:
    return load_stream(common[0], length)


def _mqar(
    common: _Common,
    *,
    vocab: int = 256,
    pairs: int | Sequence[int] = 8,
    length: int = 64,
    power: float = 0.01,
    train: int = 20_000,
    validation: int = 1_000,
    test: int = 2_000,
) -> TaskData:
    sizes = {"train": train, "validation": validation, "test": test}
    return load_recall(common[1], sizes, vocab, pairs, length, power)


def _copy(
    common: _Common,
    *,
    vocab: int = 16,
    length: int = 32,
    train: int = 20_000,
    validation: int = 1_000,
    test: int = 2_000,
) -> TaskData:
    sizes = {"train": train, "validation": validation, "test": test}
    return load_copy(common[1], sizes, vocab, length)


def _words(
    name: str,
    common: _Common,
    *,
    embedding: str = "word2vec",
    width: int = 128,
    tree: str = "semantic",
    max_tokens: int | None = None,
    train: int | None = None,
    validation: int | None = None,
    test: int | None = None,
) -> TaskData:
    return load_words(
        name,
        common[0],
        common[1],
        embedding=embedding,
        width=width,
        tree=tree,
        max_tokens=max_tokens,
        sizes={"train": train, "validation": validation, "test": test},
    )


def _coco18(
    common: _Common,
    *,
    fields: str = "both",
    layout: str = "flat",
    embedding: str = "word2vec",
    width: int = 128,
) -> TaskData:
    return load_coco(
        common[0], common[1], fields=fields, layout=layout, embedding=embedding, width=width
    )


_LOADERS: dict[str, Callable[..., TaskData]] = {
    "listops": _listops,
    "scifar10": _scifar10,
    "imdb-char": _imdb_char,
    "agnews": _agnews,
    "sst2": _sst2,
    "enwik8": _enwik8,
    "mqar": _mqar,
    "copy": _copy,
    "imdb-words": partial(_words, "imdb-words"),
    "agnews-words": partial(_words, "agnews-words"),
    "sst2-words": partial(_words, "sst2-words"),
    "coco18": _coco18,
}
TASKS: tuple[str, ...] = tuple(_LOADERS)
# A user's own data: the same, but for a name and sizes that are known in advance.
_LOADERS |= {
    TEXTS: load_own_texts,
    LANGUAGE: load_own_language,
    DOCUMENTS: load_own_documents,
    PIXELS: load_own_images,
}
# Tasks whose samples have a tree.
TREE_TASKS: tuple[str, ...] = ("imdb-words", "agnews-words", "sst2-words", "coco18")
LANGUAGE_TASKS: tuple[str, ...] = ("enwik8", "mqar", "copy")


def is_tree_task(name: str) -> bool:
    """Whether the samples of a task have a tree."""
    return name in (*TREE_TASKS, DOCUMENTS)


def is_language_task(name: str) -> bool:
    """Whether a task is to predict tokens."""
    return name in (*LANGUAGE_TASKS, LANGUAGE)
