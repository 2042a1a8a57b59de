"""Injections as data, and the sets of layers and sizes that are tried."""

from __future__ import annotations

import json

import pytest

from polyscale.inject import attention_flops
from reproduction.zero_shot.injections import Injection, layer_sets
from reproduction.zero_shot.presets import (
    CHEAP,
    PRESETS,
    TREES,
    grid_injections,
    kinds,
    reference_layers,
)


def test_six_layers_give_eleven_sets() -> None:
    assert layer_sets(6) == {
        "alternate 1": (0, 2, 4),
        "consecutive 1": (0, 1, 2),
        "alternate 2": (1, 3, 5),
        "consecutive 2": (1, 2, 3),
        "alternate 3": (2, 4),
        "consecutive 3": (2, 3),
        "alternate 4": (3, 5),
        "consecutive 4": (3, 4),
        "alternate 5": (4,),
        "alternate 6": (5,),
        "all": (0, 1, 2, 3, 4, 5),
    }


@pytest.mark.parametrize("count", [1, 2, 3, 12])
def test_no_set_of_layers_is_there_twice_or_out_of_range(count: int) -> None:
    sets = list(layer_sets(count).values())
    assert len(set(sets)) == len(sets)
    assert all(0 <= layer < count for layers in sets for layer in layers)
    assert tuple(range(count)) in sets
    assert reference_layers(count) in sets


def test_the_grid_has_every_tree_tie_and_set_once() -> None:
    grid = grid_injections(TREES, 6)
    assert len(grid) == 6 * 2 * 11 + 6 * 2
    assert len({one.name for one in grid}) == len(grid)
    assert {one.kind for one in grid} == {one.kind for one in kinds(TREES)}


def test_an_injection_survives_json() -> None:
    one = Injection((1, 3), "sentences", "columns", (0,), (7, 9), 2)
    assert Injection.from_dict(json.loads(json.dumps(one.as_dict()))) == one


def test_names_tell_sinks_apart() -> None:
    names = {
        Injection((0,), (4,), "columns", sinks, ids, opened).kind
        for sinks in ((), (0, -1), (0,))
        for ids in ((), (5,))
        for opened in (0, 1)
    }
    assert len(names) == 12


def test_savings_are_those_of_the_counted_operations() -> None:
    before = attention_flops(128, 12, 32).total
    after = attention_flops(128, 12, 32, (2, 4, 8, 16), "blocks", sinks=2).total
    one = Injection((3,), (2, 4, 8, 16), "blocks")
    assert one.saved_at(128, 12, 32) == 1 - after / before
    assert Injection((3,), "sentences", "blocks").saved_at(128, 12, 32) is None
    assert Injection((3,), (8,), "blocks", sink_ids=(4,)).saved_at(128, 12, 32) is None


def test_cheap_trees_save_what_the_aim_for_512_tokens_asks() -> None:
    for tree in CHEAP:
        saved = Injection((0,), tree, "blocks").saved_at(512, 12, 32)
        assert saved is not None
        assert saved > 0.98


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_json_data(name: str) -> None:
    data = PRESETS[name].as_dict()
    assert json.loads(json.dumps(data)) == data
