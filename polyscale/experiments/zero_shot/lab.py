"""What all units share: the model, the texts, the records; each loaded when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoModelForSequenceClassification, PreTrainedModel

from polyscale.experiments.zero_shot.presets import Preset, TaskSize
from polyscale.experiments.zero_shot.pretrained import Pretrained
from polyscale.experiments.zero_shot.records import Records
from polyscale.experiments.zero_shot.replay import BlockOutputs
from polyscale.experiments.zero_shot.texts import TaskTexts, load_task_texts
from polyscale.inject.modules import attention_layers
from polyscale.training.loop import quiet_transformers

MODELS = "models"  # folder of fine-tuned weights


@dataclass(frozen=True)
class Unit:
    """One piece of work that is done as a whole and then kept."""

    id: str
    kind: str
    task: str | None
    config: dict[str, Any]  # what it was asked to do, ready for JSON
    work: Callable[[], dict[str, Any]]  # its values, ready for JSON


@dataclass
class Lab:
    """The shared things of one run of the experiment; only one task's are held at a time."""

    preset: Preset
    source: Pretrained
    records: Records
    output: Path
    data_dir: Path | str | None
    seed: int = 0
    say: Callable[[str], None] = print
    _texts: dict[str, TaskTexts] = field(default_factory=dict)
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)
    _outputs: dict[str, BlockOutputs] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Any:
        return self.source.tokenizer()

    @cached_property
    def encoder(self) -> PreTrainedModel:
        """The model as it was published."""
        return self.source.encoder()

    @cached_property
    def layers(self) -> int:
        """How many attention layers the model has."""
        return len(attention_layers(self.encoder))

    @property
    def head_shape(self) -> tuple[int, int]:
        """Heads of a layer, and the width of one."""
        config = self.encoder.config
        return config.num_attention_heads, config.hidden_size // config.num_attention_heads

    def texts(self, size: TaskSize) -> TaskTexts:
        """The texts of a task."""
        if size.name not in self._texts:
            self._texts.clear()
            self._texts[size.name] = load_task_texts(size, self.tokenizer, self.data_dir, self.seed)
        return self._texts[size.name]

    def block_outputs(self, size: TaskSize, part: str) -> BlockOutputs:
        """What the blocks of the fine-tuned model give on a part of the test texts."""
        name = f"{size.name}/{part}"
        if name not in self._outputs:
            self._outputs.clear()  # gigabytes, for long texts
            self._outputs[name] = BlockOutputs()
        return self._outputs[name]

    def folder(self, size: TaskSize) -> Path:
        """Where the fine-tuned weights of a task are."""
        return self.output / MODELS / size.name

    def classifier(self, size: TaskSize, *, fresh: bool = False) -> PreTrainedModel:
        """The fine-tuned model of a task; a `fresh` one may be trained further."""
        if not fresh and size.name in self._models:
            return self._models[size.name]
        folder = self.folder(size)
        if not (folder / "model.safetensors").is_file():
            raise ValueError(
                f"output: {folder} has no fine-tuned weights, though {self.output} has their "
                "results; weights are not kept with results: start again in another folder"
            )
        with quiet_transformers():
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, use_safetensors=True, trust_remote_code=False
            )
        model.eval()
        if not fresh:
            self._models.clear()
            self._models[size.name] = model
        return model
