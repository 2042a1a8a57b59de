"""The backend of an operation that a native library computes."""

from collections.abc import Callable
from typing import Any

from polyscale.ops.backends import Backend
from polyscale.ops.native.library import NativeLibrary

Reason = Callable[[], str | None]


def native_backend(
    library: NativeLibrary,
    run: Callable[..., Any],
    description: str,
    why_unsupported: Callable[..., str | None],
) -> Backend:
    """The backend `"native"`, whose library is built when it is first chosen.

    Args:
        library: what `run` calls.
        run: as in `Backend`.
        description: without how it is built.
        why_unsupported: as in `Backend`.
    """
    return Backend(
        "native",
        run,
        f"{description}; a C++ compiler builds it on first use",
        why_unavailable=_constant_while_traced(library.why_unavailable),
        why_unsupported=why_unsupported,
        why_unprepared=_constant_while_traced(library.why_not_built),
    )


def _constant_while_traced(reason: Reason) -> Reason:
    """`torch.compiler.assume_constant_result`, without its import of the whole compiler.

    A compiled graph asks while it is traced and keeps the answer.
    """

    def ask() -> str | None:
        return reason()

    ask._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return ask
