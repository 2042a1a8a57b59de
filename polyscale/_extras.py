"""One place that says which optional dependency a feature needs."""

from importlib import import_module
from types import ModuleType


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import `module`, or raise an ImportError that names the extra to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs {module}, which is not installed: pip install 'polyscale[{extra}]'"
        ) from error
