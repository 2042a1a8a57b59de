"""Splits, which are Datasets with known lengths, and tasks, which have three of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

PAD_ID = 0
BYTES = "bytes"
IGNORED = -100  # the label of positions without one, as in Hugging Face models

_SHADES = " .:-=+*#%@"


class Split(Dataset[dict[str, Any]], ABC):
    """One of the three parts of a task.

    A sample has "input_ids" (int64, `[T]`) or "input_values" (float32, `[T, C]`), and "labels": a
    class (int64 scalar), or for language `[T]`, with -100 where there is no label. Language labels
    are not shifted: `labels[t]` is the token at position t, and the model shifts them. A sample of
    a tree task has "inputs" (a tensor for each modality), "tree" and "labels" instead.
    """

    lengths: Tensor  # [N], int64: positions of each sample
    labels: Tensor | None  # [N], int64: class of each sample; None for language
    groups: dict[str, Tensor]  # [N], int64 each: properties to break an accuracy down by

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._sample(self._checked(index))

    def text(self, index: int) -> str:
        """Sample `index` as readable text."""
        return self._text(self._checked(index))

    @abstractmethod
    def _sample(self, index: int) -> dict[str, Any]: ...

    @abstractmethod
    def _text(self, index: int) -> str: ...

    def _checked(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        return int(index) % len(self)


class TokenSplit(Split):
    """Classified sequences of any lengths, concatenated in one tensor.

    A token id is the stored value plus `shift`: bytes are stored unchanged, and id 0 is padding.
    `decode` turns token ids into text.

    >>> split = TokenSplit.from_bytes([b"ab", b"c"], [0, 1], shift=1, decode=decode_bytes)
    >>> split[0]["input_ids"].tolist(), split.lengths.tolist(), split.text(1)
    ([98, 99], [2, 1], 'c')
    """

    def __init__(
        self,
        tokens: Tensor,
        offsets: Tensor,
        labels: Tensor,
        *,
        decode: Callable[[Sequence[int]], str],
        shift: int = 0,
        groups: dict[str, Tensor] | None = None,
    ) -> None:
        if len(offsets) != len(labels) + 1:
            raise ValueError(
                f"offsets must be one longer than labels, got {len(offsets)} for {len(labels)}"
            )
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(tokens):
            raise ValueError(
                f"offsets must go from 0 to the number of tokens ({len(tokens)}), "
                f"got {int(offsets[0])} to {int(offsets[-1])}"
            )
        self.tokens = tokens  # [total tokens], uint8
        self.offsets = offsets  # [N + 1], int64: sample i is tokens[offsets[i]:offsets[i + 1]]
        self.labels: Tensor = labels.long()
        self.lengths = offsets.diff()
        self.groups = {"length": self.lengths, **(groups or {})}
        self.shift = shift
        self.decode = decode

    @classmethod
    def from_bytes(
        cls,
        sequences: Sequence[bytes],
        labels: Iterable[int] | Tensor,
        *,
        decode: Callable[[Sequence[int]], str],
        shift: int = 0,
        groups: dict[str, Tensor] | None = None,
    ) -> TokenSplit:
        """Concatenate sequences."""
        tokens, offsets = flatten(sequences)
        classes = labels if isinstance(labels, Tensor) else torch.tensor([*labels]).long()
        return cls(tokens, offsets, classes, decode=decode, shift=shift, groups=groups)

    def ids(self, index: int) -> Tensor:
        """Token ids of sample `index`, [T]."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].long() + self.shift

    def _sample(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids(index), "labels": self.labels[index]}

    def _text(self, index: int) -> str:
        return self.decode(self.ids(index).tolist())


class ImageSplit(Split):
    """Classified square grey images in row-major order: numbers, or a token for each pixel.

    >>> split = ImageSplit(torch.tensor([[0, 255, 255, 0]]).byte(), torch.tensor([3]), 0.5, 0.5)
    >>> split[0]["input_values"].tolist()
    [[-1.0], [1.0], [1.0], [-1.0]]
    """

    def __init__(
        self, pixels: Tensor, labels: Tensor, mean: float, std: float, *, tokens: bool = False
    ) -> None:
        self.pixels = pixels  # [N, T], uint8
        self.labels: Tensor = labels.long()
        self.lengths = torch.full((len(pixels),), pixels.shape[1])
        self.groups = {"length": self.lengths}
        self.mean, self.std = mean, std
        self.tokens = tokens

    def _sample(self, index: int) -> dict[str, Tensor]:
        if self.tokens:
            return {"input_ids": self.pixels[index].long(), "labels": self.labels[index]}
        values = (self.pixels[index].float() / 255.0 - self.mean) / self.std
        return {"input_values": values[:, None], "labels": self.labels[index]}  # [T, 1]

    def _text(self, index: int) -> str:
        """The image in ten shades; a line shows two rows, because letters are taller than wide."""
        side = round(self.pixels.shape[1] ** 0.5)
        image = self.pixels[index].view(side, side).float()
        rows = [image[row : row + 2].mean(0) for row in range(0, side, 2)]
        return "\n".join("".join(_SHADES[int(x * 10 / 256)] for x in row.tolist()) for row in rows)


class SequenceSplit(Split):
    """Language samples of one length, with a mask of the labelled positions.

    >>> ids = torch.tensor([[2, 3, 1, 2, 3]])
    >>> split = SequenceSplit(ids, torch.tensor([[0, 0, 0, 1, 1]]).bool())
    >>> split[0]["labels"].tolist()
    [-100, -100, -100, 2, 3]
    """

    labels = None

    def __init__(
        self, tokens: Tensor, asked: Tensor, *, groups: dict[str, Tensor] | None = None
    ) -> None:
        if tokens.shape != asked.shape:
            raise ValueError(
                f"asked must have the shape of tokens {list(tokens.shape)}, got {list(asked.shape)}"
            )
        self.tokens = tokens  # [N, T], any integer type
        self.asked = asked  # [N, T], bool
        self.lengths = torch.full((len(tokens),), tokens.shape[1])
        self.groups = {"length": self.lengths, **(groups or {})}

    def _sample(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens[index].long()
        return {"input_ids": ids, "labels": ids.where(self.asked[index], IGNORED)}

    def _text(self, index: int) -> str:
        """Token ids; labelled ones are in parentheses."""
        pairs = zip(self.tokens[index].tolist(), self.asked[index].tolist(), strict=True)
        return " ".join(f"({token})" if asked else str(token) for token, asked in pairs)


class WindowSplit(Split):
    """Adjacent windows of a stream of tokens, by default bytes; the last one may be shorter.

    Labels are the tokens themselves. A model predicts all of a window but the first. A token id is
    the stored value plus `shift`, and `decode` turns token ids into text.

    >>> split = WindowSplit(torch.tensor(list(b"abcdefg")).byte(), length=3)
    >>> [split.text(index) for index in range(len(split))]
    ['abc', 'def']
    """

    labels = None

    def __init__(
        self,
        stream: Tensor,
        length: int,
        *,
        shift: int = 1,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.stream = stream  # [total tokens], uint8 or any integer type
        self.length = length
        self.shift = shift
        self.decode = decode or decode_bytes
        full, rest = divmod(len(stream), length)
        # A single token has no context to be predicted from.
        sizes = [length] * full + ([rest] if rest > 1 else [])
        self.lengths = torch.tensor(sizes, dtype=torch.int64)
        self.groups = {"length": self.lengths}

    def _sample(self, index: int) -> dict[str, Tensor]:
        ids = self._ids(index)
        return {"input_ids": ids, "labels": ids.clone()}

    def _text(self, index: int) -> str:
        return self.decode(self._ids(index).tolist())

    def _ids(self, index: int) -> Tensor:
        window = self.stream[index * self.length : (index + 1) * self.length]
        return window.long() + self.shift


class ListSplit(Split):
    """Samples that are kept as they are, each with its text.

    >>> from polyscale.trees import SignalTree
    >>> tree = SignalTree.from_windows(2)
    >>> sample = {"inputs": [5, 6], "tree": tree, "labels": torch.tensor(1)}
    >>> split = ListSplit([sample], ["five six"], torch.tensor([1]), torch.tensor([2]))
    >>> split[0]["inputs"], split.text(0), split.lengths.tolist()
    ([5, 6], 'five six', [2])
    """

    def __init__(
        self,
        samples: Sequence[dict[str, Any]],
        texts: Sequence[str],
        labels: Tensor | None,
        lengths: Tensor,
    ) -> None:
        self.samples, self.texts = samples, texts
        self.labels = None if labels is None else labels.long()
        self.lengths = lengths
        self.groups = {"length": lengths}

    def _sample(self, index: int) -> dict[str, Any]:
        return dict(self.samples[index])

    def _text(self, index: int) -> str:
        return self.texts[index]


@dataclass(frozen=True)
class TaskData:
    """A task, ready for training: three splits, and the sizes that its models need."""

    name: str
    kind: str  # "classification" or "language"
    train: Split
    validation: Split
    test: Split
    collate: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]
    vocab_size: int | None  # None for numeric inputs and for trees
    input_channels: int | None  # None for tokens and for trees
    num_labels: int | None  # None for language
    max_length: int  # of any sequence
    pad_token_id: int | None
    label_names: tuple[str, ...] | None
    source: dict[str, Any]  # JSON: options, sizes, files or repository, notes
    example: str  # one test sample with its answer
    # Of tree tasks, as in `HTEConfig`: the inputs of each modality, the names of fields.
    modalities: dict[str, dict[str, int]] | None = None
    key_names: tuple[str, ...] = ()
    # The meaning of token ids: BYTES (id = byte + 1), or a word for each id; None without tokens.
    tokens: str | tuple[str, ...] | None = None
    # What turns a user's texts, documents or images into inputs; saved with the model.
    processor: Any = None

    def __repr__(self) -> str:
        sizes = f"train={len(self.train)}, validation={len(self.validation)}, test={len(self.test)}"
        return f"TaskData({self.name!r}, {self.kind}, {sizes}, max_length={self.max_length})"


def flatten(sequences: Sequence[bytes]) -> tuple[Tensor, Tensor]:
    """All sequences concatenated, and their offsets (with the end as the last entry)."""
    joined = bytearray(b"".join(sequences))
    tokens = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.zeros(0).byte()
    return tokens, torch.tensor([*accumulate(map(len, sequences), initial=0)])


def decode_bytes(ids: Sequence[int]) -> str:
    """Text of byte tokens (id = byte + 1, 0 is padding); bytes that are not UTF-8 become U+FFFD.

    >>> decode_bytes([98, 99, 0])
    'ab'
    """
    for token in ids:
        if not 0 <= token <= 256:
            raise ValueError(f"ids must be from 0 to 256, got {token}")
    return bytes(token - 1 for token in ids if token != PAD_ID).decode("utf-8", errors="replace")


def collate(batch: Sequence[dict[str, Tensor]], pad_id: int = PAD_ID) -> dict[str, Tensor]:
    """Batch samples, padded on the right to the longest of them.

    Token ids have an attention_mask, 1 on real tokens; images have one size and no mask. Labels at
    padding are -100.

    >>> rows = [torch.tensor([5]), torch.tensor([6, 7])]
    >>> batch = collate([{"input_ids": row, "labels": torch.tensor(0)} for row in rows])
    >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
    ([[5, 0], [6, 7]], [[1, 0], [1, 1]])
    """
    if not batch:
        raise ValueError("batch must have at least one sample, got none")
    labels = [sample["labels"] for sample in batch]
    if "input_values" in batch[0]:
        values = torch.stack([sample["input_values"] for sample in batch])  # [B, T, C]
        return {"input_values": values, "labels": torch.stack(labels)}
    lengths = torch.tensor([len(sample["input_ids"]) for sample in batch])
    input_ids = _pad([sample["input_ids"] for sample in batch], pad_id)  # [B, T]
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()  # [B, T]
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": _pad(labels, IGNORED) if labels[0].dim() else torch.stack(labels),
    }


def _pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
