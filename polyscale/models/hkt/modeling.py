"""The Hierarchical Kernel Transformer as Hugging Face models."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    PreTrainedModel,
    initialization,
)
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
)
from transformers.utils.generic import can_return_tuple

from polyscale.layers.filters import CausalFilter
from polyscale.layers.hkt import HKTAttention
from polyscale.layers.hkt_cache import HKTCache
from polyscale.models.cache import layer_states
from polyscale.models.hkt.configuration import HKTConfig
from polyscale.models.inputs import ModelInputs


class HKTBlock(GradientCheckpointingLayer):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, config: HKTConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention_norm = nn.LayerNorm(width, eps)
        self.attention = HKTAttention(
            width,
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
        hidden = config.intermediate_size or 4 * width
        self.mlp_norm = nn.LayerNorm(width, eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), ACT2FN[config.hidden_act], nn.Linear(hidden, width)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: HKTCache | None = None,
        return_attention: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The block's output `[B, T, C]`, and the attention matrix where asked for."""
        attended = self.attention(
            self.attention_norm(x),
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            cache=cache,
            return_details=return_attention,
        )
        attention = None
        if return_attention:
            attended, details = attended
            attention = details.attention
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), attention


class HKTPreTrainedModel(PreTrainedModel):
    """Loading, saving and initial weights, common to all HKT models."""

    config_class = HKTConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("HKTBlock",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            initialization.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            initialization.ones_(module.weight)
            initialization.zeros_(module.bias)
        elif isinstance(module, CausalFilter) and module.weight is not None:
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


class HKTModel(HKTPreTrainedModel):
    """Embeddings, blocks and a last norm: hidden states `[B, T, C]`."""

    def __init__(self, config: HKTConfig) -> None:
        super().__init__(config)
        self.embeddings: nn.Embedding | None = None
        self.input_proj: nn.Linear | None = None
        if config.input_channels is None:
            self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        else:
            self.input_proj = nn.Linear(config.input_channels, config.hidden_size)
            self.main_input_name = "input_values"
        self.position_embeddings: nn.Embedding | None = None
        if config.positions == "learned":
            self.position_embeddings = nn.Embedding(
                config.max_position_embeddings, config.hidden_size
            )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(HKTBlock(config) for _ in range(config.num_hidden_layers))
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
            input_values: `[B, T, input_channels]` (or `[B, T]` for one channel) of a model with
                continuous inputs.
            cu_seqlens: cumulative lengths of sequences packed in one row (`B = 1`).
            use_cache: whether to return a cache.
            output_hidden_states: whether to return the input of every block and the last output.
            output_attentions: whether to return the attention matrices (dense).
            **kwargs: `cu_seq_lens_q` means `cu_seqlens`; `position_ids` must be what the mask
                says.
        """
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        states = None
        if past_key_values is not None:
            states = layer_states(past_key_values, HKTCache, len(self.blocks))
        embedded = self._embed(input_ids, inputs_embeds, input_values)
        inputs = ModelInputs.read(embedded, attention_mask, cu_seqlens, states, kwargs)
        x = inputs.line_up(embedded)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(
                inputs.positions(x, self.config.max_position_embeddings)
            )
        x = self.dropout(x)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        hidden_states, attentions = [], []
        for number, block in enumerate(self.blocks):
            hidden_states.append(x)
            x, attention = block(
                x,
                inputs.lengths,
                inputs.cu_seqlens,
                cache=None if states is None else states[number],
                return_attention=output_attentions,
            )
            attentions.append(attention)
        x = self.norm(x)
        hidden_states.append(x)
        return BaseModelOutputWithPast(
            last_hidden_state=inputs.put_back(x),
            past_key_values=past_key_values,
            hidden_states=(
                tuple(inputs.put_back(state) for state in hidden_states)
                if output_hidden_states
                else None
            ),
            attentions=(
                tuple(inputs.put_back_matrix(attention) for attention in attentions)
                if output_attentions
                else None
            ),
        )

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
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(
                f"input_ids must have shape [B, T] with T >= 1, got {list(input_ids.shape)}"
            )
        return self.embeddings(input_ids)
