from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from polyscale.inject import InjectionPlan, injected_layers, load_injected, search
from polyscale.inject import candidates as tried
from polyscale.inject.before_after import compare
from polyscale.inject.command import PLAN_FILE, read_texts, run_inject
from tests.inject.models import bert, llama

WORDS = ["[PAD]", "[UNK]", "the", "cat", "sat", "on", "a", "mat", "and", "then", "slept", "."]
TEXTS = "the cat sat on a mat . " * 18 + "\n\n" + "then the cat slept . " * 25 + "\n"
OPENED = {"block": 8, "key_block": 4, "near": 4, "heavy": 8, "sample": 4, "dense": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A text file, and the folders of an encoder and a decoder with twelve words."""
    plain = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[UNK]", pad_token="[PAD]"
    )
    for name, model in (("encoder", bert(vocab_size=12)), ("decoder", llama(vocab_size=12))):
        tokenizer.save_pretrained(tmp_path / name)
        model.float().save_pretrained(tmp_path / name)
    (tmp_path / "texts.txt").write_text(TEXTS)
    return tmp_path


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_the_command_plans_injects_saves_and_compares(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On texts this short nothing is faster; what is chosen here is chosen for its change alone.
    candidate = {"prompt": dict(OPENED)}
    if kind == "decoder":
        candidate["cache"] = {"dense": 0, "near": 8}
    monkeypatch.setattr(tried, "ENCODERS", {"opened": (candidate,)})
    monkeypatch.setattr(tried, "DECODERS", {"both": (candidate,)})
    monkeypatch.setattr(tried, "DENSE", 1)
    monkeypatch.setattr(tried, "DENSE_ENCODER", 1)
    monkeypatch.setattr(search, "PAYS", 0.0)
    said: list[str] = []
    plan, table = run_inject(
        str(folder / kind),
        folder / "texts.txt",
        folder / "out",
        tolerance=1e9,
        new_tokens=4,
        announce=said.append,
    )
    assert plan.pays
    assert table is not None
    assert said[-1] == "comparing the model before and after"
    model = load_injected(folder / "out")
    assert injected_layers(model) == list(plan.layers)
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    with torch.no_grad():
        found = model(**tokenizer(["the cat slept ."], return_tensors="pt")).logits
    assert found.isfinite().all()
    kept = (folder / "out" / PLAN_FILE).read_text()
    assert InjectionPlan.from_json(kept) == plan
    assert json.loads(kept)["model"] == type(model).__name__
    shown = str(table)
    if kind == "encoder":
        assert re.search(r"seconds of a text +[\d.e-]+ +[\d.e-]+\n", shown)
        assert re.search(r"of 'then the cat.*: cosine [01]\.\d{5}$", shown)
    else:
        for row in ("seconds to the first token", "tokens per second", r"cache \(MiB\)"):
            assert re.search(rf"{row} +[\d.e+-]+ +[\d.e+-]+\n", shown)
        # Three quarters of the longer text's 125 tokens are a prompt that both models continue.
        assert "after the first 93 tokens of 'then the cat" in shown
        assert re.search(r"before: '[a-z. ]+'\nafter:  '[a-z. ]+'$", shown)


def test_where_nothing_pays_nothing_is_written(folder: Path) -> None:
    plan, table = run_inject(str(folder / "decoder"), folder / "texts.txt", folder / "out")
    assert not plan.pays
    assert table is None
    assert not (folder / "out").exists()
    model = llama()
    with pytest.raises(ValueError, match="plan must propose an injection"):
        compare(model, None, "a", plan)


def test_an_output_that_is_a_file_is_refused_before_anything_is_planned(folder: Path) -> None:
    with pytest.raises(ValueError, match="output must be a folder, got a file"):
        run_inject(str(folder / "decoder"), folder / "texts.txt", folder / "texts.txt")


def test_text_files_are_read_line_by_line_and_missing_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    with pytest.raises(ValueError, match=r"plan must be a text file .* no file"):
        read_texts(path, 3)
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="has no text"):
        read_texts(path, 3)
    path.write_text("one\n\n two \nthree\nfour\n")
    assert read_texts(path, 3) == ["one", "two", "three"]
