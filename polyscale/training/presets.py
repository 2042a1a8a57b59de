"""Sizes and budgets for each task: the presets `tiny`, `small` and `paper`.

`tiny` takes less than a minute, to check that everything works. `small` trains on a laptop in
minutes to an hour; `polyscale reproduce --preset cpu` uses it. `paper` is for a GPU: the papers'
tasks at their full length, with sizes chosen by this project, because the papers' are not known.
Budgets are tuned for standard attention and used unchanged for the other models.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyscale.checks import check_choice
from polyscale.data.own.tasks import DOCUMENTS, LANGUAGE, PIXELS, TEXTS
from polyscale.data.tasks import OWN_TASKS, TASKS, is_tree_task
from polyscale.training.config import MODELS, RunConfig
from polyscale.training.settings import TrainingSettings

PRESETS = ("tiny", "small", "paper")
LEVELS = 3

_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    "small": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "paper": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "dropout": 0.1},
}
# As in the HSA paper: one layer of 3 heads, d = 128. Heads have equal widths, hence 126 = 3 x 42;
# `paper` has 128 for each head, close to the 1.2 M parameters of the paper.
_TREE_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 3},
    "small": {
        "hidden_size": 126,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 252,
        "dropout": 0.1,
    },
    "paper": {
        "hidden_size": 384,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 384,
        "dropout": 0.1,
    },
}
# Options of the table of the HKT paper, chosen on validation data (experiments/hkt/NOTES.md):
# shared ones are the best for standard attention, those of HKT the best for its levels.
_TABLE_SHARED: dict[str, Any] = {"positions": "rotary", "initializer_range": 0.1}
_TABLE_SIZES: dict[tuple[str, str], dict[str, Any]] = {
    ("listops", "small"): {},
    ("imdb-char", "small"): {
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "causal": True,
        "local_start": 1.0,
    },
    ("scifar10", "small"): {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "causal": True,
        "positions": "learned",
    },
}
_TABLE_HKT: dict[str, Any] = {
    "levels": LEVELS,
    "values": "merged",
    "downsampling": "dense",
    "downsampling_width": 4,
}
# On IMDB the gain comes from combining adjacent bytes at level 0; an image has coarser structure.
_TABLE_HKT_BY_TASK: dict[str, dict[str, Any]] = {
    "imdb-char": {"values": "fine", "filter_width": 4},
    "scifar10": {"levels": 5},
}
# Filters are initialised as means. On ListOps, with the highest learning rate, smaller steps are
# better for them; on sequential CIFAR-10 they are equally good.
_HKT_TRAINING: dict[tuple[str, str], dict[str, Any]] = {
    ("listops", "small"): {"filter_rate": 0.25},
    ("scifar10", "small"): {"filter_rate": 0.25},
}
_SMALL_TEXTS = {"embedding": "learned", "train": 2_000, "validation": 200, "test": 200}
# A user's own data have the options and the budget of the task that is most like them; what
# follows from their number is set by `plan_own_run`.
_LIKE = {TEXTS: "imdb-char", LANGUAGE: "enwik8", DOCUMENTS: "imdb-words", PIXELS: "scifar10"}
_TINY_TRAINING = {
    "steps": 40,
    "batch_size": 16,
    "warmup_steps": 5,
    "log_every": 10,
    "evaluate_every": 20,
}
# Options of the task, and of the training, that differ from the defaults.
_TASK_OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("listops", "tiny"): {"preset": "demo", "train": 2_000, "validation": 200, "test": 200},
    # Shorter and shallower than LRA's, so that small models learn more than to guess from the
    # outermost operator; the test set is large enough to resolve two points.
    ("listops", "small"): {"preset": "t512", "min_length": 16, "max_depth": 4, "test": 10_000},
    ("listops", "paper"): {"preset": "t512"},
    ("imdb-char", "small"): {"length": 512},
    ("mqar", "tiny"): {"train": 2_000, "validation": 200, "test": 200},
    ("copy", "tiny"): {"train": 2_000, "validation": 200, "test": 200},
    ("imdb-words", "tiny"): _SMALL_TEXTS,
    ("imdb-words", "small"): {"train": 8_000, "validation": 1_000, "test": 4_000},
    ("agnews-words", "tiny"): _SMALL_TEXTS,
    ("agnews-words", "small"): {"train": 16_000, "validation": 1_000},
    ("sst2-words", "tiny"): _SMALL_TEXTS,
    ("sst2-words", "small"): {"train": 32_000, "validation": 2_000},
    ("coco18", "tiny"): {"embedding": "learned"},
}
# 30 epochs of batches of 64; the learning rate is that of the paper.
_HSA_PAPER: dict[str, Any] = {"batch_size": 64, "learning_rate": 2e-5}
_TRAINING: dict[tuple[str, str], dict[str, Any]] = {
    ("listops", "small"): {
        "steps": 6_000,
        "batch_size": 64,
        "bucket_by_length": True,
        "learning_rate": 2e-3,
    },
    ("listops", "paper"): {"steps": 30_000, "batch_size": 64, "bucket_by_length": True},
    # Evaluating the 5,000 validation images takes as long as 100 steps.
    ("scifar10", "small"): {"steps": 3_000, "batch_size": 16, "evaluate_every": 500},
    ("scifar10", "paper"): {"steps": 45_000, "batch_size": 64},
    ("imdb-char", "small"): {
        "steps": 2_800,
        "batch_size": 32,
        "bucket_by_length": True,
        "evaluate_every": 280,
    },
    ("imdb-char", "paper"): {"steps": 20_000, "batch_size": 32},
    ("agnews", "small"): {"steps": 4_000, "batch_size": 32},
    ("agnews", "paper"): {"steps": 20_000, "batch_size": 64},
    ("sst2", "small"): {"steps": 4_000, "batch_size": 64},
    ("sst2", "paper"): {"steps": 20_000, "batch_size": 64},
    ("enwik8", "small"): {"steps": 4_000, "batch_size": 16},
    ("enwik8", "paper"): {"steps": 100_000, "batch_size": 32},
    ("mqar", "small"): {"steps": 4_000, "batch_size": 64},
    ("mqar", "paper"): {"steps": 20_000, "batch_size": 128},
    ("copy", "small"): {"steps": 3_000, "batch_size": 64},
    ("copy", "paper"): {"steps": 10_000, "batch_size": 64},
    ("imdb-words", "small"): {"steps": 250, "batch_size": 32, "evaluate_every": 50},
    ("imdb-words", "paper"): _HSA_PAPER | {"steps": 10_500},
    ("agnews-words", "small"): {"steps": 400, "batch_size": 64, "evaluate_every": 100},
    ("agnews-words", "paper"): _HSA_PAPER | {"steps": 15_500},
    ("sst2-words", "small"): {"steps": 600, "batch_size": 64, "evaluate_every": 150},
    ("sst2-words", "paper"): _HSA_PAPER | {"steps": 30_000},
    ("coco18", "small"): {"steps": 400, "batch_size": 64, "evaluate_every": 100},
    ("coco18", "paper"): _HSA_PAPER | {"steps": 4_600},
}


def preset_config(
    task: str,
    model: str,
    preset: str = "small",
    *,
    seed: int = 0,
    levels: int | None = None,
) -> RunConfig:
    """The configuration of a preset; `levels` is for the model `hkt`.

    >>> preset_config("copy", "hkt", "tiny").model_options["levels"]
    3
    """
    for option, value, known in (
        ("task", task, (*TASKS, *OWN_TASKS)),
        ("model", model, MODELS),
        ("preset", preset, PRESETS),
    ):
        check_choice(option, value, known)
    options = dict(_TREE_SIZES[preset] if is_tree_task(task) else _SIZES[preset])
    like = _LIKE.get(task, task)
    in_table = (like, preset) in _TABLE_SIZES and model in ("standard", "hkt")
    if in_table:
        options |= _TABLE_SHARED | _TABLE_SIZES[like, preset]
    if task == LANGUAGE:
        options["positions"] = "rotary"  # a prompt and its answer may be longer than a window
    if model == "hkt":
        options["levels"] = LEVELS
        options |= _TABLE_HKT | _TABLE_HKT_BY_TASK.get(like, {}) if in_table else {}
        options |= {} if levels is None else {"levels": levels}
    elif levels is not None:
        raise ValueError(f"levels must be given with the model 'hkt' only, got it with {model!r}")
    training = _TINY_TRAINING if preset == "tiny" else _with_pace(_TRAINING[like, preset])
    if model == "hkt":
        training = training | _HKT_TRAINING.get((like, preset), {})
    return RunConfig(
        task=task,
        model=model,
        task_options=dict(_TASK_OPTIONS.get((task, preset), {})),
        model_options=options,
        training=TrainingSettings(**training),
        seed=seed,
    )


def plain_hkt_config(task: str, preset: str = "small", *, seed: int = 0) -> RunConfig:
    """The HKT that is the same on all tasks: ablations change one option of it.

    >>> plain_hkt_config("imdb-char").model_options["values"]
    'merged'
    """
    config = preset_config(task, "hkt", preset, seed=seed)
    own = _TABLE_HKT_BY_TASK.get(task, {})
    training = preset_config(task, "standard", preset).training
    if (task, preset) not in _TABLE_SIZES or not (own or training != config.training):
        return config
    options = {name: value for name, value in config.model_options.items() if name not in own}
    return replace(config, name="hkt-plain", model_options=options | _TABLE_HKT, training=training)


def _with_pace(training: dict[str, Any]) -> dict[str, Any]:
    """Warm-up over 5 % of the steps, 20 evaluations, 100 points of the training curve."""
    steps = training["steps"]
    return {
        "warmup_steps": steps // 20,
        "log_every": max(1, steps // 100),
        "evaluate_every": steps // 20,
    } | training
