"""Configuration of the causal HSA language model."""

from huggingface_hub.dataclasses import strict

from polyscale.models.sequence_options import SequenceConfig


@strict
class HSAConfig(SequenceConfig):
    """The configuration of a causal HSA language model.

    The hierarchy consists of windows, or follows the text. It grows during generation. The options
    are those of `polyscale.models.sequence_options.SequenceConfig`, such as `hidden_size`, with
    rotary positions by default, and these.

    Args:
        windows: family sizes from the tokens up; the last one repeats, so that memory and time
            per token grow with the logarithm of the length.
        boundary_token_ids: replaces windows: for each level, from the bottom, the ids after which
            it closes, such as `[[full stop, question mark], [newline]]` for sentences and
            paragraphs. Closing a level closes all levels below it.
        normalize: whether queries and keys are normalised.

    Example:
        >>> HSAConfig(hidden_size=64, windows=[8, 16]).windows
        [8, 16]
    """

    model_type = "hsa"

    windows: list[int] | tuple[int, ...] = (16,)
    boundary_token_ids: list[list[int]] | None = None
    normalize: bool = True
    positions: str = "rotary"

    def validate_options(self) -> None:
        """Raise a ValueError that names the bad option."""
        super().validate_options()
        if not self.windows or min(self.windows) < 2:
            raise ValueError(f"windows must be integers of at least 2, got {self.windows}")
        if self.boundary_token_ids is not None and not all(self.boundary_token_ids):
            raise ValueError(
                "boundary_token_ids must be None or hold at least one id per level, "
                f"got {self.boundary_token_ids}"
            )
        if self.positions == "rotary" and (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError("positions='rotary' needs an even hidden_size / num_attention_heads")
