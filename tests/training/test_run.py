import functools
import json
import os

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from polyscale.data.tasks import load_task
from polyscale.models import HKTConfig, HKTForSequenceClassification
from polyscale.training import loop
from polyscale.training.result import read_result
from polyscale.training.run import evaluate_run, git_commit, load_data, majority_rate, run
from polyscale.training.settings import TrainingSettings
from tests.training.runs import SMALL


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "small"
    return run(SMALL.with_values({"training.snapshots": 2}), folder, progress=False), folder


def test_the_folder_holds_everything_about_the_run(finished):
    result, folder = finished
    assert read_result(folder / "result.json") == result
    names = {path.name for path in folder.iterdir() if path.name != ".lock"}
    assert names == {
        "config.yaml",
        "config.json",
        "log.jsonl",
        "model.safetensors",
        "result.json",
        "snapshots",
        "tensorboard",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sorted(path.name for path in (folder / "snapshots").iterdir()) == [
        "step-000000",
        "step-000006",
        "step-000012",
    ]
    assert result.data["task"] == "listops"
    assert result.test_accuracy == pytest.approx(100 * result.test["accuracy"])
    assert len(result.train_curve) == 12
    assert [point["step"] for point in result.validation_curve] == [4, 8, 12]
    assert [len(point["weights"][0][0]) for point in result.level_weights_curve] == [2, 2, 2]
    assert sum(part["count"] for part in result.accuracy_by["length"]) == 40
    assert result.git_commit == git_commit()


def test_files_of_a_run_follow_the_umask(finished):
    mask = os.umask(0)
    os.umask(mask)
    files = [path for path in finished[1].rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files if path.name != ".lock"} == {
        0o666 & ~mask
    }


def test_the_best_state_on_validation_is_kept_and_measured(finished):
    result, folder = finished
    best = max(result.validation_curve, key=lambda point: (point["accuracy"], -point["step"]))
    assert result.best_step == best["step"]
    assert evaluate_run(folder) == pytest.approx(result.test, abs=1e-6)
    assert evaluate_run(folder, split="validation") == pytest.approx(result.validation, abs=1e-6)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert model.config.levels == 2


def test_a_folder_that_holds_a_run_is_not_overwritten(finished, tmp_path):
    _, folder = finished
    config = SMALL.with_values({"training.snapshots": 2})
    before = (folder / "result.json").read_bytes()
    with pytest.raises(FileExistsError, match="holds a finished run"):
        run(config, folder, progress=False)
    with pytest.raises(FileExistsError, match=r"holds another run .seed is 0 and 1."):
        run(config.with_seed(1), folder, progress=False, resume=True)
    assert (folder / "result.json").read_bytes() == before


def test_a_finished_run_is_returned_as_it_is(finished):
    result, folder = finished
    before = load_file(folder / "model.safetensors")
    again = run(SMALL.with_values({"training.snapshots": 2}), folder, progress=False, resume=True)
    assert again == result
    after = load_file(folder / "model.safetensors")
    assert all(before[name].equal(after[name]) for name in before)


def test_two_processes_cannot_run_in_one_folder(tmp_path):
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(FileExistsError, match="locked by another process"),
    ):
        run(SMALL, tmp_path, progress=False)


def test_a_run_that_was_finished_a_moment_ago_needs_no_lock(finished):
    result, folder = finished
    config = SMALL.with_values({"training.snapshots": 2})
    with FileLock(folder / ".lock"):
        assert run(config, folder, progress=False, resume=True) == result


def test_a_seed_is_a_result_and_another_seed_another(finished, tmp_path):
    result, folder = finished
    config = SMALL.with_values({"training.snapshots": 2})
    same = run(config, tmp_path / "same", progress=False)
    other = run(config.with_seed(1), tmp_path / "other", progress=False)
    assert same.train_curve == result.train_curve
    assert other.train_curve != result.train_curve
    weights = load_file(folder / "model.safetensors")
    assert all(
        weights[k].equal(v) for k, v in load_file(tmp_path / "same/model.safetensors").items()
    )


def test_accumulated_gradients_are_those_of_the_large_batch(tmp_path):
    plain = {"model.dropout": 0.0}
    large = run(SMALL.with_values(plain), tmp_path / "large", progress=False)
    small = run(
        SMALL.with_values({**plain, "training.batch_size": 2, "training.accumulate": 4}),
        tmp_path / "small",
        progress=False,
    )
    losses = [[point["loss"] for point in result.train_curve] for result in (large, small)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-6)


def test_early_stopping_ends_a_run_that_gains_nothing(tmp_path):
    settings = {
        "training.steps": 400,
        "training.learning_rate": 1e-12,
        "training.patience": 3,
        "training.evaluate_every": 2,
    }
    result = run(SMALL.with_values(settings), tmp_path, progress=False)
    assert result.steps == 8, "the first evaluation is the best, three more show nothing"
    assert result.best_step == 2


def test_a_bfloat16_run_learns_the_same_within_their_precision(tmp_path):
    plain = run(SMALL.with_values({"model.dropout": 0.0}), tmp_path / "plain", progress=False)
    half = run(
        SMALL.with_values({"model.dropout": 0.0, "training.bf16": True}),
        tmp_path / "half",
        progress=False,
    )
    losses = [[point["loss"] for point in result.train_curve] for result in (plain, half)]
    assert losses[0] != losses[1], "bfloat16 was used"
    assert losses[0] == pytest.approx(losses[1], abs=0.03)
    weights = load_file(tmp_path / "half" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_compiled_run_gives_the_same_curve(tmp_path, monkeypatch):
    # The graph is captured and run as it is: generating code would take minutes.
    backend = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", backend)
    changes = {"model.dropout": 0.0, "training.steps": 4, "training.evaluate_every": 2}
    plain = run(SMALL.with_values(changes), tmp_path / "plain", progress=False)
    compiled = run(
        SMALL.with_values({**changes, "training.compile": True, "training.batch_size": 8}),
        tmp_path / "compiled",
        progress=False,
    )
    losses = [[point["loss"] for point in result.train_curve] for result in (plain, compiled)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert not [k for k in load_file(tmp_path / "compiled/model.safetensors") if "_orig_mod" in k]


def test_a_diverged_run_says_so_and_keeps_what_it_had(tmp_path, monkeypatch):
    step = loop._Run._step

    def explode(self, number):
        return step(self, number) if number < 6 else torch.tensor(float("nan"))

    monkeypatch.setattr(loop._Run, "_step", explode)
    with pytest.raises(FloatingPointError, match="training loss is nan at step 7; lower the learn"):
        run(SMALL, tmp_path, progress=False)
    assert (tmp_path / "checkpoint-000004").is_dir()
    assert not (tmp_path / "result.json").exists()


def test_a_damaged_model_is_named(finished, tmp_path):
    _, folder = finished
    for name in ("config.yaml", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is missing"):
        evaluate_run(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        evaluate_run(tmp_path)


def test_bad_requests_for_an_evaluation_are_named(finished, tmp_path):
    with pytest.raises(
        ValueError, match="split must be one of 'train', 'validation', 'test', got 'dev'"
    ):
        evaluate_run(finished[1], split="dev")
    with pytest.raises(FileNotFoundError, match=r"must hold a run: config\.yaml is missing"):
        evaluate_run(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 1}', '{"format": 99}'])
def test_a_broken_result_is_named(tmp_path, content):
    (tmp_path / "result.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"result\.json must be"):
        read_result(tmp_path / "result.json")


def test_results_are_plain_json(finished):
    text = (finished[1] / "result.json").read_text(encoding="utf-8")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(text, parse_constant=refuse)["model"] == "hkt"


def test_seeds_share_their_data_and_data_seeds_do_not():
    one, other = (load_data(SMALL.with_seed(seed), None) for seed in (0, 1))
    assert one.train[0]["input_ids"].equal(other.train[0]["input_ids"])
    changed = load_data(SMALL.with_values({"data_seed": 1}), None)
    assert [s["labels"].item() for s in map(changed.train.__getitem__, range(20))] != [
        s["labels"].item() for s in map(one.train.__getitem__, range(20))
    ]


def test_the_majority_rate_is_that_of_the_training_majority_on_the_test_set():
    data = load_task("listops", preset="demo", train=300, validation=40, test=40)
    majority = data.train.labels.bincount().argmax()
    expected = sum(int(label) == majority for label in data.test.labels) / 40
    assert majority_rate(data.train.labels, data.test.labels) == pytest.approx(expected)


def test_filters_learn_at_a_rate_of_their_own():
    model = HKTForSequenceClassification(
        HKTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, filter_width=2)
    )
    rates = {
        id(parameter): group["rate"]
        for group in loop._make_optimizer(model, TrainingSettings(filter_rate=0.25)).param_groups
        for parameter in group["params"]
    }
    by_name = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert {name for name, rate in by_name.items() if rate == 0.25} == {
        "model.blocks.0.attention.hierarchy.input_filter.weight",
        "model.blocks.0.attention.hierarchy.downsamplers.0.weight",
        "model.blocks.0.attention.hierarchy.downsamplers.1.weight",
    }
    assert set(by_name.values()) == {0.25, 1.0}


def test_a_step_moves_filters_by_their_rate(tmp_path):
    # The first step of Adam moves a weight by its learning rate, unless its gradient is tiny.
    moved = []
    for rate in (1.0, 0.1):
        config = SMALL.with_values(
            {
                "training.steps": 1,
                "training.warmup_steps": 0,
                "training.evaluate_every": 1,
                "training.weight_decay": 0.0,
                "training.filter_rate": rate,
            }
        )
        folder = tmp_path / str(rate)
        run(config, folder, progress=False)
        weights = load_file(folder / "model.safetensors")
        name = next(name for name in weights if "downsamplers" in name)
        moved.append((weights[name] - 0.5).abs().max().item())
    assert 0.9 <= moved[0] / config.training.learning_rate <= 1.0
    assert moved[1] == pytest.approx(0.1 * moved[0], rel=1e-3)
