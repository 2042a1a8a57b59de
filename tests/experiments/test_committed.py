"""What is committed under experiments/ is what the code makes of the committed runs."""

import json
import shutil
from pathlib import Path

from polyscale.experiments import plan
from polyscale.experiments.hsa import write_tables
from polyscale.experiments.zero_shot.records import Records
from polyscale.experiments.zero_shot.tables import markdown
from polyscale.training.result import RESULT_NAME, read_result

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_tables_of_hsa_follow_from_its_runs(tmp_path):
    shutil.copytree(EXPERIMENTS / "hsa" / "runs", tmp_path / "runs")
    write_tables(tmp_path, command="polyscale reproduce hsa --preset cpu")
    for name in ("RESULTS.md", "results.json"):
        assert (tmp_path / name).read_text() == (EXPERIMENTS / "hsa" / name).read_text()


def test_every_run_of_hsa_is_there_as_it_was_planned():
    for one in plan("hsa"):
        folder = one.folder(EXPERIMENTS / "hsa")
        result = read_result(folder / RESULT_NAME)
        assert result.config == one.config.as_dict()
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
