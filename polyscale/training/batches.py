"""The samples of each step, as a function of the seed and the step: resuming needs no state."""

from __future__ import annotations

import torch
from torch import Tensor

# Samples are sorted by length within pools of this many steps, and the steps of a pool shuffled.
_STEPS_PER_POOL = 50


class BatchPlan:
    """Batches in a new random order for each epoch; an incomplete last batch is dropped.

    `step_size` is the number of samples of an optimiser step, over all processes and backward
    passes.

    >>> plan = BatchPlan(torch.tensor([5, 5, 5, 5, 5]), step_size=2, seed=0)
    >>> len(plan.step(0)), plan.steps_per_epoch
    (2, 2)
    """

    def __init__(
        self, lengths: Tensor, step_size: int, seed: int, *, bucket_by_length: bool = False
    ) -> None:
        if not 1 <= step_size <= len(lengths):
            raise ValueError(
                f"batch_size x accumulate x processes must be from 1 to {len(lengths)}, the number "
                f"of training samples, got {step_size}"
            )
        self.lengths = lengths
        self.step_size = step_size
        self.seed = seed
        self.bucket_by_length = bucket_by_length
        self.steps_per_epoch = len(lengths) // step_size
        self._epoch = -1
        self._order = torch.zeros(0, dtype=torch.int64)

    def step(self, step: int) -> list[int]:
        """Indices of the samples of a step, counted from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._make_order(epoch)
        return self._order[place * self.step_size : (place + 1) * self.step_size].tolist()

    def share(self, step: int, *, process: int, processes: int, accumulate: int) -> list[list[int]]:
        """The samples of each backward pass of one process in a step."""
        indices = self.step(step)
        size = self.step_size // (processes * accumulate)
        parts = [indices[start : start + size] for start in range(0, len(indices), size)]
        return parts[process::processes]

    def _make_order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        order = torch.randperm(len(self.lengths), generator=generator)
        order = order[: self.steps_per_epoch * self.step_size]
        if not self.bucket_by_length:
            return order
        pooled = []
        for pool in order.split(_STEPS_PER_POOL * self.step_size):
            by_length = pool[self.lengths[pool].argsort(stable=True)]
            steps = by_length.view(-1, self.step_size)
            pooled.append(steps[torch.randperm(len(steps), generator=generator)].flatten())
        return torch.cat(pooled)


def mix_seed(seed: int, *numbers: int) -> int:
    """One seed from several numbers; close numbers give unrelated seeds.

    >>> mix_seed(0, 1) != mix_seed(1, 0)
    True
    """
    state = seed
    for number in numbers:
        # splitmix64
        state = (state * 0x9E3779B97F4A7C15 + number + 1) % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state % 2**63
