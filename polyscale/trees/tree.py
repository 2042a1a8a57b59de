"""SignalTree: a signal hierarchy as flat tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from polyscale.trees import checks
from polyscale.trees.from_documents import FromDocuments

if TYPE_CHECKING:
    from polyscale.trees.diagnostics import TreeDiagnostics


@dataclass(frozen=True, eq=False, repr=False)
class SignalTree(FromDocuments):
    """A tree, or a forest of `num_trees` trees, over the rows of a data tensor.

    Nodes are numbered breadth-first: by depth, siblings side by side, families in the order of
    their parents; the roots come first. Build one with a `from_...` method. All tensors are int64
    on one device, M is the number of nodes and N the number of data rows.

    >>> tree = SignalTree.from_parents([-1, 0, 0, 1, 1])
    >>> tree.parent.tolist(), tree.leaf_count.tolist()
    ([-1, 0, 0, 1, 1], [3, 2, 1, 1, 1])
    """

    DOMAINS: ClassVar[tuple[str, ...]] = checks.DOMAINS

    parent: Tensor  # [M], -1 for a root
    depth: Tensor  # [M], 0 for a root
    first_child: Tensor  # [M], 0 for a leaf
    child_count: Tensor  # [M], 0 for a leaf
    leaf_count: Tensor  # [M], leaves under the node, 1 for a leaf
    leaf_begin: Tensor  # [M], rank in leaf_order of the first leaf under the node
    leaf_order: Tensor  # [num_leaves], leaf nodes from left to right
    leaf_row: Tensor  # [M], data row of a leaf, -1 for an inner node
    row_node: Tensor  # [N], leaf node of a data row, -1 for a row outside the tree
    domain: Tensor  # [M], index into DOMAINS, -1 for a leaf
    position: Tensor  # [M, 2], coordinates in the parent's domain
    key: Tensor  # [M], index into key_names, -1 unless the parent is keyed
    modality: Tensor  # [M], index into modality_names, -1 for an inner node
    key_names: tuple[str, ...]
    modality_names: tuple[str, ...]
    depth_offsets: tuple[int, ...]  # nodes of depth d are depth_offsets[d] : depth_offsets[d + 1]
    tree_rows: tuple[int, ...]  # rows of tree t are tree_rows[t] : tree_rows[t + 1]
    source_offsets: Tensor | None = None  # [N, 2], characters of a row in its source; -1 for none

    @property
    def num_nodes(self) -> int:
        return self.parent.numel()

    @property
    def num_rows(self) -> int:
        return self.row_node.numel()

    @property
    def num_leaves(self) -> int:
        return self.leaf_order.numel()

    @property
    def num_trees(self) -> int:
        return len(self.tree_rows) - 1

    @property
    def num_inner(self) -> int:
        return self.num_nodes - self.num_leaves

    @property
    def max_depth(self) -> int:
        """Depth of the deepest leaf; 0 for a single leaf."""
        return len(self.depth_offsets) - 2

    @property
    def device(self) -> torch.device:
        return self.parent.device

    @classmethod
    def from_parents(
        cls,
        parent: Any,
        *,
        rows: Any = None,
        num_rows: int | None = None,
        domains: str | Sequence[str | None] | Tensor | None = None,
        positions: Any = None,
        keys: Sequence[str | None] | Tensor | None = None,
        key_names: Sequence[str] | None = None,
        modalities: str | Sequence[str | None] | Tensor | None = None,
        modality_names: Sequence[str] | None = None,
    ) -> SignalTree:
        """Build one tree from the parent of each node, nodes in any order, -1 for the root.

        Siblings keep the order of their numbers. Everything else is given per node as well:
        `rows` (-1 for inner nodes) defaults to numbering the leaves from left to right, that is
        depth-first, whatever their numbers; `num_rows` to the largest row + 1. `domains`
        ("sequence" unless given) and `modalities` are one name for all, names (None where there
        is none) or a tensor of indices into DOMAINS / `modality_names`; `keys` names the
        children of keyed nodes. `positions` [M] or [M, 2] defaults to the index in the family,
        0 in a set, and must be given for the children of a grid2d.

        >>> SignalTree.from_parents([2, 2, -1], rows=[1, 0, -1]).leaf_row.tolist()
        [-1, 1, 0]
        """
        from polyscale.trees import parents

        return parents.from_parents(
            parent,
            rows=rows,
            num_rows=num_rows,
            domains=domains,
            positions=positions,
            keys=keys,
            key_names=key_names,
            modalities=modalities,
            modality_names=modality_names,
        )

    @overload
    @classmethod
    def from_nested(
        cls, nested: Any, *, arrays: str | None = None, return_leaves: Literal[False] = False
    ) -> SignalTree: ...

    @overload
    @classmethod
    def from_nested(
        cls, nested: Any, *, arrays: str | None = None, return_leaves: Literal[True]
    ) -> tuple[SignalTree, list[Any]]: ...

    @classmethod
    def from_nested(
        cls, nested: Any, *, arrays: str | None = None, return_leaves: bool = False
    ) -> SignalTree | tuple[SignalTree, list[Any]]:
        """Build a tree from nested lists, tuples or ranges (sequence), dicts (keyed) and sets.

        Anything else is one leaf, a string or a number too. Tensors and ndarrays are leaves with
        `arrays="leaf"`, families with `arrays="sequence"`, and refused otherwise; iterators always
        are. Rows are numbered from left to right; with `return_leaves` the leaves are returned in
        that order, ready to be embedded and stacked. The members of a set are sorted, so that a set
        always gives the same rows.

        >>> tree, leaves = SignalTree.from_nested({"a": [1, 2], "b": 3}, return_leaves=True)
        >>> leaves, tree.key_names
        ([1, 2, 3], ('a', 'b'))
        """
        from polyscale.trees import nested as builder

        tree, leaves = builder.from_nested(nested, arrays)
        return (tree, leaves) if return_leaves else tree

    @classmethod
    def from_windows(
        cls, n: int, windows: Sequence[int] = (), *, modality: str = "default"
    ) -> SignalTree:
        """Build a tree over `n` rows by windows, bottom to top: each groups what is below it.

        `(2, 4)` makes pairs of rows and groups of four pairs; the rest are children of the root.
        The last window of a level may be short; levels that would hold one node are left out.

        >>> SignalTree.from_windows(5, (2,)).child_count.tolist()
        [3, 2, 2, 1, 0, 0, 0, 0, 0]
        """
        from polyscale.trees import builders

        return builders.from_windows(n, windows, modality)

    @classmethod
    def from_text(
        cls,
        text: str,
        tokenizer: Any = None,
        *,
        encoding: Any = None,
        split_sentences: Callable[[str], Iterable[tuple[int, int]]] | None = None,
        max_family: int | None = 1024,
        modality: str = "default",
    ) -> SignalTree:
        """Build root, paragraphs, sentences and tokens; row i is token i of the tokenizer.

        A token belongs to the sentence where it starts, leading spaces aside; special tokens
        are leaves directly under the root, and padding (attention mask 0) has a row but no leaf.
        Takes a fast Hugging Face tokenizer or a bytewise one, or the `encoding` of `text` that
        such a tokenizer has returned. `split_sentences` gives (start, end) for each sentence of
        a paragraph. Families of more than `max_family` members, such as a text without sentence
        ends, are split into windows of 64, with a warning; None leaves them whole.

        >>> tree = SignalTree.from_text("One. Two.", tokenizer)  # doctest: +SKIP
        """
        from polyscale.trees import text as builder

        return builder.from_text(text, tokenizer, encoding, split_sentences, max_family, modality)

    @classmethod
    def from_image(
        cls,
        height: int,
        width: int,
        patch: int | tuple[int, int] = 1,
        *,
        layout: str = "quadtree",
        modality: str = "default",
    ) -> SignalTree:
        """Build a tree over the patches of an image; rows are its patches, row by row.

        "quadtree" halves the image both ways down to single patches, "rows" makes every line
        of patches a family, "flat" is one family. Patches at the far edges may be partial.

        >>> SignalTree.from_image(28, 28, 7).leaf_count.tolist()[:5]
        [16, 4, 4, 4, 4]
        """
        from polyscale.trees import builders

        return builders.from_image(height, width, patch, layout, modality)

    @classmethod
    def from_linkage(
        cls, linkage: Any, *, domain: str = "set", modality: str = "default"
    ) -> SignalTree:
        """Build the binary tree of a scipy linkage matrix [n - 1, 4]; row i is observation i.

        >>> SignalTree.from_linkage([[0, 2, 0.1, 2], [1, 3, 0.5, 3]]).leaf_row.tolist()
        [-1, 1, -1, 0, 2]
        """
        from polyscale.trees import builders

        return builders.from_linkage(linkage, domain, modality)

    @classmethod
    def from_records(
        cls, records: Any, *, modalities: Mapping[str, str] | None = None
    ) -> SignalTree:
        """Build a keyed tree from a record, a dict of fields, or a batch from a list of records.

        A field is a SignalTree, nested data as in `from_nested`, where a string or a float is one
        leaf, or an integer, the number of its rows (a sequence). Its rows follow those of the field
        before. Its leaves have the modality that `modalities` names for it, otherwise the field's
        own name; names much like a field's, but not its own, are refused.

        >>> record = {"title": 3, "photo": SignalTree.from_image(32, 32, 16)}
        >>> tree = SignalTree.from_records(record, modalities={"title": "text"})
        >>> tree.key_names, tree.modality_names, tree.num_rows
        (('title', 'photo'), ('text', 'photo'), 7)
        """
        from polyscale.trees import records as builder

        return builder.from_records(records, modalities)

    @classmethod
    def batch(cls, trees: Sequence[SignalTree]) -> SignalTree:
        """Join trees of any shapes into one forest; the rows of each follow those of the last.

        Names of keys and modalities are merged, so indices may differ from those before.

        >>> both = SignalTree.batch([SignalTree.from_windows(4, (2,)), SignalTree.from_windows(1)])
        >>> both.num_trees, both.tree_rows
        (2, (0, 4, 5))
        """
        from polyscale.trees import editing

        return editing.batch(trees)

    def unbatch(self) -> list[SignalTree]:
        """Return the trees of a forest, each with its own rows from 0."""
        from polyscale.trees import editing

        return editing.unbatch(self)

    def prune(self, keep: Tensor) -> SignalTree:
        """Leave out the rows for which `keep` [N] is False, for example padding.

        Rows keep their numbers and `num_rows` stays; inner nodes without leaves are removed.

        >>> SignalTree.from_windows(3).prune(torch.tensor([True, False, True])).row_node.tolist()
        [1, -1, 2]
        """
        from polyscale.trees import editing

        return editing.prune(self, keep)

    def collapse(self) -> SignalTree:
        """Remove the inner nodes with one child; the child takes their place, key and position.

        >>> SignalTree.from_parents([-1, 0, 1, 1]).collapse().parent.tolist()
        [-1, 0, 0]
        """
        from polyscale.trees import editing

        return editing.collapse(self)

    def flatten(self) -> SignalTree:
        """Make every leaf a child of the root of its tree: one sequence, left to right.

        >>> SignalTree.from_windows(5, (2,)).flatten().child_count.tolist()
        [5, 0, 0, 0, 0, 0]
        """
        from polyscale.trees import reshaping

        return reshaping.flatten(self)

    def pool_leaves(self) -> tuple[SignalTree, Tensor]:
        """Turn the families that have only leaves into leaves; return each old row's new row.

        New rows are numbered from left to right; rows outside the tree get -1.

        >>> tree, row_of_row = SignalTree.from_windows(5, (2,)).pool_leaves()
        >>> tree.num_rows, row_of_row.tolist()
        (3, [0, 0, 1, 1, 2])
        """
        from polyscale.trees import reshaping

        return reshaping.pool_leaves(self)

    def with_modality(self, name: str) -> SignalTree:
        """Return the same tree with all leaves of the modality `name`."""
        return replace(self, modality=self.modality.clamp(max=0), modality_names=(name,))

    def validate(self) -> None:
        """Check every tensor against all others; raise an error that names the node."""
        from polyscale.trees import validation

        validation.validate(self)

    def diagnostics(self) -> TreeDiagnostics:
        """Return depth, branching, one-child share, dilution and cost.

        >>> SignalTree.from_windows(16, (4,)).diagnostics().dilution
        3.4
        """
        from polyscale.trees import diagnostics

        return diagnostics.diagnostics(self)

    def outline(
        self,
        max_nodes: int = 60,
        labels: Sequence[str] | Callable[[int], str] | None = None,
    ) -> str:
        """Return the tree as indented text; `labels` are one name for each row, or a function.

        >>> print(SignalTree.from_windows(2).outline(labels=["x", "y"]))
        sequence of 2 (2 leaves)
        ├─ x
        └─ y
        """
        from polyscale.trees import outline

        return outline.outline(self, max_nodes, labels)

    def draw(
        self,
        path_or_ax: Any = None,
        *,
        labels: Sequence[str] | Callable[[int], str] | None = None,
        max_nodes: int = 150,
    ) -> Any:
        """Draw the tree with matplotlib to a file, on the given Axes, or on new ones; return them.

        Levels beyond `max_nodes` nodes are hidden; nodes above them show how many leaves hide.
        """
        from polyscale.trees import drawing

        return drawing.draw(self, path_or_ax, labels, max_nodes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tree to a .json or .safetensors file, completely or not at all."""
        from polyscale.trees import storage

        storage.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SignalTree:
        """Read and validate a tree that `save` wrote; damaged files raise, with the reason."""
        from polyscale.trees import storage

        return storage.load(path)

    def to(self, device: torch.device | str) -> SignalTree:
        """Return the tree with its tensors on `device`; itself if they are already there."""
        tensors = {
            field.name: getattr(self, field.name).to(device)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        same = all(tensor is getattr(self, name) for name, tensor in tensors.items())
        return self if same else replace(self, **tensors)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SignalTree):
            return NotImplemented
        if self.tree_rows != other.tree_rows or self.num_nodes != other.num_nodes:
            return False
        from polyscale.trees import editing

        return editing.same(self, other)

    def __hash__(self) -> int:
        return hash((self.num_nodes, self.tree_rows, self.depth_offsets))

    def __repr__(self) -> str:
        trees = f"trees={self.num_trees}, " if self.num_trees > 1 else ""
        rows = "" if self.num_rows == self.num_leaves else f", rows={self.num_rows}"
        return (
            f"SignalTree({trees}leaves={self.num_leaves}, nodes={self.num_nodes}, "
            f"depth={self.max_depth}{rows})"
        )

    def __str__(self) -> str:
        return self.outline()
