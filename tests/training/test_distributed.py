"""Two processes on one machine, joined by gloo over the loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyscale.models import HKTConfig, HKTForSequenceClassification
from polyscale.training.result import read_result
from polyscale.training.run import run
from polyscale.training.sharding import shard
from tests.training.pair import PLAIN, SHARDED
from tests.training.runs import SMALL


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    return run(SMALL.with_values({**PLAIN, "training.batch_size": 16}), folder, progress=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder of `pair.py`, and what each of its two processes saw; one launch for all tests."""
    folder = tmp_path_factory.mktemp("pair")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *command, str(Path(__file__).with_name("pair.py")), str(folder)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


def curves(result):
    train = [point["loss"] for point in result.train_curve]
    validation = [point["loss"] for point in result.validation_curve]
    return train + validation + [result.test["loss"], result.test["accuracy"]]


def test_the_first_process_decides_and_fails_for_both(pair):
    for seen in pair[1]:
        assert (seen["decide"]["decision"], seen["decide"]["error"]) == ("rank 0", "rank 0")


def test_two_processes_learn_what_one_does_with_the_doubled_batch(alone, pair):
    result = read_result(pair[0] / "whole" / "result.json")
    assert (alone.processes, result.processes) == (1, 2)
    assert curves(result) == pytest.approx(curves(alone), abs=2e-6)
    assert result.accuracy_by == alone.accuracy_by


def test_a_run_that_is_locked_when_the_first_process_looks_is_skipped_by_both(pair):
    folder, seen = pair
    assert [one["share"]["seeds"] for one in seen] == [[1], [1]]
    assert [one["share"]["tables"] for one in seen] == [1, 0], "the first process writes"
    runs = folder / "shared" / "runs" / "listops"
    assert [path.name for path in (runs / "standard-seed-0").iterdir()] == [".lock"]
    alone = read_result(runs / "standard-seed-1" / "result.json")
    assert (alone.seed, alone.processes) == (1, 2)


def test_a_sharded_run_that_was_stopped_goes_on_to_the_same_curve(alone, pair):
    result = read_result(pair[0] / "sharded" / "result.json")
    assert result.processes == 2
    assert curves(result) == pytest.approx(curves(alone), abs=2e-6)
    assert result.flops_per_sample == alone.flops_per_sample
    assert result.parameters == alone.parameters


def test_each_process_holds_its_share_and_only_the_first_reads_whole_weights(pair):
    first, second = (seen["train_sharded"] for seen in pair[1])
    assert [first["held"], second["held"]] == pytest.approx([0.5, 0.5], abs=0.05)
    assert first["reads"] == ["model.safetensors", "optimizer.safetensors", "best"]
    assert second["reads"] == []


def test_a_sharded_bfloat16_run_gathers_bfloat16_and_sums_float32(alone, pair):
    for seen in pair[1]:
        assert seen["train_half"]["gathers"] == ["torch.bfloat16"]
        assert seen["train_half"]["sums"] == ["torch.float32"]
    result = read_result(pair[0] / "half" / "result.json")
    assert curves(result)[:-2] == pytest.approx(curves(alone)[:-2], abs=0.03)


def test_another_number_of_processes_does_not_go_on_with_a_run(pair):
    with pytest.raises(
        ValueError, match="must be resumed with 2 processes, as in its first 4 steps, got 1"
    ):
        run(SMALL.with_values(SHARDED), pair[0] / "stopped", progress=False, resume=True)


def test_one_process_has_nobody_to_share_with(tmp_path):
    with pytest.raises(
        ValueError, match="shard must have at least 2 processes, got 1; use torchrun"
    ):
        run(SMALL.with_values({"training.shard": True}), tmp_path, progress=False)


def test_a_model_is_cut_before_it_is_moved(monkeypatch):
    model = HKTForSequenceClassification(
        HKTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    )
    monkeypatch.setattr(type(model), "to", lambda *_: pytest.fail("the whole model is moved"))
    whole = sum(weight.numel() for weight in model.parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        shard(model, torch.device("cpu"), 4, bf16=False)
        held = sum(weight.to_local().numel() for weight in model.parameters())
    finally:
        dist.destroy_process_group()
    assert held == pytest.approx(whole / 4, rel=0.05)
