"""Which implementation of an operation runs: on this machine, on these tensors, and why not.

An operation has several backends. `impl="auto"` takes the first that can run; a backend asked for
by name runs, or the reason why it cannot is raised. Nothing else decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyscale.checks import check_choice


def _nothing(*args: Any, **kwargs: Any) -> None:
    """No reason against a backend."""


@dataclass(frozen=True)
class Backend:
    """One way to compute an operation.

    `why_unavailable()` says why it cannot run on this machine, `why_unsupported(...)` why it cannot
    take these arguments; both return None where it can.
    """

    name: str
    run: Callable[..., Any]
    description: str
    why_unavailable: Callable[[], str | None] = _nothing
    why_unsupported: Callable[..., str | None] = _nothing


@dataclass(frozen=True)
class Operation:
    """An operation and its backends.

    Args:
        name: of the operation.
        backends: all of them, the reference first.
        preferred: names in the order in which `"auto"` tries them, or a function that makes the
            order from the arguments. The last one takes whatever the others do not.
    """

    name: str
    backends: tuple[Backend, ...]
    preferred: Sequence[str] | Callable[..., Sequence[str]]
    _by_name: dict[str, Backend] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {backend.name: backend for backend in self.backends})

    def check_name(self, impl: str) -> None:
        """Raise unless `impl` is `"auto"` or one of the backends."""
        check_choice("impl", impl, ("auto", *self._by_name))

    def why_not(self, name: str, *args: Any, **kwargs: Any) -> str | None:
        """Why a backend cannot run on these arguments here; None if it can."""
        backend = self._by_name[name]
        return backend.why_unavailable() or backend.why_unsupported(*args, **kwargs)

    def choose(self, impl: str, *args: Any, **kwargs: Any) -> Backend:
        """The backend that `impl` stands for; the arguments are those of `why_unsupported`.

        Raises:
            ValueError: a backend asked for by name cannot run, and why.
        """
        if impl == "auto":
            preferred = self.preferred
            names = preferred(*args, **kwargs) if callable(preferred) else preferred
            for name in names[:-1]:
                if self.why_not(name, *args, **kwargs) is None:
                    return self._by_name[name]
            return self._by_name[names[-1]]
        self.check_name(impl)
        reason = self.why_not(impl, *args, **kwargs)
        if reason is not None:
            raise ValueError(
                f"impl={impl!r} cannot run {self.name}: {reason}; impl='auto' takes what can"
            )
        return self._by_name[impl]
