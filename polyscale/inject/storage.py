"""Injected models in folders: the weights as ever, the injection as JSON beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, PreTrainedModel

from polyscale._files import follow_umask
from polyscale._injection_note import NOTE, injecting
from polyscale.inject.api import inject_hsa
from polyscale.inject.opened import inject_opened
from polyscale.inject.opened_settings import OpenedSettings, arguments_of
from polyscale.inject.records import group_data, injection_groups
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
Groups = list[tuple[list[int], str, dict[str, Any]]]  # layers, kind, and arguments or settings


def save_injected(model: PreTrainedModel, directory: str | os.PathLike[str]) -> Path:
    """Save a model and its injection; return the folder. `load_injected` reads it again.

    The folder is that of `save_pretrained` (safetensors), with one more file that says which
    layers are injected and how; `from_pretrained` alone loads the model as it was, and warns of it
    once polyscale is imported.

    >>> save_injected(model, "folder")  # doctest: +SKIP
    """
    path = Path(directory)
    groups: list[dict[str, Any]] = []
    trees: list[SignalTree] = []
    for layers, settings in injection_groups(model):
        groups.append(group_data(layers, settings, f"tree_{len(trees)}.json"))
        if isinstance(settings, HSASettings) and isinstance(settings.hierarchy, SignalTree):
            trees.append(settings.hierarchy)
    if not groups:
        raise ValueError("model: no layer is injected; save_pretrained saves it")
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
    """Load a model that was saved with its injection, and inject it as it was.

    The injection is read from the file of `save_injected`, or else from the note in the
    configuration, which any way of saving leaves (`save_pretrained`, or `save` of a
    SentenceTransformer); that keeps no given tree. `model_class` is the class the config names
    unless given; other arguments go to its `from_pretrained`. Weights are read from safetensors
    alone, and no code that comes with the folder is run.

    >>> model = load_injected("folder")  # doctest: +SKIP
    """
    path = Path(directory)
    if kwargs.pop("trust_remote_code", False):
        raise ValueError("trust_remote_code must be False, got True; no code of a folder is run")
    groups = read_injection(path)
    if not groups:
        raise ValueError(f"directory: {path} has no {FILE}, which save_injected writes")
    if model_class is None:
        model_class = class_of(path)
    with injecting():
        model = model_class.from_pretrained(
            path, use_safetensors=True, trust_remote_code=False, **kwargs
        )
    return inject_groups(model, groups)


def inject_groups(model: PreTrainedModel, groups: Groups) -> PreTrainedModel:
    """Inject a model as `read_injection` found it to be."""
    for layers, kind, settings in groups:
        if kind == "opened":
            inject_opened(model, layers, **arguments_of(settings))
        else:
            inject_hsa(model, layers=layers, **settings)
    return model


def class_of(model: str | Path) -> Any:
    """Return the class that a model's configuration names; never one of its own code."""
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    names = getattr(config, "architectures", None) or []
    return getattr(transformers, names[0], AutoModel) if names else AutoModel


def read_injection(path: Path) -> Groups:
    """Return layers, kind and settings of a folder's injection by groups; none if it has none."""
    if (path / FILE).is_file():
        return _read(path)
    config = path / "config.json"
    try:
        note = json.loads(config.read_text()).get(NOTE) if config.is_file() else None
    except (ValueError, RecursionError, AttributeError) as error:
        raise ValueError(f"{config}: not a JSON object: {error}") from error
    found = _read_groups(config, note) if note is not None else []
    if any(settings.get("hierarchy") == "tree" for _, _, settings in found):
        raise ValueError(f"{config}: the injection has a tree of its own, which {FILE} would name")
    return found


def _read(path: Path) -> Groups:
    where = path / FILE
    try:
        data = json.loads(where.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"{where}: does not say that its format is {FORMAT}")
    if data.get("version") not in READABLE:
        raise ValueError(
            f"{where}: version must be {READABLE[0]} to {VERSION}, got {data.get('version')!r}"
        )
    found = _read_groups(where, data.get("groups"))
    for _, _, settings in found:
        hierarchy = settings.get("hierarchy")
        if isinstance(hierarchy, str) and hierarchy.startswith("tree_"):
            # A plain file name: nothing outside of the folder is read.
            settings["hierarchy"] = SignalTree.load(path / Path(hierarchy).name)
    return found


def _read_groups(where: Path, groups: Any) -> Groups:
    found = []
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
        found.append((layers, kind, settings))
    return found
