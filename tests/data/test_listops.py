import hashlib
import os
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import polyscale
from polyscale.data import listops
from polyscale.data.listops import (
    DEMO,
    LRA,
    NUM_CLASSES,
    OPERATORS,
    PAD_ID,
    PRESETS,
    T512,
    VOCABULARY,
    ListOpsConfig,
    ListOpsDataset,
    collate,
    decode,
    encode,
    evaluate,
    make_listops,
    nesting_depth,
)

SMALL = ListOpsConfig(
    min_length=4, max_length=40, max_depth=5, max_args=5, train=900, validation=60, test=40
)
FINGERPRINT = f"""
from hashlib import sha256
from polyscale.data.listops import ListOpsConfig, make_listops
data = make_listops({SMALL!r})
for split in (data.train, data.validation, data.test):
    print(sha256(bytes(split.tokens.tolist() + split.labels.tolist())).hexdigest())
"""


@pytest.fixture(scope="module")
def small():
    return make_listops(SMALL)


@pytest.fixture(scope="module")
def lra():
    return make_listops(replace(LRA, train=3_000, validation=1, test=1)).train


def splits(data):
    return (data.train, data.validation, data.test)


def texts(split):
    return [split.text(index) for index in range(len(split))]


def value_by_rewriting(text):
    """Replace the innermost brackets by their value until one digit is left."""
    while "[" in text:
        start = text.rindex("[")  # the last opening bracket has no bracket inside
        stop = text.index("]", start)
        operator, *rest = text[start + 1 : stop].split()
        numbers = [int(number) for number in rest]
        value = {
            "MIN": lambda v: sorted(v)[0],
            "MAX": lambda v: sorted(v)[-1],
            "MED": lambda v: int(statistics.median(v)),
            "SM": lambda v: int(str(sum(v))[-1]),
        }[operator](numbers)
        text = f"{text[:start]}{value}{text[stop + 1 :]}"
    return int(text)


def test_labels_agree_with_an_evaluator_that_rewrites_text(small):
    for split in splits(small):
        for index, text in enumerate(texts(split)):
            assert split[index]["labels"].item() == value_by_rewriting(text), text


def test_the_public_evaluator_agrees_with_one_that_rewrites_text(small):
    for text in texts(small.train)[:300]:
        assert evaluate(text) == evaluate(encode(text)) == value_by_rewriting(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 1 2 ]", 1),
        ("[MED 9 0 4 7 ]", 5),
        ("[MED 8 1 3 ]", 3),
        ("[SM 8 7 6 ]", 1),
        ("[SM [MAX 1 5 ] [SM 5 5 ] ]", 5),
    ],
)
def test_known_values(text, value):
    assert evaluate(text) == value


def test_padding_does_not_change_a_value():
    assert evaluate([*encode("[SM 8 7 ]"), PAD_ID, PAD_ID]) == 5


@pytest.mark.parametrize("text", ["", "[MAX 1 2", "1 2", "[MAX ]", "]", "[MAX 1 ] 2"])
def test_an_incomplete_expression_is_refused(text):
    with pytest.raises(ValueError, match="expression"):
        evaluate(text)


def test_the_vocabulary_is_fixed():
    assert " ".join(VOCABULARY) == "<pad> 0 1 2 3 4 5 6 7 8 9 [MIN [MAX [MED [SM ]"
    assert PAD_ID == 0


def test_text_and_ids_make_a_round_trip(small):
    for split in splits(small):
        for index, text in enumerate(texts(split)):
            assert decode(encode(text)) == text
            assert encode(text) == split[index]["input_ids"].tolist()


def test_unknown_tokens_and_ids_are_refused_by_name():
    with pytest.raises(ValueError, match=r"\[FIRST"):
        encode("[FIRST 1 2 ]")
    with pytest.raises(ValueError, match="16"):
        decode([16])


def test_no_expression_occurs_twice_within_or_across_splits(small):
    everything = [text for split in splits(small) for text in texts(split)]
    assert len(everything) == SMALL.total
    assert len(set(everything)) == len(everything)


def test_splits_have_the_sizes_asked_for(small):
    assert [len(split) for split in splits(small)] == [900, 60, 40]


def test_every_expression_keeps_to_the_limits(small):
    for split in splits(small):
        for text in texts(split):
            tokens = text.split()
            depth = deepest = 0
            counts = []
            for token in tokens:
                if token == "]":
                    assert 2 <= counts.pop() <= SMALL.max_args
                    depth -= 1
                else:
                    if counts:
                        counts[-1] += 1
                    if token.startswith("["):
                        depth += 1
                        counts.append(0)
                # A digit directly under an operator is one deeper than it.
                deepest = max(deepest, depth + 1)
            assert SMALL.min_length <= len(tokens) <= SMALL.max_length
            assert deepest <= SMALL.max_depth
            assert depth == 0


def test_the_deepest_and_widest_trees_allowed_do_occur(small):
    widths = [len(text.split()) - 2 for text in texts(small.train) if text.count("[") == 1]
    assert max(widths) == SMALL.max_args
    nesting = []
    for text in texts(small.train):
        depth = peak = 0
        for token in text.split():
            depth += token.startswith("[") - (token == "]")
            peak = max(peak, depth)
        nesting.append(peak)
    assert max(nesting) == SMALL.max_depth - 1


def test_splits_share_one_distribution_of_lengths():
    # The space is nearly used up, so the short expressions that come first must be spread out.
    config = ListOpsConfig(4, 6, 2, 4, ("MIN",), train=5_000, validation=500, test=500)
    means = [split.lengths.float().mean().item() for split in splits(make_listops(config))]
    assert max(means) - min(means) < 0.1


def test_the_same_seed_gives_the_same_data_in_processes_with_other_hash_seeds(small):
    here = [
        hashlib.sha256(bytes(split.tokens.tolist() + split.labels.tolist())).hexdigest()
        for split in splits(small)
    ]
    for hash_seed in ("1", "2"):
        other = subprocess.run(
            [sys.executable, "-c", FINGERPRINT],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(polyscale.__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        )
        assert other.stdout.split() == here


def test_the_global_random_state_is_neither_used_nor_changed():
    random.seed(3)
    before = random.getstate()
    first = make_listops(SMALL).test.tokens
    assert random.getstate() == before
    random.seed(4)
    assert torch.equal(make_listops(SMALL).test.tokens, first)


def test_another_seed_gives_other_data(small):
    other = make_listops(replace(SMALL, seed=1))
    assert texts(other.test) != texts(small.test)


def test_the_order_of_the_operators_does_not_matter():
    config = replace(SMALL, operators=("SM", "MIN"))
    data = make_listops(config)
    assert texts(make_listops(replace(SMALL, operators=("MIN", "SM"))).train) == texts(data.train)
    assert not any("MAX" in text or "MED" in text for text in texts(data.train))


def test_the_lra_preset_has_the_published_class_balance(lra):
    rates = torch.bincount(lra.labels, minlength=NUM_CLASSES) / len(lra)
    assert 0.15 < rates[0] < 0.19
    assert 0.15 < rates[9] < 0.19
    assert rates[1:9].max() < 0.12


def naive_length(generator, depth):
    """LRA's published rule, node by node: an operator with probability 0.25, otherwise a digit."""
    if depth < 10 and generator.random() <= 0.25:
        arguments = generator.randint(2, 10)
        return 2 + sum(naive_length(generator, depth + 1) for _ in range(arguments))
    return 1


def test_the_lra_preset_has_the_lengths_of_the_published_rule(lra):
    generator = random.Random(11)
    expected = []
    while len(expected) < 3_000:
        length = naive_length(generator, 1)
        if 500 < length < 2_000:
            expected.append(length)
    lengths = lra.lengths.double()
    assert lengths.min() > 500
    assert lengths.max() < 2_000
    # Two means of 3,000 with a deviation near 390: their difference has a deviation of 10.
    assert abs(lengths.mean().item() - statistics.mean(expected)) < 40
    assert 1_000 < lengths.mean() < 1_070


def test_presets_are_the_published_settings():
    assert (LRA.train, LRA.validation, LRA.test) == (96_000, 2_000, 2_000)
    assert (LRA.max_depth, LRA.max_args, LRA.operators) == (10, 10, OPERATORS)
    assert T512.max_length == 512
    assert PRESETS == {"lra": LRA, "t512": T512, "demo": DEMO}


def test_a_split_is_one_byte_for_each_token(small):
    assert small.train.tokens.dtype == torch.uint8
    assert len(small.train.tokens) == small.train.lengths.sum()


def test_a_sample_has_long_ids_and_a_scalar_label(small):
    sample = small.train[-1]
    assert set(sample) == {"input_ids", "labels"}
    assert sample["input_ids"].dtype == sample["labels"].dtype == torch.long
    assert sample["labels"].shape == ()
    assert torch.equal(sample["input_ids"], small.train[len(small.train) - 1]["input_ids"])
    with pytest.raises(IndexError, match="900"):
        small.train[900]


def test_the_collator_pads_to_the_longest_and_masks_the_padding():
    split = ListOpsDataset.from_expressions(["[MAX 2 9 ]", "[MIN 4 7 1 3 ]"])
    batch = collate([split[0], split[1]])
    assert batch["input_ids"].tolist() == [[12, 3, 10, 15, 0, 0], [11, 5, 8, 2, 4, 15]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6]
    assert batch["labels"].tolist() == [9, 1]
    with pytest.raises(ValueError, match="batch"):
        collate([])


def test_the_depth_of_an_expression_is_how_many_operators_are_open_at_once(small, lra):
    for split in (small.train, small.test):
        assert split.groups["depth"].dtype == torch.int64
        for text, depth in zip(texts(split), split.groups["depth"].tolist(), strict=True):
            opened, deepest = 0, 0
            for letter in text:
                opened += (letter == "[") - (letter == "]")
                deepest = max(deepest, opened)
            assert depth == deepest, text
    assert lra.groups["depth"].max() == LRA.max_depth - 1


def test_depths_are_the_same_in_chunks_of_any_size(small, monkeypatch):
    expected = small.train.groups["depth"]
    monkeypatch.setattr(listops, "_CHUNK", 7)
    assert torch.equal(nesting_depth(small.train.tokens, small.train.offsets), expected)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"max_length": 3, "min_length": 1}, "max_length"),
        ({"min_length": 50}, "max_length"),
        ({"max_depth": 1}, "max_depth"),
        ({"max_args": 1}, "max_args"),
        ({"operators": ()}, "operators"),
        ({"operators": ("MIN", "FIRST")}, "operators"),
        ({"operators": "MIN"}, "operators"),
        ({"operator_probability": 0.0}, "operator_probability"),
        ({"train": 0}, "train"),
        ({"seed": -1}, "seed"),
        ({"max_depth": 2, "min_length": 20}, "min_length must be at most 7, .* got 20"),
    ],
)
def test_impossible_parameters_are_refused_by_name(changes, name):
    with pytest.raises(ValueError, match=name):
        replace(SMALL, **changes)


def test_a_size_that_is_no_whole_number_is_refused():
    with pytest.raises(TypeError, match="train"):
        replace(SMALL, train=10.0)


def test_more_expressions_than_exist_are_refused_with_the_number_found():
    # MIN over two digits: exactly 100 expressions.
    config = ListOpsConfig(4, 4, 2, 2, ("MIN",), train=99, validation=1, test=1)
    with pytest.raises(ValueError, match="got 101: after 100"):
        make_listops(config)
    assert len(make_listops(replace(config, train=98)).train) == 98


def test_a_length_no_tree_reaches_is_refused():
    # Two arguments each: lengths are 4, 7, 10, ...
    config = ListOpsConfig(5, 6, 4, 2, train=1, validation=1, test=1)
    with pytest.raises(ValueError, match="max_depth=4 and max_args=2, got 5 and 6"):
        make_listops(config)


def test_a_progress_bar_is_shown_on_request_only_and_changes_nothing(small, capsys):
    shown = make_listops(SMALL, progress=True)
    assert "100%" in capsys.readouterr().out
    assert torch.equal(shown.train.tokens, small.train.tokens)
    make_listops(SMALL)
    assert capsys.readouterr().out == ""
