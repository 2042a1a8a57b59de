"""Every task can be learnt by heart: data, labels, loss, metric and model fit together."""

from dataclasses import replace

import pytest
import torch

from polyscale.data.splits import Split
from polyscale.data.tasks import TASKS, TREE_TASKS, load_task
from polyscale.training import loop
from polyscale.training.config import RunConfig
from polyscale.training.run import run
from tests.data import samples

GENERATED = {"train": 40, "validation": 5, "test": 5}
OPTIONS = {
    "listops": {"preset": "demo", **GENERATED},
    "mqar": {"length": 32, "pairs": 4, **GENERATED},
    "copy": {"length": 12, **GENERATED},
    "enwik8": {"length": 64},
}


class FirstFew(Split):
    """The first samples of a split; images are cut to their first pixels, to be quick."""

    def __init__(self, split, count=16, length=96):
        self.split, self.length = split, length
        self.lengths = split.lengths[:count].clamp(max=length)
        self.labels = None if split.labels is None else split.labels[:count]
        self.groups = {name: values[:count] for name, values in split.groups.items()}

    def _sample(self, index):
        sample = self.split[index]
        return {
            name: value[: self.length] if value.dim() else value for name, value in sample.items()
        }

    def _text(self, index):
        return self.split.text(index)


@pytest.mark.parametrize(
    ("task", "model"),
    [
        *(
            (task, model)
            for task in TASKS
            for model in ("standard", "hkt")
            if task not in TREE_TASKS
        ),
        ("listops", "hsa"),
        ("enwik8", "hsa"),
    ],
)
def test_a_few_samples_are_learnt_by_heart(task, model, tmp_path, monkeypatch):
    folder = samples.make_folder(tmp_path / "data", monkeypatch)
    # Images of noise have nothing to learn but noise: these are the brighter the higher the class.
    pixels, classes = samples.images(100, 0)
    bright = (pixels // 10 + 22 * classes[:, None]).astype(pixels.dtype)
    samples.write_images(folder, x_train=bright)
    samples.accept(monkeypatch, folder)
    options = OPTIONS.get(task, {})
    data = load_task(task, folder, **options)
    few = FirstFew(data.train)
    data = replace(data, train=few, validation=few, test=few)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = RunConfig.from_dict(
        {
            "task": task,
            "model": model,
            "task_options": options,
            "model_options": sizes | ({"levels": 3} if model == "hkt" else {}),
            "training": {
                "steps": 400,
                "batch_size": 16,
                "learning_rate": 5e-3,
                "warmup_steps": 10,
                "evaluate_every": 10,
                "save_every": 400,
            },
        }
    )
    # What is known by heart needs no more steps.
    known = lambda self: self.state.best.get("accuracy", 0.0) > 0.95  # noqa: E731
    monkeypatch.setattr(loop._Run, "_is_patience_over", known)
    result = run(config, tmp_path / "run", data=data, progress=False)
    assert result.test["accuracy"] > 0.95
    assert result.majority_rate is None or result.majority_rate < 0.9
    assert result.kind == ("language" if data.num_labels is None else "classification")
    assert torch.isfinite(torch.tensor([p["loss"] for p in result.train_curve])).all()
