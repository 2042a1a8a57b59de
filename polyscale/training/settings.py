"""The settings of a training: everything but the model and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from polyscale.checks import check_choice

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
        learning_rate: the maximum, reached after the warm-up.
        filter_rate: a factor on the learning rate of causal filters, HKT's downsampling.
        schedule: `"cosine"`, `"linear"` or `"constant"`.
        warmup_steps: steps of linear warm-up.
        weight_decay: of matrices; biases, norms and level weights have none.
        max_grad_norm: gradients are clipped to this norm.
        bucket_by_length: batch samples of similar length, for less padding.
        bf16: bfloat16 autocast.
        compile: `torch.compile` the model; runs of the tree encoder (`hsa` on other than language
            tasks) refuse it, as its steps do not get faster.
        shard: shard weights, gradients and moments over the processes (FSDP 2), for models whose
            training does not fit one device.
        log_every: steps between two points of the training curve.
        evaluate_every: steps between two evaluations on the validation set.
        save_every: steps between two checkpoints; 0 for one at every evaluation.
        patience: stop after this many evaluations without a new best; 0 to never stop early.
        snapshots: number of states of the weights to keep over training, for `polyscale analyze`.

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
                raise TypeError(f"{field.name} must be of type {field.type}, got {value!r}")
        for name in ("steps", "batch_size", "accumulate", "log_every", "evaluate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("weight_decay", "warmup_steps", "save_every", "patience", "snapshots"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("learning_rate", "filter_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        check_choice("schedule", self.schedule, SCHEDULES)
        if self.evaluate_every > self.steps:
            raise ValueError(
                f"evaluate_every must be at most steps ({self.steps}), got {self.evaluate_every}: "
                "the best state is chosen on validation"
            )

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of one step, counted from 0, without any state."""
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
        # Also before a checkpoint, so that it need not save losses that are not averaged yet.
        return step % self.log_every == 0 or step == self.steps or self.is_checkpoint(step)

    def is_evaluation(self, step: int) -> bool:
        """Whether the model is evaluated after `step` steps; always after the last."""
        return step % self.evaluate_every == 0 or step == self.steps

    def is_checkpoint(self, step: int) -> bool:
        """Whether a checkpoint is written after `step` steps."""
        return step % (self.save_every or self.evaluate_every) == 0 and step < self.steps

    def is_snapshot(self, step: int) -> bool:
        """Whether the weights after `step` steps are kept, step 0 included."""
        if not self.snapshots:
            return False
        return step in {round(k * self.steps / self.snapshots) for k in range(self.snapshots + 1)}
