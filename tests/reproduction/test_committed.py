"""What is committed under experiments/ is what the code makes of the committed runs."""

import json
import shutil
from pathlib import Path

import pytest

from polyscale.training.config import RunConfig
from polyscale.training.result import RESULT_NAME, read_result
from reproduction import find_study
from reproduction.documents.tables import markdown as document_tables
from reproduction.records import Records
from reproduction.zero_shot import all_units
from reproduction.zero_shot.tables import markdown

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize("name", ["hkt", "hsa"])
def test_tables_follow_from_the_runs(name, tmp_path):
    shutil.copytree(EXPERIMENTS / name / "runs", tmp_path / "runs")
    find_study(name).write_tables(tmp_path, preset="cpu")
    tables = list((EXPERIMENTS / name / "tables").rglob("*.md"))
    files = [EXPERIMENTS / name / file for file in ("RESULTS.md", "results.json")]
    assert tables
    for file in (*tables, *files):
        made = tmp_path / file.relative_to(EXPERIMENTS / name)
        assert made.read_text() == file.read_text()


@pytest.mark.parametrize("name", ["hkt", "hsa"])
def test_every_run_is_as_it_was_planned(name):
    planned = {one.folder(EXPERIMENTS / name): one.config for one in find_study(name).plan("cpu")}
    committed = {path.parent for path in (EXPERIMENTS / name / "runs").rglob(RESULT_NAME)}
    assert committed == planned.keys()
    for folder in committed:
        result = read_result(folder / RESULT_NAME)
        assert RunConfig.from_dict(result.config) == planned[folder]
        assert result.git_commit
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert max(point["step"] for point in log) == result.steps


def test_every_measurement_is_as_it_was_planned():
    study = find_study("hsa-zero-shot")
    records = Records.read(EXPERIMENTS / study.name, study.format)
    planned = all_units(study.sizes("cpu"), layers=6)
    # Opening blocks of fixed trees is gone: its records stay, and nothing plans them.
    opened = [
        name for name in records.head["units"] if name.endswith("opened") or " opened, " in name
    ]
    assert len(opened) == 7
    assert [one.id for one in planned] == [
        name for name in records.head["units"] if name not in opened
    ]
    assert records.head["preset"] == study.sizes("cpu").as_dict()
    for one in planned:
        record = records.records[one.id]
        assert (record["kind"], record["task"]) == (one.kind, one.task)
        assert record["config"] == json.loads(json.dumps(one.config))


def test_tables_of_the_zero_shot_experiment_follow_from_its_records():
    folder = EXPERIMENTS / "hsa-zero-shot"
    records = Records.read(folder, find_study("hsa-zero-shot").format)
    assert [name for name in records.head["units"] if name not in records] == []
    drawn = sorted(path.name for path in (folder / "figures").iterdir())
    text = (folder / "RESULTS.md").read_text()
    shown = [name for name in drawn if f"(figures/{name})" in text]
    assert shown == drawn
    ordered = sorted(drawn, key=lambda name: text.index(f"(figures/{name})"))
    assert markdown(records, ordered) == text


def test_tables_of_documents_follow_from_the_planned_records():
    study = find_study("documents")
    folder = EXPERIMENTS / study.name
    records = Records.read(folder, study.format)
    planned = study.plan("cpu")
    assert [one.id for one in planned] == records.head["units"]
    assert [one.id for one in planned if one.id in records] == list(records.records)
    assert records.head["preset"] == json.loads(json.dumps(study.sizes("cpu").as_dict()))
    for one in planned:
        if one.id in records:  # otherwise the tables say that it is not finished
            assert records.records[one.id]["config"] == json.loads(json.dumps(one.config))
    assert (folder / "RESULTS.md").read_text() == document_tables(records)
