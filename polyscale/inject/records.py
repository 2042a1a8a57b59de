"""What is injected in a model: read from its layers, and noted in its configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from polyscale._injection_note import NOTE
from polyscale.inject.attention import RECORD
from polyscale.inject.modules import attention_layers
from polyscale.inject.opened_attention import RECORD as OPENED_RECORD
from polyscale.inject.opened_settings import OpenedSettings
from polyscale.inject.settings import HSASettings
from polyscale.trees import SignalTree

Settings = HSASettings | OpenedSettings


def injected_layers(model: PreTrainedModel) -> list[int]:
    """Return the numbers of the layers that are injected."""
    return sorted(injected_settings(model))


def injected_settings(model: PreTrainedModel) -> dict[int, Settings]:
    """Return the settings of each injected layer, by its number."""
    found: dict[int, Settings] = {}
    for module in attention_layers(model):
        for name in (RECORD, OPENED_RECORD):
            record: Any = getattr(module, name, None)
            if record is not None:
                found[record.number] = record.settings
    return found


def injection_groups(model: PreTrainedModel) -> list[tuple[list[int], Settings]]:
    """Return the numbers of the layers that are injected alike, and how, group by group."""
    groups: list[tuple[list[int], Settings]] = []
    for number, settings in sorted(injected_settings(model).items()):
        for layers, known in groups:
            if known is settings:
                layers.append(number)
                break
        else:
            groups.append(([number], settings))
    return groups


def group_data(layers: list[int], settings: Settings, tree: str = "tree") -> dict[str, Any]:
    """A group as plain data for JSON; `tree` stands for a tree that was given."""
    if isinstance(settings, OpenedSettings):
        return {"layers": layers, "kind": "opened", "settings": settings.as_dict()}
    if isinstance(settings.hierarchy, SignalTree):
        data = {**replace(settings, hierarchy=()).as_dict(), "hierarchy": tree}
    else:
        data = settings.as_dict()
    return {"layers": layers, "kind": "hsa", "settings": data}


def write_note(model: PreTrainedModel) -> None:
    """Say in the configuration what is injected: it is saved with the model, whoever saves it.

    Of a tree that was given, only that there is one.
    """
    groups = [group_data(layers, settings) for layers, settings in injection_groups(model)]
    if groups:
        setattr(model.config, NOTE, groups)
    elif hasattr(model.config, NOTE):
        delattr(model.config, NOTE)
