"""Configuration of the HKT models."""

from huggingface_hub.dataclasses import strict

from polyscale.checks import check_choice
from polyscale.layers.hkt_options import check_local_start, check_options, fixed_weights
from polyscale.models.sequence_options import SequenceConfig
from polyscale.ops.hkt.api import ATTENTION


@strict
class HKTConfig(SequenceConfig):
    """The configuration of an HKT model.

    Its options are those of `polyscale.models.sequence_options.SequenceConfig`, such as
    `hidden_size`, and these.

    Args:
        levels: resolutions of the attention; 1 is standard attention, otherwise the same model.
        causal: whether a token attends to itself and earlier tokens only.
        downsampling: `"depthwise"`, `"dense"` or `"mean"`.
        downsampling_width: taps of the downsampling filters.
        filter_width: taps of the causal filter at level 0; 0 for none.
        values: `"fine"` or `"merged"`.
        shared_projections: one query and one key projection for all levels, or one each.
        level_weights: `"learned"`, or a fixed number for each level.
        relative_positions: reach of the learned relative term of every level; 0 for none.
        local_start: with `positions="rotary"`, the initial biases of queries and keys; above 0,
            attention is local at the start of training.
        kernel: `"dot"` or `"psd"`.
        input_channels: None for token ids; otherwise the number of channels of numeric inputs,
            `input_values` `[B, T, input_channels]`, such as pixels.
        pooling: of `HKTForSequenceClassification`: `"mean"`, `"first"` or `"last"` token.

    Example:
        >>> HKTConfig(hidden_size=64, num_attention_heads=4, levels=3).levels
        3
    """

    model_type = "hkt"

    levels: int = 3
    causal: bool = True
    downsampling: str = "depthwise"
    downsampling_width: int = 2
    filter_width: int = 0
    values: str = "fine"
    shared_projections: bool = True
    level_weights: str | list[float | int] | tuple[float | int, ...] = "learned"
    relative_positions: int = 0
    local_start: float | int = 0.0
    kernel: str = "dot"
    input_channels: int | None = None
    pooling: str = "mean"

    def validate_options(self) -> None:
        """Raise a ValueError that names the bad option."""
        super().validate_options()
        ATTENTION.check_name(self.attention_impl)
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
        check_choice("pooling", self.pooling, ("mean", "first", "last"))
        if self.input_channels is not None and self.input_channels < 1:
            raise ValueError(
                f"input_channels must be None or at least 1, got {self.input_channels}"
            )
