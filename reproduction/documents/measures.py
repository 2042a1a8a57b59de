"""What is measured: vectors, tries on validation documents, test figures."""

from __future__ import annotations

import ctypes
import gc
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import added_memory
from reproduction.documents.baselines import fit_baseline
from reproduction.documents.presets import ROWS, TASKS, Preset, Row
from reproduction.documents.tasks import PARTS, Sample, Task, make_tasks
from reproduction.documents.training import predict, train
from reproduction.documents.vectors import FOLDER, VectorFile
from reproduction.measuring import Measurement
from reproduction.records import Records
from reproduction.zero_shot.pretrained import pretrained_model

SHARED = "articles"  # what the sentences are of, in both tasks


@dataclass
class Desk:
    """The documents and vectors of the task at hand."""

    preset: Preset
    records: Records
    output: Path
    data_dir: Path
    seed: int = 0
    _tasks: dict[str, Task] = field(default_factory=dict)
    _vectors: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def task(self, name: str) -> Task:
        if name not in self._tasks:
            self._tasks.clear()
            self._vectors.clear()
            path = self.output / FOLDER / f"{name}.pickle"  # reading takes longer than a run
            if not path.is_file():
                path.parent.mkdir(parents=True, exist_ok=True)
                for task in make_tasks(self.preset, self.data_dir, self.seed):
                    path.with_suffix(".part").write_bytes(pickle.dumps(task))
                    path.with_suffix(".part").replace(path.with_stem(task.name))
            self._tasks[name] = pickle.loads(path.read_bytes())
        return self._tasks[name]

    def vectors(self, name: str) -> dict[str, Tensor]:
        if name not in self._vectors:
            files = {"sentences": SHARED, "documents": name}
            self._vectors[name] = {
                kind: VectorFile(self.output, f"{file}-{kind}").load()
                for kind, file in files.items()
            }
        return self._vectors[name]

    def chosen(self, task: str, row: Row) -> dict[str, Any]:
        """The setting of a row that was best on validation documents."""
        found = [one for one in self.records.of("tune", task) if one["config"]["row"] == row.name]
        best = max(found, key=lambda one: one["values"]["accuracy"])
        return best["config"]["setting"]


def units(preset: Preset) -> list[Measurement]:
    """All measurements; test documents are looked at when the settings of a task are chosen."""
    found = [
        Measurement(f"vectors {task}", "vectors", task, {}, _vectors_of(task)) for task in TASKS
    ]
    for task in TASKS:
        rows = [row for row in ROWS if task in row.tasks]
        for row in rows:
            for number, setting in enumerate(row.tries):
                config: dict[str, Any] = {
                    "row": row.name,
                    "setting": setting,
                    "options": row.options_for(task),
                }
                name = f"tune {task} {row.name} {number}"
                found.append(Measurement(name, "tune", task, config, _try(task, row, setting)))
        for seed in preset.seeds:
            for row in rows:
                if row.is_trained or seed == preset.seeds[0]:
                    config = {"row": row.name, "seed": seed, "options": row.options_for(task)}
                    name = f"test {task} {row.name} {seed}"
                    found.append(Measurement(name, "test", task, config, _test(task, row, seed)))
    return found


def _vectors_of(name: str) -> Callable[[Desk], dict[str, Any]]:
    def measure(desk: Desk) -> dict[str, Any]:
        task, source = desk.task(name), pretrained_model()
        encoder, tokenizer = source.encoder(), source.tokenizer()
        whole = min(512, encoder.config.max_position_embeddings)
        texts = {
            "sentences": (SHARED, task.sentences, desk.preset.tokens),
            "documents": (name, [one.text for one in task.compared()], whole),
        }
        seconds = {
            kind: VectorFile(desk.output, f"{file}-{kind}").encode(some, encoder, tokenizer, tokens)
            for kind, (file, some, tokens) in texts.items()
        }
        return {
            **{f"seconds_of_{kind}": round(took, 1) for kind, took in seconds.items()},
            **_description(task),
        }

    return measure


def _description(task: Task) -> dict[str, Any]:
    """The sizes of a task."""
    samples = list(task.samples())
    words = [len(sample.text.split()) for sample in samples]
    return {
        "documents": {part: len(task.parts[part]) for part in PARTS},
        "labels": {
            name: [int((task.labels(part) == number).sum()) for part in PARTS]
            for number, name in enumerate(task.label_names)
        },
        "sentences": len(task.sentences),
        "median_words": median(words),
        "over_1000_words": sum(count > 1000 for count in words),
        "median_leaves": median(sample.tree.num_leaves for sample in samples),
        "most_leaves": max(sample.tree.num_leaves for sample in samples),
        "median_depth": median(sample.tree.max_depth for sample in samples),
    }


def _try(task: str, row: Row, setting: dict[str, Any]) -> Callable[[Desk], dict[str, Any]]:
    return lambda desk: _fit(desk, task, row, setting, desk.preset.seeds[0], "validation")


def _test(task: str, row: Row, seed: int) -> Callable[[Desk], dict[str, Any]]:
    def measure(desk: Desk) -> dict[str, Any]:
        setting = desk.chosen(task, row)
        return {"setting": setting, **_fit(desk, task, row, setting, seed, "test")}

    return measure


def _fit(
    desk: Desk, name: str, row: Row, setting: dict[str, Any], seed: int, part: str
) -> dict[str, Any]:
    """Fit a row on the training documents and score it on those of a part."""
    task, vectors = desk.task(name), desk.vectors(name)
    values: dict[str, Any] = {}
    answer: list[Callable[[Sequence[Sample]], Tensor]] = []

    def fit() -> None:
        began = time.perf_counter()
        if row.is_trained:
            model, inputs, record = train(
                task, vectors["sentences"], desk.preset, row.options_for(name), setting, seed
            )
            values.update(record)
            answer.append(lambda some: predict(model, inputs, some, desk.preset.batch_size))
        else:
            parts = row.options.get("parts", 1)
            answer.append(fit_baseline(row.kind, task, vectors, setting, parts))
            values["fit_seconds"] = round(time.perf_counter() - began, 2)

    _give_back()
    values["added_mib"] = round(added_memory(fit) / 2**20, 1)
    samples = task.parts[part]
    began = time.perf_counter()
    found = answer[0](samples)
    seconds = time.perf_counter() - began
    right = found == task.labels(part)
    if part == "validation" and row.is_trained:
        values["accuracy"] = max(values["curve"])
    else:
        values["accuracy"] = round(float(right.float().mean()), 4)
    values["macro_f1"] = round(_macro_f1(found, task.labels(part), len(task.label_names)), 4)
    values["milliseconds"] = round(1000 * seconds / len(samples), 3)  # for each document
    if part == "test":
        values["right"] = "".join(str(int(one)) for one in right.tolist())
    return values


def _give_back() -> None:
    """Return freed memory to the system, so that the next peak counts what it takes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _macro_f1(found: Tensor, known: Tensor, classes: int) -> float:
    scores = []
    for number in range(classes):
        hits = int(((found == number) & (known == number)).sum())
        both = int((found == number).sum()) + int((known == number).sum())
        scores.append(2 * hits / both if both else 0.0)
    return float(torch.tensor(scores).mean())
