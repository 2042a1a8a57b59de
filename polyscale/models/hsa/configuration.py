"""Configuration of the causal HSA language model."""

from huggingface_hub.dataclasses import strict

from polyscale.models.options import CheckedConfig

POSITIONS = ("rotary", "learned", "none")


@strict
class HSAConfig(CheckedConfig):
    """The configuration of a causal HSA language model.

    The hierarchy consists of windows, or follows the text. It grows during generation.

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
        windows: family sizes from the tokens up; the last one repeats, so that memory and time
            per token grow with the logarithm of the length.
        boundary_token_ids: replaces windows: for each level, from the bottom, the ids after which
            it closes, such as `[[full stop, question mark], [newline]]` for sentences and
            paragraphs. Closing a level closes all levels below it.
        normalize: whether queries and keys are normalised.
        positions: `"rotary"`, `"learned"` or `"none"`.
        attention_impl: see `polyscale.implementations()`.
        use_cache: whether generation keeps a cache.
        tie_word_embeddings: whether the language-model head is the token embedding.
        pad_token_id: id of padding.
        bos_token_id: id that begins a text.
        eos_token_id: id that ends a text; the default is the byte 0 of `byte_tokenizer()`, which
            texts do not have.

    Example:
        >>> HSAConfig(hidden_size=64, windows=[8, 16]).windows
        [8, 16]
    """

    model_type = "hsa"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 (Trainer adds a list to it)

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
    windows: list[int] | tuple[int, ...] = (16,)
    boundary_token_ids: list[list[int]] | None = None
    normalize: bool = True
    positions: str = "rotary"
    attention_impl: str = "auto"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1

    @property
    def layer_types(self) -> list[str]:
        """Types of layers, by which `DynamicCache(config=...)` makes an HSA cache for each."""
        return ["hsa"] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Does nothing: `layer_types` follows from the number of layers."""

    def validate_options(self) -> None:
        """Raise a ValueError that names the bad option."""
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} "
                f"and {self.num_attention_heads}"
            )
        if not self.windows or min(self.windows) < 2:
            raise ValueError(f"windows must be integers of at least 2, got {self.windows}")
        if self.boundary_token_ids is not None and not all(self.boundary_token_ids):
            raise ValueError(
                "boundary_token_ids must be None or hold at least one id per level, "
                f"got {self.boundary_token_ids}"
            )
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {POSITIONS}, got {self.positions!r}")
        if self.positions == "rotary" and (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError("positions='rotary' needs an even hidden_size / num_attention_heads")
        for name in ("vocab_size", "num_hidden_layers", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
