"""A run that is killed goes on to the same numbers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from polyscale.training.result import read_result
from polyscale.training.run import run
from tests.training.runs import SMALL

SCRIPT = Path(__file__).with_name("runs.py")
LONG = {"training.steps": 160, "training.evaluate_every": 4, "training.snapshots": 2}
# What the clock decides.
TIMED = ("seconds", "training_seconds", "samples_per_second", "finished")


def start(folder, changes):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(folder), json.dumps(changes)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def whole_and_killed(tmp_path_factory):
    """The same run twice: at one go, and killed twice on the way."""
    whole, killed = (tmp_path_factory.mktemp(name) / "run" for name in ("whole", "killed"))
    run(SMALL.with_values(LONG), whole, progress=False)
    for _ in range(2):
        before = {path.name for path in killed.glob("checkpoint-*")}
        process = start(killed, LONG)
        while not {path.name for path in killed.glob("checkpoint-*")} - before:
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (killed / "result.json").exists(), "it was killed on the way"
    run(SMALL.with_values(LONG), killed, resume=True, progress=False)
    return whole, killed


def test_the_weights_are_equal_bit_for_bit(whole_and_killed):
    for name in ("model.safetensors", "snapshots/step-000080/model.safetensors"):
        one, other = (load_file(folder / name) for folder in whole_and_killed)
        assert one.keys() == other.keys()
        assert all(one[key].equal(other[key]) for key in one)


def test_curves_and_results_are_equal(whole_and_killed):
    one, other = (read_result(folder / "result.json").as_dict() for folder in whole_and_killed)
    for name in TIMED:
        one.pop(name), other.pop(name)
    assert one == other
    assert len(one["train_curve"]) == 160


def test_the_log_holds_every_point_once(whole_and_killed):
    logs = [
        [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        for folder in whole_and_killed
    ]
    events = [sorted((e["event"], e["step"], e["loss"]) for e in log) for log in logs]
    assert events[0] == events[1]
    assert len(events[0]) == 160 + 40


def test_a_finished_run_has_no_checkpoints_left(whole_and_killed):
    for folder in whole_and_killed:
        assert not list(folder.glob("*checkpoint*"))
        assert (folder / "tensorboard").is_dir()


def test_a_damaged_checkpoint_stops_the_run_before_it_starts(tmp_path):
    process = start(tmp_path, LONG)
    while not list(tmp_path.glob("checkpoint-*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate()
    for weights in tmp_path.glob("checkpoint-*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"checkpoint-\d+ is damaged: model.safetensors"):
        run(SMALL.with_values(LONG), tmp_path, resume=True, progress=False)
