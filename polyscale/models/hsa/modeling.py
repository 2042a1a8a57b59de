"""A causal language model with Hierarchical Self-Attention.

Each token attends to the tokens of its own family and to the closed families before it, as one
node each. The cache holds only those: O(b log_b N) for families of b.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedModel,
    initialization,
)
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from polyscale.layers.hsa import HSAAttention
from polyscale.layers.hsa_cache import HSACache
from polyscale.models.cache import layer_states
from polyscale.models.hsa.configuration import HSAConfig
from polyscale.models.hsa.structure import (
    closes_by_tokens,
    closes_by_windows,
    token_trees,
    window_tree,
)
from polyscale.models.inputs import ModelInputs
from polyscale.models.language import LanguageModel
from polyscale.trees import SignalTree


class HSABlock(GradientCheckpointingLayer):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, config: HSAConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.layer_norm_eps
        self.attention_norm = nn.LayerNorm(width, eps)
        self.attention = HSAAttention(
            width,
            config.num_attention_heads,
            tie="columns",
            causal=True,
            normalize=config.normalize,
            rotary=config.positions == "rotary",
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
        tree: SignalTree | None,
        closes: Tensor,
        lengths: Tensor | None,
        cache: HSACache | None = None,
    ) -> Tensor:
        """`[B, T, C]` to the same."""
        normed = self.attention_norm(x)
        if cache is None:
            attended = self.attention(normed, tree)
        else:
            attended = self.attention(normed, tree, cache=cache, closes=closes, lengths=lengths)
        x = x + self.dropout(attended)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class HSAPreTrainedModel(PreTrainedModel):
    """Loading, saving and initial weights."""

    config_class = HSAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("HSABlock",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            initialization.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            initialization.ones_(module.weight)
            initialization.zeros_(module.bias)


class HSAModel(HSAPreTrainedModel):
    """Embeddings, blocks and a last norm: hidden states `[B, T, C]`."""

    def __init__(self, config: HSAConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings: nn.Embedding | None = None
        if config.positions == "learned":
            self.position_embeddings = nn.Embedding(
                config.max_position_embeddings, config.hidden_size
            )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(HSABlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The token embedding."""
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
            cu_seqlens: not supported; pad instead.
            use_cache: whether to return a cache.
            output_hidden_states: whether to return the input of every block and the last output.
            output_attentions: not supported; see `polyscale.hsa_matrix`.
            **kwargs: `position_ids` must be what the mask says.
        """
        if cu_seqlens is not None or kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("cu_seqlens is not supported by HSA models: pass an attention_mask")
        if output_attentions:
            raise ValueError(
                "output_attentions is not supported by HSA models: see polyscale.hsa_matrix"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds to this model")
        if input_ids is not None and (input_ids.dim() != 2 or input_ids.shape[1] == 0):
            raise ValueError(
                f"input_ids must have shape [B, T] with T >= 1, got {list(input_ids.shape)}"
            )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        states = None
        if past_key_values is not None:
            states = layer_states(past_key_values, HSACache, len(self.blocks))
        embedded = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        inputs = ModelInputs.read(embedded, attention_mask, None, states, kwargs)
        x = inputs.line_up(embedded)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(
                inputs.positions(x, self.config.max_position_embeddings)
            )
        x = self.dropout(x)
        tree, closes = self._structure(x, input_ids, inputs)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden_states = []
        for number, block in enumerate(self.blocks):
            hidden_states.append(x)
            state = None if states is None else states[number]
            x = block(x, tree, closes, inputs.lengths, cache=state)
        x = self.norm(x)
        hidden_states.append(x)
        if states is not None and input_ids is not None:
            self._remember_token(states[0], input_ids, inputs)
        return BaseModelOutputWithPast(
            last_hidden_state=inputs.put_back(x),
            past_key_values=past_key_values,
            hidden_states=(
                tuple(inputs.put_back(state) for state in hidden_states)
                if output_hidden_states
                else None
            ),
        )

    def _structure(
        self, x: Tensor, input_ids: Tensor | None, inputs: ModelInputs
    ) -> tuple[SignalTree | None, Tensor]:
        """The tree of prompts that start here, and what closes before each token `[B, T]`."""
        batch, length = x.shape[:2]
        past = inputs.past
        if self.config.boundary_token_ids is None:
            position = inputs.positions(x, None).expand(batch, -1)
            columns = length + (0 if past is None else past.columns)
            closes = closes_by_windows(position, self.config.windows, columns)
            if past is not None:
                return None, closes
            return window_tree(length, tuple(self.config.windows), x.device), closes
        if input_ids is None:
            raise ValueError("boundary_token_ids need input_ids, got inputs_embeds")
        ids = inputs.line_up(input_ids[..., None])[..., 0]
        before = torch.full_like(ids[:, :1], -1)
        if isinstance(past, HSACache) and past.last_token is not None:
            before = past.last_token[:, None]
        previous = torch.cat((before, ids[:, :-1]), dim=1)
        closes = closes_by_tokens(previous, self.config.boundary_token_ids)
        if past is not None:
            return None, closes
        lengths = inputs.lengths
        if lengths is None:
            lengths = torch.full((batch,), length, device=x.device)
        return token_trees(closes, lengths, len(self.config.boundary_token_ids)), closes

    def _remember_token(self, state: HSACache, input_ids: Tensor, inputs: ModelInputs) -> None:
        """Keep each row's newest token: a later call asks what it closes."""
        ids = inputs.line_up(input_ids[..., None])[..., 0]
        if inputs.lengths is None:
            state.last_token = ids[:, -1]
            return
        newest = ids.gather(1, (inputs.lengths - 1).clamp(min=0)[:, None])[:, 0]
        kept = torch.full_like(newest, -1) if state.last_token is None else state.last_token
        state.last_token = torch.where(inputs.lengths > 0, newest, kept)


class HSAForCausalLM(LanguageModel, HSAPreTrainedModel, GenerationMixin):
    """A causal HSA language model that works with `generate`."""

    def __init__(self, config: HSAConfig) -> None:
        super().__init__(config)
        self.model = HSAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoConfig.register("hsa", HSAConfig)
AutoModel.register(HSAConfig, HSAModel)
AutoModelForCausalLM.register(HSAConfig, HSAForCausalLM)
