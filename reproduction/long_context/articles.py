"""The texts: long articles of enwik8, or modules of Python's standard library, as token ids."""

from __future__ import annotations

import gzip
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILES = ("enwik8", "enwik8.gz", "enwik8_20mb.gz")
PAGE = b"<page>"
CHOOSING = 8  # so many articles, the longest, chose the defaults; those after them are held out


def read_pages(data_dir: Path) -> list[str]:
    """Return the pages of the dump in `data_dir`, the longest first."""
    for name in FILES:
        path = data_dir / name
        if path.is_file():
            content = path.read_bytes()
            break
    else:
        raise FileNotFoundError(f"--data-dir: {data_dir} has none of {', '.join(FILES)}")
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    pages = content.split(PAGE)[1:-1]  # the last one may have been cut off
    pages.sort(key=len, reverse=True)
    return [(PAGE + page).decode("utf-8", errors="replace") for page in pages]


def read_modules() -> list[str]:
    """Return the modules of Python's standard library, the longest first."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    return [path.read_text(encoding="utf-8") for path in files]


def long_articles(
    data_dir: Path | None, tokenizer: Any, count: int, length: int, first: int = 0
) -> list[Tensor]:
    """Return the first `length` token ids `[1, length]` of `count` articles, after `first` others.

    Without a folder of data the articles are modules of the standard library.

    Articles with fewer tokens are passed over, so the same article has the same number only for
    the same length.
    """
    found: list[Tensor] = []
    for page in read_modules() if data_dir is None else read_pages(data_dir):
        # Eight bytes a token are more than any article takes; the rest need not be read.
        ids = tokenizer(page[: 8 * length], add_special_tokens=False).input_ids
        if len(ids) >= length:
            found.append(torch.tensor([ids[:length]]))
        if len(found) == first + count:
            return found[first:]
    raise ValueError(
        f"--articles: {data_dir or 'the standard library'} has {len(found)} articles of {length} "
        f"tokens, got {count} after {first}"
    )
