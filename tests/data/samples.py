"""Small files in the formats of the real ones."""

import gzip
import hashlib
import io
import json

import numpy as np
from PIL import Image

from polyscale.data import files, stream
from polyscale.data.images import LABEL_NAMES

WORDS = ("naïve", "café", "film", "plot", "日本", "🙂", "dull", "grand", "ending", "cast")

COLOURS = ("green", "teal", "violet", "red")

TEXT_FILES = {
    "imdb-char": ("imdb_train.jsonl.gz", "imdb_test.jsonl.gz", 2),
    "agnews": ("agnews_train_part.jsonl.gz", "agnews_test.jsonl.gz", 4),
    "sst2": ("sst2_train.jsonl.gz", "sst2_dev.jsonl.gz", 2),
}


def rows(count, classes, start=0):
    return [
        {"text": f"{WORDS[i % 10]} {i} {WORDS[i % 7]}", "label": i % classes}
        for i in range(start, start + count)
    ]


def write(path, content):
    path.write_bytes(content)
    return path


def write_rows(path, content):
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
    return write(path, gzip.compress(lines.encode()))


def write_texts(folder, name, train=None, test=None):
    train_file, test_file, classes = TEXT_FILES[name]
    write_rows(folder / train_file, rows(200, classes) if train is None else train)
    write_rows(folder / test_file, rows(40, classes, start=1000) if test is None else test)


def images(count, seed):
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (count, 1024), dtype=np.uint8)
    return pixels, (np.arange(count) % 10).astype(np.uint8)


def write_images(folder, **changes):
    x_train, y_train = images(100, 0)
    x_test, y_test = images(20, 1)
    arrays = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    arrays = {**arrays, "label_names": np.array(LABEL_NAMES), **changes}
    kept = {name: array for name, array in arrays.items() if array is not None}
    np.savez_compressed(folder / "cifar10_gray.npz", **kept)
    return folder / "cifar10_gray.npz"


def write_records(folder, count=80):
    """COCO18 in small: coloured squares, captions that name the class, the last quarter for test.

    The classes are 0 to 3; every tenth record has no single label.
    """
    files, lines = [], []
    for i in range(count):
        label = i % 4
        image = Image.new("RGB", (64, 64), (60 * label, 255 - 60 * label, (7 * i) % 256))
        stream = io.BytesIO()
        image.save(stream, "JPEG")
        files.append(stream.getvalue())
        row = {
            "i": i,
            "split": "train" if i < 3 * count // 4 else "test",
            "text": f"A photo of {COLOURS[label]} things. It is nice.",
            "labels": [label],
            "label": None if i % 10 == 9 else label,
        }
        lines.append(json.dumps(row) + "\n")
    np.savez_compressed(
        folder / "coco18_mm_64px.npz",
        jpeg=np.frombuffer(b"".join(files), dtype=np.uint8),
        offset=np.cumsum([0, *map(len, files)]),
        class_names=np.array(COLOURS),
    )
    write(folder / "coco18_mm_text.jsonl.gz", gzip.compress("".join(lines).encode()))


def stream_bytes(count=2_000):
    pages = "".join(f"<page>{i} café {WORDS[i % 10]}</page>\n" for i in range(count))
    return pages.encode()[:count]


def accept(monkeypatch, folder):
    """Make the files of a folder the known ones."""
    known = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    table = {name: known.get(name, checksum) for name, checksum in files.CHECKSUMS.items()}
    monkeypatch.setattr(files, "CHECKSUMS", table)
    whole = hashlib.md5(stream_bytes()).hexdigest()
    monkeypatch.setattr(stream, "OFFICIAL_MD5", whole)


def make_folder(folder, monkeypatch):
    """A folder with small files for every task that needs some."""
    folder.mkdir()
    for name in TEXT_FILES:
        write_texts(folder, name)
    write_images(folder)
    write_records(folder)
    write(folder / "enwik8_20mb.gz", gzip.compress(stream_bytes()))
    accept(monkeypatch, folder)
    return folder
