"""Vectors of sentences from a frozen encoder, computed once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = "vectors"
TOKENS_AT_ONCE = 4096
PIECE = 4096  # sentences, or an eighth as many documents


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


class VectorFile:
    """The vectors of the texts of a task, made piece by piece below the results' folder.

    Pieces are float16, and not committed.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / FOLDER / name

    def encode(self, texts: Sequence[str], encoder: Any, tokenizer: Any, tokens: int) -> float:
        """Encode what is missing; returns the seconds that it took, over all runs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        seconds = 0.0
        piece = PIECE if tokens <= 256 else PIECE // 8
        for begin in range(0, len(texts), piece):
            path = self.folder / f"{begin}.safetensors"
            if not path.is_file():
                began = time.perf_counter()
                found = encode(texts[begin : begin + piece], encoder, tokenizer, tokens)
                took = torch.tensor(time.perf_counter() - began)
                temporary = path.with_suffix(".part")
                save_file({"vectors": found.half(), "seconds": took}, temporary)
                temporary.replace(path)
            seconds += float(load_file(path)["seconds"])
        return seconds

    def load(self) -> Tensor:
        """All vectors, [texts, C]."""
        pieces = sorted(self.folder.glob("*.safetensors"), key=lambda path: int(path.stem))
        if not pieces:
            raise ValueError(
                f"{self.folder} must have vectors, as their record exists, got none; they are not "
                "committed with results: start again in another folder"
            )
        return torch.cat([load_file(path)["vectors"] for path in pieces]).float()
