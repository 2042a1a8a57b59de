"""A tree as indented text."""

from collections.abc import Callable, Sequence

from polyscale.checks import check_integer
from polyscale.trees.tree import SignalTree

Labels = Sequence[str] | Callable[[int], str] | None


def label_of_row(labels: Labels, num_rows: int) -> Callable[[int], str]:
    """Return a function that names a data row."""
    if labels is None:
        return lambda row: f"row {row}"
    if callable(labels):
        return lambda row: _on_one_line(labels(row))
    if len(labels) != num_rows:
        raise ValueError(
            f"labels must have one name for each of {num_rows} rows, got {len(labels)}"
        )
    return lambda row: _on_one_line(labels[row])


def _on_one_line(label: object) -> str:
    text = str(label)
    return text if text.isprintable() else repr(text)


def outline(tree: SignalTree, max_nodes: int, labels: Labels) -> str:
    """See `SignalTree.outline`."""
    max_nodes = check_integer("max_nodes", max_nodes, least=1)
    name = label_of_row(labels, tree.num_rows)
    lines: list[str] = []
    # Each entry is a family still being listed: next node, its end, the indentation before it.
    stack = [(root, root + 1, "") for root in range(tree.num_trees - 1, -1, -1)]
    while stack and len(lines) < max_nodes:
        node, end, indent = stack.pop()
        if node + 1 < end:
            stack.append((node + 1, end, indent))
        is_root = int(tree.parent[node]) < 0
        branch = "" if is_root else ("├─ " if node + 1 < end else "└─ ")
        lines.append(indent + branch + _describe(tree, node, name))
        children = int(tree.child_count[node])
        if children:
            begin = int(tree.first_child[node])
            deeper = indent if is_root else indent + ("│  " if node + 1 < end else "   ")
            stack.append((begin, begin + children, deeper))
    if len(lines) < tree.num_nodes:
        lines.append(f"... and {tree.num_nodes - len(lines):,} more nodes")
    return "\n".join(lines)


def _describe(tree: SignalTree, node: int, name: Callable[[int], str]) -> str:
    key = int(tree.key[node])
    prefix = f"{tree.key_names[key]}: " if key >= 0 else ""
    row = int(tree.leaf_row[node])
    if row >= 0:
        modality = tree.modality_names[int(tree.modality[node])]
        return prefix + name(row) + (f" ({modality})" if len(tree.modality_names) > 1 else "")
    leaves = int(tree.leaf_count[node])
    domain = tree.DOMAINS[int(tree.domain[node])]
    return f"{prefix}{domain} of {int(tree.child_count[node])} ({leaves:,} leaves)"
