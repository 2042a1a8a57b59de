"""The configuration of a run: task, model, budget and seed, from YAML, options or a preset."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from polyscale.checks import check_choice, check_integer
from polyscale.data.tasks import (
    OWN_TASKS,
    TASKS,
    is_language_task,
    is_tree_task,
    task_options,
)
from polyscale.training.settings import TrainingSettings

MODELS = ("standard", "hkt", "hsa", "fsa", "deepset")
_SECTIONS = ("task_options", "model_options", "training")


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number (YAML 1.1 requires 1.0e-3)."""


class _Dumper(yaml.SafeDumper):
    """Safe YAML that quotes texts such as "1e5", which `_Loader` would read as numbers."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"),
        list("-+0123456789"),
    )


# Aliases of aliases can double the size of a document with every line. Expanded, they may add at
# most this many characters, which is more than a run needs.
_ALIASED = 1_000


def read_yaml(text: str) -> Any:
    """The content of a YAML text; a ValueError for any error in it.

    >>> read_yaml("rate: 1e-3")
    {'rate': 0.001}
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        limit = len(text) + _ALIASED
        if _length(node, {}) > limit:
            raise ValueError(
                f"aliases must expand to at most {limit:,} characters, {_ALIASED:,} more than the "
                "text has: write the values out"
            )
        return loader.construct_document(node)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    except (AttributeError, LookupError) as error:  # such as `!!bool perhaps`
        raise ValueError(f"a value does not have the type of its tag ({error!r})") from error
    finally:
        loader.dispose()


def _length(node: yaml.Node, known: dict[yaml.Node, int | None]) -> int:
    """A lower bound of the characters of a value with expanded aliases; visits each node once."""
    if node in known:
        length = known[node]
        if length is None:
            raise ValueError("an alias must not contain itself: write the values out")
        return length
    known[node] = None  # marks a node that is being visited
    if isinstance(node, yaml.MappingNode):
        length = 1 + sum(_length(part, known) for pair in node.value for part in pair)
    elif isinstance(node, yaml.SequenceNode):
        length = 1 + sum(_length(part, known) for part in node.value)
    else:
        length = max(1, len(node.value))
    known[node] = length
    return length


@dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run, except the data files and the machine.

    `name` is the name in tables, by default that of the model. `seed` is for weights, order and
    dropout, `data_seed` for splits and generated data, so that runs with other seeds share data.

    >>> RunConfig(task="copy", model="hkt", model_options={"levels": 2}).name
    'hkt'
    """

    task: str
    model: str
    task_options: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    seed: int = 0
    data_seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        check_choice("task", self.task, (*TASKS, *OWN_TASKS))
        check_choice("model", self.model, MODELS)
        hint = f"these are the models for the task {self.task}"
        check_choice("model", self.model, models_of_task(self.task), hint)
        for option in ("seed", "data_seed"):
            check_integer(option, getattr(self, option), least=0)
        _check_names("names of task_options", self.task_options, task_options(self.task))
        # Measured: a compiled step of the tree encoder takes 3 % longer than an eager one, and the
        # first two take 45 seconds; what trees need besides attention breaks its graph 40 times.
        if self.training.compile and self.model == "hsa" and not is_language_task(self.task):
            raise ValueError(
                "training.compile must be false for the tree encoder (model hsa, task "
                f"{self.task}), got true: its steps are not faster when compiled, as each batch "
                "has new trees; remove it or set it to false"
            )
        if not self.name:
            object.__setattr__(self, "name", self.model)
        if not all(letter.isalnum() or letter in "-_." for letter in self.name):
            raise ValueError(f"name must be letters, digits and -_., got {self.name!r}")

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> RunConfig:
        """Undo `as_dict`, also for a YAML file; unknown names are errors."""
        if not isinstance(content, Mapping):
            raise ValueError(f"a run must be a mapping of names to values, got {content!r}")
        _check_names("names of a run", content, [f.name for f in fields(cls)])
        for name in ("task", "model"):
            if name not in content:
                raise ValueError(f"a run must have {name!r}, got only {list(content)}")
        values = dict(content)
        for name in _SECTIONS:
            if not isinstance(values.get(name, {}), Mapping):
                raise ValueError(
                    f"{name} must be a mapping of names to values, got {values[name]!r}"
                )
        training = values.pop("training", {})
        _check_names("names of training", training, [f.name for f in fields(TrainingSettings)])
        return cls(**values, training=TrainingSettings(**training))

    @classmethod
    def from_yaml(cls, path: Path) -> RunConfig:
        """Read a YAML file; errors name it."""
        try:
            content = read_yaml(path.read_text(encoding="utf-8"))
        except ValueError as error:  # also of bytes that are not UTF-8
            raise ValueError(f"{path} must be YAML: {error}") from error
        try:
            return cls.from_dict(content)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_yaml(self) -> str:
        # Through JSON, where tuples become lists: YAML has no tuples.
        content = json.loads(json.dumps(self.as_dict()))
        return yaml.dump(content, Dumper=_Dumper, sort_keys=False)

    def with_values(self, assignments: Mapping[str, Any]) -> RunConfig:
        """A copy with dotted names set, such as `training.steps` or `model_options.levels`."""
        content = self.as_dict()
        for dotted, value in assignments.items():
            section, _, name = dotted.partition(".")
            section = {"model": "model_options", "task": "task_options"}.get(section, section)
            if name:
                if section not in _SECTIONS:
                    raise ValueError(
                        f"a name must be training.NAME, model.NAME, task.NAME, seed, data_seed or "
                        f"name, got {dotted!r}"
                    )
                content[section][name] = value
            else:
                content[dotted] = value
        return RunConfig.from_dict(content)

    def with_seed(self, seed: int) -> RunConfig:
        return replace(self, seed=seed)

    @property
    def digest(self) -> str:
        """Ten characters that change with every value."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def first_difference(self, other: RunConfig) -> str | None:
        """A description of the first value that differs in `other`; None if all are equal."""
        return _first_difference(self.as_dict(), other.as_dict())


def models_of_task(task: str) -> tuple[str, ...]:
    """The models for a task: trees need the hierarchical encoder, which is no language model.

    >>> models_of_task("coco18"), models_of_task("copy")
    (('hsa', 'fsa', 'deepset'), ('standard', 'hkt', 'hsa'))
    """
    if is_tree_task(task):
        return ("hsa", "fsa", "deepset")
    return ("standard", "hkt", "hsa") if is_language_task(task) else MODELS


def read_assignment(text: str) -> tuple[str, Any]:
    """The name and the value, read as YAML, of `name=value`.

    >>> read_assignment("training.steps=200"), read_assignment("model.downsampling=mean")
    (('training.steps', 200), ('model.downsampling', 'mean'))
    """
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise ValueError(f"--set must be NAME=VALUE, such as training.steps=200, got {text!r}")
    try:
        read = read_yaml(value)
    except ValueError as error:
        raise ValueError(f"--set {name} must be a YAML value, got {value!r}: {error}") from error
    return name, read


def _check_names(what: str, given: Any, known: Any) -> None:
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(
            f"{what} must be one of {', '.join(known) or '(there are none)'}, got {unknown[0]!r}"
        )


def _first_difference(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> str | None:
    for name in sorted({*one, *other}):
        a, b = one.get(name), other.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found = _first_difference(a, b, f"{prefix}{name}.")
            if found:
                return found
        elif json.dumps(a) != json.dumps(b):
            return f"{prefix}{name} is {a!r} and {b!r}"
    return None
