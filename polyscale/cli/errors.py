"""Errors of the command line: one line and an exit code for what a user can correct."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def one_line_errors(*, resumable: bool = False) -> Iterator[None]:
    """Print what a user can correct in one line; other errors are bugs and show a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        stop("stopped" + ("; continue with --resume" if resumable else ""), code=130)
    except (ValueError, TypeError, FloatingPointError) as error:
        stop(str(error), code=2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename and error.strerror else ""
        stop(f"{where}{error.strerror or error}", code=1)
    except ImportError as error:
        stop(str(error), code=1)


def stop(message: str, *, code: int) -> NoReturn:
    """Print one line to standard error and exit."""
    print(f"polyscale: {message}", file=sys.stderr)
    sys.exit(code)
