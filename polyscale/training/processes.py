"""Several processes in one run: joining them, and decisions of the first for all."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

# Accelerate joins several processes on a CPU only with cpu=True.
ON_CPU = not torch.accelerator.is_available()
# Set by torchrun and by the implementations of MPI for their processes.
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

Decision = TypeVar("Decision")


def join_processes() -> PartialState:
    """Join the process group, if a launcher started several processes."""
    _refuse_lone_process(os.environ)
    state = PartialState(cpu=ON_CPU)
    if state.num_processes > 1:
        atexit.unregister(_leave_processes)
        atexit.register(_leave_processes)
    return state


def _leave_processes() -> None:
    """Leave the process group: threads of its backend that are left at exit end the process."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def decide_on_main(decide: Callable[[], Decision]) -> Decision:
    """Return or raise in every process what `decide` returns or raises on the main process.

    Files can change between two reads, so processes that each read them may decide differently.
    Every process must call it.
    """
    state = join_processes()
    if state.num_processes == 1:
        return decide()
    outcome: list[Any] = [None]
    if state.is_main_process:
        try:
            outcome = [(decide(), None)]
        except Exception as error:
            outcome = [(None, error)]
    broadcast_object_list(outcome)
    decision, failure = outcome[0]
    if failure is not None:
        raise failure
    return decision


def _refuse_lone_process(environment: Any) -> None:
    """Refuse the single process that `accelerate launch` starts on a CPU instead of several.

    It sets the address of a process group and leaves starting the other processes to MPI.
    """
    launched = "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment
    if launched and not any(name in environment for name in _WORLD_SIZES):
        raise ValueError(
            "accelerate launch must start several processes, got one: on a CPU it starts no more; "
            "use torchrun --nproc-per-node N -m polyscale.cli ..."
        )
