"""What is committed under experiments/ is what the code makes of the committed runs."""

import json
import shutil
from pathlib import Path

import pytest

from polyscale.experiments import hkt, hsa, plan
from polyscale.experiments.zero_shot.records import Records
from polyscale.experiments.zero_shot.tables import markdown
from polyscale.training.config import RunConfig
from polyscale.training.result import RESULT_NAME, read_result

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.mark.parametrize(("name", "experiment"), [("hkt", hkt), ("hsa", hsa)])
def test_tables_follow_from_the_runs(name, experiment, tmp_path):
    shutil.copytree(EXPERIMENTS / name / "runs", tmp_path / "runs")
    experiment.write_tables(tmp_path, command=f"polyscale reproduce {name} --preset cpu")
    for file in ("RESULTS.md", "results.json"):
        assert (tmp_path / file).read_text() == (EXPERIMENTS / name / file).read_text()


@pytest.mark.parametrize("name", ["hkt", "hsa"])
def test_every_run_is_as_it_was_planned(name):
    planned = {one.folder(EXPERIMENTS / name): one.config for one in plan(name)}
    committed = {path.parent for path in (EXPERIMENTS / name / "runs").rglob(RESULT_NAME)}
    assert committed == planned.keys()
    for folder in committed:
        result = read_result(folder / RESULT_NAME)
        assert RunConfig.from_dict(result.config) == planned[folder]
        assert result.git_commit
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert max(point["step"] for point in log) == result.steps


def test_tables_of_the_zero_shot_experiment_follow_from_its_records():
    folder = EXPERIMENTS / "hsa-zero-shot"
    records = Records.read(folder)
    assert [name for name in records.head["units"] if name not in records] == []
    drawn = sorted(path.name for path in (folder / "figures").iterdir())
    text = (folder / "RESULTS.md").read_text()
    shown = [name for name in drawn if f"(figures/{name})" in text]
    assert shown == drawn
    ordered = sorted(drawn, key=lambda name: text.index(f"(figures/{name})"))
    assert markdown(records, ordered) == text
