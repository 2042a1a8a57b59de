"""What can compute our operations on this machine."""

from typing import NamedTuple

from polyscale.ops.backends import Operation
from polyscale.ops.hkt.native.build import availability
from polyscale.ops.hkt.triton import triton_unavailable
from polyscale.ops.opened.api import OPERATION as OPENED


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
    no_triton = triton_unavailable()
    triton = no_triton or "GPU kernel, memory linear in T"
    return [
        Implementation("hkt_attention", "reference", True, "dense, any dtype, memory T^2"),
        Implementation("hkt_attention", "sdpa", True, "exact, memory linear in T"),
        Implementation("hkt_attention", "native", *availability()),
        Implementation("hkt_attention", "triton", no_triton is None, triton),
        Implementation("hsa_attention", "reference", True, "dense recursion, slow"),
        Implementation("hsa_attention", "torch", True, "all families of a depth at once"),
        *_of(OPENED),
    ]


def _of(operation: Operation) -> list[Implementation]:
    found = []
    for backend in operation.backends:
        reason = backend.why_unavailable()
        why = backend.description if reason is None else reason
        found.append(Implementation(operation.name, backend.name, reason is None, why))
    return found
