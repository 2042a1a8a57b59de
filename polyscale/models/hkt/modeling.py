"""The Hierarchical Kernel Transformer as Hugging Face models."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from polyscale.layers.filters import CausalFilter
from polyscale.layers.hkt import HKTAttention
from polyscale.layers.hkt_cache import HKTCache
from polyscale.models.base import PolyscaleModel
from polyscale.models.hkt.configuration import HKTConfig
from polyscale.models.inputs import ModelInputs
from polyscale.models.sequence import SequenceBlock, SequenceModel, check_input_ids


class HKTBlock(SequenceBlock):
    """Pre-norm HKT attention and MLP, each with a residual."""

    def __init__(self, config: HKTConfig) -> None:
        attention = HKTAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.levels,
            causal=config.causal,
            downsampling=config.downsampling,
            downsampling_width=config.downsampling_width,
            filter_width=config.filter_width,
            values=config.values,
            shared_projections=config.shared_projections,
            level_weights=config.level_weights,
            relative_positions=config.relative_positions,
            rotary=config.positions == "rotary",
            local_start=config.local_start,
            kernel=config.kernel,
            impl=config.attention_impl,
        )
        super().__init__(config, attention)

    def attend(
        self, x: Tensor, structure: ModelInputs, cache: HKTCache | None, return_attention: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The attended values `[B, T, C]`, and the attention matrix with `return_attention`."""
        attended = self.attention(
            x,
            cu_seqlens=structure.cu_seqlens,
            lengths=structure.lengths,
            cache=cache,
            return_details=return_attention,
        )
        if not return_attention:
            return attended, None
        attended, details = attended
        return attended, details.attention


class HKTPreTrainedModel(PolyscaleModel):
    """Loading, saving and initial weights, common to all HKT models."""

    config_class = HKTConfig
    _no_split_modules = ("HKTBlock",)

    def _init_own_weights(self, module: nn.Module) -> None:
        if isinstance(module, CausalFilter) and module.weight is not None:
            initialization.copy_(module.weight, module.initial_weight())
        elif isinstance(module, HKTAttention):
            for projection in (*module.q_proj, *module.k_proj) if module.local_start else ():
                initialization.constant_(projection.bias, module.local_start)
            for parameter in (module.level_logits, module.value_logits, *module.relative_bias):
                if parameter is not None:
                    initialization.zeros_(parameter)
            if module.fixed_level_weights is not None:
                initialization.copy_(
                    module.fixed_level_weights, torch.tensor(self.config.level_weights)
                )

    def level_weights(self) -> list[Tensor]:
        """The weight of every level, `[heads, levels]` per block."""
        return [m.level_weights.detach() for m in self.modules() if isinstance(m, HKTAttention)]


class HKTModel(SequenceModel, HKTPreTrainedModel):
    """Embeddings, blocks and a final norm: hidden states `[B, T, C]`."""

    cache_class = HKTCache

    def __init__(self, config: HKTConfig) -> None:
        super().__init__(config)
        self.embeddings: nn.Embedding | None = None
        self.input_proj: nn.Linear | None = None
        if config.input_channels is None:
            self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.input_proj = nn.Linear(config.input_channels, config.hidden_size)
            self.main_input_name = "input_values"
        self._make_layers(config, HKTBlock)

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
            input_values: `[B, T, input_channels]` (or `[B, T]` for one channel) of a model with
                continuous inputs.
            cu_seqlens: cumulative lengths of sequences packed in one row (`B = 1`).
            use_cache: whether to return a cache.
            output_hidden_states: whether to return the input of every block and the last output.
            output_attentions: whether to return the attention matrices (dense).
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
        given = {
            "input_ids": input_ids,
            "inputs_embeds": inputs_embeds,
            "input_values": input_values,
        }
        names = [name for name, value in given.items() if value is not None]
        own = "input_ids" if self.input_proj is None else "input_values"
        if len(names) != 1 or names[0] not in (own, "inputs_embeds"):
            raise ValueError(f"pass either {own} or inputs_embeds to this model, got {names}")
        if inputs_embeds is not None:
            return inputs_embeds
        if input_values is not None:
            assert self.input_proj is not None
            if input_values.dim() == 2:
                input_values = input_values[..., None]
            channels = self.input_proj.in_features
            if input_values.dim() != 3 or input_values.shape[2] != channels:
                raise ValueError(
                    f"input_values must have shape [B, T, {channels}], "
                    f"got {list(input_values.shape)}"
                )
            return self.input_proj(input_values.to(self.input_proj.weight.dtype))
        assert self.embeddings is not None
        assert input_ids is not None
        check_input_ids(input_ids)
        return self.embeddings(input_ids)
