"""Train a sequence classifier, keep the state best on validation, measure it on the test set."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_model
from torch import Tensor
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging


class LabelledDataset(Protocol):
    """What the training path needs of a split: samples, and all labels at once."""

    labels: Tensor

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Tensor]: ...


class Splits(Protocol):
    """Three splits of one task, such as `polyscale.data.listops.ListOps`."""

    @property
    def train(self) -> LabelledDataset: ...

    @property
    def validation(self) -> LabelledDataset: ...

    @property
    def test(self) -> LabelledDataset: ...


@dataclass(frozen=True)
class TrainingSettings:
    """The budget: AdamW with a linear warm-up and a cosine decay to zero over `steps`.

    >>> TrainingSettings(steps=100, evaluate_every=50).batch_size
    64
    """

    steps: int = 1_000
    batch_size: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    max_grad_norm: float = 1.0
    log_every: int = 20
    evaluate_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} takes at least 1, got {getattr(self, name)}")
        for name in ("weight_decay", "warmup_steps", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} takes at least 0, got {getattr(self, name)}")
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} takes a number above 0, got {getattr(self, name)}")
        if self.evaluate_every > self.steps:
            raise ValueError(
                f"evaluate_every takes at most steps ({self.steps}), got {self.evaluate_every}: "
                "the best state is chosen on validation"
            )


@dataclass(frozen=True)
class TrainPoint:
    """Mean training loss over the steps since the last point."""

    step: int
    loss: float


@dataclass(frozen=True)
class ValidationPoint:
    """Loss and accuracy on the whole validation set."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class TrainingResult:
    """What one run gave; `as_dict` is ready for JSON."""

    name: str
    test_accuracy: float
    validation_accuracy: float  # of the kept state, the best on validation
    best_step: int
    majority_rate: float  # always answering the most frequent training class, on the test set
    parameters: int
    samples_per_second: float  # forward, backward and optimiser; evaluation left out
    seconds: float  # the whole run, with evaluation
    threads: int
    train_curve: tuple[TrainPoint, ...]
    validation_curve: tuple[ValidationPoint, ...]
    level_weights: list[list[list[float]]] | None  # layer, head, level; None if it has none
    settings: TrainingSettings
    model: dict[str, Any]  # the model's configuration

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def train_classifier(
    build: Callable[[], PreTrainedModel],
    data: Splits,
    collate: Callable[..., dict[str, Tensor]],
    settings: TrainingSettings,
    output: Path,
    *,
    name: str = "model",
    progress: bool = True,
) -> TrainingResult:
    """Train what `build` makes, save its best state in `output` and return the figures.

    `build` is called after seeding, so its initial weights belong to the seed. `output` holds a
    model for `from_pretrained` afterwards (config.json and model.safetensors). torch's number of
    threads is left as it is.
    """
    start = time.perf_counter()
    set_seed(settings.seed)
    model = build()
    best = _KeepBest(output)
    stopwatch = _Stopwatch()
    callbacks: list[TrainerCallback] = [best, stopwatch]
    if progress:
        callbacks.append(_ProgressBar(name))
    trainer = Trainer(
        model=model,
        args=_arguments(settings, output),
        data_collator=collate,
        train_dataset=data.train,
        eval_dataset=data.validation,
        compute_metrics=_accuracy,
        preprocess_logits_for_metrics=_predictions,
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    try:
        trainer.train()
    finally:
        for callback in callbacks:
            if isinstance(callback, _ProgressBar):
                callback.close()
    load_model(model, output / "model.safetensors", device=str(model.device))
    history = trainer.state.log_history
    test = trainer.evaluate(data.test, metric_key_prefix="test")
    return TrainingResult(
        name=name,
        test_accuracy=test["test_accuracy"],
        validation_accuracy=best.accuracy,
        best_step=best.step,
        majority_rate=majority_rate(data.train.labels, data.test.labels),
        parameters=sum(weight.numel() for weight in model.parameters()),
        samples_per_second=_samples_seen(len(data.train), settings) / stopwatch.seconds,
        seconds=time.perf_counter() - start,
        threads=torch.get_num_threads(),
        train_curve=tuple(
            TrainPoint(entry["step"], entry["loss"]) for entry in history if "loss" in entry
        ),
        validation_curve=tuple(
            ValidationPoint(entry["step"], entry["eval_loss"], entry["eval_accuracy"])
            for entry in history
            if "eval_accuracy" in entry
        ),
        level_weights=_level_weights(model),
        settings=settings,
        model=model.config.to_diff_dict(),
    )


def majority_rate(train_labels: Tensor, test_labels: Tensor) -> float:
    """Accuracy on the test set of always answering the most frequent training class.

    >>> majority_rate(torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0, 0]))
    0.25
    """
    majority = torch.bincount(train_labels.long()).argmax()
    return float((test_labels == majority).float().mean())


def _arguments(settings: TrainingSettings, output: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(output),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=4 * settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
        lr_scheduler_type="cosine",
        logging_steps=settings.log_every,
        eval_strategy="steps",
        eval_steps=settings.evaluate_every,
        save_strategy="no",  # _KeepBest saves, by safetensors alone
        seed=settings.seed,
        data_seed=settings.seed,
        report_to="none",
        disable_tqdm=True,  # _ProgressBar shows one line for each run
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,
    )


def _predictions(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.argmax(dim=-1)  # [B]


def _accuracy(evaluation: Any) -> dict[str, float]:
    return {"accuracy": float((evaluation.predictions == evaluation.label_ids).mean())}


def _samples_seen(train_size: int, settings: TrainingSettings) -> int:
    """Samples in `steps` batches; the last batch of an epoch can be a small one."""
    steps_per_epoch = -(-train_size // settings.batch_size)
    epochs, rest = divmod(settings.steps, steps_per_epoch)
    return epochs * train_size + rest * settings.batch_size


def _level_weights(model: PreTrainedModel) -> list[list[list[float]]] | None:
    if not hasattr(model, "level_weights"):
        return None
    return [layer.detach().float().cpu().tolist() for layer in model.level_weights()]


class _KeepBest(TrainerCallback):
    """Saves the model whenever its validation accuracy is a new best; the first of equals stays."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.accuracy = -1.0
        self.step = 0

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any, model: Any, **rest: Any
    ) -> None:
        # The test set is measured by the same Trainer once training is over.
        if metrics.get("eval_accuracy", -1.0) > self.accuracy:
            self.accuracy, self.step = metrics["eval_accuracy"], state.global_step
            # Its bar for written files would break up the line of ours.
            shown = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()
            model.save_pretrained(self.output)
            if shown:
                logging.enable_progress_bar()


class _Stopwatch(TrainerCallback):
    """Time spent inside training steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.seconds += time.perf_counter() - self.started


class _ProgressBar(TrainerCallback):
    """One line: steps done, time left, training loss, validation accuracy."""

    def __init__(self, name: str) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}, validation {task.fields[accuracy]}"),
        )
        self.task = self.bar.add_task(name, total=None, loss="-", accuracy="-")

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.bar.update(self.task, total=state.max_steps)
        self.bar.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **rest: Any) -> None:
        if "loss" in logs:
            self.bar.update(self.task, loss=f"{logs['loss']:.3f}")
        if "eval_accuracy" in logs:
            self.bar.update(self.task, accuracy=f"{logs['eval_accuracy']:.1%}")

    def close(self) -> None:
        self.bar.stop()
