"""Which implementation of an operation runs: on this machine, on these tensors, and why not.

An operation has several backends. `impl="auto"` takes the first that can run; a backend asked for
by name runs, or the reason why it cannot is raised. Nothing else decides.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from polyscale.checks import check_choice


def _no_reason(*args: Any, **kwargs: Any) -> None:
    """No reason against a backend."""


@dataclass(frozen=True)
class Backend:
    """One way to compute an operation. What speaks against it is said by three functions.

    Args:
        name: what `impl` calls it.
        run: computes the operation.
        description: a few words for `polyscale.implementations()`.
        why_unavailable: why it cannot run on this machine, as far as that is known at no cost.
        why_unsupported: why it cannot take these arguments, which are those of `run`.
        why_unprepared: prepares what the first use needs, such as a native library; why that
            failed. Called last, so that nothing is built for arguments that are not supported.

    Each returns None where nothing speaks against the backend.
    """

    name: str
    run: Callable[..., Any]
    description: str
    why_unavailable: Callable[[], str | None] = _no_reason
    why_unsupported: Callable[..., str | None] = _no_reason
    why_unprepared: Callable[[], str | None] = _no_reason


@dataclass(frozen=True)
class Operation:
    """An operation and its backends.

    Args:
        name: of the operation.
        backends: all of them, the reference first.
        preferred: names in the order in which `"auto"` tries them, or a function that makes the
            order from the arguments. The last one takes whatever the others do not.

    Example:
        >>> size = Operation("size", (Backend("reference", abs, "any number"),), ("reference",))
        >>> size.choose("auto", -3).run(-3)
        3
    """

    name: str
    backends: tuple[Backend, ...]
    preferred: Iterable[str] | Callable[..., Iterable[str]]
    _by_name: dict[str, Backend] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {backend.name: backend for backend in self.backends})

    def check_name(self, impl: str) -> None:
        """Raise unless `impl` is `"auto"` or one of the backends."""
        check_choice("impl", impl, ("auto", *self._by_name), f"these compute {self.name}")

    def why_not(self, name: str, *args: Any, **kwargs: Any) -> str | None:
        """Why a backend cannot run on these arguments here; None if it can."""
        backend = self._by_name[name]
        return (
            backend.why_unsupported(*args, **kwargs)
            or backend.why_unavailable()
            or backend.why_unprepared()
        )

    def choose(self, impl: str, *args: Any, **kwargs: Any) -> Backend:
        """The backend that `impl` stands for; the arguments are those of `run`.

        Raises:
            ValueError: a backend asked for by name cannot run, and why.
        """
        if impl == "auto":
            preferred = self.preferred
            name = ""
            for name in preferred(*args, **kwargs) if callable(preferred) else preferred:
                if self.why_not(name, *args, **kwargs) is None:
                    break
            return self._by_name[name]
        self.check_name(impl)
        reason = self.why_not(impl, *args, **kwargs)
        if reason is not None:
            raise ValueError(
                f"impl={impl!r} cannot run {self.name}: {reason}; impl='auto' takes what can"
            )
        return self._by_name[impl]

    def run(self, impl: str, *args: Any, **kwargs: Any) -> Any:
        """Compute by the backend that `impl` stands for."""
        return self.choose(impl, *args, **kwargs).run(*args, **kwargs)
