"""A document as a tree: what its leaves are, what its nodes are, and where they stand."""

from dataclasses import dataclass
from typing import Any

from polyscale.trees import SignalTree


@dataclass(frozen=True, eq=False)
class Document:
    r"""A tree with the value of every row and the kind of every node.

    >>> from polyscale.documents import read_markdown
    >>> document = read_markdown("# Fish\n\nThey swim. They eat.")
    >>> document.values, [document.text(node) for node in document.nodes("sentence")]
    (['Fish', 'They', 'swim', 'They', 'eat'], ['Fish', 'They swim', 'They eat'])
    """

    tree: SignalTree
    values: list[Any]  # of each row: a word (or what stands for one), a number, an Image
    kinds: tuple[str, ...]  # of each node: document, title, section, paragraph, sentence, ...
    source: str | None = None  # what the tree was read from

    def nodes(self, kind: str) -> list[int]:
        """Return the nodes of a kind, in the order of the text."""
        found = [node for node, name in enumerate(self.kinds) if name == kind]
        return sorted(found, key=self.tree.leaf_begin.tolist().__getitem__)

    def rows(self, node: int) -> list[int]:
        """Return the rows of the leaves under a node."""
        tree = self.tree
        begin = int(tree.leaf_begin[node])
        leaves = tree.leaf_order[begin : begin + int(tree.leaf_count[node])]
        return [int(row) for row in tree.leaf_row[leaves].tolist()]

    def span(self, node: int) -> tuple[int, int] | None:
        """Return the first character of a node in the source and its end; None if it has none."""
        if self.tree.source_offsets is None:
            return None
        offsets = self.tree.source_offsets[self.rows(node)]
        offsets = offsets[offsets[:, 0] >= 0]
        return (int(offsets[:, 0].min()), int(offsets[:, 1].max())) if len(offsets) else None

    def text(self, node: int) -> str:
        """Return the source from a node's first leaf to its last; without one, its leaves."""
        span = None if self.source is None else self.span(node)
        if span is None or self.source is None:
            return " ".join(str(self.values[row]) for row in self.rows(node))
        return self.source[slice(*span)]
