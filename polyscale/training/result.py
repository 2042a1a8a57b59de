"""The result of a run, from which tables, figures and statistics are made."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

RESULT_NAME = "result.json"
FORMAT = 1


@dataclass(frozen=True)
class RunResult:
    """One finished run; `as_dict` gives JSON and `read_result` reads it.

    Accuracies in `test`, `validation` and the curves are from 0 to 1; `test_accuracy`, the figure
    of the tables, is in percent.
    """

    task: str
    model: str  # "standard", "hkt", "hsa", or a variant's name such as "hkt-mean"
    seed: int
    kind: str  # "classification" or "language"
    test: dict[str, float]  # loss; accuracy; bits_per_token for language
    validation: dict[str, float]  # the same metrics of the state that is best on validation
    best_step: int
    steps: int  # finished; fewer than configured after early stopping
    majority_rate: float | None  # test accuracy of always predicting the majority class of train
    parameters: int
    flops_per_sample: float  # one forward pass of the longest test sample, counted
    seconds: float  # of the whole run with evaluation, over all resumptions
    training_seconds: float  # inside training steps
    samples_per_second: float  # of training steps
    device: str
    processes: int  # each has batch_size * accumulate samples of a step
    threads: int
    train_curve: list[dict[str, float]]  # step, loss (mean since the last point), learning_rate
    validation_curve: list[dict[str, float]]  # step, loss, accuracy, ...
    level_weights_curve: list[dict[str, Any]]  # step, weights [layer][head][level]; [] if none
    accuracy_by: dict[str, list[dict[str, float]]]  # group -> low, high, count, accuracy
    config: dict[str, Any]  # the whole configuration, for `polyscale train CONFIG`
    model_config: dict[str, Any]
    data: dict[str, Any]
    example: str
    versions: dict[str, str]
    git_commit: str | None
    finished: str  # date and time, UTC
    test_accuracy: float | None = None  # percent
    format: int = field(default=FORMAT)

    @property
    def metric(self) -> str:
        """The metric by which runs of this kind are compared."""
        return "accuracy" if self.kind == "classification" else "bits_per_token"

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "accuracy"

    @property
    def score(self) -> float:
        """The metric on the test set, accuracy in percent."""
        return 100 * self.test["accuracy"] if self.metric == "accuracy" else self.test[self.metric]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_result(path: Path) -> RunResult:
    """Read the result of a run; errors name the file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must be a complete JSON file: {error}") from error
    names = {f.name for f in fields(RunResult)}
    if not isinstance(record, dict) or record.get("format") != FORMAT or set(record) != names:
        raise ValueError(f"{path} must be the result of a run (format {FORMAT})")
    return RunResult(**record)
