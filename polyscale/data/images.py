"""CIFAR-10 as sequences: 1,024 grey pixels in row-major order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyscale._extras import require
from polyscale.checks import check_flag
from polyscale.data.files import DataFile, HubDataset, find_folder, read_arrays, read_first
from polyscale.data.splits import ImageSplit, TaskData, collate
from polyscale.data.validation import choose_validation

FILE = "cifar10_gray.npz"
HUB = HubDataset("uoft-cs/cifar10", "0b2714987fa478483af9968de7c934580d0bb9a2")
SIDE = 32
LABEL_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
VALIDATION = 0.1  # of the training set: 5,000 of 50,000

_Images = tuple[Tensor, Tensor]  # [N, 1024] and [N], uint8


def load_images(data_dir: Path | str | None, seed: int, tokens: bool) -> TaskData:
    """Grey CIFAR-10: pixels as normalised numbers, or as one of 256 tokens."""
    check_flag("tokens", tokens)
    folder = find_folder(data_dir)
    if folder is None:
        train, test = _from_hub("train"), _from_hub("test")
        source: dict[str, Any] = {"hub": HUB.record()}
    else:
        file = read_first(folder, (FILE,), "scifar10")
        train, test = _from_archive(file, "train"), _from_archive(file, "test")
        source = {"files": [file.record()]}
    contents = [row.tobytes() for row in train[0].numpy()]
    held_out = choose_validation(contents, train[1].tolist(), VALIDATION, seed)
    is_validation = torch.tensor(held_out)
    pixels = train[0][~is_validation]
    # Sums of bytes in float64 are exact in any order.
    mean = pixels.sum(dtype=torch.float64).item() / pixels.numel() / 255
    squares = (torch.arange(256).double() / 255 - mean).square()
    counts = torch.bincount(pixels.flatten(), minlength=256)
    std = max(1e-6, (squares @ counts.double()).div(pixels.numel()).sqrt().item())
    splits = {
        "train": ImageSplit(pixels, train[1][~is_validation], mean, std, tokens=tokens),
        "validation": ImageSplit(
            train[0][is_validation], train[1][is_validation], mean, std, tokens=tokens
        ),
        "test": ImageSplit(*test, mean, std, tokens=tokens),
    }
    label = int(splits["test"].labels[0])
    return TaskData(
        name="scifar10",
        kind="classification",
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        collate=collate,
        vocab_size=256 if tokens else None,
        input_channels=None if tokens else 1,
        num_labels=len(LABEL_NAMES),
        max_length=SIDE * SIDE,
        pad_token_id=None,  # all samples have one length, and 0 is black
        label_names=LABEL_NAMES,
        source={
            "seed": seed,
            "splits": {name: len(split) for name, split in splits.items()},
            **source,
            "normalisation": {"mean": mean, "std": std},
            "notes": ["grey by ITU-R 601 luma; validation is 10 % of every class of train"],
        },
        example=f"{splits['test'].text(0)}\n-> {LABEL_NAMES[label]}",
    )


def to_grey(colours: Tensor) -> Tensor:
    """ITU-R 601 luma of `[..., 3]` RGB bytes, in integer arithmetic.

    >>> to_grey(torch.tensor([[255, 255, 255], [255, 0, 0]]).byte()).tolist()
    [255, 76]
    """
    weights = torch.tensor([19595, 38470, 7471], dtype=torch.int32)
    return ((colours.int() * weights).sum(-1) + 32768 >> 16).byte()


def _from_archive(file: DataFile, part: str) -> _Images:
    numpy = require("numpy", "train", "scifar10")
    names = (f"x_{part}", f"y_{part}")
    arrays = read_arrays(file, names, "scifar10")
    for name, array, shape in zip(names, arrays, ("[N, 1024]", "[N]"), strict=True):
        fits = array.shape[1:] == ((SIDE * SIDE,) if "x" in name else ()) and array.ndim > 0
        if array.dtype != numpy.uint8 or not fits or len(array) != len(arrays[0]) or not len(array):
            raise ValueError(
                f"{file.path}: {name} must be uint8 {shape}, got {array.dtype} {list(array.shape)}"
            )
    return _checked(torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1]), f"{file.path}")


def _from_hub(part: str) -> _Images:
    table = HUB.load(part, "scifar10", FILE)
    numpy = require("numpy", "train", "scifar10")
    images, labels = [], []
    for number, row in enumerate(table):
        image = numpy.array(row["img"])  # [32, 32, 3]
        if image.shape != (SIDE, SIDE, 3) or image.dtype != numpy.uint8:
            raise ValueError(
                f"{HUB.repository}, {part}, row {number}: img must be 32 x 32 RGB bytes, "
                f"got {image.dtype} {list(image.shape)}"
            )
        images.append(to_grey(torch.from_numpy(image)).flatten())
        labels.append(row["label"])
    return _checked(torch.stack(images), torch.tensor(labels), f"{HUB.repository}, {part}")


def _checked(pixels: Tensor, labels: Tensor, where: str) -> _Images:
    wrong = ((labels < 0) | (labels >= len(LABEL_NAMES))).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(f"{where}: label of row {row} must be from 0 to 9, got {int(labels[row])}")
    return pixels, labels
