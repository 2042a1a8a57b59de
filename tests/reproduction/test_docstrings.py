"""The examples in the docstrings of the studies give what they show."""

from __future__ import annotations

import doctest
from importlib import import_module
from pkgutil import walk_packages

import pytest
import torch

import reproduction

MODULES = [
    "reproduction",
    *(module.name for module in walk_packages(reproduction.__path__, "reproduction.")),
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str) -> None:
    assert doctest.testmod(import_module(name), extraglobs={"torch": torch}).failed == 0
