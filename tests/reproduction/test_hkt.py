import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from polyscale.training.compare import PlannedRun, plan_comparison
from reproduction import find_study
from reproduction.hkt import HKTStudy
from tests.training.runs import SMALL


def test_a_study_brings_its_tables_up_to_date_after_every_run(tmp_path):
    small = [
        PlannedRun("listops", run.config)
        for run in plan_comparison(SMALL, ["standard", "hkt"], [0, 1], levels=2)
    ]
    seen = []

    class Watched(HKTStudy):
        def write_tables(self, output, *, preset, data_dir=None):
            super().write_tables(output, preset=preset, data_dir=data_dir)
            results = json.loads((output / "results.json").read_text())["runs"]
            seen.append([(run["model"], run["seed"]) for run in results])
            text = (output / "RESULTS.md").read_text(encoding="utf-8")
            row = re.search(r"^\| listops \| \d+ \| 0", text, re.MULTILINE)  # task, length, seeds
            assert (row is not None) == (len(results) > 1)

    study = Watched()
    study.run(small[:3], tmp_path, preset="cpu", progress=False)
    with pytest.raises(FileExistsError, match="resume"):
        study.run(small, tmp_path, preset="cpu", progress=False)
    study.run(small, tmp_path, preset="cpu", progress=False, resume=True)
    assert [len(runs) for runs in seen] == [1, 2, 3, 3, 4, 4], "after each run, and at the end"
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert "50.33 ± 0.12" in text
    assert "| Transformer | 36.37 | 42.44 | 64.27 |" in text
    record = json.loads((tmp_path / "results.json").read_text())["runs"][0]
    assert {"task", "model", "seed", "test_accuracy", "config", "git_commit", "seconds"} <= {
        *record
    }


def test_filters_in_both_models_stand_in_a_table_of_their_own(tmp_path):
    plain = [run.config for run in plan_comparison(SMALL, ["standard", "hkt"], [0], levels=2)]
    runs = [
        PlannedRun(
            "listops",
            replace(
                config,
                name=f"{config.name}-filter",
                model_options={**config.model_options, "filter_width": 2},
            ),
        )
        for config in plain
    ]
    first = [PlannedRun("listops", plain[0]), runs[0]]
    HKTStudy().run(first, tmp_path, preset="cpu", progress=False)
    assert "| HKT with filter |" not in (tmp_path / "RESULTS.md").read_text("utf-8")
    HKTStudy().run(runs, tmp_path, preset="cpu", progress=False, resume=True)
    text = (tmp_path / "RESULTS.md").read_text("utf-8")
    results = json.loads((tmp_path / "results.json").read_text())["runs"]
    score = {run["model"]: run["test_accuracy"] for run in results}
    row = re.search(r"HKT with filter \| gain \|\n.*\n\| listops \| 0 \| (.*?)% \| (.*?)% \|", text)
    assert row is not None
    assert [float(cell) for cell in row.groups()] == [
        round(score[model], 1) for model in ("standard-filter", "hkt-filter")
    ]


def test_a_run_locked_by_another_process_is_skipped(tmp_path, capsys):
    first, second = (
        PlannedRun("listops", run.config)
        for run in plan_comparison(SMALL, ["standard", "hkt"], [0], levels=2)
    )
    folder = first.folder(tmp_path)
    folder.mkdir(parents=True)
    with FileLock(folder / ".lock"):
        HKTStudy().run([first, second], tmp_path, preset="cpu", resume=True)
    assert "locked by another process: skipped" in capsys.readouterr().out
    assert not (folder / "result.json").exists()
    assert (second.folder(tmp_path) / "result.json").exists()


def test_the_plan_of_the_paper_has_every_seed_and_every_ablation():
    cpu, paper = HKTStudy().plan("cpu"), HKTStudy().plan("paper")
    assert len({run.folder(Path("x")) for run in paper}) == len(paper)
    main = [run for run in cpu if run.config.name in ("standard", "hkt")]
    assert cpu[: len(main)] == main, "first the paired seeds, then the ablations"
    assert {(run.table, run.config.name, run.config.seed) for run in main} == {
        (task, model, seed)
        for task in ("imdb-char", "listops", "scifar10")
        for model in ("standard", "hkt")
        for seed in (0, 1, 2)
    }
    for table in ("imdb-char", "listops", "scifar10"):
        names = {run.config.name for run in paper if run.table == table}
        assert len(names) == 2 + 12
    seeds = {
        (run.table, run.config.name): tuple(
            other.config.seed
            for other in cpu
            if (other.table, other.config.name) == (run.table, run.config.name)
        )
        for run in cpu[len(main) :]
    }
    every_seed = {(task, "hkt-plain") for task in ("imdb-char", "listops", "scifar10")}
    assert {key for key, found in seeds.items() if found == (0, 1, 2)} == every_seed
    assert {found for key, found in seeds.items() if key not in every_seed} == {(0,)}
    assert sum(table == "imdb-char" for table, _ in seeds) == 1 + 11
    others = ["hkt-plain", "standard-filter", "hkt-filter"]
    assert [name for table, name in seeds if table == "listops"] == others


def test_ablations_change_one_thing_of_plain_hkt():
    options = {
        (run.table, run.config.name): run.config.model_options
        for run in HKTStudy().plan("cpu")
        if run.config.model == "hkt"
    }
    plain = options["imdb-char", "hkt-plain"]
    assert plain == options["imdb-char", "hkt-fine-values"] | {"values": "merged"}
    assert plain == options["imdb-char", "hkt-2-levels"] | {"levels": 3}
    own = {"values": "fine", "filter_width": 4}
    assert options["imdb-char", "hkt"] == plain | own
    assert options["listops", "hkt-filter"] == options["listops", "hkt"] | own
    assert options["scifar10", "hkt"] == options["scifar10", "hkt-plain"] | {"levels": 5}


def test_an_unknown_study_or_preset_is_refused():
    with pytest.raises(ValueError, match=r"study must be one of 'documents', 'hkt', .* got 'gpt'"):
        find_study("gpt")
    with pytest.raises(ValueError, match="preset must be one of 'cpu', 'paper', got 'gpu'"):
        HKTStudy().plan("gpu")
