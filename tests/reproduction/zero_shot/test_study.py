"""The whole experiment on a small model: what it leaves behind, and that it can be interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from polyscale.inject import injected_layers
from reproduction import measuring
from reproduction.records import Records
from reproduction.study import RESULTS_JSON as FILE
from reproduction.zero_shot import ZeroShotStudy, classify
from reproduction.zero_shot.injections import Injection
from reproduction.zero_shot.lab import Lab
from reproduction.zero_shot.pretrained import pretrained_model
from reproduction.zero_shot.tables import markdown
from tests.reproduction.zero_shot.samples import small_preset

FORMAT = ZeroShotStudy.format
SMALL = {"small": small_preset()}


class KilledError(Exception):
    """Stands for a kill right after a unit."""


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, data_folder: Path
) -> Records:
    """The experiment, killed after three units and again in the grid, then resumed."""
    output = tmp_path_factory.mktemp("zero-shot") / "out"
    options: dict[str, Any] = {"data_dir": data_folder, "resume": True}
    kept: dict[str, Any] = {}
    for stop in ("3 of", "14 of"):

        def announce(line: str, stop: str = stop) -> None:
            if line.startswith(stop):
                raise KilledError

        killed = ZeroShotStudy(str(model_folder), SMALL, announce=announce)
        with pytest.raises(KilledError):
            killed.reproduce("small", output, **options)
        done = int(stop.split(" ")[0])
        assert killed.status("small", output).summary.startswith(f"{done} of ")
        kept = {**Records.read(output, FORMAT).records, **kept}
    ZeroShotStudy(str(model_folder), SMALL).reproduce("small", output, progress=False, **options)
    records = Records.read(output, FORMAT)
    assert {name: records.records[name] for name in kept} == kept  # nothing was done twice
    return records


def test_every_unit_is_done_once(whole: Records) -> None:
    summary = ZeroShotStudy().status("cpu", whole.folder).summary
    count = len(whole.records)
    assert summary.startswith(f"{count} of {count} units done in 0.")
    assert "next" not in summary
    assert list(whole.records) == whole.head["units"]


def test_records_say_how_they_were_made(whole: Records) -> None:
    for record in whole.records.values():
        assert record["seed"] == 0
        assert record["seconds"] >= 0
        assert "git_commit" in record
        environment = whole.head["environments"][record["environment"]]
        assert set(environment) == {"versions", "threads"}
    assert whole.head["model"] == "small-bert"


def test_the_fine_tuned_model_has_learned(whole: Records) -> None:
    values = whole.values("sst2/fine-tuning")
    assert values["test_accuracy"] > values["majority"] + 20


def test_the_grid_is_measured_against_the_original_and_windows_change_answers(
    whole: Records,
) -> None:
    grid = whole.of("grid", "sst2")
    assert len(grid) == 2 * 3 + 2  # ties and layer sets, and without sinks
    assert any(record["values"]["agreement"] < 100 for record in grid)
    for record in grid:
        values = record["values"]
        assert values["lost"] == pytest.approx(values["accuracy_before"] - values["accuracy"])


def test_the_original_is_compared_with_itself(whole: Records) -> None:
    for part, count in (("grid", 24), ("final", 30)):
        values = whole.values(f"sst2/original/{part}")
        assert values["lost"] == 0
        assert values["agreement"] == 100
        assert len(values["predictions"]) == values["texts"] == count


def test_the_best_of_the_grid_saves_enough_in_two_layers_and_loses_least(whole: Records) -> None:
    values = whole.values("sst2/final/best of the grid")
    chosen = Injection.from_dict(values["injection"])
    assert len(chosen.layers) == 2
    assert values["saved_at_length"] >= 0.3
    able = [
        record["values"]["lost"]
        for record in whole.of("grid")
        if len(record["config"]["layers"]) == 2 and record["values"]["saved_at_length"] >= 0.3
    ]
    assert whole.values(f"sst2/grid/{chosen.name}")["lost"] == min(able)
    assert values["texts"] == 30


def test_plans_are_measured_on_texts_they_have_not_seen(whole: Records) -> None:
    for name in ("any, budget 0.9", "cheap, budget 0.9"):
        plan, final = whole.values(f"sst2/plan/{name}"), whole.values(f"sst2/final/plan {name}")
        assert final["injection"] == plan["injection"]
        assert final["texts"] == 30
        assert plan["plan"]["flops"] <= 0.9


def test_fine_tuning_after_the_injection_starts_from_the_injected_model(whole: Records) -> None:
    curve = whole.values("sst2/recovery/all layers, columns")["curve"]
    assert [point["step"] for point in curve] == [0, 2, 4]
    grid = whole.values("sst2/grid/2,4,8,16 columns, sinks, layers 0 1")
    assert {name: curve[0][name] for name in grid} == grid
    control = whole.values("sst2/recovery/none")["curve"]
    assert control[0]["lost"] == 0
    injection = Injection.from_dict(whole.records["sst2/recovery/paper"]["config"])
    final = whole.values("sst2/final/paper")["injection"]
    assert injection == Injection.from_dict(final)
    assert [path.name for path in (whole.folder / "models").iterdir()] == ["sst2"]


def test_the_model_is_trained_with_its_injection_and_its_other_dropout(
    whole: Records, model_folder: Path, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Any] = []

    def stop(build: Any, *args: Any, **options: Any) -> None:
        built.append(build())
        raise KilledError

    monkeypatch.setattr(classify, "train", stop)
    source = pretrained_model(str(model_folder))
    lab = Lab(small_preset(), source, whole, whole.folder, data_folder)
    injection = Injection((0, 1), (2, 4), "blocks")
    for name, one in (("injected", injection), ("none", None)):
        with pytest.raises(KilledError):
            classify._recover(lab, lab.preset.tasks[0], name, one)
    assert [injected_layers(model) for model in built] == [[0, 1], []]
    assert all(model.training for model in built)
    assert injected_layers(lab.classifier(lab.preset.tasks[0])) == []


def test_times_are_measured_for_one_layer_and_the_whole_model(whole: Records) -> None:
    values = whole.values("timing/16")
    assert set(values["attention"]) == {
        "original",
        "2,4,8,16 blocks, sinks",
        "2,4,8,16 columns, sinks",
    }
    assert len(values["model"]) == 5
    assert all(seconds > 0 for part in ("attention", "model") for seconds in values[part].values())


def test_embeddings_drift_more_with_more_layers(whole: Records) -> None:
    found = {
        tuple(record["config"]["layers"]): record["values"]["reviews"]["cosine"]
        for record in whole.of("embeddings")
        if "2,4,8,16 blocks, sinks" in record["id"]
    }
    assert found[0, 1] < found[1,] < 1


def test_the_tables_show_the_paper_beside_ours(whole: Records) -> None:
    text = (whole.folder / "RESULTS.md").read_text()
    for part in ("94.03 | 90.25 | +3.78 | 2.1 → 0.41", "## Wall-clock", "Aim: lose no more than"):
        assert part in text
    assert "Not finished" not in text
    final = whole.values("sst2/final/paper")
    assert f"| {final['accuracy_before']:.2f} | {final['accuracy']:.2f} |" in text
    for name in ("sst2-layers.svg", "sst2-recovery.svg"):
        assert f"figures/{name}" in text
        assert (whole.folder / "figures" / name).read_text().startswith("<svg")
    assert "</svg>" in (whole.folder / "figures" / "timing.svg").read_text()


def test_tables_of_an_unfinished_experiment_say_so(whole: Records) -> None:
    part = Records(whole.folder, whole.head, FORMAT)
    part.records = {name: whole.records[name] for name in list(whole.records)[:4]}
    text = markdown(part)
    assert f"{len(whole.records) - 4} units are still to be done" in text


def test_a_finished_experiment_is_left_alone(
    whole: Records, model_folder: Path, data_folder: Path
) -> None:
    before = (whole.folder / FILE).read_text()
    said: list[str] = []
    study = ZeroShotStudy(str(model_folder), SMALL, announce=said.append)
    study.reproduce("small", whole.folder, data_dir=data_folder, resume=True)
    assert said == []
    assert (whole.folder / FILE).read_text() == before


def test_results_are_not_overwritten_unless_resumed(whole: Records, model_folder: Path) -> None:
    with pytest.raises(FileExistsError, match="holds results: resume"):
        ZeroShotStudy(str(model_folder), SMALL).reproduce("small", whole.folder)


def test_results_of_another_preset_or_model_are_not_mixed(
    whole: Records, model_folder: Path, tmp_path: Path
) -> None:
    other = {"small": replace(small_preset(), recovery_steps=5)}
    with pytest.raises(FileExistsError, match="results of another preset"):
        ZeroShotStudy(str(model_folder), other).reproduce("small", whole.folder, resume=True)
    renamed = tmp_path / "named-otherwise"
    renamed.mkdir()
    (renamed / "config.json").write_text((model_folder / "config.json").read_text())
    with pytest.raises(FileExistsError, match="results of another model"):
        ZeroShotStudy(str(renamed), SMALL).reproduce("small", whole.folder, resume=True)


def test_some_units_can_be_done_again(
    whole: Records, model_folder: Path, data_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / FILE).write_text((whole.folder / FILE).read_text())
    options: dict[str, Any] = {"data_dir": data_folder, "resume": True}
    said: list[str] = []
    study = ZeroShotStudy(str(model_folder), SMALL, redo=["timing"], announce=said.append)
    study.reproduce("small", tmp_path, **options)
    assert len(said) == 1
    assert "timing/16" in said[0]
    new = Records.read(tmp_path, FORMAT)
    assert list(new.records) == list(whole.records)
    assert new.records["timing/16"] != whole.records["timing/16"]
    for wrong in ("", "speed"):
        study = ZeroShotStudy(str(model_folder), SMALL, redo=[wrong])
        with pytest.raises(ValueError, match=f"redo must be .* got '{wrong}'"):
            study.reproduce("small", tmp_path, **options)
    study = ZeroShotStudy(str(model_folder), SMALL, redo="timing")
    with pytest.raises(TypeError, match="redo must be a list of prefixes of ids, got 'timing'"):
        study.reproduce("small", tmp_path, **options)


def test_missing_weights_are_named(
    whole: Records, model_folder: Path, data_folder: Path, tmp_path: Path
) -> None:
    data = json.loads((whole.folder / FILE).read_text())
    data["records"] = data["records"][:1]  # as in a checkout: results, but no weights
    (tmp_path / FILE).write_text(json.dumps(data))
    with pytest.raises(ValueError, match="has no fine-tuned weights"):
        ZeroShotStudy(str(model_folder), SMALL).reproduce(
            "small", tmp_path, data_dir=data_folder, resume=True
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "must have the format polyscale.zero-shot"),
        ('{"format": "polyscale.zero-shot", "version": 9}', "must have version 1, got 9"),
        ('{"format": "polyscale.zero-shot", "version": 1, "records": [1]}', "a list of records"),
    ],
)
def test_a_damaged_results_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=message):
        ZeroShotStudy().status("cpu", tmp_path)


def test_a_folder_without_results_has_no_status(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"results\.json is missing"):
        ZeroShotStudy().status("cpu", tmp_path)


def test_a_study_of_measurements_refuses_two_processes(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "join_processes", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(ValueError, match="hsa-zero-shot must run in one process, got 2"):
        ZeroShotStudy(str(model_folder), SMALL).reproduce("small", tmp_path)


def test_a_folder_in_use_is_refused(tmp_path: Path, model_folder: Path) -> None:
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(FileExistsError, match="is locked by another process"),
    ):
        ZeroShotStudy(str(model_folder), SMALL).reproduce("small", tmp_path)
