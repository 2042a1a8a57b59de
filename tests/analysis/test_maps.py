"""Plain numbers and small matrices."""

import json

import pytest
import torch

from polyscale.analysis.maps import MAP_BUDGET, map_cells, map_entry, pooled
from polyscale.analysis.values import as_json
from tests.theory.helpers import draw


def test_numbers_keep_six_digits_and_what_json_cannot_hold_is_none():
    given = {
        "a": torch.tensor([1 / 3, torch.inf, torch.nan], dtype=torch.float64),
        1: (True, "x", 7),
    }
    found = as_json(given)
    assert found == {"a": [0.333333, None, None], "1": [True, "x", 7]}
    json.dumps(found, allow_nan=False)
    with pytest.raises(TypeError, match="numbers, text, lists and dicts"):
        as_json({"a": object()})


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e4, 1e9])
def test_maps_keep_four_digits(scale):
    matrix = scale * draw(20, 20)
    for row, shown in zip(matrix.tolist(), map_entry(matrix, 128), strict=True):
        assert shown == [float(f"{value:.4g}") for value in row]


def test_zero_stays_zero():
    assert map_entry(torch.zeros(2, 2), 128) == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("size", "cells"), [(5, 8), (8, 8), (9, 8), (130, 128), (1000, 64)])
def test_pooling_keeps_the_mean_of_whole_cells(size, cells):
    matrix = draw(size, size)
    small = pooled(matrix, cells)
    assert len(small) == min(size, cells)
    if size <= cells:
        assert torch.equal(small, matrix)
    if size % cells == 0:
        step = size // cells
        blocks = matrix.unflatten(0, (cells, step)).unflatten(2, (cells, step)).mean((1, 3))
        torch.testing.assert_close(small, blocks)


def test_maps_share_a_budget():
    assert map_cells([20] * 100) == 128
    for number in (1, 50, 200, 500):
        cells = map_cells([1024] * number)
        assert number * cells**2 <= MAP_BUDGET
    assert map_cells([1024] * 10_000) == 0


def test_what_is_not_finite_is_not_shown():
    with pytest.raises(ValueError, match="must be finite"):
        map_entry(torch.full((2, 2), torch.nan), 4)
