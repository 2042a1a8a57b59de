"""A plan by FLOPs: which layers, which hierarchy, and what it changes and saves."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from polyscale.inject.api import inject_hsa
from polyscale.inject.modules import attention_layers

FORMAT = "polyscale.plan"
VERSION = 1


@dataclass(frozen=True)
class Sensitivity:
    """What one layer alone does when it is injected."""

    layer: int
    hierarchy: tuple[int, ...] | str
    tie: str
    change: float  # of the model's output
    kl: float  # of the attention: nats per token and head, certified; sinks counted as tied
    flops: float  # of the layer's attention, as a share of softmax attention


@dataclass(frozen=True)
class Step:
    """One step of the search: layers injected together, and what was measured."""

    layers: tuple[int, ...]
    change: float
    flops: float  # of all attention layers, as a share


@dataclass(frozen=True)
class FlopsPlan:
    """A proposal: `apply` injects it, `str` explains it, `to_json` keeps it."""

    model: str
    count: int  # attention layers of the model
    layers: tuple[int, ...]
    hierarchy: tuple[int, ...] | str
    tie: str
    sinks: tuple[int, ...]
    sink_ids: tuple[int, ...]
    sink_queries: str
    sentence_ends: tuple[int, ...]
    measure: str  # what `change` is
    change: float
    flops: float  # attention FLOPs after, as a share of those before
    flops_before: int  # per text, all attention layers
    flops_after: int
    budget: float | None
    tolerance: float | None
    sensitivities: tuple[Sensitivity, ...]
    steps: tuple[Step, ...]

    def apply(self, model: PreTrainedModel, **options: Any) -> PreTrainedModel:
        """Inject the plan into a model; options such as `dropout` go to `inject_hsa`."""
        count = len(attention_layers(model))
        if count != self.count:
            raise ValueError(
                f"model must have {self.count} attention layers as the plan's ({self.model}), "
                f"got {count}"
            )
        return inject_hsa(
            model,
            self.layers,
            self.hierarchy,
            self.tie,
            self.sinks,
            sink_ids=self.sink_ids,
            sink_queries=self.sink_queries,
            sentence_ends=self.sentence_ends,
            **options,
        )

    @property
    def saved(self) -> float:
        """The share of attention FLOPs that is saved."""
        return 1 - self.flops

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` reads it."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> FlopsPlan:
        """Read what `to_json` wrote."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"text: not JSON: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"text: does not say that its format is {FORMAT}")
        if data.pop("version", None) != VERSION:
            raise ValueError(f"text: its version is not {VERSION}")
        try:
            parts = [
                Sensitivity(**{**one, "hierarchy": _tuple(one["hierarchy"])})
                for one in data.pop("sensitivities")
            ]
            steps = [Step(**{**one, "layers": tuple(one["layers"])}) for one in data.pop("steps")]
            plain = {key: _tuple(value) for key, value in data.items()}
            return cls(**plain, sensitivities=tuple(parts), steps=tuple(steps))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"text: not a plan: {error!r}") from error

    def __str__(self) -> str:
        where = ", ".join(str(number) for number in self.layers)
        name = _name(self.hierarchy, self.tie)
        lines = [
            f"{self.model}: HSA in layers {where} of {self.count} (counted from 0)",
            f"hierarchy  {name}",
            f"sinks      positions {list(self.sinks)}, token ids {list(self.sink_ids)}",
            f"saves      {self.saved:.1%} of the attention FLOPs "
            f"({self.flops_before / 1e6:,.1f} M -> {self.flops_after / 1e6:,.1f} M per text)",
            f"changes    {self.change:.4g} ({self.measure})",
            "",
            "step by step (layers, change, attention FLOPs)",
        ]
        lines += [f"  {show_step(step)}" for step in self.steps]
        lines += ["", "each layer alone", "  layer     change         KL   FLOPs"]
        groups: dict[str, list[Sensitivity]] = {}
        for one in self.sensitivities:
            groups.setdefault(_name(one.hierarchy, one.tie), []).append(one)
        for one in groups[name]:
            mark = "*" if one.layer in self.layers else " "
            lines.append(
                f"  {one.layer:>4} {mark} {one.change:>9.3g}  {one.kl:>9.3g}  {one.flops:>6.1%}"
            )
        lines += ["", "candidates, mean over layers alone", "    change         KL   FLOPs"]
        for label, row in groups.items():
            means = [
                sum(values) / len(row)
                for values in zip(*((one.change, one.kl, one.flops) for one in row), strict=True)
            ]
            mark = " *" if label == name else ""
            lines.append(f" {means[0]:>9.3g}  {means[1]:>9.3g}  {means[2]:>6.1%}  {label}{mark}")
        return "\n".join(lines)


def _name(hierarchy: tuple[int, ...] | str, tie: str) -> str:
    return f"{show(hierarchy)}, {tie}"


def show(hierarchy: tuple[int, ...] | str) -> str:
    """Return a hierarchy in a few characters."""
    return hierarchy if isinstance(hierarchy, str) else ",".join(str(one) for one in hierarchy)


def show_step(step: Step) -> str:
    """Return a step in a few characters."""
    layers = ",".join(str(number) for number in step.layers)
    return f"{layers}: {step.change:.3g} at {step.flops:.0%}"


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
