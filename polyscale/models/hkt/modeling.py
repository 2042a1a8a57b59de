"""The Hierarchical Kernel Transformer as Hugging Face models."""

import torch
from torch import Tensor, nn
from transformers import initialization

from polyscale.layers.filters import CausalFilter
from polyscale.layers.hkt import HKTAttention
from polyscale.layers.hkt_cache import HKTCache
from polyscale.models.base import PolyscaleModel
from polyscale.models.hkt.configuration import HKTConfig
from polyscale.models.inputs import ModelInputs
from polyscale.models.sequence import SequenceBlock, SequenceModel


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

    def _project(self, input_values: Tensor) -> Tensor:
        assert self.input_proj is not None
        if input_values.dim() == 2:
            input_values = input_values[..., None]
        channels = self.input_proj.in_features
        if input_values.dim() != 3 or input_values.shape[2] != channels:
            raise ValueError(
                f"input_values must have shape [B, T, {channels}], got {list(input_values.shape)}"
            )
        return self.input_proj(input_values.to(self.input_proj.weight.dtype))
