"""The measurements of one task: fine-tuning, plans, the grid, the choice, and recovery."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from polyscale._injection_note import injecting
from polyscale.training.loop import quiet_transformers, remove_checkpoints, train
from polyscale.training.run import majority_rate
from polyscale.training.settings import TrainingSettings
from reproduction.measuring import Measurement
from reproduction.zero_shot.flops_search import plan_by_flops
from reproduction.zero_shot.injections import EDGES, Injection
from reproduction.zero_shot.lab import MODELS, Lab
from reproduction.zero_shot.measures import (
    as_text,
    certify,
    compare,
    from_text,
    injected,
    predict,
)
from reproduction.zero_shot.presets import (
    CHEAP,
    Preset,
    TaskSize,
    grid_injections,
    kinds,
    paper_injections,
    recovery_injections,
)

GRID, FINAL = "grid", "final"
BEST = "best of the grid"


def task_units(preset: Preset, size: TaskSize, layers: int) -> Iterator[Measurement]:
    """All measurements of a task for a model with so many layers, in their order."""

    def unit(id: str, kind: str, config: dict[str, Any], measure: Any) -> Measurement:
        return Measurement(
            f"{size.name}/{id}", kind, size.name, config, partial(measure, size=size)
        )

    def final(name: str, config: dict[str, Any]) -> Measurement:
        work = partial(_chosen, name=name, config=config)
        return unit(f"final/{name}", "final", {"name": name, **config}, work)

    sizes = {"length": size.length, "train": size.train, "epochs": size.epochs}
    yield unit("fine-tuning", "fine-tuning", sizes, _fine_tune)
    for part in (GRID, FINAL):
        yield unit(f"original/{part}", "original", {"texts": part}, partial(_original, part=part))
    plans = plan_options(preset)
    for name, options in plans.items():
        yield unit(f"plan/{name}", "plan", options, partial(_plan, options=options))
    for name, injection in paper_injections(layers).items():
        yield final(name, injection.as_dict())
    for name in plans:
        yield final(f"plan {name}", {"chosen by": f"{size.name}/plan/{name}"})
    yield unit("certificate", "certificate", {"texts": preset.certificate_texts}, _certificate)
    for injection in grid_injections(preset.trees, layers):
        work = partial(_measure, part=GRID, injection=injection)
        yield unit(f"grid/{injection.name}", "grid", injection.as_dict(), work)
    yield final(BEST, {"chosen by": f"{size.name}/grid"})
    for name, after in recovery_injections(layers).items():
        work = partial(_recover, name=name, injection=after)
        yield unit(f"recovery/{name}", "recovery", {} if after is None else after.as_dict(), work)


def plan_options(preset: Preset) -> dict[str, dict[str, Any]]:
    """What the planner may choose from: any hierarchy, or only those that save the most."""
    found: dict[str, dict[str, Any]] = {}
    for budget in preset.budgets:
        found[f"any, budget {budget}"] = {
            "budget": budget,
            "hierarchies": [one if isinstance(one, str) else [*one] for one in preset.trees],
            "ties": ["blocks", "columns"],
            "sinks": "auto",
        }
        found[f"cheap, budget {budget}"] = {
            "budget": budget,
            "hierarchies": [[*one] for one in CHEAP],
            "ties": ["blocks"],
            "sinks": [*EDGES],
        }
    return found


def _fine_tune(lab: Lab, size: TaskSize) -> dict[str, Any]:
    data = lab.texts(size).data
    assert data.num_labels is not None
    settings = size.training(lab.preset.learning_rate, bf16=lab.preset.bf16)
    trained = train(
        partial(lab.source.classifier, data.num_labels),
        data,
        settings,
        lab.seed,
        lab.folder(size),
        name=size.title,
    )
    remove_checkpoints(lab.folder(size))
    state = trained.state
    assert data.train.labels is not None
    assert data.test.labels is not None
    return {
        "validation": state.best,
        "test_accuracy": 100 * trained.test.accuracy,
        "majority": 100 * majority_rate(data.train.labels, data.test.labels),
        "steps": state.step,
        "best_step": state.best_step,
        "curve": state.validation_curve,
        "training_seconds": state.training_seconds,
        "mean_length": float(data.test.lengths.double().mean()),
        "data": data.source,
    }


def _split(lab: Lab, size: TaskSize, part: str) -> Any:
    texts = lab.texts(size)
    return texts.data.test if part == GRID else texts.final


def _original(lab: Lab, size: TaskSize, part: str) -> dict[str, Any]:
    split = _split(lab, size, part)
    found = predict(lab.classifier(size), split, lab.texts(size).data.collate)
    values: dict[str, Any] = dict(compare(found, found, split.labels))
    return {**values, "predictions": as_text(found)}


def _measure(
    lab: Lab,
    size: TaskSize,
    part: str,
    injection: Injection | None,
    model: PreTrainedModel | None = None,
) -> dict[str, Any]:
    """Accuracy with an injection, against the predictions of the fine-tuned model without it."""
    split, collate = _split(lab, size, part), lab.texts(size).data.collate
    before = from_text(lab.records.values(f"{size.name}/original/{part}")["predictions"])
    known, first = None, 0
    if model is None and injection is not None:
        model, first = lab.classifier(size), injection.layers[0]
        known = lab.block_outputs(size, part)
        if not known.batches:
            predict(model, split, collate, known)
    model = model if model is not None else lab.classifier(size)
    with injected(model, injection, lab.tokenizer):
        after = predict(model, split, collate, known, first)
    values: dict[str, Any] = dict(compare(before, after, split.labels))
    if injection is not None:
        values["saved_at_length"] = injection.saved_at(size.flops_length, *lab.head_shape)
    return values


def _certificate(lab: Lab, size: TaskSize) -> dict[str, Any]:
    texts = lab.texts(size).grid_texts[: lab.preset.certificate_texts]
    model = lab.classifier(size)
    found = certify(model, kinds(lab.preset.trees), texts, lab.tokenizer, size.length)
    return {"texts": len(texts), "kinds": found}


def _plan(lab: Lab, size: TaskSize, options: dict[str, Any]) -> dict[str, Any]:
    hierarchies = [one if isinstance(one, str) else tuple(one) for one in options["hierarchies"]]
    try:
        plan = plan_by_flops(
            lab.classifier(size),
            lab.texts(size).plan_texts[: lab.preset.plan_texts],
            lab.tokenizer,
            budget=options["budget"],
            hierarchies=hierarchies,
            ties=options["ties"],
            sinks=options["sinks"],
            max_length=size.length,
        )
    except ValueError as error:
        if not str(error).startswith("budget must be at least"):
            raise
        return {"refused": str(error)}  # short texts save little: that is a result as well
    return {"injection": Injection.from_plan(plan).as_dict(), "plan": json.loads(plan.to_json())}


def _chosen(lab: Lab, size: TaskSize, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Measure the chosen injection on texts that were not used for the choice."""
    if name == BEST:
        injection = best_of_grid(lab, size)
    elif "chosen by" in config:
        chosen = lab.records.values(config["chosen by"])
        if "refused" in chosen:
            return {"refused": chosen["refused"]}
        injection = Injection.from_dict(chosen["injection"])
    else:
        injection = Injection.from_dict(config)
    if injection is None:
        return {"refused": f"no setting of the grid saves {size.saved:.0%} in two layers or more"}
    values = _measure(lab, size, FINAL, injection)
    texts = lab.texts(size).grid_texts[: lab.preset.certificate_texts]
    (found,) = certify(lab.classifier(size), [injection], texts, lab.tokenizer, size.length)
    by_layer = found.pop("kl")
    kl = [by_layer[layer] for layer in injection.layers]
    return {**values, **found, "kl": sum(kl) / len(kl), "injection": injection.as_dict()}


def best_of_grid(lab: Lab, size: TaskSize) -> Injection | None:
    """The injection of two layers or more that loses least among those that save enough.

    Ties are broken by how many predictions stay the same.
    """
    found = []
    for record in lab.records.of("grid", size.name):
        injection, values = Injection.from_dict(record["config"]), record["values"]
        saved = values["saved_at_length"]
        if len(injection.layers) >= 2 and saved is not None and saved >= size.saved:
            found.append((values["lost"], -values["agreement"], injection.name, injection))
    return min(found)[-1] if found else None


def _recover(lab: Lab, size: TaskSize, name: str, injection: Injection | None) -> dict[str, Any]:
    """Train further for a few steps with the injection, and measure on the way."""
    preset, data = lab.preset, lab.texts(size).data
    folder = lab.output / MODELS / f"{size.name} after {name}"
    settings = TrainingSettings(
        steps=preset.recovery_steps,
        batch_size=size.recovery_batch,
        learning_rate=preset.recovery_rate,
        schedule="linear",
        warmup_steps=max(1, preset.recovery_steps // 20),
        bucket_by_length=True,
        bf16=preset.bf16,
        evaluate_every=max(1, preset.recovery_steps // 2),
        snapshots=preset.recovery_points,
    )

    def build() -> PreTrainedModel:
        model = lab.classifier(size, fresh=True)
        if injection is not None:
            injection.apply(model, lab.tokenizer, dropout="off")
        return model.train()

    trained = train(build, data, settings, lab.seed, folder, name=f"{size.title} after {name}")
    curve = []
    for step, weights in _snapshots(folder):
        with quiet_transformers(), injecting():  # `_measure` does
            model = type(trained.model).from_pretrained(weights, use_safetensors=True)
        curve.append({"step": step, **_measure(lab, size, GRID, injection, model)})
    shutil.rmtree(folder)
    return {"samples_per_step": size.recovery_batch, "curve": curve}


def _snapshots(folder: Path) -> Iterator[tuple[int, Path]]:
    for one in sorted((folder / "snapshots").glob("step-*")):
        yield int(one.name.split("-")[1]), one
