"""The constructors of SignalTree that read documents; polyscale.documents does the work."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyscale.documents import Document
    from polyscale.trees.tree import SignalTree


class FromDocuments:
    """Trees whose leaves know their places in a source, `source_offsets` [N, 2].

    All take `drop_empty=True`, which leaves out what has no content, `max_family=1024`, above which
    families are split into windows with a warning, and `max_leaves`. With `return_leaves` the
    words, numbers and images of the rows are returned, too.
    """

    @classmethod
    def from_html(cls, source: str, *, return_leaves: bool = False, **options: Any) -> Any:
        """Build the tree of a page: title, sections by heading level, lists, tables, links, images.

        >>> tree = SignalTree.from_html("<h1>Fish</h1><p>They swim.")  # doctest: +SKIP
        """
        return _read("read_html", source, return_leaves, options)

    @classmethod
    def from_markdown(cls, source: str, *, return_leaves: bool = False, **options: Any) -> Any:
        r"""Build the tree of a Markdown text, as `from_html` does of a page.

        >>> tree = SignalTree.from_markdown("# Fish\n\nThey swim.")  # doctest: +SKIP
        """
        return _read("read_markdown", source, return_leaves, options)

    @classmethod
    def from_json(cls, source: str, *, return_leaves: bool = False, **options: Any) -> Any:
        """Build the tree of JSON: keyed objects, arrays, and the words of strings.

        >>> tree = SignalTree.from_json('{"name": "old house"}')  # doctest: +SKIP
        """
        return _read("read_json", source, return_leaves, options)

    @classmethod
    def from_table(
        cls,
        table: Any,
        *,
        columns: Sequence[str] | None = None,
        return_leaves: bool = False,
        **options: Any,
    ) -> Any:
        r"""Build the tree of a table: CSV, dicts or lists as rows, a dict of columns, a data frame.

        >>> tree = SignalTree.from_table("name,price\nold house,3.5")  # doctest: +SKIP
        """
        return _read("read_table", table, return_leaves, options, columns=columns)

    @classmethod
    def from_python(cls, source: str, *, return_leaves: bool = False, **options: Any) -> Any:
        """Build the tree of Python source: classes and functions, blocks, lines, tokens.

        >>> tree = SignalTree.from_python("x = 1")  # doctest: +SKIP
        """
        return _read("read_python", source, return_leaves, options)


def _read(
    reader: str, source: Any, return_leaves: bool, options: dict[str, Any], **more: Any
) -> SignalTree | tuple[SignalTree, list[Any]]:
    # By name: trees are below documents, and only the one who asks needs them.
    documents: Any = import_module("polyscale.documents")
    document: Document = getattr(documents, reader)(source, documents.Reading(**options), **more)
    return (document.tree, document.values) if return_leaves else document.tree
