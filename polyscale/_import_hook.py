"""Doing something once a module is imported, now or later, without importing it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def once_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module: at once if it is imported already, else right after it is.

    >>> once_imported("sys", lambda module: print(module.__name__))
    sys
    """
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, act))


class _Waiting(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader, run = spec.loader, spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.act(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
