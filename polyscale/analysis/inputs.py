"""The input of an analysis: a text file, or samples of a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyscale._extras import require
from polyscale.data.tasks import load_task
from polyscale.data.texts import BYTE_VOCABULARY

# In these models the first position follows that of padding.
_POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet")


@dataclass(frozen=True)
class Examples:
    """A batch as the model takes it; tokens and text belong to its first entry."""

    batch: dict[str, Any]
    tokens: Sequence[str] | None
    text: str | None
    source: str
    notes: list[str] = field(default_factory=list)


def read_text(path: Path, folder: Path, model: Any, max_length: int) -> Examples:
    """The beginning of a text file, in the tokens of the model."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data must be a UTF-8 text file, but {path} is not: {error}") from error
    if not text.strip():
        raise ValueError(f"data must be a text file with at least one word, but {path} is empty")
    limit = min(max_length, _longest(model.config) or max_length)
    if any(folder.glob("tokenizer*")) or (folder / "vocab.txt").is_file():
        ids, tokens, shown, total = _tokenize(text, folder, limit)
    elif getattr(model.config, "vocab_size", None) == BYTE_VOCABULARY:
        ids, tokens, shown, total = _bytes(text, limit)  # a run of an early version
    else:
        raise ValueError(
            f"data: {folder} has no tokenizer, so the encoding of its tokens is unknown; save the "
            "one it was trained with there (tokenizer.save_pretrained), or give the name of its "
            "task instead of a text file"
        )
    count = len(ids)
    notes = [f"The text is cut to its first {count} of {total} tokens."] if total > count else []
    batch = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    return Examples(batch, tokens, shown, path.name, notes)


def _longest(config: Any) -> int | None:
    if getattr(config, "positions", "learned") != "learned":
        return None
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is not None and config.model_type in _POSITIONS_AFTER_PADDING:
        longest -= config.pad_token_id + 1
    return longest


def _tokenize(text: str, folder: Path, limit: int) -> tuple[Tensor, list[str], str, int]:
    transformers: Any = require("transformers", "hf", "an analysis")
    from polyscale.models.tokenizers import codes_bytes  # also needs transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if codes_bytes(tokenizer):
        return _bytes(text, min(limit, tokenizer.model_max_length))
    try:
        total = len(tokenizer(text, verbose=False)["input_ids"])
    except Exception as error:  # tokenizers raises plain Exception
        raise ValueError(
            f"data must be a text in the words of the model; its tokenizer in {folder} rejects "
            f"this one: {error}"
        ) from error
    ids = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    return torch.tensor(ids), tokenizer.convert_ids_to_tokens(ids), shown, total


def _bytes(text: str, limit: int) -> tuple[Tensor, list[str], str, int]:
    coded = text.encode("utf-8")
    shown = coded[:limit]
    names = list(map(_byte_name, shown))
    return torch.tensor(list(shown)) + 1, names, shown.decode("utf-8", errors="replace"), len(coded)


def _byte_name(byte: int) -> str:
    return chr(byte) if byte < 128 else f"<{byte:02x}>"


def read_own(path: Path, folder: Path, model: Any, examples: int, max_length: int) -> Examples:
    """The first rows of a table or files of a folder, as the model's own training reads them."""
    from polyscale.training.answers import InputReader, read_inputs

    reader = InputReader(folder, model)
    found = read_inputs(str(path), folder)
    items = found.items[:examples]
    samples = [reader.sample(item, max_length) for item in items]
    batch = {name: value for name, value in reader.collate(samples).items() if name != "labels"}
    ids = samples[0].get("input_ids")
    tokens: list[str] | None = None
    if ids is not None:
        coded = reader.coder.tokenizer
        tokens = (
            [_byte_name(number - 1) for number in ids.tolist()]
            if coded is None
            else coded.convert_ids_to_tokens(ids.tolist())
        )
    first = items[0]
    shown = first.where if isinstance(first.content, bytes) else first.text
    notes = found.notes()
    if found.text:
        notes.append(f"Texts are in the column {', '.join(found.text)} of {path.name}.")
    return Examples(batch, tokens, shown, path.name, notes)


def read_task(
    name: str,
    folder: Path,
    model: Any,
    examples: int,
    data_dir: Path | str | None,
    task_options: Mapping[str, Any] | None = None,
) -> Examples:
    """The first test samples of a task, with the options of the run in `folder` if it has one."""
    options: dict[str, Any] = {}
    run = None
    if (folder / "config.yaml").is_file():
        from polyscale.training.config import RunConfig

        run = RunConfig.from_yaml(folder / "config.yaml")
        if run.task == name:
            options = {**run.task_options, "seed": run.data_seed}
    task = load_task(name, data_dir, **{**options, **(task_options or {})})
    if model.config.model_type == "hte":
        if run is None or run.task != name:
            raise ValueError(
                f"data: {folder} is a model over trees, and {name} is not the task of its run "
                "(config.yaml), so there are no trees for its samples"
            )
        from polyscale.training.builders import model_for_task

        task = model_for_task(run.model, run.model_options, task).data
    split = task.test
    count = min(examples, len(split))
    if count == 0:
        raise ValueError(f"data: the test split of {name} is empty")
    samples = [split[index] for index in range(count)]
    _check_fit(name, model.config, samples)
    batch = {key: value for key, value in task.collate(samples).items() if key != "labels"}
    return Examples(batch, _names(split, samples[0]), split.text(0), f"{name} (test)")


def _check_fit(name: str, config: Any, samples: list[dict[str, Tensor]]) -> None:
    size = getattr(config, "vocab_size", None)
    channels = getattr(config, "input_channels", None)
    if config.model_type == "hte":
        return  # sizes belong to its modalities
    if ("input_values" in samples[0]) != (channels is not None):
        kind = "numbers" if channels is not None else "tokens"
        raise ValueError(f"data: the model takes {kind}, which {name} does not have")
    if channels is None and size is not None:
        top = max(int(sample["input_ids"].max()) for sample in samples)
        if top >= size:
            raise ValueError(f"data: {name} has token {top}, the model takes 0 to {size - 1}")


def _names(split: Any, sample: dict[str, Tensor]) -> list[str] | None:
    """Names of the tokens, if they have any."""
    ids = sample.get("input_ids")
    if ids is None:
        return None
    decode = getattr(split, "decode", None)
    if decode is None:
        return [str(number) for number in ids.tolist()]
    names = [decode([number]) for number in ids.tolist()]
    return [
        _byte_name(number - 1) if "\ufffd" in name else name
        for name, number in zip(names, ids.tolist(), strict=True)
    ]
