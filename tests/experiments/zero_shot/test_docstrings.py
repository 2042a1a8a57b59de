"""The examples in the docstrings do what they show."""

from __future__ import annotations

import doctest
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

from polyscale.experiments import zero_shot

NAME = zero_shot.__name__
MODULES = [NAME, *(f"{NAME}.{module.name}" for module in iter_modules(zero_shot.__path__))]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str) -> None:
    assert doctest.testmod(import_module(name), extraglobs={"torch": torch}).failed == 0


@pytest.mark.parametrize("name", zero_shot.__all__)
def test_everything_public_has_an_example(name: str) -> None:
    assert ">>>" in getattr(zero_shot, name).__doc__
