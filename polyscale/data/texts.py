"""Classified texts: IMDB, AG News, SST-2; as texts, or as the bytes they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyscale.data.files import HubDataset, check_row, find_folder, read_first, read_rows
from polyscale.data.options import whole
from polyscale.data.splits import BYTES, PAD_ID, TaskData, TokenSplit, collate, decode_bytes
from polyscale.data.validation import choose_validation

BYTE_VOCABULARY = 257  # padding, then every byte: id = byte + 1


@dataclass(frozen=True)
class _Origin:
    """Where a set of texts is found, and how large the official one is."""

    train_files: tuple[str, ...]  # the first one found is taken
    test_files: tuple[str, ...]
    hub: HubDataset
    hub_test: str
    hub_column: str
    label_names: tuple[str, ...]
    validation: float  # share of the training set
    official_rows: int  # of the training set
    notes: tuple[str, ...] = ()


_ORIGINS = {
    "imdb-char": _Origin(
        train_files=("imdb_train.jsonl.gz",),
        test_files=("imdb_test.jsonl.gz",),
        hub=HubDataset("stanfordnlp/imdb", "e6281661ce1c48d982bc483cf8a173c1bbeb5d31"),
        hub_test="test",
        hub_column="text",
        label_names=("negative", "positive"),
        validation=0.1,
        official_rows=25_000,
    ),
    "agnews": _Origin(
        train_files=("agnews_train.jsonl.gz", "agnews_train_part.jsonl.gz"),
        test_files=("agnews_test.jsonl.gz",),
        hub=HubDataset("fancyzhx/ag_news", "eb185aade064a813bc0b7f42de02595523103ca4"),
        hub_test="test",
        hub_column="text",
        label_names=("World", "Sports", "Business", "Sci/Tech"),
        validation=0.1,
        official_rows=120_000,
    ),
    "sst2": _Origin(
        train_files=("sst2_train.jsonl.gz",),
        test_files=("sst2_dev.jsonl.gz",),
        hub=HubDataset("stanfordnlp/sst2", "8d51e7e4887a4caaa95b3fbebbf53c0490b58bbb"),
        hub_test="validation",
        hub_column="sentence",
        label_names=("negative", "positive"),
        validation=0.05,
        official_rows=67_349,
        notes=(
            "test is the official development set: the labels of the official test set are secret",
            "training rows are phrases, many of them parts of each other, so validation (other "
            "phrases of the same sentences) may be easier than test",
        ),
    ),
}
TEXT_TASKS = tuple(_ORIGINS)


@dataclass(frozen=True)
class LabelledTexts:
    """Texts of one split and their classes."""

    texts: list[str]
    labels: Tensor  # [N], int64

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TextSplits:
    """The three splits of a set of texts; `source` says where they come from (ready for JSON)."""

    name: str
    train: LabelledTexts
    validation: LabelledTexts
    test: LabelledTexts
    label_names: tuple[str, ...]
    source: dict[str, Any]


def load_texts(
    name: str, data_dir: Path | str | None = None, *, seed: int = 0, task: str | None = None
) -> TextSplits:
    """Texts as they stand in the source, for any tokenizer: "imdb-char", "agnews" or "sst2".

    Test is the official test set (the development set of SST-2), whole. A training text that is
    also in it is left out. `seed` chooses the validation texts out of the training set; no text
    is in both. `task` is the name that messages about missing files use.

        texts = load_texts("sst2", "data")
        texts.train.texts[0], texts.train.labels[0]
    """
    if name not in TEXT_TASKS:
        raise ValueError(f"name takes one of {', '.join(TEXT_TASKS)}, got {name!r}")
    whole("seed", seed, 0)
    origin = _ORIGINS[name]
    folder = find_folder(data_dir)
    if folder is None:
        train, test, source = _from_hub(task or name, origin)
    else:
        train, test, source = _from_folder(task or name, origin, folder)
    notes = [*origin.notes]
    if len(train[0]) != origin.official_rows:
        notes.append(f"train has {len(train[0]):,} rows; the official one {origin.official_rows:,}")
    (texts, labels), left_out = _without(train, set(test[0]))
    if left_out:
        notes.append(f"{left_out} training rows are left out: their text is also in test")
    kept_back = choose_validation(
        [text.encode() for text in texts], labels, origin.validation, seed
    )
    splits = {
        "train": _select(texts, labels, [not back for back in kept_back]),
        "validation": _select(texts, labels, kept_back),
        "test": LabelledTexts(test[0], torch.tensor(test[1], dtype=torch.int64)),
    }
    sizes = {part: len(split) for part, split in splits.items()}
    return TextSplits(
        name=name,
        **splits,
        label_names=origin.label_names,
        source={"seed": seed, "splits": sizes, **source, "notes": notes},
    )


def load_bytes(name: str, data_dir: Path | str | None, seed: int, length: int) -> TaskData:
    """A set of texts as bytes, the first `length` of each."""
    whole("length", length, 1)
    texts = load_texts(name, data_dir, seed=seed)
    splits, long, seen = {}, {}, {}
    for part in ("train", "validation", "test"):
        side: LabelledTexts = getattr(texts, part)
        coded = [text.encode() for text in side.texts]
        long[part] = sum(len(content) > length for content in coded)
        coded = [content[:length] for content in coded]
        seen[part] = set(coded)
        splits[part] = TokenSplit.from_bytes(coded, side.labels, shift=1, decode=decode_bytes)
    alike = {part: len(seen["train"] & seen[part]) for part in ("validation", "test")}
    test = splits["test"]
    return TaskData(
        name=name,
        kind="classification",
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        collate=collate,
        vocab_size=BYTE_VOCABULARY,
        input_channels=None,
        num_labels=len(texts.label_names),
        max_length=length,
        pad_token_id=PAD_ID,
        label_names=texts.label_names,
        source={
            **texts.source,
            "cut_to_length": long,
            "equal_to_a_training_text_once_cut": alike,
        },
        example=f"{test.text(0)[:400]} -> {texts.label_names[int(test.labels[0])]}",
        tokens=BYTES,
    )


_Rows = tuple[list[str], list[int]]


def _from_folder(name: str, origin: _Origin, folder: Path) -> tuple[_Rows, _Rows, dict[str, Any]]:
    classes = len(origin.label_names)
    rows, records = [], []
    for names in (origin.train_files, origin.test_files):
        file = read_first(folder, names, name)
        rows.append(read_rows(file, classes))
        records.append(file.record(rows=len(rows[-1][0])))
    return rows[0], rows[1], {"files": records}


def _from_hub(name: str, origin: _Origin) -> tuple[_Rows, _Rows, dict[str, Any]]:
    files = f"{origin.train_files[0]} and {origin.test_files[0]}"
    rows: list[_Rows] = []
    for split in ("train", origin.hub_test):
        table = origin.hub.load(split, name, files)
        texts = [*table[origin.hub_column]]
        if origin is _ORIGINS["sst2"]:  # a space is at the end of every sentence there
            texts = [text.rstrip(" ") for text in texts]
        labels = [*table["label"]]
        for number, (text, label) in enumerate(zip(texts, labels, strict=True)):
            where = f"{origin.hub.repository}, {split}, row {number}"
            check_row(text, label, len(origin.label_names), where)
        rows.append((texts, labels))
    sizes = {"train": len(rows[0][0]), "test": len(rows[1][0])}
    return rows[0], rows[1], {"hub": origin.hub.record(rows=sizes)}


def _without(rows: _Rows, banned: set[str]) -> tuple[_Rows, int]:
    kept = [(text, label) for text, label in zip(*rows, strict=True) if text not in banned]
    texts = [text for text, _ in kept]
    return (texts, [label for _, label in kept]), len(rows[0]) - len(texts)


def _select(texts: Sequence[str], labels: Sequence[int], wanted: Sequence[bool]) -> LabelledTexts:
    chosen = [index for index, is_wanted in enumerate(wanted) if is_wanted]
    picked = torch.tensor([labels[index] for index in chosen], dtype=torch.int64)
    return LabelledTexts([texts[index] for index in chosen], picked)
