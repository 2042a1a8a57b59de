"""A small random model with a tokenizer, and small files in the formats of the real texts."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from reproduction.zero_shot.presets import PRESETS, Preset, TaskSize

GOOD = ("grand", "fine", "warm", "bright")
BAD = ("dull", "poor", "cold", "grey")
PLAIN = ("film", "plot", "cast", "scene", "the", "a", "was", "and", "of", "with", "ending", "song")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
FILES = {
    "imdb-char": ("imdb_train.jsonl.gz", "imdb_test.jsonl.gz"),
    "sst2": ("sst2_train.jsonl.gz", "sst2_dev.jsonl.gz"),
}


def write_model(folder: Path, layers: int = 2) -> Path:
    """A BERT with random weights, attention far from uniform."""
    torch.manual_seed(0)
    words = [*SPECIAL, ".", "!", *GOOD, *BAD, *PLAIN]
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    return folder


def write_texts(folder: Path) -> Path:
    """Texts whose class is that of most of their adjectives; no text is there twice."""
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(0)
    seen: set[str] = set()
    for train, test in FILES.values():
        for file, count in ((train, 400), (test, 60)):
            rows = []
            while len(rows) < count:
                label = len(rows) % 2
                text = " ".join(_sentence(chance, label) for _ in range(chance.randint(1, 4)))
                if text not in seen:
                    seen.add(text)
                    rows.append({"text": text, "label": label})
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / file).write_bytes(gzip.compress(lines.encode()))
    return folder


def _sentence(chance: random.Random, label: int) -> str:
    words = [chance.choice(PLAIN) for _ in range(chance.randint(5, 9))]
    words.insert(chance.randrange(len(words)), chance.choice(GOOD if label else BAD))
    return " ".join(words).capitalize() + chance.choice(".!")


def small_preset() -> Preset:
    """One task that a small model learns in seconds, and one of everything else."""
    task = TaskSize(
        "sst2", "SST-2", length=40, train=320, validation=16, grid=24, final=30, epochs=10,
        batch_size=16, recovery_batch=8, flops_length=64, saved=0.3, lost=3.78,
    )  # fmt: skip
    return replace(
        PRESETS["tiny"],
        name="small",
        tasks=(task,),
        trees=((2, 4, 8, 16),),
        learning_rate=4e-3,
        recovery_rate=5e-3,
    )
