"""The texts: long articles of enwik8, as token ids."""

from __future__ import annotations

import gzip
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


def long_articles(
    data_dir: Path, tokenizer: Any, count: int, length: int, first: int = 0
) -> list[Tensor]:
    """Return the first `length` token ids `[1, length]` of `count` articles, after `first` others.

    Articles with fewer tokens are passed over, so the same article has the same number only for
    the same length.
    """
    found: list[Tensor] = []
    for page in read_pages(data_dir):
        # Eight bytes a token are more than any article takes; the rest need not be read.
        ids = tokenizer(page[: 8 * length], add_special_tokens=False).input_ids
        if len(ids) >= length:
            found.append(torch.tensor([ids[:length]]))
        if len(found) == first + count:
            return found[first:]
    raise ValueError(
        f"--articles: {data_dir} has {len(found)} articles of {length} tokens, "
        f"got {count} after {first}"
    )
