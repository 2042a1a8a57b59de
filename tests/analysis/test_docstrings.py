"""The examples in the docstrings do what they show."""

import doctest
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

import polyscale.analysis as analysis

MODULES = ["polyscale.analysis"]
MODULES += [f"polyscale.analysis.{module.name}" for module in iter_modules(analysis.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name):
    torch.manual_seed(0)
    assert doctest.testmod(import_module(name), extraglobs={"torch": torch}).failed == 0


@pytest.mark.parametrize("name", [name for name in analysis.__all__ if name != "Analysis"])
def test_everything_public_has_an_example(name):
    assert ">>>" in getattr(analysis, name).__doc__
