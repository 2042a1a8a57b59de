"""enwik8: the bytes of Wikipedia, cut into windows."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from polyscale.checks import check_integer
from polyscale.data.files import FOLDER_VARIABLE, find_folder, read_first, unzip
from polyscale.data.splits import BYTES, PAD_ID, TaskData, WindowSplit, collate
from polyscale.data.texts import BYTE_VOCABULARY

FILES = ("enwik8", "enwik8.gz", "enwik8_20mb.gz")
OFFICIAL_BYTES = 100_000_000
OFFICIAL_MD5 = "a1fa5ffddb56f4953e226637dabbb36a"

# The copies on the Hub need code from there to be run.
_ADVICE = "unpack https://mattmahoney.net/dc/enwik8.zip"


def load_stream(data_dir: Path | str | None, length: int) -> TaskData:
    """90 % of the bytes for training, the next 5 % for validation, the last 5 % for test."""
    check_integer("length", length, least=2)
    folder = find_folder(data_dir)
    if folder is None:
        raise FileNotFoundError(
            f"enwik8 needs data_dir (--data-dir) or {FOLDER_VARIABLE}, a folder with one of "
            f"{', '.join(FILES)}: {_ADVICE} in it"
        )
    file = read_first(folder, FILES, "enwik8", advice=f"{_ADVICE} there")
    content = unzip(file) if file.path.suffix == ".gz" else file.content
    if file.path.name in FILES[:2]:
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != OFFICIAL_MD5:
            raise ValueError(
                f"{file.path} must have {OFFICIAL_BYTES:,} bytes with MD5 {OFFICIAL_MD5}, got "
                f"{len(content):,} with {found}: it is damaged or another file"
            )
    first, second = len(content) * 90 // 100, len(content) * 95 // 100
    bounds = {"train": (0, first), "validation": (first, second), "test": (second, len(content))}
    if min(stop - start for start, stop in bounds.values()) < 2:
        raise ValueError(f"{file.path} must have at least 40 bytes, got {len(content)}")
    stream = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    # Copies, so that sending a split to another process does not send the others.
    splits = {
        name: WindowSplit(stream[start:stop].clone(), length)
        for name, (start, stop) in bounds.items()
    }
    notes = [
        "windows do not overlap: the first byte of each is given, not predicted",
        "90, 5 and 5 % of the bytes, in the order of the file",
    ]
    if len(content) != OFFICIAL_BYTES:
        notes.append(
            f"the first {len(content):,} of {OFFICIAL_BYTES:,} bytes: results are not comparable "
            "with those on the whole"
        )
    return TaskData(
        name="enwik8",
        kind="language",
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        collate=collate,
        vocab_size=BYTE_VOCABULARY,
        input_channels=None,
        num_labels=None,
        max_length=length,
        pad_token_id=PAD_ID,
        label_names=None,
        source={
            "splits": {name: len(split) for name, split in splits.items()},
            "bytes": {name: stop - start for name, (start, stop) in bounds.items()},
            "files": [file.record(bytes=len(content))],
            "notes": notes,
        },
        example=f"{splits['test'].text(0)[:400]} -> every byte from those before it",
        tokens=BYTES,
    )
