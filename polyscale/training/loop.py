"""The training loop: AdamW on Accelerate, with checkpoints that resume to the same numbers.

All randomness of a step follows from the seed, the step and the process, so a killed run continues
with the same numbers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel, set_seed
from transformers.utils import logging

from polyscale._files import follow_umask, new_folder, write_text
from polyscale.layers.filters import CausalFilter
from polyscale.training.batches import BatchPlan, mix_seed
from polyscale.training.builders import tokenizer_for_task
from polyscale.training.checkpoint import (
    gather_moments,
    gather_weights,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    scatter_weights,
)
from polyscale.training.evaluation import Evaluation, evaluate
from polyscale.training.processes import ON_CPU, decide_on_main, join_processes
from polyscale.training.progress import RunProgress
from polyscale.training.settings import TrainingSettings
from polyscale.training.sharding import shard
from polyscale.training.state import RunState, last_checkpoint

LOG_NAME = "log.jsonl"


@dataclass(frozen=True)
class Trained:
    """A finished training: the model in its best state, and the state of the run.

    With `shard`, the model of a process holds its shards of the weights.
    """

    model: PreTrainedModel
    state: RunState
    test: Evaluation
    accelerator: Accelerator


def train(
    build: Callable[[], PreTrainedModel],
    data: Any,
    settings: TrainingSettings,
    seed: int,
    output: Path,
    *,
    name: str = "model",
    progress: bool = True,
) -> Trained:
    """Train the model of `build` on `data` (a `TaskData`), from the last checkpoint in `output`.

    `build` is called after seeding, so the seed determines its initial weights. `output` gets the
    state that is best on validation, for `from_pretrained`, and checkpoints during the run.
    """
    join_processes()
    accelerator = Accelerator(cpu=ON_CPU, mixed_precision="no")  # _step has its own autocast
    processes = accelerator.num_processes
    checkpoint, state = decide_on_main(lambda: last_checkpoint(output, processes))
    set_seed(seed)
    run = _Run(accelerator, build(), data, settings, seed, output, name, state)
    if checkpoint is not None:
        load_checkpoint(checkpoint, run.model, run.optimizer)
    shown = progress and accelerator.is_main_process
    with RunProgress(name, settings.steps, run.state.step, shown=shown) as bar:
        run.go(bar)
    return run.finish()


class _Run:
    def __init__(
        self,
        accelerator: Accelerator,
        model: PreTrainedModel,
        data: Any,
        settings: TrainingSettings,
        seed: int,
        output: Path,
        name: str,
        state: RunState,
    ) -> None:
        self.accelerator = accelerator
        self.data, self.settings, self.seed, self.output = data, settings, seed, output
        self.name, self.state = name, state
        self.unwrapped = model.train()  # `from_pretrained` returns models in evaluation mode
        if settings.shard:
            shard(model, accelerator.device, accelerator.num_processes, bf16=settings.bf16)
        runnable: nn.Module = torch.compile(model) if settings.compile else model  # type: ignore[assignment]
        self.model = runnable if settings.shard else accelerator.prepare_model(runnable)
        self.optimizer = _make_optimizer(model, settings)
        self.plan = BatchPlan(
            data.train.lengths,
            settings.batch_size * settings.accumulate * accelerator.num_processes,
            seed,
            bucket_by_length=settings.bucket_by_length,
        )

    def go(self, bar: RunProgress) -> None:
        """Train until the last step, or until patience is exhausted."""
        settings, state = self.settings, self.state
        losses: list[Tensor] = []
        before = time.perf_counter() - state.seconds
        with self._logs() as log:
            if self.accelerator.is_main_process:
                self._save_tokenizer(self.output)  # also for runs begun by an older version
            if not state.step:
                self._snapshot(0)
            while state.step < settings.steps and not self._is_patience_over():
                losses.append(self._step(state.step))
                state.step += 1
                bar.step(state.step)
                if settings.is_log(state.step):
                    bar.loss(self._log_loss(losses, log))
                    losses = []
                if settings.is_evaluation(state.step):
                    bar.evaluated(state.step, self._validate(log))
                if settings.is_snapshot(state.step):
                    self._snapshot(state.step)
                state.seconds = time.perf_counter() - before
                if settings.is_checkpoint(state.step):
                    self._save_checkpoint()
        state.seconds = time.perf_counter() - before

    def finish(self) -> Trained:
        """Restore the best state and evaluate it on the test set."""
        self.accelerator.wait_for_everyone()
        began = time.perf_counter()
        if self.settings.shard:
            model = self.unwrapped
            whole = self._read_best() if self.accelerator.is_main_process else None
            scatter_weights({} if whole is None else whole.state_dict(), model)
        else:
            model = self._read_best().to(self.accelerator.device)
        test = self._evaluate(model, self.data.test)
        self.state.seconds += time.perf_counter() - began
        return Trained(model, self.state, test, self.accelerator)

    def _read_best(self) -> PreTrainedModel:
        with quiet_transformers():
            model = type(self.unwrapped).from_pretrained(self.output)
        self._name_labels(model)
        return model

    def _step(self, step: int) -> Tensor:
        """One optimiser step; returns the mean loss of this process."""
        accelerator, settings = self.accelerator, self.settings
        began = time.perf_counter()
        set_step_seed(self.seed, step, accelerator.process_index)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step) * group["rate"]
        shares = self.plan.share(
            step,
            process=accelerator.process_index,
            processes=accelerator.num_processes,
            accumulate=settings.accumulate,
        )
        total = torch.zeros((), device=accelerator.device)
        for number, indices in enumerate(shares):
            samples = [self.data.train[index] for index in indices]
            batch = send_to_device(self.data.collate(samples), accelerator.device)
            last = number == len(shares) - 1
            with contextlib.nullcontext() if last else accelerator.no_sync(self.model):
                with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=settings.bf16):
                    loss = self.model(**batch).loss / len(shares)
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.training_seconds += time.perf_counter() - began
        return total

    def _log_loss(self, losses: list[Tensor], log: _Log) -> float:
        mean = torch.stack(losses).mean()
        loss = float(self.accelerator.reduce(mean, reduction="mean"))
        if loss != loss or abs(loss) == float("inf"):
            raise FloatingPointError(
                f"{self.name}: the training loss is {loss} at step {self.state.step}; "
                "lower the learning rate or raise warmup_steps"
            )
        step = self.state.step
        rate = self.settings.learning_rate_at(step - 1)
        point = {"step": step, "loss": loss, "learning_rate": rate}
        self.state.train_curve.append(point)
        log.write("train", point)
        return loss

    def _validate(self, log: _Log) -> str:
        """Evaluate on the validation set, and save the weights if they are the best so far."""
        state, data = self.state, self.data
        found = self._evaluate(self.model, data.validation).metrics(data.kind)
        point = {"step": state.step, **found}
        state.validation_curve.append(point)
        log.write("validation", point)
        weights = _level_weights(self.unwrapped)
        if weights is not None:
            state.level_weights_curve.append({"step": state.step, "weights": weights})
        if not state.best or is_better(found, state.best, data.kind):  # ties keep the earlier state
            state.best, state.best_step, state.evaluations_since_best = found, state.step, 0
            self._save_best()
        else:
            state.evaluations_since_best += 1
        if data.kind == "classification":
            return f"{found['accuracy']:.1%}"
        return f"{found['bits_per_token']:.3f} bits per token, {found['accuracy']:.1%}"

    def _evaluate(self, model: nn.Module, split: Any) -> Evaluation:
        settings = self.settings
        return evaluate(
            model,
            split,
            self.data.collate,
            2 * settings.batch_size,
            self.accelerator,
            bf16=settings.bf16,
        )

    def _is_patience_over(self) -> bool:
        patience = self.settings.patience
        return bool(patience) and self.state.evaluations_since_best >= patience

    def _save_checkpoint(self) -> None:
        weights = gather_weights(self.model)
        moments = gather_moments(self.model, self.optimizer)
        if self.accelerator.is_main_process:
            save_checkpoint(self.output, self.state.step, weights, moments, asdict(self.state))
        self.accelerator.wait_for_everyone()

    def _save_best(self) -> None:
        weights = gather_weights(self.model)
        if self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.output, prefix=".best-") as folder:
                _save_model(self.unwrapped, weights, Path(folder))
                for file in Path(folder).iterdir():
                    os.replace(file, self.output / file.name)

    def _snapshot(self, step: int) -> None:
        if not self.settings.is_snapshot(step):
            return
        weights = gather_weights(self.model)
        if self.accelerator.is_main_process:
            with new_folder(self.output / "snapshots" / f"step-{step:06d}") as folder:
                _save_model(self.unwrapped, weights, folder)
                self._save_tokenizer(folder)

    def _save_tokenizer(self, folder: Path) -> None:
        tokenizer = tokenizer_for_task(self.data)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    def _name_labels(self, model: PreTrainedModel) -> None:
        """Add the names of classes to a state saved by an older version, which has none."""
        named = self.unwrapped.config
        if model.config.id2label == named.id2label:
            return
        model.config.id2label, model.config.label2id = named.id2label, named.label2id
        if self.accelerator.is_main_process:
            model.config.save_pretrained(self.output)

    def _logs(self) -> _Log:
        return _Log(self.output, self.state, enabled=self.accelerator.is_main_process)


class _Log:
    """`log.jsonl` and TensorBoard; drops what a killed run wrote after its checkpoint."""

    def __init__(self, output: Path, state: RunState, *, enabled: bool) -> None:
        self.path = output / LOG_NAME
        self.enabled = enabled
        self.board: Any = None
        if not enabled:
            return
        curves = {"train": state.train_curve, "validation": state.validation_curve}
        events: list[dict[str, Any]] = [
            {"event": kind, **point} for kind, curve in curves.items() for point in curve
        ]
        events.sort(key=lambda event: event["step"])
        write_text(self.path, "".join(json.dumps(event) + "\n" for event in events))
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(output / "tensorboard"), purge_step=state.step + 1)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *error: object) -> None:
        if self.board is not None:
            self.board.close()

    def write(self, kind: str, point: dict[str, float]) -> None:
        """Append one point of a curve."""
        if not self.enabled:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": kind, **point}) + "\n")
        for name, value in point.items():
            if name != "step":
                self.board.add_scalar(f"{kind}/{name}", value, int(point["step"]))


def is_better(new: dict[str, float], best: dict[str, float], kind: str) -> bool:
    """Whether validation metrics are better: accuracy for classes, loss for language."""
    if kind == "classification":
        return new["accuracy"] > best["accuracy"]
    return new["loss"] < best["loss"]


def set_step_seed(seed: int, step: int, process: int) -> None:
    """Seed the randomness of a step (dropout), independently of the steps before it."""
    torch.manual_seed(mix_seed(seed, step, process))


def remove_checkpoints(output: Path) -> None:
    """Remove the checkpoints of a finished run; its result and its best state stay."""
    for folder in list_checkpoints(output):
        shutil.rmtree(folder)


def _make_optimizer(model: nn.Module, settings: TrainingSettings) -> torch.optim.AdamW:
    filters = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, CausalFilter)
        for parameter in module.parameters()
    }
    groups: dict[tuple[float, float], list[nn.Parameter]] = {
        (settings.weight_decay, 1.0): [],
        (0.0, 1.0): [],
    }
    for name, parameter in model.named_parameters():
        # Level weights are softmax logits: decay would pull them towards uniform weights.
        free = parameter.dim() < 2 or name.endswith("_logits")
        rate = settings.filter_rate if id(parameter) in filters else 1.0
        groups.setdefault((0.0 if free else settings.weight_decay, rate), []).append(parameter)
    # Every step sets the learning rate.
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "rate": rate}
            for (decay, rate), parameters in groups.items()
        ],
        lr=settings.learning_rate,
        fused=True,
    )


def _save_model(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=weights)
    for file in folder.iterdir():
        follow_umask(file)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable the progress bars of transformers, which would break ours."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _level_weights(model: PreTrainedModel) -> list[Any] | None:
    if not hasattr(model, "level_weights"):
        return None
    found = []
    for layer in model.level_weights():
        whole = layer.full_tensor() if hasattr(layer, "full_tensor") else layer  # sharded models
        found.append(whole.detach().float().cpu().tolist())
    return found
