"""What all measurements share: the model, the texts, the records; each loaded when first used."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from polyscale.inject.modules import attention_layers
from polyscale.training.loop import quiet_transformers
from reproduction.records import Records
from reproduction.zero_shot.presets import Preset, TaskSize
from reproduction.zero_shot.pretrained import Pretrained
from reproduction.zero_shot.replay import BlockOutputs
from reproduction.zero_shot.texts import TaskTexts, load_task_texts

MODELS = "models"  # folder of fine-tuned weights


@dataclass
class Lab:
    """Models and texts of the study; those of one task at a time are kept in memory."""

    preset: Preset
    source: Pretrained
    records: Records
    output: Path
    data_dir: Path | str | None
    seed: int = 0
    originals: dict[str, tuple[list[str], int, Tensor]] = field(default_factory=dict)
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
        """The block outputs of the fine-tuned model on one part of the test texts."""
        name = f"{size.name}/{part}"
        if name not in self._outputs:
            self._outputs.clear()  # gigabytes, for long texts
            self._outputs[name] = BlockOutputs()
        return self._outputs[name]

    def folder(self, size: TaskSize) -> Path:
        """The folder of the fine-tuned weights of a task."""
        return self.output / MODELS / size.name

    def classifier(self, size: TaskSize, *, fresh: bool = False) -> PreTrainedModel:
        """The fine-tuned model of a task; a `fresh` one is a copy to train further."""
        if not fresh and size.name in self._models:
            return self._models[size.name]
        folder = self.folder(size)
        if not (folder / "model.safetensors").is_file():
            raise ValueError(
                f"{folder} has no fine-tuned weights, but {self.output} has their results; weights "
                "are not committed with results: start again in another folder"
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
