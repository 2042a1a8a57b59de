"""What can compute our operations on this machine."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import polyscale.ops
from polyscale.ops.backends import Operation


class Implementation(NamedTuple):
    """One way to compute an operation, and whether it can run here."""

    operation: str
    name: str
    available: bool
    reason: str


def implementations() -> list[Implementation]:
    """What can run here, and why the others cannot.

    >>> [found.name for found in implementations() if found.operation == "hkt_attention"]
    ['reference', 'sdpa', 'native', 'triton']
    """
    found = []
    for operation in operations():
        for backend in operation.backends:
            reason = backend.why_unavailable()
            available = reason is None
            described = backend.description if reason is None else reason
            found.append(Implementation(operation.name, backend.name, available, described))
    return found


def operations() -> Iterator[Operation]:
    """Every operation: what the `api` modules of the packages in `polyscale.ops` list.

    A package registers its operations by one line in its `api.py`: `OPERATIONS = (ATTENTION,)`.
    """
    for package in pkgutil.iter_modules(polyscale.ops.__path__, "polyscale.ops."):
        if package.ispkg and find_spec(f"{package.name}.api"):
            api = import_module(f"{package.name}.api")
            yield from getattr(api, "OPERATIONS", ())
