"""The base of HKT and HSA models of sequences: embeddings, pre-norm blocks, and a final norm."""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import DynamicCache
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from polyscale.layers.row_cache import RowCache
from polyscale.models.base import PolyscaleModel
from polyscale.models.cache_layers import layer_states
from polyscale.models.inputs import ModelInputs


class SequenceBlock(GradientCheckpointingLayer):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, config: Any, attention: nn.Module) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention_norm = nn.LayerNorm(width, eps)
        self.attention = attention
        hidden = config.intermediate_size or 4 * width
        self.mlp_norm = nn.LayerNorm(width, eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), ACT2FN[config.hidden_act], nn.Linear(hidden, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        structure: Any,
        cache: RowCache | None = None,
        return_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The output `[B, T, C]`, and the attention matrix with `return_attention`.

        `structure` has the layout of the batch that the attention needs.
        """
        attended, attention = self.attend(
            self.attention_norm(x), structure, cache, return_attention
        )
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), attention

    def attend(
        self, x: Tensor, structure: Any, cache: Any, return_attention: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The attended values `[B, T, C]`, and the attention matrix with `return_attention`."""
        raise NotImplementedError


class SequenceModel(PolyscaleModel):
    """Embeddings, blocks and a final norm: hidden states `[B, T, C]`."""

    cache_class: ClassVar[type[RowCache]]
    embeddings: nn.Embedding | None

    def _make_layers(self, config: Any, make_block: Callable[[Any], SequenceBlock]) -> None:
        self.position_embeddings: nn.Embedding | None = None
        if config.positions == "learned":
            self.position_embeddings = nn.Embedding(
                config.max_position_embeddings, config.hidden_size
            )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(make_block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        """The token embedding; None for continuous inputs."""
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of every token; zeros at padding.

        Args:
            input_ids: `[B, T]` token ids.
            attention_mask: `[B, T]`, 1 for real tokens and 0 for padding, on any side; with a
                cache, of all tokens so far.
            past_key_values: a `DynamicCache(config=model.config)`; `input_ids` are then the new
                tokens only.
            inputs_embeds: `[B, T, hidden_size]` instead of ids.
            input_values: `[B, T, input_channels]` (or `[B, T]` for one channel) of an HKT model
                with continuous inputs.
            cu_seqlens: cumulative lengths of sequences packed in one row (`B = 1`); HKT only.
            use_cache: whether to return a cache.
            output_hidden_states: whether to return the input of every block and the last output.
            output_attentions: whether to return the attention matrices (dense); HKT only.
            **kwargs: `cu_seq_lens_q` is `cu_seqlens`; `position_ids` must agree with the mask.
        """
        options = {
            "cu_seqlens": cu_seqlens,
            "use_cache": use_cache,
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
            **kwargs,
        }
        embedded = self._embed(input_ids, inputs_embeds, input_values)
        return self._encode(embedded, input_ids, attention_mask, past_key_values, options)

    def _embed(
        self, input_ids: Tensor | None, inputs_embeds: Tensor | None, input_values: Tensor | None
    ) -> Tensor:
        """`[B, T, C]` from the one input that was given."""
        given = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "input_values": input_values,
        }
        names = [name for name, value in given.items() if value is not None]
        own = self.main_input_name
        if len(names) != 1 or names[0] not in (own, "inputs_embeds"):
            raise ValueError(f"pass either {own} or inputs_embeds to this model, got {names}")
        if inputs_embeds is not None:
            return inputs_embeds
        if input_values is not None:
            return self._project(input_values)
        assert self.embeddings is not None
        assert input_ids is not None
        check_input_ids(input_ids)
        return self.embeddings(input_ids)

    def _project(self, input_values: Tensor) -> Tensor:
        """`[B, T, C]` from continuous inputs, of a model that has them."""
        raise NotImplementedError

    def _encode(
        self,
        embedded: Tensor,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        options: dict[str, Any],
    ) -> BaseModelOutputWithPast:
        """Run the blocks on `[B, T, C]`; `options` are the other arguments of `forward`."""
        if options.pop("use_cache") and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        states = None
        if past_key_values is not None:
            states = layer_states(past_key_values, self.cache_class, len(self.blocks))
        return_states = self._requested("output_hidden_states", options)
        return_attentions = self._requested("output_attentions", options)
        inputs = ModelInputs.read(
            embedded, attention_mask, options.pop("cu_seqlens"), states, options
        )
        x = inputs.line_up(embedded)
        if self.position_embeddings is not None:
            limit = self.config.max_position_embeddings
            x = x + self.position_embeddings(inputs.positions(x, limit))
        x = self.dropout(x)
        structure = self._structure(x, input_ids, inputs)
        hidden_states, attentions = [], []
        for number, block in enumerate(self.blocks):
            hidden_states.append(x)
            x, attention = block(
                x,
                structure,
                cache=None if states is None else states[number],
                return_attention=return_attentions,
            )
            attentions.append(attention)
        x = self.norm(x)
        hidden_states.append(x)
        if states is not None and input_ids is not None:
            self._remember(states[0], input_ids, inputs)
        return BaseModelOutputWithPast(
            last_hidden_state=inputs.put_back(x),
            past_key_values=past_key_values,
            hidden_states=tuple(map(inputs.put_back, hidden_states)) if return_states else None,
            attentions=(
                tuple(map(inputs.put_back_matrix, attentions)) if return_attentions else None
            ),
        )

    def _requested(self, name: str, options: dict[str, Any]) -> bool:
        """Whether to return an output: the argument, or the configuration if it is None."""
        requested = options.pop(name)
        return getattr(self.config, name) if requested is None else requested

    def _structure(self, x: Tensor, input_ids: Tensor | None, inputs: ModelInputs) -> Any:
        """The layout of the batch that the attention of every block needs."""
        return inputs

    def _remember(self, state: Any, input_ids: Tensor, inputs: ModelInputs) -> None:
        """Store in the first layer's cache what the next call needs; nothing by default."""


def check_input_ids(input_ids: Tensor) -> None:
    """Raise unless there are token ids `[B, T]`."""
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(
            f"input_ids must have shape [B, T] with T >= 1, got {list(input_ids.shape)}"
        )
