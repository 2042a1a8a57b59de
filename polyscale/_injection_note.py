"""A note in the configuration of an injected model, and a warning where it is loaded without.

`save_pretrained` of transformers, and what is built on it, writes weights and configuration and
knows nothing of an injection. The note goes with the configuration.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

NOTE = "polyscale_injection"  # attribute of a configuration, key in config.json

_injecting: ContextVar[bool] = ContextVar("_injecting", default=False)


@contextmanager
def injecting() -> Iterator[None]:
    """Within, models are loaded in order to be injected: no warning."""
    token = _injecting.set(True)
    try:
        yield
    finally:
        _injecting.reset(token)


def warn_of_lost_injections(modeling_utils: ModuleType) -> None:
    """Make `from_pretrained` of transformers warn of models that were saved with an injection."""
    base = modeling_utils.PreTrainedModel
    plain = base.from_pretrained.__func__

    @functools.wraps(plain)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        loaded = plain(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if not _injecting.get():
            _warn(model)
        return loaded

    base.from_pretrained = classmethod(from_pretrained)


def _warn(model: Any) -> None:
    config = getattr(model, "config", None)
    for one in (config, *vars(config or object).values()):
        if getattr(type(one), "model_type", None) is None or not getattr(one, NOTE, None):
            continue
        delattr(one, NOTE)  # it says what this model is, which has no injection
        warnings.warn(
            f"{type(model).__name__} was saved with polyscale's attention injected (see "
            f'"{NOTE}" in its config.json), and is loaded without it: it attends by softmax. Load '
            "the folder with polyscale.load_injected, or inject it again",
            stacklevel=3,
        )
