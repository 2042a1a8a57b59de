"""COCO18: photographs with a caption, as records of an image and a text."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyscale._extras import require
from polyscale.checks import check_choice, check_integer
from polyscale.data.documents import TEXT, Document, DocumentSplit, TreeCollate, read_document
from polyscale.data.files import DataFile, find_folder, read_arrays, read_first, unzip_lines
from polyscale.data.splits import Split, TaskData
from polyscale.data.validation import choose_validation
from polyscale.data.vectors import embed_words
from polyscale.trees import SignalTree

IMAGE_FILE = "coco18_mm_64px.npz"
TEXT_FILE = "coco18_mm_text.jsonl.gz"
SIDE = 64  # pixels
PATCH = 8  # pixels: 8 x 8 patches of 8 x 8 x 3
IMAGE = "image"  # the modality of patches
FIELDS = ("both", IMAGE, TEXT)
LAYOUTS = ("flat", "quadtree", "rows")
VALIDATION = 0.1  # of the training set

_PARTS = {"train": 0, "test": 1}  # the numbers in the files
_ADVICE = "put it there; it is not on the Hub"


class RecordSplit(Split):
    """Classified records of an image, a text, or both, each under its own key."""

    def __init__(
        self,
        captions: DocumentSplit,
        pixels: Tensor,
        labels: Tensor,
        *,
        fields: str,
        layout: str,
        mean: Tensor,
        std: Tensor,
    ) -> None:
        self.captions = captions
        self.patches = _patches(pixels)  # [N, 64, 192], uint8
        self.labels: Tensor = labels.long()
        self.fields = fields
        self.mean, self.std = mean.repeat(PATCH * PATCH), std.repeat(PATCH * PATCH)  # [192]
        self.image_tree = SignalTree.from_image(SIDE, SIDE, PATCH, layout=layout)
        words = captions.lengths if fields != IMAGE else torch.zeros_like(captions.lengths)
        self.lengths = words + (self.patches.shape[1] if fields != TEXT else 0)
        self.groups = {"length": self.lengths}

    def _sample(self, index: int) -> dict[str, Any]:
        record: dict[str, SignalTree] = {}
        inputs: dict[str, Tensor] = {}
        if self.fields != TEXT:
            record[IMAGE] = self.image_tree
            inputs[IMAGE] = (self.patches[index].float() / 255 - self.mean) / self.std  # [64, 192]
        if self.fields != IMAGE:
            record[TEXT] = self.captions.tree(index)
            inputs[TEXT] = self.captions.words[index].long()
        tree = SignalTree.from_records(record)
        return {"inputs": inputs, "tree": tree, "labels": self.labels[index]}

    def _text(self, index: int) -> str:
        return self.captions.text(index)


def load_coco(
    data_dir: Path | str | None,
    seed: int,
    *,
    fields: str,
    layout: str,
    embedding: str,
    width: int,
) -> TaskData:
    """The single-label view of COCO18: photographs of one class of object, or of people only."""
    check_choice("fields", fields, FIELDS)
    check_choice("layout", layout, LAYOUTS)
    check_integer("width", width, least=1)
    folder = find_folder(data_dir)
    if folder is None:
        raise FileNotFoundError(
            f"coco18 needs data_dir (--data-dir) or POLYSCALE_DATA: a folder with {IMAGE_FILE} and "
            f"{TEXT_FILE}; they are not on the Hub"
        )
    archive = read_first(folder, (IMAGE_FILE,), "coco18", _ADVICE)
    lines = read_first(folder, (TEXT_FILE,), "coco18", _ADVICE)
    images, names = _read_archive(archive)
    rows = [row for row in _read_lines(lines, len(names), len(images)) if row["label"] is not None]
    sides = {part: [row for row in rows if row["split"] == part] for part in _PARTS}
    for part, side in sides.items():
        if not side:
            raise ValueError(f"{lines.path} has no labelled rows of the split {part!r}")

    # By photograph: different photographs may have equal captions.
    held_out = choose_validation(
        [images[row["i"]] for row in sides["train"]],
        [row["label"] for row in sides["train"]],
        VALIDATION,
        seed,
    )
    chosen = list(zip(sides["train"], held_out, strict=True))
    parts = {
        "train": [row for row, is_held in chosen if not is_held],
        "validation": [row for row, is_held in chosen if is_held],
        "test": sides["test"],
    }
    documents = {part: [read_document(row["text"]) for row in side] for part, side in parts.items()}
    words = embed_words([one.words for one in documents["train"]], embedding, width, seed)
    pixels = {
        part: torch.stack([_decode(images[row["i"]], row["i"], archive) for row in side])
        for part, side in parts.items()
    }  # [N, 64, 64, 3]
    bytes_of_colour = pixels["train"].flatten(0, 2).double() / 255  # [N * 64 * 64, 3]
    mean, std = bytes_of_colour.mean(0), bytes_of_colour.std(0).clamp(min=1e-6)

    def split(part: str) -> RecordSplit:
        labels = torch.tensor([row["label"] for row in parts[part]])
        texts: list[Document] = documents[part]
        captions = DocumentSplit(texts, labels, words.vocabulary)
        return RecordSplit(
            captions,
            pixels[part],
            labels,
            fields=fields,
            layout=layout,
            mean=mean.float(),
            std=std.float(),
        )

    splits = {part: split(part) for part in parts}
    used = FIELDS[1:] if fields == "both" else (fields,)
    kinds = {IMAGE: {"width": PATCH * PATCH * 3}, TEXT: words.kind}
    test = splits["test"]
    return TaskData(
        name="coco18",
        kind="classification",
        train=splits["train"],
        validation=splits["validation"],
        test=test,
        collate=TreeCollate(words.tables(TEXT)),
        vocab_size=None,
        input_channels=None,
        num_labels=len(names),
        max_length=max(int(one.lengths.max()) for one in splits.values()),
        pad_token_id=None,
        label_names=names,
        source={
            "seed": seed,
            "splits": {part: len(one) for part, one in splits.items()},
            "files": [archive.record(), lines.record()],
            "vectors": words.source,
            "normalisation": {"mean": mean.tolist(), "std": std.tolist()},
            "notes": [
                "the single-label view: records with one class besides 'person', or of persons "
                "alone",
                "there is no official split with labels; validation is 10 % of every class of "
                "train",
            ],
        },
        example=f"{test.text(0)} -> {names[int(test.labels[0])]}",
        modalities={name: kinds[name] for name in used},
        key_names=tuple(used),
    )


def _patches(pixels: Tensor) -> Tensor:
    """`[N, 64, 64, 3]` as `[N, 64, 192]`: patches, and the pixels of each, in row-major order."""
    count, tiles = len(pixels), SIDE // PATCH
    tiled = pixels.view(count, tiles, PATCH, tiles, PATCH, 3).transpose(2, 3)
    return tiled.reshape(count, tiles * tiles, PATCH * PATCH * 3)


def _read_archive(file: DataFile) -> tuple[list[bytes], tuple[str, ...]]:
    """The JPEG files, and the names of the classes."""
    numpy = require("numpy", "train", "coco18")
    jpeg, offset, names = read_arrays(file, ("jpeg", "offset", "class_names"), "coco18")
    for name, array, kind in (("jpeg", jpeg, numpy.uint8), ("offset", offset, numpy.integer)):
        if array.ndim != 1 or not numpy.issubdtype(array.dtype, kind):
            raise ValueError(
                f"{file.path}: {name} must be [N] of {kind.__name__}, "
                f"got {list(array.shape)} of {array.dtype}"
            )
    starts = offset.tolist()
    # The images are then disjoint and together no larger than the file.
    ascending = all(start <= stop for start, stop in pairwise(starts))
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(jpeg) or not ascending:
        raise ValueError(
            f"{file.path}: offset must ascend from 0 to the {len(jpeg)} bytes of jpeg, "
            f"got {len(starts)} numbers: {', '.join(map(str, starts[:4]))}, ..."
        )
    content = jpeg.tobytes()
    return [content[a:b] for a, b in pairwise(starts)], tuple(str(name) for name in names.flat)


def _read_lines(file: DataFile, classes: int, images: int) -> list[dict[str, Any]]:
    rows = []
    for where, line in unzip_lines(file):
        try:
            row = json.loads(line)
            index, part, text, label = (row[name] for name in ("i", "split", "text", "label"))
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{where} must be an object with i, split, text and label, got {line[:80]!r}"
            ) from None
        good = isinstance(index, int) and 0 <= index < images and isinstance(text, str)
        if not good or not (label is None or (isinstance(label, int) and 0 <= label < classes)):
            raise ValueError(
                f"{where} must have i from 0 to {images - 1}, a string as text, and label null or "
                f"from 0 to {classes - 1}, got {line[:80]!r}"
            )
        check_choice(f"{where}: split", part, _PARTS)
        rows.append({"i": index, "split": part, "text": text, "label": label})
    return rows


def _decode(content: bytes, index: int, file: DataFile) -> Tensor:
    """[64, 64, 3], uint8."""
    pillow = require("PIL.Image", "train", "coco18")
    # DecompressionBombError, for images that are too large, is not an OSError.
    failures = (OSError, pillow.DecompressionBombError)
    try:
        image = pillow.open(io.BytesIO(content), formats=("JPEG",))
        # Before it is decoded: a small file can declare an image of gigabytes.
        if image.size != (SIDE, SIDE):
            raise ValueError(
                f"{file.path}: image {index} must have 64 x 64 pixels, got {image.size}"
            )
        pixels = image.convert("RGB").tobytes()
    except failures as error:
        raise ValueError(f"{file.path}: image {index} cannot be read ({error})") from error
    return torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(SIDE, SIDE, 3)
