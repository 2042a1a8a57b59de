"""Predictions of a finished run on its test set, for metrics other than accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from polyscale._files import write_json
from polyscale.data.tasks import TaskData
from polyscale.training.builders import model_for_task
from polyscale.training.run import load_data, load_model, read_config

PREDICTIONS_NAME = "predictions.json"
_BATCH = 128


def macro_f1(predictions: Tensor, labels: Tensor, classes: int) -> float:
    """F1 averaged over the classes that occur in the labels or in the predictions.

    >>> macro_f1(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1]), 3)
    0.7333333492279053
    """
    if predictions.shape != labels.shape or labels.dim() != 1 or not len(labels):
        raise ValueError(
            f"predictions and labels must have one class for each sample, got shapes "
            f"{list(predictions.shape)} and {list(labels.shape)}"
        )
    pairs = torch.bincount(labels * classes + predictions, minlength=classes * classes)
    table = pairs.view(classes, classes).float()  # [labels, predictions]
    total = table.sum(0) + table.sum(1)  # [classes]
    found = total > 0
    return float((2 * table.diagonal()[found] / total[found]).mean())


def read_macro_f1(folder: Path, data_dir: Path | None, loaded: dict[str, TaskData]) -> float | None:
    """Macro-F1 on the test set of the run in `folder`; None without its model or predictions.

    Predictions are saved beside the model, so that later tables need neither model nor data.
    `loaded` caches data between calls.
    """
    path = folder / PREDICTIONS_NAME
    if not path.is_file():
        if not (folder / "model.safetensors").is_file():
            return None
        write_json(path, _predict(folder, data_dir, loaded))
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        answers, labels = torch.tensor(record["predictions"]), torch.tensor(record["labels"])
        return macro_f1(answers, labels, record["classes"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must hold predictions ({error}); delete it") from error


@torch.no_grad()
def _predict(folder: Path, data_dir: Path | None, loaded: dict[str, TaskData]) -> dict[str, object]:
    config = read_config(folder)
    key = repr((config.task, config.task_options, config.data_seed))
    if key not in loaded:
        loaded.clear()  # one set of data at a time
        loaded[key] = load_data(config, data_dir)
    chosen = model_for_task(config.model, config.model_options, loaded[key])
    model = load_model(folder, chosen.build).eval()
    test = chosen.data.test
    answers = torch.zeros(len(test), dtype=torch.int64)
    for indices in test.lengths.argsort(stable=True).split(_BATCH):
        batch = chosen.data.collate([test[int(index)] for index in indices])
        answers[indices] = model(**batch).logits.argmax(-1)
    assert test.labels is not None
    return {
        "classes": chosen.data.num_labels,
        "labels": test.labels.tolist(),
        "predictions": answers.tolist(),
    }
