"""What to run: the table of the HKT paper and its ablations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyscale.training.compare import PlannedRun
from polyscale.training.config import RunConfig
from polyscale.training.presets import plain_hkt_config, preset_config

# What `preset_config` calls the size of each preset.
PRESETS = {"cpu": "small", "paper": "paper"}
SEEDS = (0, 1, 2)

# In the order of the runs, largest gain in the paper first.
HKT_TASKS = ("imdb-char", "listops", "scifar10")

# What each ablation changes in plain HKT with three levels, or in `standard`, which is HKT with one
# level. Plain HKT is the same on all tasks; its runs are called `hkt` or `hkt-plain`.
_ABLATIONS: dict[str, dict[str, Any]] = {
    "hkt-2-levels": {"levels": 2},
    "hkt-4-levels": {"levels": 4},
    "hkt-equal-weights": {"level_weights": [1 / 3, 1 / 3, 1 / 3]},
    "hkt-level-1-alone": {"level_weights": [0.0, 1.0, 0.0]},
    "hkt-level-2-alone": {"level_weights": [0.0, 0.0, 1.0]},
    "hkt-mean-downsampling": {"downsampling": "mean"},
    "hkt-own-projections": {"shared_projections": False},
    "hkt-depthwise": {"downsampling": "depthwise"},
    "hkt-width-2": {"downsampling_width": 2},
    "hkt-fine-values": {"values": "fine"},
    "standard-filter": {"downsampling": "dense", "filter_width": 4},
    "hkt-filter": {"filter_width": 4, "values": "fine"},
}
# A filter at level 0, as wide as those between levels, with and without levels: it separates the
# gain of convolution from that of scale.
_FILTERS = ("standard-filter", "hkt-filter")


def plan_hkt(size: str) -> list[PlannedRun]:
    """The paired seeds of the three tasks, those of plain HKT where it differs, and the ablations.

    `size` names a preset of `preset_config`. The size "paper" has all ablations with every seed;
    smaller ones have them with one seed on the first task, and those of the filter on ListOps.

    >>> len(plan_hkt("small")), len(plan_hkt("paper"))
    (40, 126)
    """
    everything = size == "paper"
    main = [
        PlannedRun(task, preset_config(task, model, size, seed=seed))
        for task in HKT_TASKS
        for seed in SEEDS
        for model in ("standard", "hkt")
    ]
    plain = [
        PlannedRun(task, plain_hkt_config(task, size, seed=seed))
        for task in HKT_TASKS
        for seed in SEEDS
    ]
    ablations = [
        PlannedRun(task, _ablation(task, name, change, size, seed))
        for task in HKT_TASKS
        for seed in (SEEDS if everything else SEEDS[:1])
        for name, change in _ABLATIONS.items()
        if everything or task == HKT_TASKS[0] or (task == "listops" and name in _FILTERS)
    ]
    known = [run.config for run in main]
    return [
        *main,
        *(run for run in plain if run.config not in known),
        *(run for run in ablations if replace(run.config, name="hkt") not in known),
    ]


def _ablation(task: str, name: str, change: dict[str, Any], size: str, seed: int) -> RunConfig:
    if name.startswith("standard"):
        config = preset_config(task, "standard", size, seed=seed)
    else:
        config = plain_hkt_config(task, size, seed=seed)
    return replace(config, name=name, model_options={**config.model_options, **change})
