"""The HKT cache in the form Hugging Face's `generate` handles."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from polyscale.layers.hkt_cache import HKTCache


class HKTCacheLayer(DynamicLayer):
    """One layer of a `DynamicCache`, made for every layer of an `HKTConfig`."""

    _layer_type = "hkt"
    is_croppable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.state = HKTCache()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the attention layer fills the state."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refused: keys alone cannot continue the coarse levels."""
        raise NotImplementedError("an HKT cache is filled by HKTAttention, not by update()")

    def get_seq_length(self) -> int:
        """Tokens fed so far, padding included."""
        return self.state.columns

    def reset(self) -> None:
        """Forget everything."""
        self.state = HKTCache()

    def offload(self) -> None:
        """Move to the CPU."""
        self.state.to("cpu")

    def prefetch(self) -> None:
        """Move back to the device of the last `device` it was on."""
        if self.state.device is not None:
            self.state.to(self.state.device)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, unless there is nothing to remove."""
        if tokens_to_remove:
            raise NotImplementedError(
                "an HKT cache cannot be cropped: the coarse levels forget the inputs they merged"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the beams that go on."""
        self.state.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self.state.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.state.select(indices)


def layer_states(past_key_values: Cache, layers: int) -> list[HKTCache]:
    """The HKT state of every layer; a TypeError for any other kind of cache."""
    found = [layer.state for layer in past_key_values.layers if isinstance(layer, HKTCacheLayer)]
    if len(found) != layers:
        raise TypeError(
            "past_key_values must be a DynamicCache(config=model.config) of this model, "
            f"got {type(past_key_values).__name__} with {len(found)} HKT layers instead of {layers}"
        )
    return found
