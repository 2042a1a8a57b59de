"""The examples of the package do what they show (those of its modules: tests/test_package.py)."""

import doctest

import pytest

import polyscale.analysis as analysis


def test_the_examples_of_the_package_run():
    assert doctest.testmod(analysis).failed == 0


@pytest.mark.parametrize("name", [name for name in analysis.__all__ if name != "Analysis"])
def test_everything_public_has_an_example(name):
    assert ">>>" in getattr(analysis, name).__doc__
