"""Two processes on one machine, joined by gloo over the loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyscale.training.result import read_result
from polyscale.training.run import run
from tests.training.runs import SMALL

SCRIPT = Path(__file__).with_name("runs.py")
PLAIN = {"model.dropout": 0.0}


def launch(folder, changes, kind, stop_at=None):
    """The result of two processes that hold `whole` or `sharded` weights; None if they stop."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            str(SCRIPT),
            str(folder),
            json.dumps(changes),
            *([] if stop_at is None else [str(stop_at)]),
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.count(kind) == 2, done.stderr[-3000:]
    if stop_at is not None:
        assert not (folder / "result.json").exists()
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    return read_result(folder / "result.json")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    return run(SMALL.with_values({**PLAIN, "training.batch_size": 16}), folder, progress=False)


def curves(result):
    train = [point["loss"] for point in result.train_curve]
    validation = [point["loss"] for point in result.validation_curve]
    return train + validation + [result.test["loss"], result.test["accuracy"]]


def test_two_processes_learn_what_one_does_with_the_doubled_batch(alone, tmp_path):
    pair = launch(tmp_path / "pair", PLAIN, "whole")
    assert (alone.processes, pair.processes) == (1, 2)
    assert curves(pair) == pytest.approx(curves(alone), abs=2e-6)
    assert pair.accuracy_by == alone.accuracy_by


def test_a_sharded_run_that_was_stopped_goes_on_to_the_same_curve(alone, tmp_path):
    changes = {**PLAIN, "training.shard": True}
    launch(tmp_path / "sharded", changes, "sharded", stop_at=7)
    assert (tmp_path / "sharded" / "checkpoint-000004").is_dir()
    pair = launch(tmp_path / "sharded", changes, "sharded")
    assert pair.processes == 2
    assert curves(pair) == pytest.approx(curves(alone), abs=2e-6)


def test_one_process_has_nobody_to_share_with(tmp_path):
    with pytest.raises(ValueError, match="shard takes at least 2 processes"):
        run(SMALL.with_values({"training.shard": True}), tmp_path, progress=False)
