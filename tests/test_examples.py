"""The saved model of examples/documents answers, and the search finds sections."""

import importlib.util
import json
from pathlib import Path

import pytest

import polyscale as ps
from reproduction.documents.articles import Article
from tests.reproduction.zero_shot.samples import write_model

FOLDER = Path(__file__).parents[1] / "examples" / "documents"
PAGE = "# Vega\n\nVega is a star.\n\n## Observation\n\nIts light is blue. It is near the sun."


def load(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_saved_model_answers_with_reasons():
    model = ps.HTEForClassification.from_pretrained(FOLDER / "model")
    (answer,) = model.predict(PAGE)
    assert answer["label"] in {"people", "places", "arts", "technology", "science", "society"}
    reasons = model.explain(PAGE, kinds=("sentence",)).top(2)
    assert all(text in PAGE for _, _, text in reasons)
    result = json.loads((FOLDER / "model" / "result.json").read_text())
    assert 0 < result["right"] < result["test"]


def test_a_question_leads_to_its_section(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "encoder")
    search = load("search")
    source = search.pretrained_model(str(folder))
    monkeypatch.setattr(search, "pretrained_model", lambda: source)
    texts = [
        "# One\n\nA film.\n\n## Warm\n\nGrand and warm.\n\n## Cold\n\nDull and cold.\n",
        "# Two\n\nA song.\n\n## Scene\n\nThe cast of a scene.\n",
    ]
    articles = [Article(text[2:5], text, None) for text in texts]
    monkeypatch.setattr(search, "read_articles", lambda *_: articles)
    with pytest.raises(SystemExit, match="run the command index first"):
        search.load(tmp_path / "index")
    assert not search.index(tmp_path, tmp_path / "index", 10, seconds=0)
    assert search.index(tmp_path, tmp_path / "index", 10)
    found = search.load(tmp_path / "index")
    assert [one["heading"] for one in found.sections] == ["Warm", "Cold", "Scene"]
    best = found("The cast of a scene.", 1)
    assert [(one["title"], one["heading"]) for one in best] == [("Two", "Scene")]
    assert len(found("warm", 10)) == 3
