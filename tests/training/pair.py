"""What two processes do together, for `test_distributed`; run by torchrun.

python -m torch.distributed.run --nproc-per-node=2 pair.py FOLDER

Each process writes what it saw to FOLDER/seen-0.json or seen-1.json.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyscale.training import checkpoint, loop
from polyscale.training.compare import plan_comparison, run_all
from polyscale.training.processes import decide_on_main, join_processes
from polyscale.training.run import run
from tests.training.runs import SMALL

PLAIN = {"model.dropout": 0.0}
SHARDED = {**PLAIN, "training.shard": True}
HALF = {**SHARDED, "training.bf16": True}
SEEN = {}


class StoppedError(Exception):
    """A run that ends on the way."""


class Watched(loop._Run):
    """Says how much of the weights it holds, and may stop on the way."""

    stop_at = None

    def _step(self, step):
        if step == self.stop_at:
            raise StoppedError
        return super()._step(step)

    def go(self, bar):
        weights = list(self.model.parameters())
        here = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
        SEEN["held"] = sum(w.numel() for w in here) / sum(w.numel() for w in weights)
        super().go(bar)

    def _read_best(self):
        SEEN["reads"].append("best")
        return super()._read_best()


def watched_load_file(path):
    SEEN["reads"].append(path.name)
    return load_file(path)


class WatchedExchange(TorchDispatchMode):
    """Notes in which types weights are gathered and gradients are summed."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for kind, name in (("gathers", "_allgather_base_"), ("sums", "_reduce_scatter_base_")):
            if func is getattr(torch.ops.c10d, name).default:
                SEEN[kind].append(str(args[1].dtype))
        return func(*args, **(kwargs or {}))


def train_new(folder, rank):
    time.sleep(rank / 2)  # the first process is well under way when the second one looks
    run(SMALL.with_values(PLAIN), folder / "whole", progress=False)


def train_sharded(folder, rank):
    config = SMALL.with_values(SHARDED)
    Watched.stop_at = 7
    with contextlib.suppress(StoppedError):
        run(config, folder / "sharded", progress=False)
    Watched.stop_at = None
    if rank == 0:
        (folder / "sharded").rename(folder / "stopped")
        (folder / "sharded").mkdir()
        for path in (folder / "stopped").rglob("*"):
            new = folder / "sharded" / path.relative_to(folder / "stopped")
            new.mkdir() if path.is_dir() else new.write_bytes(path.read_bytes())
    run(config, folder / "sharded", progress=False, resume=True)


def train_half(folder, rank):
    with WatchedExchange():
        run(SMALL.with_values(HALF), folder / "half", progress=False)


def share(folder, rank):
    """Two runs, one of which another process holds when the first of us looks at it."""
    planned = plan_comparison(
        SMALL.with_values({"training.steps": 4}), ["standard"], [0, 1], levels=2
    )
    held = planned[0].folder(folder / "shared")
    lock = FileLock(held / ".lock")
    if rank == 0:
        held.mkdir(parents=True)
        lock.acquire()
    SEEN["tables"] = 0

    def write():
        SEEN["tables"] += 1

    results = run_all(planned, folder / "shared", resume=True, progress=False, after_each=write)
    SEEN["seeds"] = [result.seed for result in results]
    lock.release()


def decide(folder, rank):
    def fail():
        raise FileNotFoundError(f"rank {rank}")

    SEEN["decision"] = decide_on_main(lambda: f"rank {rank}")
    try:
        decide_on_main(fail)
    except FileNotFoundError as error:
        SEEN["error"] = str(error)


def main(folder):
    torch.set_num_threads(1)
    loop._Run, checkpoint.load_file = Watched, watched_load_file
    rank = join_processes().process_index
    everything = {}
    for scenario in (decide, train_new, train_sharded, train_half, share):
        SEEN.clear()
        SEEN.update(reads=[], gathers=[], sums=[])
        scenario(folder, rank)
        everything[scenario.__name__] = {
            key: sorted(set(value)) if key in ("gathers", "sums") else value
            for key, value in SEEN.items()
        }
    (folder / f"seen-{rank}.json").write_text(json.dumps(everything))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
