"""A small run that the tests of training share; as a script, in a process of its own.

python runs.py FOLDER '{"training.steps": 12}'
"""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from polyscale.training import loop
from polyscale.training.config import RunConfig
from polyscale.training.run import run

SMALL = RunConfig.from_dict(
    {
        "task": "listops",
        "model": "hkt",
        "task_options": {"preset": "demo", "train": 300, "validation": 40, "test": 40},
        "model_options": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "levels": 2,
            "dropout": 0.1,
        },
        "training": {
            "steps": 12,
            "batch_size": 8,
            "warmup_steps": 2,
            "log_every": 1,
            "evaluate_every": 4,
        },
    }
)


class _TellsItsKind(loop._Run):
    """Prints whether the weights are shared out over the processes, and may stop on the way."""

    stop_at = -1

    def _step(self, step):
        if step == self.stop_at:
            sys.exit(3)
        return super()._step(step)

    def go(self, bar):
        print(
            "sharded" if any(isinstance(p, DTensor) for p in self.model.parameters()) else "whole"
        )
        super().go(bar)


if __name__ == "__main__":
    torch.set_num_threads(1)
    loop._Run = _TellsItsKind
    if len(sys.argv) > 3:
        _TellsItsKind.stop_at = int(sys.argv[3])
    run(
        SMALL.with_values(json.loads(sys.argv[2])),
        Path(sys.argv[1]),
        resume=True,
        progress=False,
    )
