"""HTEProcessor: documents and records in, inputs of an HTE model out."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoProcessor, PreTrainedTokenizerFast, ProcessorMixin

from polyscale._extras import require
from polyscale.checks import check_choice, check_integer
from polyscale.documents import (
    Document,
    Reading,
    read_html,
    read_json,
    read_markdown,
    read_python,
    read_table,
)
from polyscale.documents.building import IMAGE, MAX_LEAVES, NUMBER, TEXT, DocumentBuilder
from polyscale.documents.record import PIXELS, read_record
from polyscale.documents.text import Text
from polyscale.documents.words import split_words
from polyscale.models.hte.collation import collate_trees
from polyscale.models.hte.configuration import HTEConfig
from polyscale.models.hte.embedding import PADDING as ROW_PADDING
from polyscale.trees import SignalTree

UNKNOWN = "<unknown>"  # the word and the field that stand for those never seen
PADDING = "<pad>"
PROBLEMS = ("single_label_classification", "multi_label_classification", "regression")
LEAVES = ("words", "tokens", "sentences")
SCALES = torch.tensor([10.0**power for power in range(-3, 7)])


def read_text(source: str, reading: Reading) -> Document:
    """Read plain text: paragraphs, sentences, words."""
    builder = DocumentBuilder("text", reading, source)
    text = Text()
    text.add(source, 0, len(source))
    builder.prose(text)
    return builder.finish()


READERS: dict[str, Any] = {
    "html": read_html,
    "markdown": read_markdown,
    "json": read_json,
    "python": read_python,
    "table": read_table,
    "text": read_text,
    "record": read_record,
}


class HTEProcessor(ProcessorMixin):
    r"""Reads documents as trees and their leaves as ids and vectors; saved and loaded with a model.

    Make one with `from_documents`. Words and fields that it has not seen have an id of their own.

    Args:
        tokenizer: any fast tokenizer; the vocabulary if the leaves are words.
        format: of the documents: "html", "markdown", "json", "python", "table", "text" or "record"
            (dicts of texts, numbers and images).
        leaves: "words" in the tokenizer's vocabulary, the "tokens" it makes of each text, or whole
            "sentences", as the rows of tokens that an encoder reads.
        lowercase: look words up in lower case.
        modalities: those a model of it knows; leaves of others are unknown words.
        key_names: fields it knows.
        label_names: of the classes.
        problem_type: as `HTEConfig.problem_type`.
        drop_empty, max_family, max_leaves: as in `SignalTree.from_html`.
        max_characters: longer sentences are divided at spaces, if leaves are sentences.
        image_size, patch_size: images are scaled to `image_size` and cut into patches.

    Example:
        >>> processor = HTEProcessor.from_documents(["# Fish\n\nThey swim."], format="markdown")
        >>> processor(["# Cats\n\nThey swim."])["inputs"]["text"].tolist()
        [1, 4, 3]
    """

    def __init__(
        self,
        tokenizer: Any,
        format: str = "text",
        leaves: str = "words",
        lowercase: bool = True,
        modalities: Sequence[str] = (TEXT,),
        key_names: Sequence[str] = (),
        label_names: Sequence[str] | None = None,
        problem_type: str = "single_label_classification",
        drop_empty: bool = True,
        max_family: int | None = 1024,
        max_leaves: int = MAX_LEAVES,
        max_characters: int = 400,
        image_size: int = 32,
        patch_size: int = 8,
        **kwargs: Any,
    ) -> None:
        check_choice("format", format, READERS)
        check_choice("leaves", leaves, LEAVES)
        check_choice("problem_type", problem_type, PROBLEMS)
        if leaves == "sentences" and format == "python":
            raise ValueError(
                "leaves must be 'words' or 'tokens' for format='python', got 'sentences'; the "
                "leaves of Python are its tokens"
            )
        check_integer("image_size", image_size, least=1)
        if image_size % check_integer("patch_size", patch_size, least=1):
            raise ValueError(
                f"image_size must be a multiple of patch_size, got {image_size} and {patch_size}"
            )
        self.format, self.leaves, self.lowercase = format, leaves, lowercase
        self.modalities, self.key_names = list(modalities), list(key_names)
        self.label_names = None if label_names is None else list(label_names)
        self.problem_type, self.drop_empty = problem_type, drop_empty
        self.max_family, self.max_leaves = max_family, max_leaves
        self.max_characters = max_characters
        self.image_size, self.patch_size = image_size, patch_size
        super().__init__(tokenizer, **kwargs)

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Any],
        labels: Iterable[Any] | None = None,
        *,
        tokenizer: Any = None,
        min_count: int = 1,
        max_words: int = 50_000,
        **options: Any,
    ) -> "HTEProcessor":
        """Make a processor that knows the words, fields and labels of these documents.

        With a `tokenizer`, leaves are its tokens, or sentences of them with leaves="sentences"
        (for the tokenizer of an encoder); otherwise words that occur `min_count` times, the
        `max_words` most frequent ones.
        """
        if tokenizer is not None:
            options.setdefault("leaves", "tokens")
        first = cls(tokenizer or _vocabulary([]), **options)
        counts: Counter[str] = Counter()
        keys: dict[str, None] = {}
        modalities = {TEXT}
        for document in documents:
            read = first.read(document)
            keys.update(dict.fromkeys(read.tree.key_names))
            modalities.update(read.tree.modality_names)
            counts.update(first._word(value) for value in read.values if isinstance(value, str))
        if tokenizer is None:
            frequent = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:max_words]
            first.tokenizer = _vocabulary([w for w, n in frequent if n >= min_count and w])
        first.key_names = [*keys, UNKNOWN]
        first.modalities = sorted(modalities)
        if labels is not None and first.problem_type != "regression" and first.label_names is None:
            first.label_names = _label_names(labels, first.problem_type)
        return first

    def config(self, **options: Any) -> HTEConfig:
        """Return the configuration of a model for what this processor makes.

        Sentences need an `encoder`: its configuration. With `vector_width`, words are vectors of
        that width; `HTEForClassification.from_processor` does both with pretrained weights.
        """
        width, encoder = options.pop("vector_width", None), options.get("encoder")
        if (self.leaves == "sentences") != (encoder is not None):
            raise ValueError(
                "encoder must be the configuration of an encoder if leaves are sentences, and "
                f"None otherwise, got {type(encoder).__name__} for leaves={self.leaves!r}; "
                "HTEForClassification.from_processor(processor, encoder=...) takes it from a model"
            )
        text = {"vocab_size": len(self.tokenizer)} | ({} if width is None else {"width": width})
        kinds: dict[str, dict[str, int]] = {
            TEXT: text if encoder is None else {"width": encoder["hidden_size"]},
            IMAGE: {"vocab_size": 1},
            NUMBER: {"width": len(SCALES)},
            PIXELS: {"width": 3 * self.patch_size**2},
        }
        labels: dict[str, Any] = {"num_labels": 1}
        if self.label_names is None and self.problem_type != "regression":
            if "num_labels" not in options:
                raise ValueError(
                    "label_names must be known to make a classifier, got None; pass labels to "
                    "from_documents, or num_labels here"
                )
            labels = {}
        if self.label_names is not None:
            labels = {
                "id2label": dict(enumerate(self.label_names)),
                "label2id": {name: number for number, name in enumerate(self.label_names)},
            }
        return HTEConfig(
            modalities={name: kinds[name] for name in self.modalities},
            key_names=self.key_names,
            problem_type=self.problem_type,
            **{**labels, **options},
        )

    def read(self, document: Any) -> Document:
        """Return the tree of a document (its source, or a Path to it) or record.

        A document that is read already is returned as it is.
        """
        if isinstance(document, Document):
            return document
        if isinstance(document, Path):
            document = document.read_text(encoding="utf-8")
        reading = Reading(
            drop_empty=self.drop_empty,
            max_family=self.max_family,
            max_leaves=self.max_leaves,
            split=split_words if self.leaves == "words" else self._tokens,
            sentences=self.leaves == "sentences",
            max_characters=self.max_characters,
        )
        if self.format == "record":
            sizes = {"image_size": self.image_size, "patch_size": self.patch_size}
            return read_record(document, reading, **sizes)
        return READERS[self.format](document, reading)

    def example(self, document: Any) -> dict[str, Any]:
        """Return the inputs and the tree of a document, for `collate_trees`."""
        return self.example_of(self.read(document))

    def example_of(self, document: Document) -> dict[str, Any]:
        """Return the inputs and the tree of what `read` has returned."""
        tree = self._known(document.tree)
        row_modality = tree.modality[tree.row_node]  # [N]
        inputs = {}
        for number, name in enumerate(tree.modality_names):
            rows = (row_modality == number).nonzero().flatten().tolist()
            if rows:
                inputs[name] = self._inputs(name, [document.values[row] for row in rows])
        return {"inputs": inputs, "tree": tree}

    def __call__(self, documents: Any, labels: Any = None) -> dict[str, Any]:
        """Return a batch for the model: inputs, tree and, if given, labels."""
        documents = _as_list(documents)
        examples = [self.example(document) for document in documents]
        if labels is not None:
            if len(labels) != len(examples):
                raise ValueError(
                    f"labels must be one for each of {len(examples)} documents, got {len(labels)}"
                )
            for example, label in zip(examples, labels, strict=True):
                example["labels"] = self.label(label)
        return collate_trees(examples)

    def label(self, label: Any) -> Tensor:
        """Return a label as the loss takes it: an index, an indicator of several, or a number."""
        if self.problem_type == "regression":
            return torch.as_tensor(label, dtype=torch.float32).reshape(-1)[0]
        if self.label_names is None:
            raise ValueError(
                "label_names must be known to read labels, got None; pass labels to from_documents"
            )
        if self.problem_type == "multi_label_classification":
            indicator = torch.zeros(len(self.label_names))
            for name in label:
                indicator[self._label_index(name)] = 1
            return indicator
        return torch.tensor(self._label_index(label))

    def _label_index(self, label: Any) -> int:
        names = self.label_names or []
        if str(label) not in names:
            raise ValueError(f"label must be one of {names}, got {label!r}")
        return names.index(str(label))

    @property
    def model_input_names(self) -> list[str]:
        return ["inputs", "tree"]

    def _word(self, value: str) -> str:
        return value.lower() if self.lowercase and self.leaves == "words" else value

    def _tokens(self, text: str) -> Iterable[tuple[int, int, str]]:
        found = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        tokens = self.tokenizer.convert_ids_to_tokens(found["input_ids"])
        for (begin, end), name in zip(found["offset_mapping"], tokens, strict=True):
            yield begin, end, name

    def _inputs(self, modality: str, values: list[Any]) -> Tensor:
        if modality == NUMBER:
            # Bounded, and different at every size: a number says most at its own scale.
            numbers = torch.tensor(values, dtype=torch.float64)
            return torch.tanh(numbers[:, None] / SCALES.double()).float()
        if modality == PIXELS:
            return torch.stack(values)
        if modality == IMAGE:
            return torch.zeros(len(values), dtype=torch.int64)
        if self.leaves == "sentences":
            texts = [value if isinstance(value, str) else UNKNOWN for value in values]
            return self._rows_of_tokens(texts)
        words = [self._word(value) if isinstance(value, str) else UNKNOWN for value in values]
        unknown = self.tokenizer.unk_token_id or 0
        ids = self.tokenizer.convert_tokens_to_ids(words)
        return torch.tensor([unknown if one is None else one for one in ids])

    def _rows_of_tokens(self, texts: list[str]) -> Tensor:
        """Token ids of sentences, [n, L], padded with -1."""
        rows = self.tokenizer(texts, verbose=False).input_ids
        limit = self.tokenizer.model_max_length
        too_long = sum(len(row) > limit for row in rows)
        if too_long:
            warnings.warn(
                f"{too_long} of {len(rows)} sentences have more than the {limit} tokens that the "
                f"encoder takes, and are cut; pass a smaller max_characters than "
                f"{self.max_characters}",
                stacklevel=2,
            )
            rows = self.tokenizer(texts, truncation=True, verbose=False).input_ids
        tensors = [torch.tensor(row) for row in rows]
        return pad_sequence(tensors, batch_first=True, padding_value=ROW_PADDING)

    def _known(self, tree: SignalTree) -> SignalTree:
        """The tree with the fields and modalities that a model of this processor knows."""
        keys = list(self.key_names)
        unknown = [name for name in tree.key_names if name not in keys]
        if unknown and UNKNOWN not in keys:
            raise ValueError(f"key_names must have {unknown} or {UNKNOWN!r}, got {keys}")
        numbers = [keys.index(n if n in keys else UNKNOWN) for n in tree.key_names]
        kinds = list(self.modalities)
        kind = [kinds.index(n if n in kinds else TEXT) for n in tree.modality_names]
        return replace(
            tree,
            key=torch.tensor([*numbers, -1])[tree.key],
            key_names=tuple(keys),
            modality=torch.tensor([*kind, -1])[tree.modality],
            modality_names=tuple(kinds),
        )


def _as_list(documents: Any) -> list[Any]:
    if isinstance(documents, (str, Path, dict)):
        raise TypeError(
            f"documents must be a list, got one {type(documents).__name__}; use [document]"
        )
    return list(documents)


def _label_names(labels: Iterable[Any], problem_type: str) -> list[str]:
    if problem_type == "multi_label_classification":
        labels = [name for several in labels for name in several]
    return sorted({str(label) for label in labels})


def _vocabulary(words: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizers: Any = require("tokenizers", "hf", "a vocabulary of words")
    known = dict.fromkeys([PADDING, UNKNOWN, *words])
    numbers = {word: number for number, word in enumerate(known)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token=UNKNOWN))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=UNKNOWN, pad_token=PADDING, split_special_tokens=True
    )


AutoProcessor.register(HTEConfig, HTEProcessor)
