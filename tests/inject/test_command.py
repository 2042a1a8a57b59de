from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from polyscale.inject import Plan, injected_layers, load_injected
from polyscale.inject.command import parse_hierarchies, read_texts, run_inject
from tests.inject.models import bert

WORDS = ["[PAD]", "[UNK]", "the", "cat", "sat", "on", "a", "mat", "and", "then", "slept", "."]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer of twelve words."""
    plain = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[UNK]", pad_token="[PAD]"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    bert().float().save_pretrained(tmp_path / "model")
    return tmp_path


def test_the_command_plans_injects_and_saves_a_model_that_loads_again(folder: Path) -> None:
    texts = folder / "texts.txt"
    texts.write_text("the cat sat on a mat . " * 5 + "\n\n" + "then the cat slept . " * 7 + "\n")
    said: list[str] = []
    plan = run_inject(
        str(folder / "model"),
        texts,
        folder / "out",
        budget=0.7,
        hierarchies=parse_hierarchies(["4,4", "sentences"]),
        say=said.append,
    )
    assert plan.flops <= 0.7
    assert said
    model = load_injected(folder / "out")
    assert injected_layers(model) == list(plan.layers)
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    with torch.no_grad():
        found = model(**tokenizer(["the cat slept ."], return_tensors="pt")).logits
    assert found.isfinite().all()
    kept = (folder / "out" / "polyscale_plan.json").read_text()
    assert Plan.from_json(kept) == plan
    assert json.loads(kept)["model"] == "BertForMaskedLM"


def test_text_files_are_read_line_by_line_and_missing_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    with pytest.raises(ValueError, match="is not a file"):
        read_texts(path, 3)
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="has no text"):
        read_texts(path, 3)
    path.write_text("one\n\n two \nthree\nfour\n")
    assert read_texts(path, 3) == ["one", "two", "three"]


def test_hierarchies_are_read_as_written_on_a_command_line() -> None:
    assert parse_hierarchies(["2,4,8", "sentences", "16"]) == [(2, 4, 8), "sentences", (16,)]
    with pytest.raises(ValueError, match=r"hierarchy must .*got 'words'"):
        parse_hierarchies(["words"])
