"""The examples in the docstrings do what they show."""

import doctest

import pytest
import torch

from polyscale.ops.hsa import entmax, hsa_attention, hsa_energy, hsa_matrix, reference
from polyscale.trees import SignalTree


@pytest.mark.parametrize(
    "documented",
    [hsa_attention, hsa_matrix, hsa_energy, entmax.normalise_entmax, reference.from_lists],
    ids=lambda documented: documented.__name__,
)
def test_the_example_runs(documented: object) -> None:
    names = {"torch": torch, "SignalTree": SignalTree, documented.__name__: documented}  # type: ignore[attr-defined]
    found = doctest.DocTestFinder(recurse=False).find(documented, globs=names)
    assert sum(len(test.examples) for test in found) > 0
    runner = doctest.DocTestRunner()
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
