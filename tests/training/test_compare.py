import json
from dataclasses import replace

import pytest
from filelock import FileLock

from polyscale.report.comparison import Comparison
from polyscale.training import compare
from polyscale.training.compare import (
    plan_comparison,
    read_results,
    run_all,
    seconds_left,
    status,
)
from tests.training.runs import SMALL


@pytest.fixture(scope="module")
def four_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    planned = plan_comparison(SMALL, ["standard", "hkt"], [0, 1], levels=2)
    return planned, run_all(planned, folder, progress=False), folder


def test_every_model_runs_with_every_seed_and_nothing_else_differs(four_runs):
    _, results, folder = four_runs
    assert [(r.model, r.seed) for r in results] == [
        ("standard", 0),
        ("hkt", 0),
        ("standard", 1),
        ("hkt", 1),
    ]
    assert len({json.dumps(r.config["training"]) for r in results}) == 1
    assert len({json.dumps(r.data) for r in results}) == 1
    assert [r.model_config.get("levels", 3) for r in results] == [1, 2, 1, 2]
    assert [r.as_dict() for r in read_results(folder)] == sorted(
        (r.as_dict() for r in results), key=lambda r: (r["model"], r["seed"])
    )


def test_the_runs_become_a_comparison(four_runs, tmp_path):
    _, results, _ = four_runs
    comparison = Comparison.from_results(results, command="polyscale compare")
    comparison.write(tmp_path)
    assert {row.model for row in comparison.rows()} == {"standard", "hkt"}
    assert (tmp_path / "report.html").is_file()


def test_finished_runs_are_not_done_again(four_runs, monkeypatch):
    planned, results, folder = four_runs
    with pytest.raises(FileExistsError, match="exists: resume"):
        run_all(planned, folder, progress=False)
    monkeypatch.setattr(compare, "load_data", lambda *a, **k: pytest.fail("nothing is left to do"))
    again = run_all(planned, folder, progress=False, resume=True)
    assert [r.as_dict() for r in again] == [r.as_dict() for r in results]


def test_the_status_tells_what_is_done_and_how_long_the_rest_takes(four_runs):
    planned, results, folder = four_runs
    more = [*planned, *plan_comparison(SMALL, ["standard", "hkt"], [2], levels=2)]
    found = status(more, folder)
    assert [one.finished for one in found] == [True] * 4 + [False] * 2
    own = {m: [r.seconds for r in results if r.model == m] for m in ("standard", "hkt")}
    expected = sum(sum(seconds) / len(seconds) for seconds in own.values())
    assert seconds_left(found) == pytest.approx(expected)
    assert seconds_left(found[:4]) == 0
    assert seconds_left(found[4:]) is None, "no run of any kind is finished"


def test_steps_in_a_checkpoint_count_as_done(tmp_path):
    (planned,) = plan_comparison(SMALL, ["hkt"], [0], levels=2)
    (planned.folder(tmp_path) / "checkpoint-000004").mkdir(parents=True)
    assert status([planned], tmp_path)[0].steps == 4


def test_runs_locked_by_another_process_are_skipped_and_tried_again_at_the_end(tmp_path, capsys):
    planned = plan_comparison(SMALL, ["standard", "hkt"], [0], levels=2)
    planned.append(replace(planned[0], config=planned[0].config.with_seed(1)))
    locks = []
    for one in planned[:2]:
        one.folder(tmp_path).mkdir(parents=True)
        locks.append(FileLock(one.folder(tmp_path) / ".lock"))
        locks[-1].acquire()
    release = locks[0].release  # the other process is killed while we are at the third run
    results = run_all(
        planned, tmp_path, resume=True, progress=False, announce=True, after_each=release
    )
    assert [(r.model, r.seed) for r in results] == [("standard", 0), ("standard", 1)]
    assert not (planned[1].folder(tmp_path) / "result.json").exists()
    locks[1].release()
    said = capsys.readouterr().out
    assert said.count("hkt-seed-0 is locked by another process: skipped") == 3
    assert said.count("run 1 of 3: listops, standard, seed 0") == 2
