"""Options that all models of sequences have."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from polyscale.checks import check_choice
from polyscale.models.options import CheckedConfig


@strict
class SequenceConfig(CheckedConfig):
    """The options of every model of sequences, with the names of Hugging Face where they exist.

    Args:
        vocab_size: number of token ids, `len(tokenizer)`. The default has room for
            `polyscale.byte_tokenizer()`, which turns text to bytes and needs no files.
        hidden_size: width of the model.
        num_hidden_layers: number of blocks.
        num_attention_heads: heads per block.
        intermediate_size: width of the MLP; four times `hidden_size` if None.
        max_position_embeddings: longest sequence, for `positions="learned"`.
        hidden_act: activation of the MLP.
        dropout: of embeddings, attention outputs and MLP outputs.
        layer_norm_eps: of all layer norms.
        initializer_range: standard deviation of the initial weights.
        positions: `"learned"`, `"rotary"` or `"none"`.
        attention_impl: implementation of the attention, see `polyscale.implementations()`.
        use_cache: whether generation keeps a cache.
        tie_word_embeddings: whether the language-model head is the token embedding.
        pad_token_id: id of padding.
        bos_token_id: id that begins a text.
        eos_token_id: id that ends a text; the default is the byte 0 of `byte_tokenizer()`, which
            texts do not have.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 259
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    intermediate_size: int | None = None
    max_position_embeddings: int = 2048
    hidden_act: str = "gelu"
    dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    positions: str = "learned"
    attention_impl: str = "auto"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1

    @property
    def layer_types(self) -> list[str]:
        """Types of layers, by which `DynamicCache(config=...)` makes the cache of each."""
        return [self.model_type] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Does nothing: `layer_types` follows from the number of layers."""

    def validate_options(self) -> None:
        """Raise a ValueError that names the bad option."""
        self.check_sizes("vocab_size", "max_position_embeddings")
        check_choice("positions", self.positions, ("learned", "rotary", "none"))
