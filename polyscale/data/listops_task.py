"""ListOps as a task: generated and cached, or read from the files of the Long Range Arena."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from polyscale.checks import check_choice
from polyscale.data.generated import cached_or_made
from polyscale.data.listops import (
    NUM_CLASSES,
    PAD_ID,
    PRESETS,
    VOCABULARY,
    ListOpsConfig,
    ListOpsDataset,
    collate,
    encode,
    evaluate,
    make_listops,
)
from polyscale.data.splits import TaskData

# Increase with every change of the generated data, so that older cache entries are not used.
GENERATOR_VERSION = 1
TSV_FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}

# Data of fewer tokens are generated about as fast as they are read.
_CACHED_FROM = 5_000_000
_COLUMNS = ("tokens", "offsets", "labels")
_Splits = dict[str, ListOpsDataset]


def load_listops(
    seed: int, progress: bool, preset: str, tsv: str | Path | None, **limits: Any
) -> TaskData:
    """ListOps by preset, changed by the limits that are not None, or from TSV files."""
    limits = {name: value for name, value in limits.items() if value is not None}
    if tsv is not None:
        if limits:
            raise ValueError(
                f"tsv must not be combined with {', '.join(limits)}: files are read whole"
            )
        splits, source = _read_folder(tsv)
        longest = max(int(split.lengths.max()) for split in splits.values())
    else:
        config = _configure(preset, limits, seed)
        splits, source = _generate(config, progress)
        longest = config.max_length
    test = splits["test"]
    return TaskData(
        name="listops",
        kind="classification",
        train=splits["train"],
        validation=splits["validation"],
        test=test,
        collate=collate,
        vocab_size=len(VOCABULARY),
        input_channels=None,
        num_labels=NUM_CLASSES,
        max_length=longest,
        pad_token_id=PAD_ID,
        label_names=tuple("0123456789"),
        source={
            "seed": seed,
            "splits": {name: len(split) for name, split in splits.items()},
            **source,
        },
        example=f"{test.text(0)} -> {int(test.labels[0])}",
        tokens=VOCABULARY,
    )


def _configure(preset: str, limits: dict[str, Any], seed: int) -> ListOpsConfig:
    check_choice("preset", preset, PRESETS)
    if isinstance(limits.get("operators"), list):
        limits["operators"] = tuple(limits["operators"])  # YAML and JSON have lists
    return replace(PRESETS[preset], **limits, seed=seed)


def _generate(config: ListOpsConfig, progress: bool) -> tuple[_Splits, dict[str, Any]]:
    recipe = {"version": GENERATOR_VERSION, **asdict(config)}

    def make() -> _Splits:
        made = make_listops(config, progress=progress)
        return {"train": made.train, "validation": made.validation, "test": made.test}

    small = config.total * config.max_length < _CACHED_FROM
    splits = make() if small else _cached_or_made(recipe, make)
    return splits, {"generator": recipe, "notes": []}


def _read_folder(folder: str | Path) -> tuple[_Splits, dict[str, Any]]:
    if not isinstance(folder, str | Path):
        raise TypeError(f"tsv must be a folder, got {folder!r}")
    paths = {part: Path(folder).expanduser() / name for part, name in TSV_FILES.items()}
    for path in paths.values():
        if not path.is_file():
            names = ", ".join(TSV_FILES.values())
            raise FileNotFoundError(f"tsv must be a folder with {names}; {path} is missing")
    # Checking every value is slow, so the result is cached.
    records = [{"name": path.name, "sha256": _digest(path)} for path in paths.values()]
    recipe = {"version": GENERATOR_VERSION, "files": records}

    def make() -> _Splits:
        return {part: ListOpsDataset.from_samples(read_tsv(path)) for part, path in paths.items()}

    splits = _cached_or_made(recipe, make)
    trained = set(_contents(splits["train"]))
    notes = []
    for part in ("validation", "test"):
        repeats = sum(content in trained for content in _contents(splits[part]))
        if repeats:
            notes.append(f"{repeats} {part} expressions are also in train")
    return splits, {"files": records, "notes": notes}


def read_tsv(path: Path) -> list[tuple[bytes, int]]:
    """Token ids and values from a file of the Long Range Arena; each value is checked.

    Its columns are Source, whose round parentheses are removed, and Target.
    """
    samples = []
    columns: list[str] = []
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            where = f"{path}, line {number}"
            cells = line.decode("utf-8", errors="replace").rstrip("\r\n").split("\t")
            if number == 1:
                columns = cells
                if not {"Source", "Target"} <= set(columns):
                    raise ValueError(f"{where} must name Source and Target, got {line[:80]!r}")
                continue
            if len(cells) != len(columns):
                raise ValueError(f"{where} must have {len(columns)} columns, got {len(cells)}")
            row = dict(zip(columns, cells, strict=True))
            try:
                ids = encode(row["Source"].replace("(", " ").replace(")", " "))
                value = evaluate(ids)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            if row["Target"] != str(value):
                raise ValueError(f"{where}: Target must be {value}, got {row['Target']!r}")
            samples.append((bytes(ids), value))
    if not samples:
        raise ValueError(f"{path} has no rows")
    return samples


def _cached_or_made(recipe: dict[str, Any], make: Callable[[], _Splits]) -> _Splits:
    """The splits from the cache; otherwise they are made and cached."""

    def make_tensors() -> dict[str, Tensor]:
        return {
            f"{part}.{column}": getattr(split, column)
            for part, split in make().items()
            for column in _COLUMNS
        }

    tensors = cached_or_made("listops", recipe, make_tensors)
    return {
        part: ListOpsDataset(*(tensors[f"{part}.{column}"] for column in _COLUMNS))
        for part in TSV_FILES
    }


def _contents(split: ListOpsDataset) -> Iterator[bytes]:
    flat = split.tokens.numpy().tobytes()
    for start, stop in pairwise(split.offsets.tolist()):
        yield flat[start:stop]


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
