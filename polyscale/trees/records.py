"""Trees from records: dicts of fields."""

from collections.abc import Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from polyscale.checks import check_integer
from polyscale.trees.assembly import assemble
from polyscale.trees.builders import from_windows
from polyscale.trees.checks import KEYED
from polyscale.trees.editing import batch
from polyscale.trees.nested import from_nested, is_array
from polyscale.trees.tree import SignalTree

MISSPELT = 0.75  # names more alike than this are one name, misspelt
EMPTY = "leave the field out of a record that does not have it"


def from_records(records: Any, modalities: Mapping[str, str] | None) -> SignalTree:
    """See `SignalTree.from_records`."""
    if modalities is not None and not isinstance(modalities, Mapping):
        raise TypeError(
            "modalities must be a dict from the names of fields to names of modalities, "
            f"got {modalities!r}"
        )
    if isinstance(records, Mapping):
        _check_modalities([records], modalities)
        return _record(records, modalities or {}, "records")
    if not isinstance(records, Sequence) or isinstance(records, (str, bytes)) or not records:
        raise TypeError(f"records must be a dict or a list of dicts, got {type(records).__name__}")
    for place, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise TypeError(f"records[{place}] must be a dict, got {type(record).__name__}")
    _check_modalities(records, modalities)
    return batch(
        [_record(record, modalities or {}, f"records[{i}]") for i, record in enumerate(records)]
    )


def _record(record: Mapping[str, Any], modalities: Mapping[str, str], where: str) -> SignalTree:
    if not record:
        raise ValueError(f"{where} must have at least one field, got an empty record")
    fields = []
    for name, value in record.items():
        if not isinstance(name, str):
            raise TypeError(f"the names of the fields of {where} must be str, got {name!r}")
        fields.append(_field(value, name, modalities.get(name), f"{where}[{name!r}]"))
    forest = batch(fields)
    names = tuple(record)
    key_names = tuple(dict.fromkeys((*names, *forest.key_names)))
    number = forest.key.new_tensor([*(key_names.index(n) for n in forest.key_names), -1])
    roots = len(names)
    place = torch.arange(roots, device=forest.device)
    key = torch.cat([place, number[forest.key[roots:]]])
    position = forest.position.clone()
    position[:roots, 0] = place

    def with_root(values: Tensor, root: int) -> Tensor:
        return torch.cat([values.new_full((1, *values.shape[1:]), root), values])

    return assemble(
        with_root(forest.parent + 1, -1),  # the former roots, -1, are now children of node 0
        with_root(forest.leaf_row, -1),
        domain=with_root(forest.domain, KEYED),
        position=with_root(position, 0),
        key=with_root(key, -1),
        modality=with_root(forest.modality, -1),
        key_names=key_names,
        modality_names=forest.modality_names,
        tree_rows=(0, forest.num_rows),
        source_offsets=forest.source_offsets,
    )


def _check_modalities(
    records: Sequence[Mapping[str, Any]], modalities: Mapping[str, str] | None
) -> None:
    """Refuse misspelt names; records may lack fields, so a name unlike all of them is none."""
    fields = dict.fromkeys(str(name) for record in records for name in record)
    others = [name for name in fields if name not in (modalities or {})]
    for name in modalities or {}:
        meant = [] if name in fields else get_close_matches(str(name), others, 1, MISSPELT)
        if meant:
            raise ValueError(
                f"modalities must name fields, got {name!r}; the records have {meant[0]!r}, for "
                "which it names none"
            )


def _field(value: Any, name: str, modality: str | None, where: str) -> SignalTree:
    if isinstance(value, SignalTree):
        tree = value
        if tree.num_trees != 1:
            raise ValueError(f"{where} must be one tree, got a batch of {tree.num_trees} trees")
    elif _is_size(value):
        tree = from_windows(check_integer(where, value, least=1, hint=EMPTY), ())
    elif isinstance(value, (Sequence, Mapping, Set)) and not len(value):
        raise ValueError(f"{where} is an empty {type(value).__name__}; {EMPTY}")
    else:
        tree = from_nested(value, name=where)[0]
    if tree.modality_names == ("default",):
        return tree.with_modality(modality or name)
    if modality is not None and tree.modality_names != (modality,):
        raise ValueError(
            f"modalities: {name!r} is to be {modality!r}, but its tree already has "
            f"{', '.join(tree.modality_names)}"
        )
    return tree


def _is_size(value: Any) -> bool:
    """Whether a field is a number of rows: an integer of any kind, numpy's too, but no bool."""
    is_index = hasattr(value, "__index__") and not isinstance(value, bool)
    return is_index and not is_array(value) and not getattr(value, "is_floating_point", bool)()
