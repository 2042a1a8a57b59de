"""Vectors of sentences from a frozen encoder, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = "vectors"
TOKENS_AT_ONCE = 4096


@torch.inference_mode()
def encode(texts: Sequence[str], encoder: Any, tokenizer: Any, tokens: int) -> Tensor:
    """The normalised mean of the encoder's last hidden states, [texts, C], of truncated texts.

    Texts of about one length are encoded together, in bfloat16 products (`torch.autocast`).
    """
    rows = tokenizer(list(texts), truncation=True, max_length=tokens).input_ids
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    found = torch.empty(len(rows), encoder.config.hidden_size)
    begin = 0
    while begin < len(order):
        count = max(1, TOKENS_AT_ONCE // len(rows[order[begin]]))
        part = order[begin : begin + count]
        width = len(rows[part[-1]])
        ids = torch.full((len(part), width), tokenizer.pad_token_id)
        for place, index in enumerate(part):
            ids[place, : len(rows[index])] = torch.tensor(rows[index])
        lengths = torch.tensor([len(rows[index]) for index in part])
        mask = torch.arange(width) < lengths[:, None]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        mean = (hidden.float() * mask[..., None]).sum(1) / lengths[:, None]
        found[torch.tensor(part)] = torch.nn.functional.normalize(mean, dim=-1)
        begin += count
    return found


def save_vectors(folder: Path, name: str, vectors: dict[str, Tensor]) -> None:
    """Write the vectors of a task below the results' folder, as float16; they are not committed."""
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    halves = {key: values.half().contiguous() for key, values in vectors.items()}
    temporary = folder / FOLDER / f"{name}.part"
    save_file(halves, temporary)
    temporary.replace(folder / FOLDER / f"{name}.safetensors")


def load_vectors(folder: Path, name: str) -> dict[str, Tensor]:
    """Read what `save_vectors` wrote."""
    path = folder / FOLDER / f"{name}.safetensors"
    if not path.is_file():
        raise ValueError(
            f"{path} is missing, but its record exists; vectors are not committed with results: "
            "start again in another folder"
        )
    return {key: values.float() for key, values in load_file(path).items()}
