"""Checkpoints: everything that a run needs to resume to the same numbers, as safetensors and JSON.

A checkpoint is a folder `checkpoint-000500` with the weights, the optimiser's moments, the state of
the run, and a manifest with the SHA-256 of each file. It gets its name when it is complete. The
order of the data, the learning rate and the random numbers of a step follow from the seed and the
step, so nothing else is saved.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from polyscale._files import new_folder, write_json

_UNUSED = "unused"
_NAME = re.compile(r"checkpoint-(\d+)")
_KEPT = 2  # the last one, and one to fall back to if it is damaged
_WEIGHTS, _MOMENTS, _STATE, _MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "manifest.json",
)


def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name, on the CPU; of sharded and data-parallel models too.

    Every process must call it; the result is complete on the first one.
    """
    weights: Any = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    return weights


def scatter_weights(weights: dict[str, Tensor], model: nn.Module) -> None:
    """Load complete weights of the first process into the model; the others may pass none.

    Every process must call it. A device holds one unsharded tensor at a time.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves the last gathered weights in place
    named: Any = weights
    set_model_state_dict(model, named, options=_scatter_options())


def gather_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state by flat names such as `blocks.0.mlp.0.weight/exp_avg`.

    A parameter that no step has used has no state, which a marker records.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole: Any = get_optimizer_state_dict(model, optimizer, options=options)
    state = whole.get("state", {})  # empty on processes other than the first
    moments = {
        f"{name}/{key}": value for name, entries in state.items() for key, value in entries.items()
    }
    names = [name for group in whole.get("param_groups", ()) for name in group["params"]]
    return moments | {f"{name}/{_UNUSED}": torch.zeros(()) for name in names if name not in state}


def save_checkpoint(
    output: Path, step: int, weights: dict[str, Tensor], moments: dict[str, Tensor], state: Any
) -> Path:
    """Write a checkpoint, then remove old ones; the previous one stays until this is complete."""
    folder = output / f"checkpoint-{step:06d}"
    with new_folder(folder) as partial:
        save_tensors(weights, partial / _WEIGHTS)
        save_tensors(moments, partial / _MOMENTS)
        write_json(partial / _STATE, state)
        write_json(
            partial / _MANIFEST,
            {name: _digest(partial / name) for name in (_WEIGHTS, _MOMENTS, _STATE)},
        )
    for old in list_checkpoints(output)[:-_KEPT]:
        shutil.rmtree(old)
    return folder


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write safetensors; tensors that share memory are written once for each name."""
    copies = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    try:
        save_file(copies, path, metadata={"format": "pt"})
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{path.name} cannot be written: {error}") from error


def list_checkpoints(output: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    found = [path for path in output.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, after checking all its files; errors name what is damaged."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        expected = {name: manifest[name] for name in (_WEIGHTS, _MOMENTS, _STATE)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, f"{_MANIFEST} cannot be read") from error
    for name, digest in expected.items():
        if not (folder / name).is_file():
            raise _damaged(folder, f"{name} is missing")
        if _digest(folder / name) != digest:
            raise _damaged(folder, f"{name} does not have the checksum it was written with")
    return json.loads((folder / _STATE).read_text(encoding="utf-8"))


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore weights and moments; every process must call it, and the first one reads."""
    reads = not dist.is_initialized() or dist.get_rank() == 0
    scatter_weights(load_file(folder / _WEIGHTS) if reads else {}, model)
    # The state of a new optimiser has the names and the groups; its values are replaced.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # on the first process
    whole: Any = get_optimizer_state_dict(model, optimizer, options=options)
    if reads:
        _replace_moments(whole["state"], folder)
    set_optimizer_state_dict(model, optimizer, whole, options=_scatter_options())


def _scatter_options() -> StateDictOptions:
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=dist.is_initialized())


def _replace_moments(state: dict[str, dict[str, Any]], folder: Path) -> None:
    moments = load_file(folder / _MOMENTS)
    unused = {name for name in state if moments.pop(f"{name}/{_UNUSED}", None) is not None}
    wanted = {
        f"{name}/{key}" for name, entries in state.items() for key in entries if name not in unused
    }
    if wanted != set(moments):
        odd = sorted(wanted ^ set(moments))[0]
        raise _damaged(folder, f"{_MOMENTS} does not fit the model: {odd}")
    for name, entries in state.items():
        for key, entry in entries.items():
            # Moments of an unused parameter start from zero.
            entries[key] = torch.zeros_like(entry) if name in unused else moments[f"{name}/{key}"]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _damaged(folder: Path, what: str) -> ValueError:
    return ValueError(
        f"{folder} is damaged: {what}; delete that folder to resume from the checkpoint before it, "
        "or from the start"
    )
