"""Texts of users as token ids: bytes, or a tokenizer of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from polyscale._extras import require
from polyscale.data.splits import (
    BYTES,
    PAD_ID,
    TokenSplit,
    WindowSplit,
    collate,
    decode_bytes,
)
from polyscale.data.texts import BYTE_VOCABULARY


class Coder:
    """Texts to ids and back; without a tokenizer, a token is a byte.

    >>> Coder(None).ids("ab"), Coder(None).unit
    ([98, 99], 'bytes')
    """

    def __init__(self, tokenizer: str | None) -> None:
        self.tokenizer = None if tokenizer is None else load_tokenizer(tokenizer)
        self.unit = "bytes" if tokenizer is None else "tokens"

    @classmethod
    def of(cls, tokenizer: Any) -> Coder:
        """The coder of a tokenizer that is loaded; that of bytes codes bytes."""
        from polyscale.models.tokenizers import codes_bytes  # imports transformers

        coder = cls(None)
        if not codes_bytes(tokenizer):
            coder.tokenizer, coder.unit = tokenizer, "tokens"
        return coder

    @property
    def sizes(self) -> dict[str, Any]:
        """What `TaskData` says of the tokens."""
        if self.tokenizer is None:
            pad = PAD_ID
            return {"vocab_size": BYTE_VOCABULARY, "pad_token_id": pad, "tokens": BYTES}
        pad = self.tokenizer.pad_token_id
        return {
            "vocab_size": len(self.tokenizer),
            "pad_token_id": pad,
            "tokens": None,
            "processor": self.tokenizer,
        }

    @property
    def collate(self) -> Any:
        """The collator for its padding."""
        pad = None if self.tokenizer is None else self.tokenizer.pad_token_id
        return partial(collate, pad_id=pad) if pad else collate

    def ids(self, text: str, length: int | None = None) -> list[int]:
        """The ids of a text, at most `length` of them."""
        if self.tokenizer is None:
            return [byte + 1 for byte in text.encode()[:length]]
        found: list[int] = self.tokenizer(
            text, truncation=length is not None, max_length=length, verbose=False
        )["input_ids"]
        if not found:
            unknown = self.tokenizer.unk_token_id
            if unknown is None:
                raise ValueError(
                    f"tokenizer must give tokens for every text, got none for {text!r}"
                )
            return [unknown]
        return found

    def stream(self, text: str) -> Tensor:
        """The ids of a long text as `WindowSplit` stores them."""
        if self.tokenizer is None:
            return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        found = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(found, dtype=torch.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        if self.tokenizer is None:
            return decode_bytes(ids)
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_split(self, texts: Sequence[str], labels: Sequence[int], length: int) -> TokenSplit:
        """Classified texts, each cut to `length`."""
        if self.tokenizer is None:
            coded = [text.encode()[:length] for text in texts]
            return TokenSplit.from_bytes(coded, labels, shift=1, decode=decode_bytes)
        ids = [torch.tensor(self.ids(text, length), dtype=torch.int32) for text in texts]
        offsets = torch.tensor([0, *[len(row) for row in ids]]).cumsum(0)
        classes = torch.tensor([*labels]).long()
        return TokenSplit(torch.cat(ids), offsets, classes, decode=self.decode)

    def window_split(self, stream: Tensor, length: int) -> WindowSplit:
        """Windows of a stream of ids."""
        if self.tokenizer is None:
            return WindowSplit(stream, length)
        return WindowSplit(stream, length, shift=0, decode=self.decode)


def load_tokenizer(name: str) -> Any:
    """A fast tokenizer by the name of its folder or repository; no code of theirs is run."""
    transformers: Any = require("transformers", "hf", "a tokenizer")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # of tokenizers, huggingface_hub and transformers
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"tokenizer must be 'bytes', a folder or a name on the Hugging Face Hub, got {name!r}: "
            f"{reason}"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer must be a fast one (tokenizer.json), got {name!r}")
    return tokenizer


def usual_length(lengths: Sequence[int], most: int, share: float = 0.95) -> tuple[int, int]:
    """A length that holds most samples, in steps of 32, and the quantile it comes from.

    >>> usual_length([10, 20, 100], most=1024), usual_length([5000], most=1024)
    ((128, 100), (1024, 5000))
    """
    ranked = sorted(lengths)
    quantile = ranked[min(len(ranked) - 1, int(share * len(ranked)))]
    return min(most, -(-quantile // 32) * 32), quantile
