"""Injected models in folders: the weights as ever, the injection as JSON beside them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, PreTrainedModel

from polyscale._files import follow_umask
from polyscale.inject.api import inject_hsa, injected_settings
from polyscale.inject.opened import inject_opened
from polyscale.inject.opened_settings import OpenedSettings
from polyscale.inject.settings import HSASettings
from polyscale.trees import SignalTree

FILE = "polyscale_injection.json"
FORMAT = "polyscale.injection"
VERSION = 2
READABLE = (1, 2)  # version 1 knew HSA alone
KEYS = {
    "hsa": tuple(HSASettings(()).as_dict()),
    "opened": tuple(OpenedSettings().as_dict()),
}
GONE = (
    "open_blocks has been removed: inject HSA without it (load the folder with from_pretrained and "
    "call polyscale.inject_hsa), or polyscale.inject_opened, which opens attention where the "
    "queries look"
)


def save_injected(model: PreTrainedModel, directory: str | os.PathLike[str]) -> Path:
    """Save a model and its injection; return the folder. `load_injected` reads it again.

    The folder is that of `save_pretrained` (safetensors), with one more file that says which
    layers are injected and how; `from_pretrained` alone loads the model as it was.

    >>> save_injected(model, "folder")  # doctest: +SKIP
    """
    path = Path(directory)
    groups: list[dict[str, Any]] = []
    trees: list[SignalTree] = []
    for number, settings in sorted(injected_settings(model).items()):
        for group in groups:
            if group["settings"] is settings:
                group["layers"].append(number)
                break
        else:
            groups.append({"layers": [number], "settings": settings})
    if not groups:
        raise ValueError("model: no layer is injected; save_pretrained saves it")
    for group in groups:
        settings = group["settings"]
        group["kind"] = "opened" if isinstance(settings, OpenedSettings) else "hsa"
        if isinstance(settings, OpenedSettings):
            group["settings"] = settings.as_dict()
        elif isinstance(settings.hierarchy, SignalTree):
            group["settings"] = {
                **replace(settings, hierarchy=()).as_dict(),
                "hierarchy": f"tree_{len(trees)}.json",
            }
            trees.append(settings.hierarchy)
        else:
            group["settings"] = settings.as_dict()
    model.save_pretrained(path)
    for weights in path.glob("*.safetensors"):
        follow_umask(weights)
    for number, tree in enumerate(trees):
        tree.save(path / f"tree_{number}.json")
    data = {"format": FORMAT, "version": VERSION, "groups": groups}
    (path / FILE).write_text(json.dumps(data, indent=2) + "\n")
    return path


def load_injected(
    directory: str | os.PathLike[str], model_class: Any = None, **kwargs: Any
) -> PreTrainedModel:
    """Load a model that `save_injected` saved, and inject it as it was.

    `model_class` is the class the config names unless given; other arguments go to its
    `from_pretrained`. Weights are read from safetensors alone.

    >>> model = load_injected("folder")  # doctest: +SKIP
    """
    path = Path(directory)
    if not (path / FILE).is_file():
        raise ValueError(f"directory: {path} has no {FILE}, which save_injected writes")
    groups = _read(path)
    if model_class is None:
        model_class = _class_of(path)
    model = model_class.from_pretrained(path, use_safetensors=True, **kwargs)
    for layers, kind, settings in groups:
        if kind == "opened":
            inject_opened(model, layers, **OpenedSettings.from_dict(settings).arguments())
        else:
            inject_hsa(model, layers=layers, **settings)
    return model


def _class_of(path: Path) -> Any:
    names = getattr(AutoConfig.from_pretrained(path), "architectures", None) or []
    return getattr(transformers, names[0], AutoModel) if names else AutoModel


def _read(path: Path) -> list[tuple[list[int], str, dict[str, Any]]]:
    where = path / FILE
    try:
        data = json.loads(where.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{where}: does not say that its format is {FORMAT}")
    if data.get("version") not in READABLE:
        raise ValueError(
            f"{where}: has version {data.get('version')!r}, takes {READABLE[0]} to {VERSION}"
        )
    found = []
    groups = data.get("groups")
    for group in groups if isinstance(groups, list) else [None]:
        group = group if isinstance(group, dict) else {}
        kind, settings = group.get("kind", "hsa"), group.get("settings")
        if isinstance(settings, dict) and settings.pop("open_blocks", 0):
            raise ValueError(f"{where}: {GONE}")
        keys = KEYS.get(kind) if isinstance(kind, str) else None
        if keys is None or not isinstance(settings, dict) or sorted(settings) != sorted(keys):
            raise ValueError(
                f"{where}: groups takes layers and settings with "
                f"{', '.join(keys or KEYS['hsa'])} for each, and a kind, {' or '.join(KEYS)}"
            )
        layers = group.get("layers")
        if not isinstance(layers, list):
            raise ValueError(f"{where}: layers takes a list of numbers, got {layers!r}")
        hierarchy = settings.get("hierarchy")
        if isinstance(hierarchy, str) and hierarchy.startswith("tree_"):
            # A plain file name: nothing outside of the folder is read.
            settings["hierarchy"] = SignalTree.load(path / Path(hierarchy).name)
        found.append((layers, kind, settings))
    return found
