"""Sources of data: a folder of known files, or the Hugging Face Hub. Nothing is unpickled.

Compressed files are unpacked up to a limit in proportion to their size.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polyscale._extras import require

FOLDER_VARIABLE = "POLYSCALE_DATA"

# The largest ratio of unpacked to compressed size: text has 3 to 5, deflate can reach 1,032. Up to
# _HARMLESS bytes any ratio is accepted.
EXPANSION = 64
_HARMLESS = 2**20  # bytes

# SHA-256 of files with a known content. Files of other names, such as a user's own
# agnews_train.jsonl.gz, are not listed: their rows are checked and counted instead.
CHECKSUMS = {
    "cifar10_gray.npz": "28151f70bb05e0a99d2ef20d0cd5d1f12ede83fc2d80a2204c0397c0486c309a",
    "imdb_train.jsonl.gz": "bfdcb58d2cf7aca8144bb2810fb16a50d7e0bf194cb7467e5d60f43e666bb628",
    "imdb_test.jsonl.gz": "a9a8162e6be953da9bf702239640d7b206dddcc4064a813bdec364645451350d",
    "agnews_train_part.jsonl.gz": (
        "1f0a7df403d0ec622beda190ae9f50da9cfd6302e7b7c041c2b828deb04c8d2a"
    ),
    "agnews_test.jsonl.gz": "d2f4b63a6cc5d2a805e952aac359e4063bbe58c6c4f064a913158b8205755e63",
    "sst2_train.jsonl.gz": "0e4f1150ff1c26b4e18a73c3ac8e621d2ae18eb47698c7abd4391aa25eb6a7c9",
    "sst2_dev.jsonl.gz": "cf4c5ad0a61565bd09b4cd5a70760828a3b5b65c8d30a74a1d147bf5796d0586",
    "coco18_mm_64px.npz": "807616df307e803dbe402457ed57f218d246504e76b78ea49bff49eb0a357019",
    "coco18_mm_text.jsonl.gz": "dba003b48d96d1b39e414d45136b74b34f3f6dc87a2b75487b61e7bb77a05f4d",
    "enwik8_20mb.gz": "c5861cbd978e3bfbcbbe8fe2acf70d3be150de853e079417bbfa6abbf8d5b977",
}


@dataclass(frozen=True)
class DataFile:
    """The content of a file, read and checked once."""

    path: Path
    content: bytes
    sha256: str

    def record(self, **more: Any) -> dict[str, Any]:
        """The entry of the file in `TaskData.source`."""
        return {"name": self.path.name, "sha256": self.sha256, **more}


def find_folder(data_dir: Path | str | None) -> Path | None:
    """The folder with the files: the argument or POLYSCALE_DATA; None for the Hub."""
    chosen = data_dir if data_dir is not None else os.environ.get(FOLDER_VARIABLE) or None
    if chosen is None:
        return None
    if not isinstance(chosen, str | Path):
        raise TypeError(f"data_dir must be a path or None, got {chosen!r}")
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        name = "data_dir" if data_dir is not None else FOLDER_VARIABLE
        raise FileNotFoundError(f"{name} must be a folder that exists, got {folder}")
    return folder


def read_first(folder: Path, names: Sequence[str], task: str, advice: str = "") -> DataFile:
    """The first of `names` in the folder; its checksum must be the known one."""
    for name in names:
        path = folder / name
        if path.is_file():
            return _read(path)
    advice = advice or "put it there, or give no folder to load the data from the Hub"
    raise FileNotFoundError(f"{task} needs {' or '.join(names)} in {folder}: {advice}")


def _read(path: Path) -> DataFile:
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    expected = CHECKSUMS.get(path.name)
    if expected is not None and found != expected:
        raise ValueError(
            f"{path} must have SHA-256 {expected}, got {found}: it is damaged or another file"
        )
    return DataFile(path, content, found)


def unzip(file: DataFile) -> bytes:
    """The content of a gzip file; truncated, damaged and oversized files are errors."""
    limit = _limit(file)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(file.content)) as stream:
            content = stream.read(limit + 1)
    except EOFError:
        raise ValueError(f"{file.path} is truncated: the end of its gzip data is missing") from None
    except (OSError, zlib.error) as error:
        raise ValueError(f"{file.path} is damaged or not a gzip file: {error}") from None
    if len(content) > limit:
        raise ValueError(_too_large(file, "more"))
    return content


def _limit(file: DataFile) -> int:
    return max(_HARMLESS, EXPANSION * len(file.content))


def _too_large(file: DataFile, size: str) -> str:
    return (
        f"{file.path} must unpack to at most {_limit(file):,} bytes ({EXPANSION} times its own "
        f"{len(file.content):,}), got {size}: it is not data of this kind"
    )


def unzip_lines(file: DataFile) -> Iterator[tuple[str, bytes]]:
    """The non-blank lines of a gzip file, each with its location for messages."""
    for number, line in enumerate(io.BytesIO(unzip(file)), start=1):
        if line.strip():
            yield f"{file.path}, line {number}", line.rstrip(b"\r\n")


def read_arrays(file: DataFile, names: Sequence[str], task: str) -> list[Any]:
    """Arrays of an .npz file; declared sizes are checked against the file before reading."""
    numpy = require("numpy", "train", task)
    try:
        with zipfile.ZipFile(io.BytesIO(file.content)) as archive:
            members = [archive.getinfo(f"{name}.npy") for name in names]
            total = sum(member.file_size for member in members)
            if total <= _limit(file):
                # zipfile unpacks no more than a member declares.
                return [_read_array(numpy, archive.read(member)) for member in members]
    # A damaged header can raise almost any error: it is parsed as Python.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"{file.path} is damaged or not an .npz file of arrays ({reason})"
        ) from error
    raise ValueError(_too_large(file, f"{total:,}"))


def _read_array(numpy: Any, content: bytes) -> Any:
    stream = io.BytesIO(content)
    headers = numpy.lib.format
    readers = {(1, 0): headers.read_array_header_1_0, (2, 0): headers.read_array_header_2_0}
    shape, _, kind = readers[headers.read_magic(stream)](stream)
    declared, held = math.prod(shape) * kind.itemsize, len(content) - stream.tell()
    # Objects would be unpickled, and an array of zero-sized elements can declare any shape.
    if kind.hasobject or not kind.itemsize or declared != held:
        raise ValueError(f"an array of {list(shape)} elements of {kind!r} in {held:,} bytes")
    stream.seek(0)
    return headers.read_array(stream, allow_pickle=False)


def read_rows(file: DataFile, classes: int) -> tuple[list[str], list[int]]:
    """Texts and labels of a .jsonl.gz file; errors name the line."""
    texts, labels = [], []
    for where, line in unzip_lines(file):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} must be JSON in UTF-8 ({error})") from None
        if not isinstance(row, dict) or not {"text", "label"} <= row.keys():
            raise ValueError(f"{where} must be an object with text and label, got {line[:80]!r}")
        texts.append(row["text"])
        labels.append(row["label"])
        check_row(texts[-1], labels[-1], classes, where)
    if not texts:
        raise ValueError(f"{file.path} has no rows")
    return texts, labels


def check_row(text: Any, label: Any, classes: int, where: str) -> None:
    """Raise unless the text is a non-empty string and the label is in range."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"{where}: text must be a non-empty string, got {text!r}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: text must be UTF-8, got half a surrogate pair") from None
    if not isinstance(label, int) or isinstance(label, bool) or not 0 <= label < classes:
        raise ValueError(f"{where}: label must be from 0 to {classes - 1}, got {label!r}")


@dataclass(frozen=True)
class HubDataset:
    """A dataset repository at one commit; it holds Parquet files and no code."""

    repository: str
    revision: str

    def load(self, split: str, task: str, files: str) -> Any:
        """One split; error messages name `files` as the alternative."""
        folder = f"data_dir (--data-dir) or {FOLDER_VARIABLE}"
        datasets = require("datasets", "train", f"{task} without a data folder ({folder})")
        try:
            return datasets.load_dataset(self.repository, split=split, revision=self.revision)
        # Whatever the cause (network, revision, disk space), the alternative is the same.
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise FileNotFoundError(
                f"{task}: {self.repository} could not be loaded from the Hugging Face Hub "
                f"({reason}): set {folder} to a folder with {files}"
            ) from error

    def record(self, **more: Any) -> dict[str, Any]:
        """The entry of the repository in `TaskData.source`."""
        return {"repository": self.repository, "revision": self.revision, **more}
