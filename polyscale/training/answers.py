"""Models in folders that answer: labels for texts, documents and images, or text after a prompt.

A folder may be that of a run, or one that `save_pretrained` or the Trainer of transformers wrote.
Weights are read from safetensors alone, and no code of a folder is run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

import polyscale.models as own_models
from polyscale.data.own.coding import Coder
from polyscale.data.own.images import open_image
from polyscale.data.own.items import IMAGE, Item, Items
from polyscale.data.own.reading import Wanted, read_source
from polyscale.data.own.tables import is_table
from polyscale.data.own.tasks import document_content
from polyscale.data.splits import PAD_ID, ListSplit, collate
from polyscale.inject.storage import load_injected, read_injection
from polyscale.models import collate_trees
from polyscale.training.builders import WINDOWS, collate_windows
from polyscale.training.evaluation import evaluate
from polyscale.training.loop import quiet_transformers
from polyscale.training.processes import ON_CPU

CLASSIFIERS = ("ForSequenceClassification", "ForClassification", "ForImageClassification")
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True)
class Answer:
    """The label of one item, with the probability of each label."""

    item: Item
    label: str
    scores: dict[str, float]

    @property
    def probability(self) -> float:
        return self.scores[self.label]


class InputReader:
    """What turns items into the inputs of the model in a folder: as its training did."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder, self.model = folder, model
        self.processor = getattr(model, "processor", None)
        self.images: Any = None
        self.tokenizer: Any = None
        self.coder = Coder(None)
        if self.processor is not None:
            return
        if (folder / "preprocessor_config.json").is_file():
            self.images = transformers.AutoImageProcessor.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
        elif any((folder / name).is_file() for name in _TOKENIZERS):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            self.coder = Coder.of(self.tokenizer)
        else:
            raise ValueError(
                f"{folder} must have a tokenizer or a processor to read inputs, got none; save the "
                "one of its training there (tokenizer.save_pretrained), or train with --data"
            )

    @property
    def limit(self) -> int | None:
        """The most tokens of a text."""
        config = self.model.config
        known = getattr(self.tokenizer, "model_max_length", None)
        positions = getattr(config, "max_position_embeddings", None)
        limits = [one for one in (known, positions) if one is not None and one < 10**9]
        if config.model_type in ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet"):
            limits = [min(limits) - config.pad_token_id - 1] if limits else []
        return min(limits, default=None)

    def sample(self, item: Item, limit: int | None = None) -> dict[str, Any]:
        """The inputs of an item; an error names it."""
        try:
            return self._sample(item, limit)
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"{item.where} cannot be read by {self.folder}: {error}") from error

    def _sample(self, item: Item, limit: int | None) -> dict[str, Any]:
        is_image = isinstance(item.content, bytes)
        if self.processor is not None:
            return self.processor.example(document_content(item))
        if is_image != (self.images is not None):
            wanted = "images" if self.images is not None else "texts"
            raise ValueError(
                f"the model takes {wanted}, got {'an image' if is_image else 'a text'}"
            )
        if self.images is not None:
            found = self.images([open_image(item.content)], return_tensors="pt")
            return {name: values[0] for name, values in found.items()}
        limits = [one for one in (limit, self.limit) if one is not None]
        ids = self.coder.ids(item.text, min(limits, default=None))
        return {"input_ids": torch.tensor(ids, dtype=torch.int64)}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch with labels; those of samples without one are 0."""
        samples = [
            {**sample, "labels": sample.get("labels", torch.tensor(0))} for sample in samples
        ]
        if self.processor is not None:
            return collate_trees(samples)
        if self.model.config.model_type == "hte":
            return collate_windows(_windows_of(self.folder), samples)
        if self.images is not None:
            return {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
        pad = self.model.config.pad_token_id
        pad = self.tokenizer.pad_token_id if pad is None else pad
        return collate(samples, PAD_ID if pad is None else pad)


def load_answering(folder: Path, heads: Sequence[str]) -> PreTrainedModel:
    """The model of a folder, if its class ends with one of `heads`; injected as it was saved."""
    name = _class_name(folder)
    if not name.endswith(tuple(heads)):
        if name.endswith(LANGUAGE_MODELS):
            raise ValueError(
                f"{folder} must hold a classifier, got the language model {name}; polyscale "
                "generate continues a prompt with it"
            )
        if name.endswith(CLASSIFIERS):
            raise ValueError(
                f"{folder} must hold a language model, got the classifier {name}; polyscale "
                "predict answers with it"
            )
        raise ValueError(f"{folder} must hold a model that answers, got {name}")
    known = own_models if name in own_models.__all__ else transformers
    model_class = getattr(known, name, None)
    if model_class is None:
        raise ValueError(f"{folder / 'config.json'} must name a known model, got {name!r}")
    if not (folder / "model.safetensors").is_file() and not any(folder.glob("*.index.json")):
        raise FileNotFoundError(f"{folder} must hold a trained model: model.safetensors is missing")
    try:
        with quiet_transformers():
            if read_injection(folder):
                return load_injected(folder, model_class, local_files_only=True).eval()
            model, report = model_class.from_pretrained(
                folder, use_safetensors=True, local_files_only=True, output_loading_info=True
            )
    except Exception as error:  # of safetensors and transformers, of many classes
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{folder} cannot be loaded: {reason}") from error
    if report["missing_keys"]:  # transformers would set them at random
        raise ValueError(
            f"{folder} must have all weights of {name}, got none for "
            f"{sorted(report['missing_keys'])[0]}"
        )
    return model.eval()


def predict(
    folder: Path, source: str, *, text: tuple[str, ...] = (), batch_size: int = 32
) -> tuple[list[Answer], Items]:
    """The answers for a table, a folder, a dataset, a document, an image, or a text itself."""
    model = load_answering(folder, CLASSIFIERS)
    kind = getattr(model.config, "problem_type", None)
    if kind not in (None, "single_label_classification"):
        raise ValueError(f"{folder} must be a model of one label, got {kind}; use model.predict")
    reader = InputReader(folder, model)
    items = read_inputs(source, folder, text)
    samples = [reader.sample(item) for item in items.items]
    # Inputs of similar lengths share a batch, for less padding.
    order = sorted(range(len(samples)), key=lambda number: len(items.items[number].key))
    rows: dict[int, Tensor] = {}
    with torch.no_grad():
        for begin in range(0, len(order), batch_size):
            numbers = order[begin : begin + batch_size]
            batch = reader.collate([samples[number] for number in numbers])
            batch.pop("labels")
            rows |= dict(zip(numbers, model(**batch).logits.float().softmax(-1), strict=True))
    names = [model.config.id2label[number] for number in range(model.config.num_labels)]
    answers = []
    for number, item in enumerate(items.items):
        scores = dict(zip(names, rows[number].tolist(), strict=True))
        answers.append(Answer(item, max(names, key=scores.__getitem__), scores))
    return answers, items


def evaluate_data(
    folder: Path,
    data: str,
    *,
    text: tuple[str, ...] = (),
    label: str | None = None,
    batch_size: int = 32,
) -> dict[str, Any]:
    """Measure the model of a folder on a user's data: loss and accuracy, or bits per token."""
    model = load_answering(folder, (*CLASSIFIERS, *LANGUAGE_MODELS))
    reader = InputReader(folder, model)
    is_language = _class_name(folder).endswith(LANGUAGE_MODELS)
    found: dict[str, Any]
    if is_language:
        items = read_inputs(data, folder, text)
        split: Any = _windows(reader, items)
        collator: Any = partial(collate, pad_id=model.config.pad_token_id or PAD_ID)
    else:
        items = read_inputs(data, folder, text, label=label, labelled=True)
        names = [str(model.config.id2label[n]) for n in range(model.config.num_labels)]
        classes = torch.tensor([_number(item, names) for item in items.items])
        samples = [
            {**reader.sample(item), "labels": answer}
            for item, answer in zip(items.items, classes, strict=True)
        ]
        lengths = torch.tensor([len(item.key) for item in items.items])
        split = ListSplit(samples, [item.where for item in items.items], classes, lengths)
        collator = reader.collate
    accelerator = Accelerator(cpu=ON_CPU, mixed_precision="no")
    model = model.to(accelerator.device)
    measured = evaluate(model, split, collator, batch_size, accelerator)
    found = measured.metrics("language" if is_language else "classification")
    return {**found, "samples": len(split), "left_out": len(items.left_out)}


def generate(
    folder: Path, prompt: str, *, tokens: int = 200, temperature: float = 0.0, seed: int = 0
) -> str:
    """The prompt and what the language model of a folder writes after it; greedy at 0."""
    if not prompt:
        raise ValueError("prompt must have at least one character, got none")
    model = load_answering(folder, LANGUAGE_MODELS)
    tokenizer = InputReader(folder, model).tokenizer
    if tokenizer is None:
        raise ValueError(f"{folder} must have a tokenizer to read a prompt, got none")
    try:
        inputs = tokenizer(prompt, return_tensors="pt")
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(f"prompt must be in the words of the model: {error}") from error
    inputs.pop("token_type_ids", None)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": temperature > 0, "max_new_tokens": tokens}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.no_grad():
        made: Any = model.generate(**inputs, **options)
    return str(tokenizer.decode(made[0], skip_special_tokens=True))


def read_inputs(
    source: str,
    folder: Path,
    text: tuple[str, ...] = (),
    *,
    label: str | None = None,
    labelled: bool = False,
) -> Items:
    """Items for the model of a folder, from the columns of its run; a text is an item itself."""
    path = Path(source).expanduser()
    if not labelled and not _names_a_file(source) and not _exists(path):
        if not source.strip():
            raise ValueError("the text must have at least one word, got none")
        return Items("text", "text", [Item("text", source)])
    options = _task_options(folder)
    # Columns of the run, where the table has them; otherwise they are guessed again.
    known = tuple(options.get("text") or ())
    wanted = Wanted(text, label, None, labelled)
    if path.is_file() and is_table(path) and not (text and (label or not labelled)):
        from polyscale.data.own.tables import read_table

        columns = read_table(path).columns
        text = text or (known if set(known) <= set(columns) else ())
        usual = options.get("label")
        label = label or (usual if usual in columns else None)
        wanted = Wanted(text, label, None, labelled)
    parts = read_source(source, wanted)
    return parts.get("test", parts["train"])


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # such as a text that is too long for a name
        return False


def _names_a_file(source: str) -> bool:
    """Whether a text that names nothing is meant as a file: one word with an ending."""
    path = Path(source)
    return len(source.split()) == 1 and (is_table(path) or "/" in source or bool(path.suffix[2:]))


def _windows(reader: InputReader, items: Items) -> Any:
    if items.media == IMAGE:
        raise ValueError(f"the model takes texts, got the images of {items.name}")
    stream = reader.coder.stream("\n\n".join(item.text for item in items.items))
    length = _task_options(reader.folder).get("length") or min(reader.limit or 256, 256)
    if len(stream) < 2:
        raise ValueError(f"{items.name} must have at least 2 tokens, got {len(stream)}")
    return reader.coder.window_split(stream, length)


def _number(item: Item, names: Sequence[str]) -> int:
    """The class of an item: by name, or by number for models whose classes have no names."""
    if item.label in names:
        return names.index(str(item.label))
    unnamed = all(name == f"LABEL_{number}" for number, name in enumerate(names))
    label = str(item.label)
    if unnamed and label.isdigit() and int(label) < len(names):
        return int(label)
    raise ValueError(
        f"label must be one of {', '.join(map(repr, names[:10]))}, got {item.label!r} in "
        f"{item.where}"
    )


def _class_name(folder: Path) -> str:
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must hold a trained model: config.json is missing")
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["architectures"]
        return str(names[0])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} must name its model in 'architectures', got none") from error


def _task_options(folder: Path) -> dict[str, Any]:
    """The options of the task of a run; none for other folders."""
    from polyscale.training.run import CONFIG_NAME, read_config

    return read_config(folder).task_options if (folder / CONFIG_NAME).is_file() else {}


def _windows_of(folder: Path) -> Sequence[int]:
    from polyscale.training.run import CONFIG_NAME, read_config

    options = read_config(folder).model_options if (folder / CONFIG_NAME).is_file() else {}
    return options.get("windows", WINDOWS)
