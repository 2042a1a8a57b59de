"""Batches of examples, for a DataLoader or Trainer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.models.hte.embedding import PADDING
from polyscale.models.hte.inputs import read_inputs
from polyscale.trees import SignalTree

FIELDS = ("inputs", "tree", "labels", "graph_positions")


def collate_trees(examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join examples with "inputs", "tree" and, if any has one, "labels" into one batch.

    Trees become a forest, and the inputs of each modality are concatenated. Inputs may be tensors
    or arguments of `torch.as_tensor`. Graph domains also need "graph_positions", `[M, width]`. With
    `Trainer`, set `remove_unused_columns=False`.

    >>> example = {"inputs": [5, 6, 7], "tree": SignalTree.from_windows(3), "labels": 1}
    >>> batch = collate_trees([example, example])
    >>> batch["inputs"]["default"].tolist(), batch["tree"].num_trees, batch["labels"].tolist()
    ([5, 6, 7, 5, 6, 7], 2, [1, 1])
    """
    if not examples:
        raise ValueError("examples must have at least one example, got none")
    parts: dict[str, list[Tensor]] = {}
    for number, example in enumerate(examples):
        for name in ("inputs", "tree"):
            if name not in example:
                raise ValueError(
                    f"examples[{number}] must have {name!r}, got {list(example)}; with Trainer, "
                    "set remove_unused_columns=False"
                )
        unknown = [name for name in example if name not in FIELDS]
        if unknown:
            raise ValueError(f"examples[{number}] must have {list(FIELDS)} only, got {unknown}")
        try:
            found = read_inputs(_as_tensors(example["inputs"]), example["tree"])
        except (TypeError, ValueError) as error:
            raise type(error)(f"examples[{number}]: {error}") from error
        for name, (_, values) in found.items():
            parts.setdefault(name, []).append(values)
    trees = [example["tree"] for example in examples]
    batch: dict[str, Any] = {}
    if _all_or_none(examples, "labels"):
        # First, because Trainer uses the length of the first tensor as the batch size.
        batch["labels"] = torch.stack([torch.as_tensor(e["labels"]) for e in examples])
    batch["inputs"] = {name: _join(name, values) for name, values in parts.items()}
    batch["tree"] = SignalTree.batch(trees)
    if _all_or_none(examples, "graph_positions"):
        batch["graph_positions"] = _join_nodes(trees, [e["graph_positions"] for e in examples])
    return batch


def _as_tensors(inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {name: torch.as_tensor(values) for name, values in inputs.items()}
    return None if inputs is None else torch.as_tensor(inputs)


def _all_or_none(examples: Sequence[Mapping[str, Any]], name: str) -> bool:
    have = [example.get(name) is not None for example in examples]
    if any(have) and not all(have):
        raise ValueError(f"examples[{have.index(False)}] must have {name!r}, as others have it")
    return all(have)


def _join(name: str, values: list[Tensor]) -> Tensor:
    if all(part.dim() == 2 and not part.is_floating_point() for part in values):
        width = max(part.shape[1] for part in values)  # rows of token ids, for an encoder
        values = [F.pad(part, (0, width - part.shape[1]), value=PADDING) for part in values]
    shapes = {tuple(part.shape[1:]) for part in values}
    if len(shapes) > 1:
        raise ValueError(
            f"inputs[{name!r}] of all examples must have one width, got {sorted(shapes)}"
        )
    return torch.cat(values)


def _join_nodes(trees: list[SignalTree], values: list[Any]) -> Tensor:
    parts = [torch.as_tensor(part) for part in values]
    for number, (tree, part) in enumerate(zip(trees, parts, strict=True)):
        if part.dim() != 2 or part.shape[0] != tree.num_nodes:
            raise ValueError(
                f"graph_positions of examples[{number}] must have shape [{tree.num_nodes}, width], "
                f"got {list(part.shape)}"
            )
    # The nodes of a forest are the nodes of its trees, sorted by depth.
    order = torch.argsort(torch.cat([tree.depth for tree in trees]), stable=True)
    return torch.cat(parts)[order.to(parts[0].device)]
