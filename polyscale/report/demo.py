"""The demo: HKT against standard attention on short ListOps expressions, under one budget."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from polyscale.report.comparison import Comparison
from polyscale.training.compare import plan_comparison, run_all
from polyscale.training.config import RunConfig
from polyscale.training.settings import TrainingSettings

LEVELS = 3

# Tuned for standard attention and used unchanged for HKT.
DEMO = RunConfig(
    task="listops",
    model="standard",
    task_options={"preset": "demo"},
    model_options={
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
    training=TrainingSettings(steps=1_500, learning_rate=1e-3, evaluate_every=100),
)
# Every step of the demo in a few seconds; too short to learn much.
QUICK = replace(
    DEMO,
    task_options={"preset": "demo", "train": 500, "validation": 100, "test": 100},
    training=replace(
        DEMO.training, steps=20, batch_size=32, warmup_steps=5, log_every=5, evaluate_every=10
    ),
)


def run_demo(
    output: Path, *, seed: int = 0, quick: bool = False, command: str = "", progress: bool = True
) -> Comparison:
    """Train both models, write the report into `output` and return the comparison.

    An earlier run stays intact until this one is finished; files that no demo made are not
    touched. Raises OSError if `output` cannot be written.
    """
    config = replace(QUICK if quick else DEMO, data_seed=seed)
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(output))
    output.mkdir(parents=True, exist_ok=True)
    for left in output.glob(".unfinished-*"):  # of a demo that was killed
        shutil.rmtree(left, ignore_errors=True)
    unfinished_files = tempfile.TemporaryDirectory(dir=output, prefix=".unfinished-")
    with unfinished_files as unfinished, _one_thread():
        folder = Path(unfinished)
        planned = plan_comparison(config, ("standard", "hkt"), (seed,), LEVELS)
        comparison = Comparison.from_results(
            run_all(planned, folder, progress=progress), command=command
        )
        comparison.write(folder)
        _move_files(folder, output)
    return comparison


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread during the demo, unless OMP_NUM_THREADS is set.

    A second thread gains little for a model this small, and costs much when a core is busy with
    something else. With one thread the figures do not depend on the number of cores.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _move_files(source: Path, target: Path) -> None:
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
