from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    BertForMaskedLM,
    BertModel,
    CLIPConfig,
    CLIPModel,
    PreTrainedModel,
)

from polyscale._injection_note import NOTE
from polyscale.inject import inject_hsa, injected_settings, load_injected, restore, save_injected
from polyscale.inject.command import run_inject
from polyscale.inject.storage import FILE
from polyscale.trees import SignalTree
from tests.inject.models import bert, llama, logits, text


def assert_same(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """The same weights, bit for bit, and the same logits but for how memory is aligned."""
    weights = other.state_dict()
    assert all(torch.equal(part, weights[name]) for name, part in one.state_dict().items())
    found, expected = (logits(model, input_ids=text()) for model in (one, other))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


def test_a_saved_model_loads_with_its_injection(tmp_path: Path) -> None:
    model = inject_hsa(bert(), layers=[0], hierarchy=(2, 3), tie="blocks", sinks=(0,))
    inject_hsa(model, layers=[2], hierarchy="sentences", sentence_ends=(7, 8), sink_ids=(9,))
    save_injected(model, tmp_path)
    again = load_injected(tmp_path)
    assert isinstance(again, BertForMaskedLM)
    assert injected_settings(again) == injected_settings(model)
    assert_same(again, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["config.json", "model.safetensors", FILE]
    )


def test_saved_weights_follow_the_umask(tmp_path: Path) -> None:
    save_injected(inject_hsa(bert(), hierarchy=(2, 2)), tmp_path)
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes == {(tmp_path / "new").stat().st_mode}


def test_the_folder_loads_without_polyscale_as_the_model_it_was(tmp_path: Path) -> None:
    model = inject_hsa(bert(), hierarchy=(2, 2))
    save_injected(model, tmp_path)
    with pytest.warns(UserWarning, match="loaded without it"):
        plain = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert_same(plain, restore(model))


def test_given_trees_and_other_classes_and_decoders_are_saved_too(tmp_path: Path) -> None:
    model = inject_hsa(bert(), layers=[1], hierarchy=SignalTree.from_windows(21, (4,)))
    save_injected(model, tmp_path / "tree")
    again = load_injected(tmp_path / "tree")
    assert_same(again, model)
    base = load_injected(tmp_path / "tree", BertModel)
    assert list(injected_settings(base)) == [1]
    decoder = inject_hsa(llama(), hierarchy=(2, 2))
    save_injected(decoder, tmp_path / "llama")
    again = load_injected(tmp_path / "llama")
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": -1}
    assert torch.equal(again.generate(text(), **options), decoder.generate(text(), **options))


def test_a_model_without_injection_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no layer is injected"):
        save_injected(bert(), tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
    bert().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"has no {FILE}"):
        load_injected(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "does not say that its format"),
        ({"version": 3}, "version must be 1 to 2, got 3"),
        ({"groups": 3}, "takes layers and settings"),
        ({"groups": [{"layers": [0], "settings": {"tie": "blocks"}}]}, "takes layers and settings"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    save_injected(inject_hsa(bert()), tmp_path)
    data = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**data, **change}))
    with pytest.raises(ValueError, match=message):
        load_injected(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        load_injected(tmp_path)


def test_a_tree_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    SignalTree.from_windows(21).save(tmp_path / "tree_0.json")
    folder = tmp_path / "model"
    save_injected(inject_hsa(bert()), folder)
    data = json.loads((folder / FILE).read_text())
    data["groups"][0]["settings"]["hierarchy"] = "tree_/../../tree_0.json"
    (folder / FILE).write_text(json.dumps(data))
    with pytest.raises(FileNotFoundError, match=r"model.tree_0.json"):
        load_injected(folder)


def lost(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(one.message) for one in caught if "loaded without it" in str(one.message)]


@pytest.mark.parametrize("save", [PreTrainedModel.save_pretrained, save_injected])
def test_loading_without_the_injection_warns(tmp_path: Path, save: Any) -> None:
    save(inject_hsa(bert(), layers=[0, 2], hierarchy=(2, 2)), tmp_path / "injected")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plain = AutoModel.from_pretrained(tmp_path / "injected")
        assert "or inject it again" in lost(caught)[0]
        # The model it is now has no injection, and says so when it is saved in its turn.
        plain.save_pretrained(tmp_path / "plain")
        BertModel.from_pretrained(tmp_path / "plain")
        load_injected(tmp_path / "injected")
        assert len(lost(caught)) == 1


def test_an_injection_inside_of_another_model_warns_too(tmp_path: Path) -> None:
    text_config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision_config = {**text_config, "image_size": 8, "patch_size": 4, "intermediate_size": 8}
    config = CLIPConfig(text_config=text_config, vision_config=vision_config)
    model = CLIPModel(config)
    inject_hsa(model.vision_model, hierarchy=(2,))
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="loaded without it"):
        CLIPModel.from_pretrained(tmp_path)


def test_a_restored_model_is_saved_without_a_note(tmp_path: Path) -> None:
    model = inject_hsa(bert(), hierarchy=(2, 2))
    restore(model, layers=[0])
    assert [group["layers"] for group in getattr(model.config, NOTE)] == [[1, 2]]
    restore(model).save_pretrained(tmp_path)
    assert NOTE not in json.loads((tmp_path / "config.json").read_text())


def test_a_folder_that_any_other_way_of_saving_made_loads_with_its_injection(
    tmp_path: Path,
) -> None:
    model = inject_hsa(bert(), layers=[0], hierarchy=(2, 3), tie="blocks", sinks=(0,))
    inject_hsa(model, layers=[2], hierarchy="sentences", sentence_ends=(7, 8), sink_ids=(9,))
    model.save_pretrained(tmp_path / "plain")
    again = load_injected(tmp_path / "plain")
    assert injected_settings(again) == injected_settings(model)
    assert_same(again, model)
    inject_hsa(model, layers=[1], hierarchy=SignalTree.from_windows(21, (4,)))
    model.save_pretrained(tmp_path / "tree")
    with pytest.raises(ValueError, match="has a tree of its own"):
        load_injected(tmp_path / "tree")


def test_code_of_a_folder_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: Any) -> str:
        raise AssertionError("asked whether to run the code of a folder")

    monkeypatch.setattr("builtins.input", ask)
    save_injected(inject_hsa(bert()), tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "theirs.py").write_text(
        f"import pathlib\npathlib.Path({str(ran)!r}).touch()\n"
        "from transformers import BertConfig as Theirs, BertModel as Model\n"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "theirs.Theirs", "AutoModel": "theirs.Model"}
    config["auto_map"]["AutoTokenizer"] = ["theirs.Theirs", None]
    # Of a kind that transformers knows, and of one that the folder alone would.
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model_class in (None, AutoModel):
        load_injected(tmp_path, model_class)
    with pytest.raises(ValueError, match="no code of a folder is run"):
        load_injected(tmp_path, trust_remote_code=True)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "theirs"}))
    for model_class in (None, AutoModel):
        with pytest.raises(ValueError, match="custom code"):
            load_injected(tmp_path, model_class)
    # It has no tokenizer, and what it says to make one is not run.
    with pytest.raises(ValueError, match="tokenizer"):
        run_inject(str(tmp_path), _one_text(tmp_path), tmp_path / "out")
    assert not ran.exists()


def _one_text(folder: Path) -> Path:
    (folder / "texts.txt").write_text("a text\n")
    return folder / "texts.txt"
