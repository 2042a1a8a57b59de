"""The examples of the package do what they show (those of its modules: tests/test_package.py)."""

import doctest

import pytest

import polyscale.theory as theory


def test_the_examples_of_the_package_run():
    assert doctest.testmod(theory).failed == 0


@pytest.mark.parametrize("name", theory.__all__)
def test_everything_public_has_an_example(name):
    assert ">>>" in getattr(theory, name).__doc__
