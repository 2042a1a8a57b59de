"""Models from folders: safetensors only, no remote code, no missing weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polyscale._extras import require

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_SHARDS = "model.safetensors.index.json"
_STEP = re.compile(r"step-(\d+)")
# Parts that attention does not depend on; checkpoints with another head lack them.
_OPTIONAL = re.compile(r"(^|\.)pooler\.")


def model_kind(folder: Path) -> str:
    """`hkt`, `hsa`, `hte`, or `transformer` for any other model of Hugging Face."""
    config = _read_config(folder)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"{folder / _CONFIG} names no model_type")
    if config.get("is_encoder_decoder"):
        raise ValueError(f"{folder} holds an encoder-decoder model ({kind}): not supported")
    return kind if kind in ("hkt", "hsa", "hte") else "transformer"


def load_model(folder: Path) -> Any:
    """The model of a folder with config.json and model.safetensors, ready for evaluation."""
    models: Any = require("polyscale.models", "hf", "an analysis")
    transformers: Any = require("transformers", "hf", "an analysis")
    if not (folder / _WEIGHTS).is_file() and not (folder / _SHARDS).is_file():
        raise FileNotFoundError(f"{folder} holds no model: {_WEIGHTS} is missing")
    model_class = transformers.AutoModel
    if model_kind(folder) != "transformer":
        name = (_read_config(folder).get("architectures") or [None])[0]
        if name not in models.__all__:
            raise ValueError(f"{folder / _CONFIG} names no model of polyscale, got {name!r}")
        model_class = getattr(models, name)
    options = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
    if model_class is transformers.AutoModel:
        options["trust_remote_code"] = False
    note: Any = require("polyscale._injection_note", "hf", "an analysis")
    try:
        with _no_progress_bar(transformers.utils.logging), note.injecting():
            model, report = model_class.from_pretrained(folder, **options)
    except Exception as error:  # of safetensors and transformers, of many classes
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{folder} cannot be loaded: {reason}") from error
    missing = sorted(name for name in report["missing_keys"] if not _OPTIONAL.search(name))
    # transformers would initialise them at random, and the report would be about that.
    if missing:
        raise ValueError(f"{folder} lacks {len(missing)} weights of its model, first {missing[0]}")
    if model_class is transformers.AutoModel:
        storage: Any = require("polyscale.inject.storage", "hf", "an analysis")
        storage.inject_groups(model, storage.read_injection(folder))
    return model.eval()


@contextmanager
def _no_progress_bar(logging: Any) -> Iterator[None]:
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def find_snapshots(folder: Path, most: int = 12) -> tuple[list[tuple[int, Path]], int]:
    """States over training as (step, folder), at most `most` evenly spaced; and how many there are.

    The first and the last are always among them.
    """
    found = sorted(
        (int(match.group(1)), path)
        for path in (folder / "snapshots").glob("step-*")
        if (match := _STEP.fullmatch(path.name)) and (path / _WEIGHTS).is_file()
    )
    if len(found) <= most:
        return found, len(found)
    chosen = {round(index * (len(found) - 1) / (most - 1)) for index in range(most)}
    return [found[index] for index in sorted(chosen)], len(found)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / _CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no model: {_CONFIG} is missing")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config
