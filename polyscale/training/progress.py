"""The progress of a run: a bar on a terminal, otherwise a line for each evaluation."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class RunProgress:
    """One line: steps done, time left, training loss, the validation metric."""

    def __init__(self, name: str, steps: int, start: int = 0, *, shown: bool = True) -> None:
        self.name = name
        self.steps = steps
        self.start = start
        self.began = time.monotonic()
        self.console = Console()
        self.lines = shown and not self.console.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("loss {task.fields[loss]}, validation {task.fields[metric]}"),
            console=self.console,
            disable=not (shown and self.console.is_terminal),
        )
        self.task = self.bar.add_task(name, total=steps, completed=start, loss="-", metric="-")

    def __enter__(self) -> RunProgress:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def step(self, step: int) -> None:
        """Show a finished step."""
        self.bar.update(self.task, completed=step)

    def loss(self, loss: float) -> None:
        """Show the training loss."""
        self.bar.update(self.task, loss=f"{loss:.3f}")

    def evaluated(self, step: int, metric: str) -> None:
        """Show a validation metric."""
        self.bar.update(self.task, metric=metric)
        if self.lines:
            pace = (time.monotonic() - self.began) / max(1, step - self.start)
            left = pace * (self.steps - step)
            self.console.print(
                f"{self.name}: step {step} of {self.steps}, validation {metric}, "
                f"{left / 60:.0f} min left",
                highlight=False,
            )
