"""The budget of a run: everything that decides a training besides the model and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "str": (str,),
    "float": (int, float),
}
SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True)
class TrainingSettings:
    """AdamW with a linear warm-up, then a schedule that ends at zero (or stays constant).

    Args:
        steps: optimiser steps.
        batch_size: samples of one process and one backward pass.
        accumulate: backward passes for each step; a step sees `batch_size * accumulate` samples
            of every process.
        learning_rate: the highest one, reached after the warm-up.
        filter_rate: what the learning rate of causal filters, HKT's downsampling, is multiplied by.
        schedule: `"cosine"`, `"linear"` or `"constant"`.
        warmup_steps: steps of linear warm-up.
        weight_decay: on matrices alone; biases, norms and level weights have none.
        max_grad_norm: gradients are clipped to this norm.
        bucket_by_length: batches of samples of about the same length, for less padding.
        bf16: bfloat16 autocast.
        compile: `torch.compile` the model.
        shard: share weights, gradients and moments out over the processes (FSDP 2), for models
            whose training does not fit one device.
        log_every: steps between two points of the training curve.
        evaluate_every: steps between two looks at the validation set.
        save_every: steps between two checkpoints; 0 for at every evaluation.
        patience: stop after this many evaluations without a new best; 0 for never.
        snapshots: how many states of the weights to keep over training, for `polyscale analyze`.

    >>> settings = TrainingSettings(steps=100, warmup_steps=10, learning_rate=1.0)
    >>> settings.learning_rate_at(4), settings.learning_rate_at(9), settings.learning_rate_at(55)
    (0.5, 1.0, 0.5)
    """

    steps: int = 1_000
    batch_size: int = 64
    accumulate: int = 1
    learning_rate: float = 1e-3
    filter_rate: float = 1.0
    schedule: str = "cosine"
    warmup_steps: int = 50
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    bucket_by_length: bool = False
    bf16: bool = False
    compile: bool = False
    shard: bool = False
    log_every: int = 20
    evaluate_every: int = 100
    save_every: int = 0
    patience: int = 0
    snapshots: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            wanted = _TYPES[str(field.type)]
            if not isinstance(value, wanted) or (field.type != "bool" and isinstance(value, bool)):
                raise TypeError(f"{field.name} takes a value of type {field.type}, got {value!r}")
        for name in ("steps", "batch_size", "accumulate", "log_every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} takes at least 1, got {getattr(self, name)}")
        for name in ("weight_decay", "warmup_steps", "save_every", "patience", "snapshots"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} takes at least 0, got {getattr(self, name)}")
        for name in ("learning_rate", "filter_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} takes a number above 0, got {getattr(self, name)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule takes one of {SCHEDULES}, got {self.schedule!r}")
        if self.evaluate_every > self.steps:
            raise ValueError(
                f"evaluate_every takes at most steps ({self.steps}), got {self.evaluate_every}: "
                "the best state is chosen on validation"
            )

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of one step, counted from 0: no state to save, nothing to drift."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        if self.schedule == "linear":
            return self.learning_rate * (1 - done)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    def is_log(self, step: int) -> bool:
        """Whether the training curve gets a point after `step` steps."""
        # Before a checkpoint too: then no loss waits to be averaged, and none has to be saved.
        return step % self.log_every == 0 or step == self.steps or self.is_checkpoint(step)

    def is_evaluation(self, step: int) -> bool:
        """Whether the validation set is looked at after `step` steps; always after the last."""
        return step % self.evaluate_every == 0 or step == self.steps

    def is_checkpoint(self, step: int) -> bool:
        """Whether a checkpoint is written after `step` steps."""
        return step % (self.save_every or self.evaluate_every) == 0 and step < self.steps

    def is_snapshot(self, step: int) -> bool:
        """Whether the weights after `step` steps are kept; the start (step 0) is one of them."""
        if not self.snapshots:
            return False
        return step in {round(k * self.steps / self.snapshots) for k in range(self.snapshots + 1)}
