"""Decoding caches in the form that Hugging Face's `generate` uses."""

from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from polyscale.layers.hkt_cache import HKTCache
from polyscale.layers.hsa_cache import HSACache
from polyscale.layers.row_cache import RowCache

State = TypeVar("State", bound=RowCache)


class StateLayer(DynamicLayer, Generic[State]):
    """One layer of a `DynamicCache`: a state that the attention layer itself fills."""

    is_croppable = False
    state_class: ClassVar[type[RowCache]]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.state = self.state_class()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the attention layer fills the state."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Not supported: keys and values alone cannot continue a hierarchy."""
        raise NotImplementedError(
            f"a {self.state_class.__name__} is filled by its attention layer, not by update()"
        )

    def get_seq_length(self) -> int:
        """Tokens fed so far, padding included."""
        return self.state.columns

    def reset(self) -> None:
        """Clear the cache."""
        self.state = self.state_class()

    def offload(self) -> None:
        """Move to the CPU."""
        self.state.to("cpu")

    def prefetch(self) -> None:
        """Move back to where the layer computes."""
        if self.state.device is not None:
            self.state.to(self.state.device)

    def crop(self, tokens_to_remove: int) -> None:
        """Not supported, except for removing no token."""
        if tokens_to_remove:
            raise NotImplementedError(
                f"a {self.state_class.__name__} cannot be cropped: "
                "coarse levels do not keep the tokens that they merged"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows of the surviving beams."""
        self.state.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.state.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self.state.select(indices)


class HKTCacheLayer(StateLayer[HKTCache]):
    """A layer of `DynamicCache` for an `HKTConfig`."""

    _layer_type = "hkt"
    state_class = HKTCache


class HSACacheLayer(StateLayer[HSACache]):
    """A layer of `DynamicCache` for an `HSAConfig`."""

    _layer_type = "hsa"
    state_class = HSACache


def layer_states(past_key_values: Cache, state_class: type[State], layers: int) -> list[State]:
    """The state of every layer; a TypeError for any other kind of cache."""
    found = [
        layer.state
        for layer in past_key_values.layers
        if isinstance(layer, StateLayer) and isinstance(layer.state, state_class)
    ]
    if len(found) != layers:
        raise TypeError(
            "past_key_values must be a DynamicCache(config=model.config) of this model, got "
            f"{type(past_key_values).__name__} with {len(found)} layers of "
            f"{state_class.__name__} instead of {layers}"
        )
    return found
