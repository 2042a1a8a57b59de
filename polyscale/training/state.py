"""The state of a run in a checkpoint, besides weights and moments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyscale.training.checkpoint import list_checkpoints, read_state


@dataclass
class RunState:
    """The state of a run besides weights and moments; JSON in a checkpoint."""

    processes: int = 1  # of this run; not in checkpoints of earlier versions
    step: int = 0  # finished steps
    best_step: int = 0
    best: dict[str, float] = field(default_factory=dict)  # validation metrics of the best state
    evaluations_since_best: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    train_curve: list[dict[str, float]] = field(default_factory=list)
    validation_curve: list[dict[str, float]] = field(default_factory=list)
    level_weights_curve: list[dict[str, Any]] = field(default_factory=list)


def last_checkpoint(output: Path, processes: int) -> tuple[Path | None, RunState]:
    """The checkpoint to resume from and the state of the run; refuses other batch sizes."""
    checkpoints = list_checkpoints(output)
    if not checkpoints:
        return None, RunState(processes=processes)
    state = RunState(**read_state(checkpoints[-1]))
    if state.processes != processes:
        raise ValueError(
            f"{output} must be resumed with {state.processes} processes, as in its first "
            f"{state.step} steps, got {processes}: batch_size is that of one process, so batches "
            f"would have another size; use torchrun --nproc-per-node {state.processes}, or choose "
            "another folder"
        )
    return checkpoints[-1], state
