"""Classified texts: IMDB, AG News, SST-2; as strings or as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyscale.checks import check_choice, check_integer
from polyscale.data.files import HubDataset, check_row, find_folder, read_first, read_rows
from polyscale.data.splits import BYTES, PAD_ID, TaskData, TokenSplit, collate, decode_bytes
from polyscale.data.validation import choose_validation

BYTE_VOCABULARY = 257  # padding, then every byte: id = byte + 1


@dataclass(frozen=True)
class _Origin:
    """Where a set of texts comes from, and the size of the official one."""

    train_files: tuple[str, ...]  # the first that exists is used
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
    """The three splits of a set of texts; `source` (JSON) says where they come from."""

    name: str
    train: LabelledTexts
    validation: LabelledTexts
    test: LabelledTexts
    label_names: tuple[str, ...]
    source: dict[str, Any]


def load_texts(
    name: str, data_dir: Path | str | None = None, *, seed: int = 0, task: str | None = None
) -> TextSplits:
    """Unchanged texts for any tokenizer: "imdb-char", "agnews" or "sst2".

    Test is the complete official test set (for SST-2 the development set). Training texts that are
    also in it are dropped. `seed` chooses the validation texts among the training texts; no text is
    in both. Messages about missing files name `task`.

        texts = load_texts("sst2", "data")
        texts.train.texts[0], texts.train.labels[0]
    """
    check_choice("name", name, TEXT_TASKS)
    check_integer("seed", seed, least=0)
    origin = _ORIGINS[name]
    folder = find_folder(data_dir)
    if folder is None:
        train, test, source = _from_hub(task or name, origin)
    else:
        train, test, source = _from_folder(task or name, origin, folder)
    notes = [*origin.notes]
    if len(train[0]) != origin.official_rows:
        notes.append(f"train has {len(train[0]):,} rows; the official one {origin.official_rows:,}")
    (texts, labels), dropped = _drop_texts(train, set(test[0]))
    if dropped:
        notes.append(f"{dropped} training rows are left out: their text is also in test")
    held_out = choose_validation([text.encode() for text in texts], labels, origin.validation, seed)
    splits = {
        "train": _select(texts, labels, [not is_held for is_held in held_out]),
        "validation": _select(texts, labels, held_out),
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
    """A set of texts as bytes, truncated to `length`."""
    check_integer("length", length, least=1)
    texts = load_texts(name, data_dir, seed=seed)
    splits, long, seen = {}, {}, {}
    for part in ("train", "validation", "test"):
        side: LabelledTexts = getattr(texts, part)
        coded = [text.encode() for text in side.texts]
        long[part] = sum(len(content) > length for content in coded)
        coded = [content[:length] for content in coded]
        seen[part] = set(coded)
        splits[part] = TokenSplit.from_bytes(coded, side.labels, shift=1, decode=decode_bytes)
    repeated = {part: len(seen["train"] & seen[part]) for part in ("validation", "test")}
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
            "equal_to_a_training_text_once_cut": repeated,
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
        if origin is _ORIGINS["sst2"]:  # every sentence there ends with a space
            texts = [text.rstrip(" ") for text in texts]
        labels = [*table["label"]]
        for number, (text, label) in enumerate(zip(texts, labels, strict=True)):
            where = f"{origin.hub.repository}, {split}, row {number}"
            check_row(text, label, len(origin.label_names), where)
        rows.append((texts, labels))
    sizes = {"train": len(rows[0][0]), "test": len(rows[1][0])}
    return rows[0], rows[1], {"hub": origin.hub.record(rows=sizes)}


def _drop_texts(rows: _Rows, dropped: set[str]) -> tuple[_Rows, int]:
    kept = [(text, label) for text, label in zip(*rows, strict=True) if text not in dropped]
    texts = [text for text, _ in kept]
    return (texts, [label for _, label in kept]), len(rows[0]) - len(texts)


def _select(texts: Sequence[str], labels: Sequence[int], wanted: Sequence[bool]) -> LabelledTexts:
    chosen = [index for index, is_wanted in enumerate(wanted) if is_wanted]
    picked = torch.tensor([labels[index] for index in chosen], dtype=torch.int64)
    return LabelledTexts([texts[index] for index in chosen], picked)
