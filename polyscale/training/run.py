"""One run from a configuration to a result, in a folder that says what it holds.

config.yaml          the configuration, for `polyscale train config.yaml`
log.jsonl            every point of the curves; also in `tensorboard/`
model.safetensors    the state best on validation, with config.json, for `from_pretrained`
tokenizer.json       the tokenizer of the task, with tokenizer_config.json
snapshots/           states over training, with `snapshots`
checkpoint-000500/   during the run
result.json          when the run is finished
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PreTrainedModel

import polyscale
from polyscale._files import write_json, write_text
from polyscale.checks import check_choice
from polyscale.cost.forward import count_forward_flops
from polyscale.data.tasks import TaskData, load_task
from polyscale.training.builders import model_for_task
from polyscale.training.checkpoint import list_checkpoints
from polyscale.training.config import RunConfig
from polyscale.training.evaluation import accuracy_by, evaluate
from polyscale.training.locks import LOCK_NAME
from polyscale.training.loop import Trained, quiet_transformers, remove_checkpoints, train
from polyscale.training.processes import ON_CPU, decide_on_main, join_processes
from polyscale.training.result import RESULT_NAME, RunResult, read_result

CONFIG_NAME = "config.yaml"


class RunInUseError(FileExistsError):
    """The run is locked by another process."""


def run(
    config: RunConfig,
    output: Path,
    *,
    data_dir: Path | None = None,
    data: TaskData | None = None,
    resume: bool = False,
    progress: bool = True,
) -> RunResult:
    """Train and evaluate by `config`, and write everything into `output`.

    With `resume`, an unfinished run in `output` continues from its last checkpoint and the result
    of a finished one is returned; without it, a folder that holds a run is an error. `data` is the
    task of `config`, if it is loaded already.

    With several processes the first one reads the folder and decides for all; a run locked by
    others raises a RunInUseError in each.
    """
    with _locked_run(config, output, resume=resume) as found:
        if found is not None:
            return found
        if data is None:
            main = join_processes().is_main_process
            data = load_data(config, data_dir, progress=progress and main)
        chosen = model_for_task(config.model, config.model_options, data)
        trained = train(
            chosen.build,
            chosen.data,
            config.training,
            config.seed,
            output,
            name=f"{config.name}, seed {config.seed}",
            progress=progress,
        )

        def conclude() -> RunResult:
            model = load_model(output, chosen.build)
            result = _result(config, chosen.data, trained, model)
            write_json(output / RESULT_NAME, result.as_dict())
            remove_checkpoints(output)
            return result

        return decide_on_main(conclude)


def evaluate_run(
    folder: Path, *, split: str = "test", data_dir: Path | None = None
) -> dict[str, float]:
    """Evaluate the model of a run on one of its splits."""
    check_choice("split", split, ("train", "validation", "test"))
    config = read_config(folder)
    data = load_data(config, data_dir)
    chosen = model_for_task(config.model, config.model_options, data)
    model = load_model(folder, chosen.build)
    accelerator = Accelerator(cpu=ON_CPU, mixed_precision="no")
    return evaluate(
        model.to(accelerator.device),
        getattr(data, split),
        chosen.data.collate,
        2 * config.training.batch_size,
        accelerator,
        bf16=config.training.bf16,
    ).metrics(data.kind)


def load_data(config: RunConfig, data_dir: Path | None, *, progress: bool = False) -> TaskData:
    """The data of a run."""
    return load_task(
        config.task, data_dir, seed=config.data_seed, progress=progress, **config.task_options
    )


def load_model(folder: Path, build: Any) -> PreTrainedModel:
    """The best state of a run; errors name a missing or damaged file."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} must hold a trained model: {name} is missing")
    try:
        with quiet_transformers():
            return build.func.from_pretrained(folder)
    except Exception as error:  # such as SafetensorError
        raise ValueError(f"{folder / 'model.safetensors'} cannot be read: {error}") from error


def read_config(folder: Path) -> RunConfig:
    """The configuration of the run in a folder."""
    if not (folder / CONFIG_NAME).is_file():
        raise FileNotFoundError(f"{folder} must hold a run: {CONFIG_NAME} is missing")
    return RunConfig.from_yaml(folder / CONFIG_NAME)


def steps_done(folder: Path) -> int:
    """Steps of an unfinished run up to its last checkpoint."""
    checkpoints = list_checkpoints(folder)
    return int(checkpoints[-1].name.split("-")[1]) if checkpoints else 0


def majority_rate(train_labels: Tensor, test_labels: Tensor) -> float:
    """Test accuracy of always predicting the most frequent training class.

    >>> majority_rate(torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0, 0]))
    0.25
    """
    majority = torch.bincount(train_labels.long()).argmax()
    return float((test_labels == majority).float().mean())


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that determine the results."""
    versions = {"python": platform.python_version(), "polyscale": polyscale.__version__}
    for package in ("torch", "transformers", "accelerate", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def git_commit() -> str | None:
    """The commit of this code, marked if files are changed; None outside a checkout."""
    root = Path(polyscale.__file__).parents[1]
    try:
        top, commit, changes = (
            subprocess.run(
                ["git", "-C", str(root), *arguments],
                capture_output=True,
                text=True,
                check=True,
                timeout=30,
            ).stdout.strip()
            for arguments in (
                ["rev-parse", "--show-toplevel"],
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "polyscale", "reproduction"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if Path(top).resolve() != root.resolve():
        return None  # installed inside another repository
    return commit + ("+changes" if changes else "")


def _prepare_folder(config: RunConfig, output: Path, *, resume: bool) -> RunResult | None:
    """Check the content of the folder; returns the result of a finished run."""
    if (output / CONFIG_NAME).exists():
        before = read_config(output)
        difference = before.first_difference(config)
        if before.task_options.get("digest") != config.task_options.get("digest"):
            raise FileExistsError(
                f"{output} holds a run on other data (digest "
                f"{before.task_options.get('digest')}, now {config.task_options.get('digest')}): "
                "restore the data to resume it, or choose another folder"
            )
        if difference is not None:
            raise FileExistsError(
                f"{output} holds another run ({difference}): choose another folder"
            )
        finished = (output / RESULT_NAME).exists()
        if not resume:
            done = (
                "a finished run" if finished else f"an unfinished run ({steps_done(output)} steps)"
            )
            raise FileExistsError(f"{output} holds {done}: resume it, or choose another folder")
        return read_result(output / RESULT_NAME) if finished else None
    write_text(output / CONFIG_NAME, config.to_yaml())
    return None


def _result(
    config: RunConfig, data: TaskData, trained: Trained, model: PreTrainedModel
) -> RunResult:
    state, accelerator = trained.state, trained.accelerator
    settings = config.training
    samples = state.step * settings.batch_size * settings.accumulate * accelerator.num_processes
    classes = data.kind == "classification"
    longest = int(data.test.lengths.argmax())
    sample = data.collate([data.test[longest]])
    test = trained.test.metrics(data.kind)
    rate = None
    if classes:
        assert data.train.labels is not None
        assert data.test.labels is not None
        rate = majority_rate(data.train.labels, data.test.labels)
    return RunResult(
        task=config.task,
        model=config.name,
        seed=config.seed,
        kind=data.kind,
        test=test,
        validation=state.best,
        best_step=state.best_step,
        steps=state.step,
        majority_rate=rate,
        parameters=sum(weight.numel() for weight in model.parameters()),
        flops_per_sample=count_forward_flops(model, sample),
        seconds=state.seconds,
        training_seconds=state.training_seconds,
        samples_per_second=samples / state.training_seconds,
        device=accelerator.device.type,
        processes=accelerator.num_processes,
        threads=torch.get_num_threads(),
        train_curve=state.train_curve,
        validation_curve=state.validation_curve,
        level_weights_curve=state.level_weights_curve,
        accuracy_by=accuracy_by(trained.test.correct, data.test.groups),
        config=config.as_dict(),
        model_config=json.loads(json.dumps(model.config.to_diff_dict())),
        data=data.source,
        example=data.example,
        versions=installed_versions(),
        git_commit=git_commit(),
        finished=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        test_accuracy=100 * test["accuracy"] if classes else None,
    )


@contextmanager
def _locked_run(config: RunConfig, output: Path, *, resume: bool) -> Iterator[RunResult | None]:
    """Lock the folder of a run; yields its result if it is finished.

    Two runs in one folder would overwrite each other. The lock of a killed process is released.
    """
    lock = FileLock(output / LOCK_NAME)

    def lock_folder() -> RunResult | None:
        output.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            # The other process may have written its result and be about to release the lock.
            if not (resume and (output / RESULT_NAME).exists()):
                raise RunInUseError(f"{output} is locked by another process") from error
        return _prepare_folder(config, output, resume=resume)

    try:
        yield decide_on_main(lock_folder)
    finally:
        lock.release()
