"""Texts as tokens: which are chosen, and that no part sees another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reproduction.zero_shot.pretrained import pretrained_model
from reproduction.zero_shot.texts import TaskTexts, load_task_texts
from tests.reproduction.zero_shot.samples import small_preset

SIZE = small_preset().tasks[0]


def load(model_folder: Path, data_folder: Path, seed: int = 0, **changes: int) -> TaskTexts:
    tokenizer = pretrained_model(str(model_folder)).tokenizer()
    return load_task_texts(replace(SIZE, **changes), tokenizer, data_folder, seed)


def test_no_text_is_in_two_parts(model_folder: Path, data_folder: Path) -> None:
    found = load(model_folder, data_folder)
    parts = [found.data.train, found.data.validation, found.data.test, found.final]
    texts = [[part.text(at) for at in range(len(part))] for part in parts]
    assert [len(part) for part in texts] == [320, 16, 24, 30]
    together = [text for part in texts for text in part]
    assert len(set(together)) == len(together)
    assert found.data.source["used"] == {"train": 320, "validation": 16, "test": 24, "final": 30}


def test_the_seed_chooses_the_texts(model_folder: Path, data_folder: Path) -> None:
    first, same, other = (load(model_folder, data_folder, seed).grid_texts for seed in (0, 0, 1))
    assert first == same
    assert first != other


def test_long_texts_are_cut_and_keep_their_last_token(
    model_folder: Path, data_folder: Path
) -> None:
    found = load(model_folder, data_folder, length=7)
    assert set(found.data.test.lengths.tolist()) == {7}
    assert found.data.test[0]["input_ids"][[0, -1]].tolist() == [2, 3]  # [CLS] and [SEP]


def test_labels_stay_with_their_texts(model_folder: Path, data_folder: Path) -> None:
    found = load(model_folder, data_folder)
    for at, text in enumerate(found.grid_texts):
        good = any(word in text.lower() for word in ("grand", "fine", "warm", "bright"))
        assert int(found.data.test[at]["labels"]) == int(good)


def test_more_texts_than_there_are_is_refused(model_folder: Path, data_folder: Path) -> None:
    with pytest.raises(ValueError, match="at most the 60 test texts that there are, got 1030"):
        load(model_folder, data_folder, grid=1_000)


def test_the_planner_sees_training_texts_that_are_long_enough(
    model_folder: Path, data_folder: Path
) -> None:
    every = load(model_folder, data_folder).plan_texts
    some = load(model_folder, data_folder, plan_words=12).plan_texts
    assert len(every) == 320
    assert some == [text for text in every if len(text.split()) >= 12]
    assert 0 < len(some) < 320
    with pytest.raises(ValueError, match=r"plan_words must be at most .* got 99"):
        load(model_folder, data_folder, plan_words=99)
