"""Text files of users: every way in which one can be unreadable is an error that names it."""

from __future__ import annotations

import codecs
import hashlib
from pathlib import Path

from polyscale.data.files import DataFile, unzip

MAX_LINE = 2**24  # characters; more in one line is no row of a table
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text_file(path: Path) -> str:
    """The text of a UTF-8 file, unpacked if its name ends with .gz.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for an empty file, another encoding, NUL bytes or damaged gzip data.
    """
    if not path.is_file():
        raise FileNotFoundError(f"data must be a file or folder that exists, got {path}")
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = unzip(DataFile(path, content, hashlib.sha256(content).hexdigest()))
    return decode_text(content, str(path))


def decode_text(content: bytes, name: str) -> str:
    r"""The text of UTF-8 bytes, without a byte-order mark; errors begin with `name`.

    >>> decode_text(b"\xef\xbb\xbfa\r\nb", "file")
    'a\r\nb'
    """
    if not content.strip():
        raise ValueError(f"{name} must have some text, got an empty file")
    if content.startswith(_UTF16):
        raise ValueError(f"{name} must be UTF-8, got UTF-16; convert it with iconv -t UTF-8")
    if b"\0" in content:
        line = content.count(b"\n", 0, content.index(b"\0")) + 1
        raise ValueError(f"{name} must be text, got a NUL byte in line {line}; is it a text file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} must be UTF-8, got the byte 0x{content[error.start]:02x} in line {line}; "
            "convert it, such as with iconv -f WINDOWS-1252 -t UTF-8"
        ) from None


def check_lines(text: str, name: str) -> None:
    """Raise if a line is longer than any row of a table."""
    begin = 0
    while (end := text.find("\n", begin)) >= 0 or begin < len(text):
        end = len(text) if end < 0 else end
        if end - begin > MAX_LINE:
            line = text.count("\n", 0, begin) + 1
            raise ValueError(
                f"{name} must have lines of at most {MAX_LINE:,} characters, got {end - begin:,} "
                f"in line {line}; is it a table with one row on each line?"
            )
        begin = end + 1
