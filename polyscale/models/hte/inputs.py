"""The inputs of the leaves, by modality."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyscale.trees import SignalTree

Inputs = Tensor | Mapping[str, Tensor]


def rows_by_modality(tree: SignalTree) -> dict[str, Tensor]:
    """Return the rows of the leaves of each modality, in order, without empty modalities.

    >>> tree = SignalTree.from_records([{"word": 2, "tag": 1}, {"word": 1}])
    >>> {name: rows.tolist() for name, rows in rows_by_modality(tree).items()}
    {'word': [0, 1, 3], 'tag': [2]}
    """
    code = torch.where(tree.row_node >= 0, tree.modality[tree.row_node.clamp(min=0)], -1)  # [N]
    rows = {name: (code == n).nonzero().flatten() for n, name in enumerate(tree.modality_names)}
    return {name: found for name, found in rows.items() if found.numel()}


def read_inputs(inputs: Any, tree: SignalTree) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (rows, values) of each modality in the tree; inputs must fit the tree."""
    if not isinstance(tree, SignalTree):
        raise TypeError(f"tree must be a SignalTree, got {type(tree).__name__}")
    if inputs is None:
        raise ValueError("inputs must be a tensor for each modality of the tree, got None")
    rows = rows_by_modality(tree)
    if not isinstance(inputs, Mapping):
        if len(rows) > 1:
            raise ValueError(
                f"inputs must be a dict with a tensor for each modality of the tree, {list(rows)}, "
                f"got {type(inputs).__name__}"
            )
        inputs = dict.fromkeys(rows, inputs)
    missing = [name for name in rows if inputs.get(name) is None]
    if missing:
        raise ValueError(
            f"inputs must have {missing}, which are modalities of the tree, got {list(inputs)}"
        )
    found = {}
    for name, values in inputs.items():
        if not isinstance(values, Tensor):
            raise TypeError(f"inputs[{name!r}] must be a tensor, got {type(values).__name__}")
        if values.dim() not in (1, 2):
            raise ValueError(
                f"inputs[{name!r}] must be ids [n] or vectors [n, width], got shape "
                f"{list(values.shape)}"
            )
        if name in rows:
            found[name] = rows[name], _of_leaves(name, values, rows, tree)
        elif values.shape[0]:
            raise ValueError(
                f"inputs must be those of the modalities of the tree, {list(rows)}, got "
                f"{values.shape[0]} of {name!r}"
            )
    return found


def _of_leaves(name: str, values: Tensor, rows: dict[str, Tensor], tree: SignalTree) -> Tensor:
    if values.shape[0] == rows[name].numel():
        return values
    # With one modality, inputs may also cover all rows, padding included.
    if len(rows) == 1 and values.shape[0] == tree.num_rows:
        return values[rows[name].to(values.device)]
    padding = f" (or {tree.num_rows} with padding)" if len(rows) == 1 else ""
    raise ValueError(
        f"inputs[{name!r}] must have one for each of the {rows[name].numel()} leaves of that "
        f"modality in the tree{padding}, got {values.shape[0]}"
    )


def prune_inputs(
    inputs: Mapping[str, Tensor], tree: SignalTree, keep: Tensor
) -> tuple[dict[str, Tensor], SignalTree]:
    """Return the inputs and the tree of the rows that `keep` [N] keeps.

    `tree.prune` alone forgets which modality the rows had that it leaves out.

    >>> tree = SignalTree.from_records({"word": 2, "tag": 1})
    >>> inputs = {"word": torch.tensor([5, 6]), "tag": torch.tensor([7])}
    >>> inputs, tree = prune_inputs(inputs, tree, torch.tensor([True, False, True]))
    >>> inputs["word"].tolist(), inputs["tag"].tolist(), tree.num_leaves
    ([5], [7], 2)
    """
    pruned = tree.prune(keep)
    left = {}
    for name, (rows, values) in read_inputs(inputs, tree).items():
        kept = keep.to(rows.device)[rows]
        if kept.any():
            left[name] = values[kept.to(values.device)]
    return left, pruned
