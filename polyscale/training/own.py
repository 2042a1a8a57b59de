"""Runs on a user's own data: the task, the sizes and the budget follow from the data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyscale.checks import check_choice
from polyscale.data.own.folders import media_of
from polyscale.data.own.hub import is_saved_dataset
from polyscale.data.own.items import IMAGE, TEXT
from polyscale.data.own.reading import Wanted, read_source
from polyscale.data.own.tables import is_table
from polyscale.data.own.tasks import DOCUMENTS, LANGUAGE, PIXELS, TEXTS
from polyscale.data.tasks import TaskData, load_task, task_options
from polyscale.training.config import MODELS, RunConfig
from polyscale.training.presets import preset_config
from polyscale.training.settings import TrainingSettings

KINDS = ("classification", "language")
TREES = ("documents", "windows")  # what the encoders over trees read of texts
_ENCODERS = ("hsa", "fsa", "deepset")
# Passes over the data. Trees of words learn an embedding of each word, and overfit sooner.
_EPOCHS = {TEXTS: 12, LANGUAGE: 12, DOCUMENTS: 5, PIXELS: 12}
_STEPS = {"small": (200, 4_000), "paper": (1_000, 40_000)}
_LOCAL = ("data", "labels", "validation", "test")  # options that name files


@dataclass(frozen=True)
class OwnRun:
    """A run on a user's data, the data, and what the user should know, a sentence for each line."""

    config: RunConfig
    data: TaskData
    said: list[str]


def plan_own_run(
    options: Mapping[str, Any],
    *,
    model: str | None = None,
    kind: str | None = None,
    trees: str | None = None,
    preset: str = "small",
    seed: int = 0,
    levels: int | None = None,
    changes: Mapping[str, Any] | None = None,
) -> OwnRun:
    """The configuration for a user's data, with everything in it that was guessed.

    Args:
        options: of the task: `data`, and any of text, label, labels, validation, test, tokenizer,
            length and format.
        model: one of `MODELS`; hkt, or for documents with structure hsa.
        kind: "classification" or "language"; language for a single text, otherwise classification.
        trees: for the models hsa, fsa and deepset: trees of "documents", or "windows" of tokens.
        preset: the size of the model and its budget.
        seed: of weights, order and dropout.
        levels: of hkt.
        changes: as `RunConfig.with_values` takes them.
    """
    given = {name: _located(name, value) for name, value in options.items() if value is not None}
    said: list[str] = []
    if kind is not None:
        check_choice("kind", kind, KINDS)
    if trees is not None:
        check_choice("trees", trees, TREES)
    if kind is None:
        kind = _guess_kind(str(given.get("data", "")), said)
    if model is None:
        model = _guess_model(given, kind, said)
    check_choice("model", model, MODELS)
    task = _task(given, kind, model, trees)
    known = task_options(task)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"{unknown[0]} does not go with {kind} of {given['data']} by the model {model}, got "
            f"{given[unknown[0]]!r}; leave it out"
        )
    config = preset_config(task, model, preset, seed=seed, levels=levels)
    config = replace(config, task_options={**config.task_options, **given})
    of_training = {n: value for n, value in (changes or {}).items() if n.startswith("training.")}
    others = {n: value for n, value in (changes or {}).items() if n not in of_training}
    config = config.with_values(others)
    data = load_task(task, seed=config.data_seed, **config.task_options)
    found = {
        name: value
        for name, value in data.source["options"].items()
        if value is not None and value != known[name]
    }
    said += _guesses(found, config.task_options, data)
    said += data.source["notes"]
    budget = _budget(data, preset, of_training.get("training.steps"))
    training = TrainingSettings(**{**config.as_dict()["training"], **budget})
    config = replace(config, task_options=found, training=training).with_values(of_training)
    training = config.training
    said.append(
        f"{model} trains for {training.steps:,} steps of {training.batch_size} samples "
        "(--set training.steps=N changes it)"
    )
    return OwnRun(config, data, said)


def _located(name: str, value: Any) -> Any:
    """A path to something that exists, from the root, so that a run resumes from any folder."""
    if name not in _LOCAL:
        return value
    path = Path(str(value)).expanduser()
    return str(path.resolve()) if path.exists() else str(value)


def _guess_kind(data: str, said: list[str]) -> str:
    path = Path(data)
    if path.is_file() and not is_table(path) and media_of(path) not in (None, "json", IMAGE):
        said.append(f"{path.name} is one text: its language is modelled (--kind language)")
        return "language"
    return "classification"


def _guess_model(given: dict[str, Any], kind: str, said: list[str]) -> str:
    if kind == "classification" and _media(given) not in (TEXT, IMAGE):
        said.append("the model is hsa, over the trees of the documents (--model chooses)")
        return "hsa"
    said.append("the model is hkt (--model chooses)")
    return "hkt"


def _task(given: dict[str, Any], kind: str, model: str, trees: str | None) -> str:
    if trees is not None and (model not in _ENCODERS or kind == "language"):
        raise ValueError(
            f"trees must be left out for {kind} with the model {model}, got {trees!r}; it goes "
            f"with classification by {', '.join(_ENCODERS)}"
        )
    if kind == "language":
        return LANGUAGE
    if model in _ENCODERS and trees != "windows":
        return DOCUMENTS
    return PIXELS if _media(given) == IMAGE else TEXTS


def _media(given: dict[str, Any]) -> str:
    """What the data consist of, by names of files if they say it."""
    path = Path(str(given.get("data", "")))
    if "format" in given:
        return str(given["format"])
    if path.is_dir() and not is_saved_dataset(path) and "labels" not in given:
        kinds = Counter(
            media for file in path.rglob("*") if (media := media_of(file)) and file.is_file()
        )
        if kinds:
            return max(kinds, key=lambda media: kinds[media])
    text = given.get("text") or ()
    columns = tuple(text.split(",")) if isinstance(text, str) else tuple(text)
    wanted = Wanted(columns, given.get("label"), given.get("labels"), labelled=False)
    return read_source(str(given.get("data") or ""), wanted)["train"].media


def _budget(data: TaskData, preset: str, steps: Any = None) -> dict[str, Any]:
    """Steps for some passes over the data, and batches that small data can fill.

    With `steps` as the user chose them, the pace of evaluations follows from those.
    """
    count = len(data.train)
    if preset == "tiny":
        batch, default = min(16, count), 40
    else:
        batch = max(1, min(32, count // 8))
        least, most = _STEPS[preset]
        default = max(least, min(most, _EPOCHS[data.name] * count // batch))
    chosen = default if not isinstance(steps, int) or steps < 1 else steps
    return {
        "steps": chosen,
        "batch_size": batch,
        "warmup_steps": max(1, chosen // 20),
        "log_every": max(1, chosen // (4 if preset == "tiny" else 100)),
        "evaluate_every": max(1, chosen // (2 if preset == "tiny" else 20)),
        "bucket_by_length": int(data.train.lengths.min()) != int(data.train.lengths.max()),
    }


def _guesses(found: Mapping[str, Any], given: Mapping[str, Any], data: TaskData) -> list[str]:
    """What was guessed of the columns, and which labels there are."""
    name = Path(str(found["data"])).name
    rows = ", ".join(
        f"{len(getattr(data, part)):,} {part}" for part in ("train", "validation", "test")
    )
    said = [f"{name}: {rows} samples"]
    guesses = []
    if found.get("text") and not given.get("text"):
        listed = Path(str(found["data"]))  # a folder with a table names its files there
        what = "files" if listed.is_dir() and not is_saved_dataset(listed) else "texts"
        guesses.append(f"{what} are in the column {', '.join(map(repr, found['text']))}")
    if found.get("label") and not given.get("label"):
        guesses.append(f"labels in {found['label']!r}")
    if guesses:
        said.append(" and ".join(guesses) + " (guessed; --text-column and --label-column choose)")
    if data.label_names is not None and data.train.labels is not None:
        counts = data.train.labels.bincount(minlength=len(data.label_names)).tolist()
        pairs = [f"{name} ({n:,})" for name, n in zip(data.label_names, counts, strict=True)]
        more = f" and {len(pairs) - 10} more" if len(pairs) > 10 else ""
        said.append(f"{len(pairs)} labels for training: {', '.join(pairs[:10])}{more}")
    return said
