"""How far a run is: what a checkpoint says besides weights and moments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyscale.training.checkpoint import list_checkpoints, read_state


@dataclass
class RunState:
    """What a run knows besides weights and moments; JSON in a checkpoint."""

    processes: int = 1  # that did them; checkpoints of earlier versions do not say
    step: int = 0  # steps done
    best_step: int = 0
    best: dict[str, float] = field(default_factory=dict)  # validation metrics of the kept state
    evaluations_since_best: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    train_curve: list[dict[str, float]] = field(default_factory=list)
    validation_curve: list[dict[str, float]] = field(default_factory=list)
    level_weights_curve: list[dict[str, Any]] = field(default_factory=list)


def last_checkpoint(output: Path, processes: int) -> tuple[Path | None, RunState]:
    """The checkpoint to go on from, and the state of the run; refuses other batches."""
    checkpoints = list_checkpoints(output)
    if not checkpoints:
        return None, RunState(processes=processes)
    state = RunState(**read_state(checkpoints[-1]))
    if state.processes != processes:
        raise ValueError(
            f"{output} takes {state.processes} processes, as in its first {state.step} steps, got "
            f"{processes}: batch_size is that of one process, so the batches would have another "
            f"size; use torchrun --nproc-per-node {state.processes}, or choose another folder"
        )
    return checkpoints[-1], state
