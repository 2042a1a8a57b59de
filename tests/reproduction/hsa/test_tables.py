import json
import re

import pytest
import torch

from polyscale._files import write_json
from polyscale.training.compare import RUNS
from polyscale.training.config import RunConfig
from polyscale.training.run import run
from reproduction.hsa.predictions import PREDICTIONS_NAME, macro_f1, read_macro_f1
from reproduction.hsa.tables import write_tables
from tests.data.samples import make_folder
from tests.training.fake_results import make_result

SEEDS = (0, 1, 2)


def put(output, table, model, accuracies, task="imdb-words"):
    for seed, accuracy in zip(SEEDS, accuracies, strict=False):
        folder = output / RUNS / table / f"{model}-seed-{seed}"
        folder.mkdir(parents=True)
        result = make_result(
            model,
            seed,
            accuracy,
            task=task,
            levels=1,
            level_weights_curve=[],
            model_config={"model_type": "hte"},
        )
        write_json(folder / "result.json", result.as_dict())
    return output


def tables(output):
    write_tables(output, command="polyscale reproduce hsa")
    return (output / "RESULTS.md").read_text(encoding="utf-8")


def test_the_paper_s_figures_stand_beside_ours(tmp_path):
    put(tmp_path, "imdb-word2vec", "fsa", (0.70, 0.71, 0.72))
    put(tmp_path, "imdb-word2vec", "hsa", (0.80, 0.81, 0.82))
    text = tables(tmp_path)
    row = next(line for line in text.splitlines() if line.startswith("| imdb-words | word2vec"))
    for figure in ("900 / 500", "71.0 ± 1.0 %", "81.0 ± 1.0 %", "+10.0 points", "67.39", "74.69"):
        assert figure in row
    assert "+7.3" in row
    assert "Elec" in text
    record = json.loads((tmp_path / "results.json").read_text())
    assert len(record["runs"]) == 6
    assert (tmp_path / "tables" / "imdb-word2vec" / "comparison.json").is_file()


def test_the_way_there_is_told_step_by_step(tmp_path):
    put(tmp_path, "imdb-word2vec", "fsa", (0.70, 0.72))
    assert "On the way" not in tables(tmp_path)
    put(tmp_path, "imdb-word2vec", "hsa", (0.80, 0.81))
    text = tables(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())["runs"]
    point = results[0]["validation_curve"][-1]
    expected = [
        sum(r["validation_curve"][-1]["accuracy"] for r in results if r["model"] == model) / 2
        for model in ("fsa", "hsa")
    ]
    lines = text[text.index("## On the way") :].splitlines()
    assert lines[2].endswith(f"| {point['step']} |")
    assert [line.split(" | ")[-1] for line in lines[4:6]] == [f"{100 * e:.1f} |" for e in expected]


def test_tables_come_before_all_runs_are_done(tmp_path):
    assert "0 runs" in tables(tmp_path)
    put(tmp_path, "imdb-word2vec", "fsa", (0.70,))
    assert "1 runs" in tables(tmp_path)
    put(tmp_path, "agnews-minilm", "hsa", (0.80,), task="agnews-words")
    assert "| agnews-words" not in tables(tmp_path), "its baseline is still to come"


@pytest.mark.parametrize(
    ("random", "verdict"),
    [
        ((0.60, 0.62, 0.61), "Semantic trees are better than random ones"),
        ((0.79, 0.82, 0.815), "Random trees of the same shape are as good as semantic ones"),
        ((0.90, 0.92, 0.91), "Random trees of the same shape are better"),
        ((0.60, 0.61, 0.62), r"Every seed differs by \+20\.0 points"),
        ((0.60,), "With one seed nothing can be said"),
    ],
)
def test_the_question_of_the_tree_gets_the_answer_that_the_figures_give(tmp_path, random, verdict):
    put(tmp_path, "imdb-word2vec", "fsa", (0.70, 0.71, 0.72))
    put(tmp_path, "imdb-word2vec", "hsa", (0.80, 0.81, 0.82))
    put(tmp_path, "imdb-word2vec", "hsa-random", random)
    assert re.search(verdict, tables(tmp_path))


def test_macro_f1_counts_every_class_alike():
    predictions, labels = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 0, 1, 1, 2])
    # F1: 0.8 for class 0, 2/3 for class 1, 1 for class 2; class 3 does not occur.
    assert macro_f1(predictions, labels, 4) == pytest.approx((0.8 + 2 / 3 + 1) / 3)
    assert macro_f1(labels, labels, 4) == 1
    with pytest.raises(ValueError, match="predictions and labels must have one class"):
        macro_f1(predictions, labels[:2], 4)


def test_records_get_their_macro_f1_from_the_answers_of_the_kept_model(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    data = make_folder(tmp_path / "data", monkeypatch)
    config = RunConfig.from_dict(
        {
            "task": "coco18",
            "model": "fsa",
            "task_options": {"embedding": "learned", "fields": "text"},
            "model_options": {"hidden_size": 12, "num_attention_heads": 3},
            "training": {"steps": 4, "batch_size": 8, "warmup_steps": 1, "evaluate_every": 2},
        }
    )
    output = tmp_path / "output"
    folder = output / RUNS / "coco18" / "fsa-seed-0"
    result = run(config, folder, data_dir=data, progress=False)
    write_tables(output, command="x", data_dir=data)
    record = json.loads((folder / PREDICTIONS_NAME).read_text())
    right = sum(a == b for a, b in zip(record["predictions"], record["labels"], strict=True))
    assert right / len(record["labels"]) == pytest.approx(result.test["accuracy"])
    expected = macro_f1(torch.tensor(record["predictions"]), torch.tensor(record["labels"]), 4)
    text = (output / "RESULTS.md").read_text()
    assert f"| {100 * expected:.1f}% |" in text
    # Once written, neither the model nor the data are needed.
    (folder / "model.safetensors").unlink()
    assert read_macro_f1(folder, None, {}) == pytest.approx(expected)
    (folder / PREDICTIONS_NAME).write_text("{}")
    with pytest.raises(ValueError, match=f"{PREDICTIONS_NAME} must hold predictions"):
        read_macro_f1(folder, None, {})
    (folder / PREDICTIONS_NAME).unlink()
    assert read_macro_f1(folder, None, {}) is None
