"""Configuration of the hierarchical transformer encoder."""

import math
from dataclasses import field
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from polyscale.checks import check_choice
from polyscale.models.options import CheckedConfig
from polyscale.ops.hsa import IMPLEMENTATIONS, TIES

ATTENTIONS = ("hierarchical", "flat", "none")
POOLINGS = ("leaves", "tree")


def _one_modality() -> dict[str, dict[str, int]]:
    return {"default": {"vocab_size": 259}}


@strict
class HTEConfig(CheckedConfig):
    """The configuration of an HTE model, with the names of Hugging Face where they exist.

    Args:
        modalities: for each modality of the leaves `{"vocab_size": n}` for token ids or
            `{"width": n}` for vectors, such as those of image patches; with both, ids stand for
            vectors of that width, such as pretrained word vectors. The default is for trees
            without modalities, and has enough ids for `polyscale.byte_tokenizer()`.
        encoder: configuration of a Hugging Face encoder (`config.to_dict()`) that reads the leaves
            of the modality `encoder_modality`, each a row of token ids; None for no encoder.
        encoder_modality: its modality, whose width is that of the encoder.
        freeze: keep the encoder and tables of word vectors as they are in training.
        key_names: names that keyed families may use, such as the fields of records.
        hidden_size: width of the model.
        num_hidden_layers: number of layers.
        num_attention_heads: heads per layer.
        intermediate_size: width of the MLP; four times `hidden_size` if None.
        attention: `"hierarchical"`; `"flat"`, over the leaves as one sequence (the FSA baseline);
            `"none"`, without attention between leaves (the DeepSet baseline).
        tie: `"blocks"` (the paper's) or `"columns"` (closer to softmax).
        include_self: whether a leaf attends to itself; in the paper's training form it does not.
        alpha: 1 for softmax, larger values for sparse entmax, `"learned"` for a value between 1
            and 2 for each depth and layer.
        position_width: width of the nodes' position embeddings, even; 0 for none.
        leaf_positions: add to each leaf an embedding of its place, made of its ancestors' positions
            in their families. Attention alone sees positions relative to each other.
        position_seed: seed of their random frequencies.
        local_pooling: pool families of leaves into their parents after each layer but the last.
        pooling: the input of a classifier: `"leaves"`, the mean of all leaves (the paper's), or
            `"tree"`, the mean of means, in which all children of a node have the same weight, such
            as the fields of a record, regardless of their numbers of leaves.
        classifier_size: width of the classifier's hidden layer; `hidden_size` if None.
        dropout: of embeddings, attention outputs, MLP outputs and the classifier.
        layer_norm_eps: of all layer norms.
        initializer_range: standard deviation of the initial weights.
        attention_impl: implementation of the attention, see `polyscale.hsa_attention`.

    Example:
        >>> config = HTEConfig(modalities={"text": {"vocab_size": 500}, "image": {"width": 48}})
        >>> config.modality_names
        ('image', 'text')
    """

    model_type = "hte"
    other_names: ClassVar[dict[str, str]] = {
        **CheckedConfig.other_names,
        "vocab_size": 'modalities={"default": {"vocab_size": ...}}',
        "input_channels": 'modalities={"default": {"width": ...}}',
        "width": 'modalities={"default": {"width": ...}}',
    }

    modalities: dict[str, dict[str, int]] = field(default_factory=_one_modality)
    key_names: list[str] | tuple[str, ...] = ()
    encoder: dict[str, Any] | None = None
    encoder_modality: str = "text"
    freeze: bool = True
    hidden_size: int = 128
    num_hidden_layers: int = 1
    num_attention_heads: int = 4
    intermediate_size: int | None = None
    attention: str = "hierarchical"
    tie: str = "blocks"
    include_self: bool = False
    alpha: float | int | str = 1.0
    position_width: int = 32
    leaf_positions: bool = False
    position_seed: int = 0
    local_pooling: bool = False
    pooling: str = "leaves"
    classifier_size: int | None = None
    dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    attention_impl: str = "auto"

    @property
    def modality_names(self) -> tuple[str, ...]:
        """The names in the order of the weights: sorted, because JSON objects are unordered."""
        return tuple(sorted(self.modalities))

    def validate_options(self) -> None:
        """Raise a ValueError that names the bad option."""
        for name, value, known in (
            ("attention", self.attention, ATTENTIONS),
            ("pooling", self.pooling, POOLINGS),
            ("tie", self.tie, TIES),
            ("attention_impl", self.attention_impl, IMPLEMENTATIONS),
        ):
            check_choice(name, value, known)
        self.check_sizes()
        if self.classifier_size is not None and self.classifier_size < 1:
            raise ValueError(
                f"classifier_size must be None or at least 1, got {self.classifier_size}"
            )
        if self.position_width < 0 or self.position_width % 2:
            raise ValueError(f"position_width must be 0 or even, got {self.position_width}")
        if self.leaf_positions and not self.position_width:
            raise ValueError(
                "position_width must be at least 2 with leaf_positions=True, got 0; it is the "
                "width of the positions that leaves get"
            )
        if self.local_pooling and self.num_hidden_layers < 2:
            raise ValueError(
                "local_pooling needs num_hidden_layers of at least 2: it pools between layers, "
                f"got {self.num_hidden_layers}"
            )
        self._validate_alpha()
        self._validate_names()
        self._validate_encoder()

    def _validate_alpha(self) -> None:
        if isinstance(self.alpha, str):
            good = self.alpha == "learned"
        else:
            good = math.isfinite(self.alpha) and self.alpha >= 1
        if not good:
            raise ValueError(f"alpha must be a number >= 1 or 'learned', got {self.alpha!r}")

    def _validate_names(self) -> None:
        if not self.modalities:
            raise ValueError("modalities must name at least one modality, got none")
        for name, kind in self.modalities.items():
            if not kind or not set(kind) <= {"vocab_size", "width"}:
                raise ValueError(
                    f"modalities[{name!r}] must be {{'vocab_size': n}}, {{'width': n}} or both, "
                    f"got {kind!r}"
                )
            if min(kind.values()) < 1:
                raise ValueError(f"modalities[{name!r}] must be at least 1 wide, got {kind!r}")
        if len(set(self.key_names)) != len(self.key_names):
            raise ValueError(f"key_names must be distinct, got {list(self.key_names)}")

    def _validate_encoder(self) -> None:
        if self.encoder is None:
            return
        if "model_type" not in self.encoder or "hidden_size" not in self.encoder:
            raise ValueError(
                "encoder must be the configuration of an encoder with its model_type and "
                f"hidden_size, got {list(self.encoder)}; use config.to_dict()"
            )
        expected = {"width": self.encoder["hidden_size"]}
        if self.modalities.get(self.encoder_modality) != expected:
            raise ValueError(
                f"modalities[{self.encoder_modality!r}] must be {expected}, the width of the "
                f"encoder, got {self.modalities.get(self.encoder_modality)}"
            )

    def layer_options(self) -> dict[str, Any]:
        """The arguments of `HTELayer`."""
        return {
            "intermediate_size": self.intermediate_size,
            "dropout": self.dropout,
            "layer_norm_eps": self.layer_norm_eps,
            "attention": "none" if self.attention == "none" else "hierarchical",
            "tie": self.tie,
            "include_self": self.include_self,
            "modalities": self.modality_names,
            # Without attention there are no positions and no alpha to learn.
            "position_width": 0 if self.attention == "none" else self.position_width,
            "alpha": 1.0 if self.attention == "none" else self.alpha,
            "impl": self.attention_impl,
        }
