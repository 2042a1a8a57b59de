"""Trees in files: JSON to read, safetensors to be quick. Nothing is ever unpickled."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyscale._extras import require
from polyscale._files import write_bytes
from polyscale.trees.assembly import assemble
from polyscale.trees.checks import check_parents
from polyscale.trees.tree import SignalTree

FORMAT = "polyscale.SignalTree"
VERSION = 1
# All else follows from these and is computed anew on loading.
TENSORS = ("parent", "leaf_row", "domain", "position", "key", "modality")
OFFSETS = "source_offsets"  # only of trees that have them
SUFFIXES = (".json", ".safetensors")
# Rows without a leaf are padding, of which a file of a few bytes can declare any number. It may be
# this many for each byte of the file, and as many as are harmless in any case.
ROWS_PER_BYTE = 16
HARMLESS_ROWS = 2**20


def save(tree: SignalTree, path: str | os.PathLike[str]) -> None:
    """See `SignalTree.save`."""
    path = Path(path)
    _check_suffix(path)
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "tree_rows": list(tree.tree_rows),
        "key_names": list(tree.key_names),
        "modality_names": list(tree.modality_names),
    }
    names = TENSORS if tree.source_offsets is None else (*TENSORS, OFFSETS)
    tensors = {name: getattr(tree, name).cpu().contiguous() for name in names}
    if path.suffix == ".json":
        lists = {name: tensor.tolist() for name, tensor in tensors.items()}
        data = json.dumps({**header, **lists}).encode()
    else:
        safetensors = require("safetensors.torch", "hf", "saving a tree as safetensors")
        data = safetensors.save(tensors, metadata={"tree": json.dumps(header)})
    _check_rows(tree.num_rows, data)  # what could not be loaded is not written
    write_bytes(path, data)


def load(path: str | os.PathLike[str]) -> SignalTree:
    """See `SignalTree.load`."""
    path = Path(path)
    _check_suffix(path)
    data = path.read_bytes()
    try:
        header, tensors = _read_json(data) if path.suffix == ".json" else _read_safetensors(data)
        _check_rows(header["tree_rows"][-1], data)
        return _restore(header, tensors)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a tree: {error}") from error


def _check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"path must be a name ending in {' or '.join(SUFFIXES)}, got {str(path)!r}"
        )


def _read_json(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        header = json.loads(data)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    _check_header(header)
    tensors = {}
    for name in _stored(header):
        values = header.get(name)
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name} is missing, or not a list of whole numbers")
        # Whole numbers of any size are valid JSON; a tensor of them is not.
        pairs = name in ("position", OFFSETS)
        flat = [one for pair in values for one in _pair(name, pair)] if pairs else values
        if {type(value) for value in flat} != {int} or max(flat) >= 2**63 or min(flat) < -(2**63):
            raise ValueError(f"{name} is not a list of whole numbers")
        tensor = torch.tensor(flat, dtype=torch.int64)
        tensors[name] = tensor.reshape(-1, 2) if pairs else tensor
    return header, tensors


def _stored(found: Any) -> tuple[str, ...]:
    return (*TENSORS, OFFSETS) if OFFSETS in found else TENSORS


def _pair(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{name} must hold pairs, got {value!r}")
    return value


def _read_safetensors(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    safetensors = require("safetensors.torch", "hf", "loading a tree from safetensors")
    error_type = require("safetensors", "hf", "loading a tree from safetensors").SafetensorError
    try:
        tensors = safetensors.load(data)
    except (error_type, ValueError, KeyError) as error:
        raise ValueError(f"the safetensors data is damaged ({error})") from error
    # safetensors.load has checked the header; load() gives no access to its metadata.
    size = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    header = json.loads(metadata.get("tree", "null"))
    _check_header(header)
    for name in _stored(tensors):
        if name not in tensors:
            raise ValueError(f"{name} is missing")
        if tensors[name].dtype != torch.int64:
            raise ValueError(f"{name} must have dtype int64, got {tensors[name].dtype}")
    return header, tensors


def _check_header(header: Any) -> None:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"the file does not say that its format is {FORMAT}")
    if header.get("version") != VERSION:
        raise ValueError(f"its version is {header.get('version')!r}, this polyscale reads 1")
    for name, kind in (("tree_rows", int), ("key_names", str), ("modality_names", str)):
        values = header.get(name)
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise ValueError(f"{name} is missing, or not a list of {kind.__name__}")
    if len(header["tree_rows"]) < 2:
        raise ValueError("tree_rows must have two or more numbers")


def _check_rows(rows: int, data: bytes) -> None:
    most = max(HARMLESS_ROWS, ROWS_PER_BYTE * len(data))
    if not 0 < rows <= most:
        raise ValueError(
            f"tree_rows must end at 1 to {most:,} in a file of {len(data):,} bytes, got {rows:,} "
            f"({ROWS_PER_BYTE} for each, or {HARMLESS_ROWS:,}): too many rows without a leaf"
        )


def _restore(header: dict[str, Any], tensors: dict[str, Tensor]) -> SignalTree:
    parent, leaf_row = tensors["parent"], tensors["leaf_row"]
    nodes = parent.numel()
    for name in TENSORS:
        shape = (nodes, 2) if name == "position" else (nodes,)
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name} must have shape {list(shape)}, got {list(tensors[name].shape)}"
            )
    tree_rows = tuple(header["tree_rows"])
    check_parents(parent, len(tree_rows) - 1)
    if (parent[1:] < parent[:-1]).any():
        raise ValueError("parent is not breadth-first")
    rows = tree_rows[-1]
    if int(leaf_row.max()) >= rows or int(leaf_row.min()) < -1:
        raise ValueError(f"leaf_row is outside the {rows} rows of the data")
    tree = assemble(
        parent,
        leaf_row,
        domain=tensors["domain"],
        position=tensors["position"],
        key=tensors["key"],
        modality=tensors["modality"],
        key_names=tuple(header["key_names"]),
        modality_names=tuple(header["modality_names"]),
        tree_rows=tree_rows,
        source_offsets=tensors.get(OFFSETS),
    )
    tree.validate()
    return tree
