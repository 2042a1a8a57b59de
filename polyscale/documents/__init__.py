"""Documents to trees: HTML, Markdown, JSON, tables and Python source, and back to their places."""

from polyscale.documents.building import Reading
from polyscale.documents.document import Document
from polyscale.documents.html import read_html
from polyscale.documents.json import read_json
from polyscale.documents.markdown import read_markdown
from polyscale.documents.python import read_python
from polyscale.documents.table import read_table
from polyscale.documents.text import Image

__all__ = [
    "Document",
    "Image",
    "Reading",
    "read_html",
    "read_json",
    "read_markdown",
    "read_python",
    "read_table",
]
