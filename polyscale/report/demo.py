"""The demo: HKT against standard attention on short ListOps expressions, under one budget."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from polyscale.data import listops
from polyscale.models import HKTConfig, HKTForSequenceClassification
from polyscale.ops.hkt.cost import score_flop_ratio
from polyscale.report.comparison import Comparison, installed_versions
from polyscale.report.html import comparison_page
from polyscale.training.classification import TrainingSettings, train_classifier

LEVELS = 3
REPORT_NAME = "report.html"
RESULTS_NAME = "results.json"


@dataclass(frozen=True)
class DemoPreset:
    """Data, model and budget; the two models differ in `levels` alone."""

    data: listops.ListOpsConfig
    model: dict[str, Any]
    training: TrainingSettings


# Tuned for standard attention and used unchanged for HKT.
DEMO = DemoPreset(
    data=listops.DEMO,
    model={
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "pooling": "mean",
        "positions": "learned",
        "dropout": 0.0,
    },
    training=TrainingSettings(steps=1_500, learning_rate=1e-3, evaluate_every=100),
)
# Every step of the demo in a few seconds; too short to learn much.
QUICK = replace(
    DEMO,
    data=replace(listops.DEMO, train=500, validation=100, test=100),
    training=replace(
        DEMO.training, steps=20, batch_size=32, warmup_steps=5, log_every=5, evaluate_every=10
    ),
)


def run_demo(
    output: Path, *, seed: int = 0, quick: bool = False, command: str = "", progress: bool = True
) -> Comparison:
    """Train both models, write the report into `output` and return the comparison.

    A finished run already there stays whole until this one is finished; files that no demo made
    are left alone. Raises OSError if `output` cannot be written.
    """
    preset = QUICK if quick else DEMO
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(output))
    output.mkdir(parents=True, exist_ok=True)
    unfinished_files = tempfile.TemporaryDirectory(dir=output, prefix=".unfinished-")
    with unfinished_files as unfinished, _one_thread():
        folder = Path(unfinished)
        comparison = _compare(preset, seed, folder, command, progress)
        comparison.write_json(folder / RESULTS_NAME)
        (folder / REPORT_NAME).write_text(comparison_page(comparison), encoding="utf-8")
        _move_files(folder, output)
    return comparison


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread for the time of the demo, unless OMP_NUM_THREADS asks for another number.

    A second thread gains a model this small little, and costs it a lot whenever a core is busy with
    something else; with one, the figures do not depend on the number of cores either.
    """
    before = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _compare(
    preset: DemoPreset, seed: int, folder: Path, command: str, progress: bool
) -> Comparison:
    data = listops.make_listops(replace(preset.data, seed=seed))
    settings = replace(preset.training, seed=seed)
    runs = {"standard": ("Standard attention", 1), "hkt": (f"HKT ({LEVELS} levels)", LEVELS)}
    results = tuple(
        train_classifier(
            partial(_build, preset, levels),
            data,
            listops.collate,
            settings,
            folder / directory,
            name=name,
            progress=progress,
        )
        for directory, (name, levels) in runs.items()
    )
    length = preset.data.max_length
    return Comparison(
        title="HKT and standard attention on ListOps",
        results=results,
        score_flop_ratios=tuple(score_flop_ratio(levels, length) for _, levels in runs.values()),
        data={"task": "ListOps", **asdict(data.config)},
        example=f"{data.test.text(0)}  =  {int(data.test.labels[0])}",
        seed=seed,
        command=command,
        versions=installed_versions(),
    )


def _build(preset: DemoPreset, levels: int) -> HKTForSequenceClassification:
    config = HKTConfig(
        vocab_size=len(listops.VOCABULARY),
        num_labels=listops.NUM_CLASSES,
        pad_token_id=listops.PAD_ID,
        eos_token_id=None,
        max_position_embeddings=preset.data.max_length,
        causal=False,
        levels=levels,
        **preset.model,
    )
    return HKTForSequenceClassification(config)


def _move_files(source: Path, target: Path) -> None:
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
