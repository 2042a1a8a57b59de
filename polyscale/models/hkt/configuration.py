"""Configuration of the HKT models."""

from huggingface_hub.dataclasses import strict

from polyscale.layers.hkt_options import check_local_start, check_options, fixed_weights
from polyscale.models.options import CheckedConfig
from polyscale.ops.hkt.api import ATTENTION

POSITIONS = ("learned", "rotary", "none")
POOLINGS = ("mean", "first", "last")


@strict
class HKTConfig(CheckedConfig):
    """The configuration of an HKT model, with the names of Hugging Face where they exist.

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
        levels: resolutions of the attention; 1 is standard attention, otherwise the same model.
        causal: whether a token attends to itself and earlier tokens only.
        downsampling: `"depthwise"`, `"dense"` or `"mean"`.
        downsampling_width: taps of the downsampling filters.
        filter_width: taps of the causal filter at level 0; 0 for none.
        values: `"fine"` or `"merged"`.
        shared_projections: one query and one key projection for all levels, or one each.
        level_weights: `"learned"`, or a fixed number for each level.
        relative_positions: reach of the learned relative term of every level; 0 for none.
        positions: `"learned"`, `"rotary"` or `"none"`.
        local_start: with `positions="rotary"`, the initial biases of queries and keys; above 0,
            attention is local at the start of training.
        kernel: `"dot"` or `"psd"`.
        attention_impl: implementation of the attention, see `polyscale.implementations()`.
        input_channels: None for token ids; otherwise the number of channels of numeric inputs,
            `input_values` `[B, T, input_channels]`, such as pixels.
        pooling: of `HKTForSequenceClassification`: `"mean"`, `"first"` or `"last"` token.
        use_cache: whether generation keeps a cache.
        tie_word_embeddings: whether the language-model head is the token embedding.
        pad_token_id: id of padding.
        bos_token_id: id that begins a text.
        eos_token_id: id that ends a text; the default is the byte 0 of `byte_tokenizer()`, which
            texts do not have.

    Example:
        >>> HKTConfig(hidden_size=64, num_attention_heads=4, levels=3).levels
        3
    """

    model_type = "hkt"
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
    levels: int = 3
    causal: bool = True
    downsampling: str = "depthwise"
    downsampling_width: int = 2
    filter_width: int = 0
    values: str = "fine"
    shared_projections: bool = True
    level_weights: str | list[float | int] | tuple[float | int, ...] = "learned"
    relative_positions: int = 0
    positions: str = "learned"
    local_start: float | int = 0.0
    kernel: str = "dot"
    attention_impl: str = "auto"
    input_channels: int | None = None
    pooling: str = "mean"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1

    @property
    def layer_types(self) -> list[str]:
        """Types of layers, by which `DynamicCache(config=...)` makes an HKT cache for each."""
        return ["hkt"] * self.num_hidden_layers

    def validate_layer_type(self) -> None:
        """Does nothing: `layer_types` follows from the number of layers."""

    def validate_options(self) -> None:
        """Raise a ValueError that names the bad option."""
        ATTENTION.check_name(self.attention_impl)
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} "
                f"and {self.num_attention_heads}"
            )
        check_options(
            self.hidden_size,
            self.num_attention_heads,
            self.levels,
            self.downsampling,
            self.values,
            self.kernel,
            self.relative_positions,
            self.positions == "rotary",
        )
        check_local_start(self.local_start, self.positions == "rotary")
        if not isinstance(self.level_weights, str):
            fixed_weights(self.level_weights, self.levels)
        for name, value, known in (
            ("positions", self.positions, POSITIONS),
            ("pooling", self.pooling, POOLINGS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        for name in ("vocab_size", "num_hidden_layers", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.input_channels is not None and self.input_channels < 1:
            raise ValueError(
                f"input_channels must be None or at least 1, got {self.input_channels}"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
