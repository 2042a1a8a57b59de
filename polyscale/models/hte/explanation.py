"""Which part of a document mattered: each node left out, and gradients, against each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyscale.documents import Document
from polyscale.models.hte.collation import collate_trees
from polyscale.models.hte.inputs import prune_inputs
from polyscale.trees import SignalTree

ROWS_AT_ONCE = 20_000


@dataclass(frozen=True, eq=False)
class Explanation:
    """What each node adds to the logit of a label.

    `left_out` is the logit with the node less the logit without its subtree, NaN where it was not
    computed: at the root, and at kinds that were not asked for. `gradient` is the same to first
    order, from one backward pass.
    """

    document: Document
    label: str
    logit: float
    left_out: Tensor  # [M]
    gradient: Tensor  # [M]
    format: str = "text"  # of the document, as the processor reads it

    @property
    def agreement(self) -> float:
        """Correlation of the two over all nodes that both have; NaN below three nodes."""
        both = ~self.left_out.isnan()
        if int(both.sum()) < 3:
            return float("nan")
        pair = torch.stack([self.left_out[both], self.gradient[both]])
        return float(torch.corrcoef(pair)[0, 1])

    def top(self, count: int = 5, kind: str | None = None) -> list[tuple[int, float, str]]:
        """Return (node, effect, text) of the nodes that matter most, by leaving them out."""
        nodes = [
            node
            for node in (~self.left_out.isnan()).nonzero().flatten().tolist()
            if kind is None or self.document.kinds[node] == kind
        ]
        nodes.sort(key=lambda node: -abs(float(self.left_out[node])))
        return [(n, float(self.left_out[n]), self.document.text(n)) for n in nodes[:count]]

    def fields(self) -> dict[str, float]:
        """Return the effect of each field of a record, or of title and body of a document."""
        tree = self.document.tree
        begin = int(tree.first_child[0])
        nodes = range(begin, begin + int(tree.child_count[0]))
        return {
            tree.key_names[int(tree.key[node])]: float(self.left_out[node])
            for node in nodes
            if int(tree.key[node]) >= 0
        }

    def outline(self, max_nodes: int = 60) -> str:
        """Return the tree as text, every leaf with its effect."""
        tree = self.document.tree
        effect = torch.where(self.left_out.isnan(), self.gradient, self.left_out)

        def name(row: int) -> str:
            return f"{self.document.values[row]} {float(effect[tree.row_node[row]]):+.3f}"

        return tree.outline(max_nodes, name)


def explain(
    model: Any, processor: Any, document: Any, label: str | int | None, kinds: Sequence[str] | None
) -> Explanation:
    """See `HTEForClassification.explain`."""
    if isinstance(kinds, str):
        raise TypeError(f"kinds must be a sequence of kinds, got {kinds!r}; use ({kinds!r},)")
    read = processor.read(document)
    unknown = [kind for kind in kinds or () if kind not in read.kinds]
    if unknown:
        raise ValueError(f"kinds must be among {sorted(set(read.kinds))}, got {unknown}")
    example = processor.example_of(read)
    if model.model.encoder is not None:
        # Once for all: without a node, the vectors of the other leaves are the same.
        (example,) = model.encode_leaves([example])
    logits, gradient, index = _gradient(model, collate_trees([example]), label)
    left_out = _left_out(model, example, read, kinds, logits[index], index)
    name = str(model.config.id2label[index])
    return Explanation(read, name, float(logits[index]), left_out, gradient, processor.format)


def _gradient(
    model: Any, batch: dict[str, Any], label: str | int | None
) -> tuple[Tensor, Tensor, int]:
    """Logits, the first-order effect of each node, and which logit is explained."""
    from polyscale.models.hte.documents import node_means

    with torch.enable_grad():
        output = model(**batch, output_hidden_states=True)
        logits = output.logits[0]
        index = int(logits.argmax()) if label is None else _index(model, label)
        leaves = output.hidden_states[0]  # [N, C]
        (slope,) = torch.autograd.grad(logits[index], leaves)
    tree: SignalTree = batch["tree"]
    # Without a leaf, the others stand for it.
    change = (slope * (leaves - leaves.mean(0))).sum(-1, keepdim=True).detach()
    effect = node_means(change, tree)[:, 0].cpu() * tree.leaf_count
    return logits.detach().cpu(), effect, index


def _index(model: Any, label: str | int) -> int:
    names = {number: str(name) for number, name in model.config.id2label.items()}
    if isinstance(label, int) and not isinstance(label, bool) and label in names:
        return label
    found = [number for number, name in names.items() if name == label]
    if not found:
        raise ValueError(f"label must be one of {list(names.values())}, got {label!r}")
    return found[0]


@torch.no_grad()
def _left_out(
    model: Any,
    example: dict[str, Any],
    document: Document,
    kinds: Sequence[str] | None,
    logit: Tensor,
    index: int,
) -> Tensor:
    """The logit less that without each node, many pruned trees at once."""
    tree: SignalTree = example["tree"]
    effect = torch.full((tree.num_nodes,), float("nan"))
    whole = tree.leaf_count == tree.num_leaves  # nothing is left without them
    nodes = [
        node
        for node in range(tree.num_nodes)
        if not whole[node] and (kinds is None or document.kinds[node] in kinds)
    ]
    at_once = max(1, ROWS_AT_ONCE // tree.num_rows)
    for begin in range(0, len(nodes), at_once):
        part = nodes[begin : begin + at_once]
        pruned = []
        for node in part:
            keep = torch.ones(tree.num_rows, dtype=torch.bool)
            keep[document.rows(node)] = False
            inputs, smaller = prune_inputs(example["inputs"], tree, keep)
            pruned.append({"inputs": inputs, "tree": smaller})
        logits = model(**collate_trees(pruned)).logits[:, index].cpu()
        effect[torch.tensor(part)] = logit - logits
    return effect
