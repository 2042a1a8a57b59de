"""Finished runs with known numbers, made without training."""

from polyscale.training.result import RunResult


def make_result(model="standard", seed=0, accuracy=0.6, **changes):
    """A run of a short classification task; `changes` replace fields of the record."""
    levels = changes.pop("levels", 3 if model.startswith("hkt") else 1)
    steps = (10, 20, 30, 40)
    values = {
        "task": "listops",
        "model": model,
        "seed": seed,
        "kind": "classification",
        "test": {"loss": 1.1, "accuracy": accuracy},
        "validation": {"loss": 1.0, "accuracy": accuracy + 0.01},
        "best_step": 40,
        "steps": 40,
        "majority_rate": 0.125,
        "parameters": 70_290 + 10 * levels,
        "flops_per_sample": 2e6 if levels == 1 else 2.5e6,
        "seconds": 60.0 if levels == 1 else 75.0,
        "training_seconds": 50.0,
        "samples_per_second": 1234.5,
        "device": "cpu",
        "processes": 1,
        "threads": 2,
        "train_curve": [
            {"step": step, "loss": 2.0 - step / 50 + 0.05 * seed, "learning_rate": 1e-3}
            for step in steps
        ],
        "validation_curve": [
            {"step": 20, "loss": 1.4, "accuracy": 0.4 + 0.02 * seed},
            {"step": 40, "loss": 1.1, "accuracy": accuracy},
        ],
        "level_weights_curve": [
            {"step": step, "weights": [[_weights(levels, step)] * 4] * 2} for step in (0, 20, 40)
        ],
        "accuracy_by": {
            "length": [
                {"low": 3, "high": 10, "count": 250, "accuracy": accuracy + 0.1},
                {"low": 11, "high": 24, "count": 250, "accuracy": accuracy - 0.1},
            ],
            "depth": [
                {"low": depth, "high": depth, "count": 250, "accuracy": accuracy - 0.05 * depth}
                for depth in (1, 2)
            ],
        },
        "config": {
            "task": "listops",
            "model": model,
            "task_options": {"preset": "demo"},
            "model_options": {"hidden_size": 64, "levels": levels},
            "training": {"steps": 40, "batch_size": 64},
            "seed": seed,
            "data_seed": 0,
            "name": model,
        },
        "model_config": {"model_type": "hkt", "levels": levels, "max_position_embeddings": 24},
        "data": {"task": "listops", "seed": 0, "splits": {"train": 900, "test": 500}},
        "example": "[MAX 2 9 ]  =  9",
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "git_commit": None,
        "finished": "2026-01-02T03:04:05+00:00",
        "test_accuracy": 100 * accuracy,
    }
    return RunResult(**{**values, **changes})


def make_language_result(model="standard", seed=0, bits=2.0, **changes):
    """A run of a language task, compared by bits per token."""
    values = {
        "task": "enwik8",
        "kind": "language",
        "test": {"loss": bits * 0.6931, "accuracy": 0.5, "bits_per_token": bits},
        "validation": {"loss": bits * 0.6931, "accuracy": 0.5, "bits_per_token": bits},
        "majority_rate": None,
        "validation_curve": [
            {"step": step, "loss": 1.5, "accuracy": 0.5, "bits_per_token": bits + 1 - step / 40}
            for step in (20, 40)
        ],
        "accuracy_by": {},
        "test_accuracy": None,
    }
    return make_result(model, seed, **{**values, **changes})


def make_results(standard=(0.60, 0.62, 0.61), hkt=(0.66, 0.69, 0.68)):
    """Paired seeds of two models."""
    return [
        *(make_result("standard", seed, accuracy) for seed, accuracy in enumerate(standard)),
        *(make_result("hkt", seed, accuracy) for seed, accuracy in enumerate(hkt)),
    ]


def _weights(levels, step):
    """Equal at first; the fine level grows with the steps."""
    if levels == 1:
        return [1.0]
    fine = 1 / levels + step / 200
    return [fine, *[(1 - fine) / (levels - 1)] * (levels - 1)]
