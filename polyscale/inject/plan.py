"""A planned injection: what was tried, what each took and changed, and which one is proposed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from polyscale.inject.api import inject_hsa
from polyscale.inject.modules import attention_layers
from polyscale.inject.opened import inject_opened

FORMAT = "polyscale.plan"
VERSION = 2
PAYS = 1.02  # times as fast, from which on an injection is worth proposing


@dataclass(frozen=True)
class Trial:
    """One injection that was measured on all texts."""

    arguments: Mapping[str, Any]  # of `inject_opened`, or of `inject_hsa` if they have a hierarchy
    layers: tuple[int, ...]
    reading: float  # seconds of a text on average, to the first token if more are written
    token: float | None  # seconds of each token after that
    seconds: float  # of a text and the tokens that are written after it
    speedup: float  # how many times as fast as the model without an injection
    change: float  # of the model's output
    worst: float  # change of the text that changed most

    def inject(self, model: PreTrainedModel) -> PreTrainedModel:
        """Inject it into a model."""
        return inject_arguments(model, self.layers, self.arguments)


@dataclass(frozen=True)
class InjectionPlan:
    """What `plan_injection` found: `print` it, `apply` it, keep it as JSON.

    `pays` says whether there is anything to apply; `trials[chosen]` is what is proposed.
    """

    model: str
    count: int  # attention layers of the model
    texts: int
    shortest: int  # tokens of a text
    longest: int
    new_tokens: int | None  # written after each text, as far as `seconds` counts; None if none are
    measure: str  # what `change` is
    tolerance: float | None
    wanted: float | None  # the speedup that was asked for
    reading: float  # seconds, without an injection
    token: float | None
    seconds: float
    trials: tuple[Trial, ...]
    chosen: int | None
    notes: tuple[str, ...]  # what was not tried, and why; why nothing is proposed
    took: float  # seconds of planning

    @property
    def pays(self) -> bool:
        """Whether an injection was found that is faster and within what was asked for."""
        return self.chosen is not None

    @property
    def proposal(self) -> Trial | None:
        """The injection that is proposed, None if none pays."""
        return None if self.chosen is None else self.trials[self.chosen]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of the proposal."""
        return () if self.proposal is None else self.proposal.layers

    @property
    def speedup(self) -> float:
        """How many times as fast the proposal makes the model; 1 if none pays."""
        return 1.0 if self.proposal is None else self.proposal.speedup

    @property
    def change(self) -> float:
        """The change of the output by the proposal; 0 if none pays."""
        return 0.0 if self.proposal is None else self.proposal.change

    def apply(self, model: PreTrainedModel) -> PreTrainedModel:
        """Inject the proposal into a model; an error if none pays."""
        count = len(attention_layers(model))
        if count != self.count:
            raise ValueError(
                f"model must have {self.count} attention layers as the plan's ({self.model}), "
                f"got {count}"
            )
        if self.proposal is None:
            raise ValueError(
                "plan must propose an injection to be applied, got one by which nothing pays; ask "
                "plan.pays, and leave the model as it is"
            )
        return self.proposal.inject(model)

    def to_json(self) -> str:
        """Return the plan as JSON; `from_json` reads it."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> InjectionPlan:
        """Read what `to_json` wrote."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"text must be JSON, got an error in it: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f"text must be a plan with format {FORMAT!r}, got another JSON")
        version = data.pop("version", None)
        if version == 1:
            raise ValueError(
                "text must be a plan of version 2, got version 1, which planned FLOPs and not "
                "time; plan again with plan_injection"
            )
        if version != VERSION:
            raise ValueError(f"text must be a plan of version {VERSION}, got {version!r}")
        try:
            trials = tuple(
                Trial(**{**one, "layers": tuple(one["layers"])}) for one in data.pop("trials")
            )
            found = cls(**{**data, "notes": tuple(data["notes"])}, trials=trials)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"text must be a plan, got {error!r}") from error
        if found.chosen is not None and not 0 <= found.chosen < len(trials):
            raise ValueError(f"text must be a plan, got a choice of trial {found.chosen}")
        return replace(
            found, trials=tuple(replace(one, arguments=_tuples(one.arguments)) for one in trials)
        )

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.count} attention layers: {self._verdict()}"]
        if self.proposal is not None:
            lines += [
                f"inject   {show_arguments(self.proposal.arguments)}",
                f"layers   {show_layers(self.proposal.layers, self.count)}",
            ]
        sizes = (
            f"{self.shortest}"
            if self.shortest == self.longest
            else (f"{self.shortest} to {self.longest}")
        )
        written = f", {self.new_tokens} tokens written after each" if self.new_tokens else ""
        lines += [
            f"texts    {self.texts} of {sizes} tokens{written}",
            f"change   {self.measure}",
            "",
            *self._table(),
        ]
        lines += ["", *self.notes] if self.notes else []
        return "\n".join([*lines, f"planned in {self.took:.0f} s"])

    def _verdict(self) -> str:
        one = self.proposal
        if one is None:
            return "nothing pays; leave it as it is"
        return f"{one.speedup:.2f} times as fast, change {show_change(one.change)}"

    def _table(self) -> list[str]:
        head = ["", "read (s)", "token (ms)", "speedup", "change", "worst", "layers", "settings"]
        rows = [["", _seconds(self.reading), _token(self.token), "1.00", "0", "0", "none", ""]]
        for number, one in enumerate(self.trials):
            rows.append(
                [
                    "*" if number == self.chosen else "",
                    _seconds(one.reading),
                    _token(one.token),
                    f"{one.speedup:.2f}",
                    show_change(one.change),
                    show_change(one.worst),
                    show_layers(one.layers, self.count),
                    show_arguments(one.arguments),
                ]
            )
        keep = [at for at in range(len(head)) if at != 2 or self.token is not None]
        widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
        return [
            "  ".join(
                row[at].ljust(widths[at]) if at > 5 else row[at].rjust(widths[at]) for at in keep
            ).rstrip()
            for row in [head, *rows]
        ]


def inject_arguments(
    model: PreTrainedModel, layers: tuple[int, ...], arguments: Mapping[str, Any]
) -> PreTrainedModel:
    """Inject by the arguments of `inject_hsa` if they have a hierarchy, else of `inject_opened`."""
    if "hierarchy" in arguments:
        return inject_hsa(model, layers, **arguments)
    return inject_opened(model, layers, **arguments)


def show_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of an injection in a few characters."""
    if "hierarchy" in arguments:
        rest = {name: value for name, value in arguments.items() if name != "hierarchy"}
        tree = arguments["hierarchy"]
        name = tree if isinstance(tree, str) else "windows " + ",".join(map(str, tree))
        return ", ".join([name, *(f"{key}={value}" for key, value in rest.items())])
    parts = []
    for part in ("prompt", "cache"):
        options = arguments.get(part) or {}
        shown = ", ".join(f"{key}={value}" for key, value in options.items())
        parts.append(f"{part}({shown})" if shown else "")
    return " ".join(part for part in parts if part) or "prompt() cache()"


def show_layers(layers: tuple[int, ...], count: int) -> str:
    """Return layer numbers in a few characters.

    >>> show_layers((0, 1, 2), 3), show_layers((1, 2, 3, 5), 6)
    ('all', '1-3,5')
    """
    if len(layers) == count:
        return "all"
    runs: list[list[int]] = []
    for number in layers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def show_change(value: float) -> str:
    """Return a change in a few characters."""
    return f"{value:.2g}" if value else "0"


def _seconds(value: float) -> str:
    return f"{value:.3g}"


def _token(value: float | None) -> str:
    return "" if value is None else f"{1000 * value:.1f}"


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(one) for one in value)
    if isinstance(value, Mapping):
        return {name: _tuples(one) for name, one in value.items()}
    return value
