"""What stands beside the package in a checkout of the repository, and is not installed with it."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def import_from_checkout(module: str) -> ModuleType:
    """Import a module of `benchmarks` or `reproduction`, or say what is needed.

    Raises:
        ImportError: polyscale is installed as a plain package.
    """
    root = Path(__file__).parents[1]
    package = module.partition(".")[0]
    if not (root / package / "__init__.py").is_file():
        raise ImportError(
            f"{package} is not part of the installed package; clone the repository, run "
            "`make setup` there and call .venv/bin/polyscale"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return import_module(module)
