"""Hugging Face models. Importing this module registers them with the Auto classes."""

from polyscale._extras import require

require("transformers", "hf", "polyscale.models")

from polyscale.models.hkt.configuration import HKTConfig  # noqa: E402
from polyscale.models.hkt.heads import (  # noqa: E402
    HKTForCausalLM,
    HKTForSequenceClassification,
    HKTForTokenClassification,
)
from polyscale.models.hkt.modeling import HKTModel  # noqa: E402
from polyscale.models.hsa.configuration import HSAConfig  # noqa: E402
from polyscale.models.hsa.modeling import HSAForCausalLM, HSAModel  # noqa: E402
from polyscale.models.hte.collation import collate_trees  # noqa: E402
from polyscale.models.hte.configuration import HTEConfig  # noqa: E402
from polyscale.models.hte.modeling import HTEForClassification, HTEModel  # noqa: E402
from polyscale.models.hte.processing import HTEProcessor  # noqa: E402
from polyscale.models.pixels import PixelProcessor  # noqa: E402
from polyscale.models.tokenizers import byte_tokenizer, word_tokenizer  # noqa: E402

__all__ = [
    "HKTConfig",
    "HKTForCausalLM",
    "HKTForSequenceClassification",
    "HKTForTokenClassification",
    "HKTModel",
    "HSAConfig",
    "HSAForCausalLM",
    "HSAModel",
    "HTEConfig",
    "HTEForClassification",
    "HTEModel",
    "HTEProcessor",
    "PixelProcessor",
    "byte_tokenizer",
    "collate_trees",
    "word_tokenizer",
]
