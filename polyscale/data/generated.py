"""A cache of generated data: tensors as safetensors, and a JSON file with their checksum.

The JSON file is written last, so a run that is killed while writing leaves no valid entry.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from polyscale._cache_folder import CACHE_VARIABLE, cache_folder, make_folder
from polyscale._extras import require
from polyscale._files import write_bytes


def cached_or_made(
    name: str, recipe: dict[str, Any], make: Callable[[], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """The tensors of `recipe` from the cache; otherwise those that `make` returns, cached."""
    try:
        entry = cache_entry(name, recipe)
    except OSError as error:
        _warn(str(error))
        return make()
    tensors = load_cached(entry, recipe)
    if tensors is None:
        tensors = make()
        save_cached(entry, recipe, tensors)
    return tensors


def cache_entry(name: str, recipe: dict[str, Any]) -> Path:
    """The JSON file of the data of `recipe`; the tensors are stored beside it."""
    key = hashlib.sha256(_to_json(recipe).encode()).hexdigest()[:16]
    return cache_folder() / f"{name}-{key}.json"


def load_cached(entry: Path, recipe: dict[str, Any]) -> dict[str, Tensor] | None:
    """The tensors of an entry; None if there is none, an error if it is damaged."""
    tensors = entry.with_suffix(".safetensors")
    if not entry.is_file() or not tensors.is_file():
        return None
    safetensors = require("safetensors.torch", "train", "the cache of generated data")
    try:
        card = json.loads(entry.read_bytes())
        expected, made_by = card["sha256"], card["recipe"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{entry} is damaged: delete it, and the data are made again") from None
    if made_by != json.loads(_to_json(recipe)):
        raise ValueError(f"{entry} is of other data: delete it, and the data are made again")
    content = tensors.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise ValueError(
            f"{tensors} is damaged (SHA-256 {found}, expected {expected}): "
            "delete it, and the data are made again"
        )
    return safetensors.load(content)


def save_cached(entry: Path, recipe: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Save tensors under an entry; where that fails, a warning says why: the data are in memory."""
    safetensors = require("safetensors.torch", "train", "the cache of generated data")
    content = safetensors.save(tensors)
    card = {"sha256": hashlib.sha256(content).hexdigest(), "recipe": recipe}
    try:
        make_folder(entry.parent)
        write_bytes(entry.with_suffix(".safetensors"), content)
        write_bytes(entry, _to_json(card).encode())
    except OSError as error:
        _warn(f"{entry.parent} cannot be written ({error}); {CACHE_VARIABLE} names another folder")


def _warn(reason: str) -> None:
    warnings.warn(f"generated data are not kept for the next run: {reason}", stacklevel=4)


def _to_json(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)
