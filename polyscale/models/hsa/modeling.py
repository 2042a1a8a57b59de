"""A causal language model with Hierarchical Self-Attention.

Each token attends to the tokens of its own family and to the closed families before it, each as one
node. The cache holds only these entries: O(b log_b N) for families of b.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from polyscale.layers.hsa import HSAAttention
from polyscale.layers.hsa_cache import HSACache
from polyscale.models.base import PolyscaleModel
from polyscale.models.hsa.configuration import HSAConfig
from polyscale.models.inputs import ModelInputs
from polyscale.models.language import LanguageModel
from polyscale.models.sequence import SequenceBlock, SequenceModel, check_input_ids
from polyscale.trees import SignalTree
from polyscale.trees.growth import (
    closes_by_tokens,
    closes_by_windows,
    token_trees,
    tower,
    window_tree,
)


class TextStructure(NamedTuple):
    """The layout of a batch that HSA's blocks need."""

    tree: SignalTree | None  # of a prompt; None when decoding continues
    closes: Tensor  # [B, T], the number of levels that close before each token
    lengths: Tensor | None  # [B], real tokens


class HSABlock(SequenceBlock):
    """Pre-norm HSA attention and MLP, each with a residual."""

    def __init__(self, config: HSAConfig) -> None:
        attention = HSAAttention(
            config.hidden_size,
            config.num_attention_heads,
            tie="columns",
            causal=True,
            normalize=config.normalize,
            rotary=config.positions == "rotary",
            impl=config.attention_impl,
        )
        super().__init__(config, attention)

    def attend(
        self, x: Tensor, structure: TextStructure, cache: HSACache | None, return_attention: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The attended values `[B, T, C]`; there is no attention matrix."""
        tree, closes, lengths = structure
        if cache is None:
            return self.attention(x, tree), None
        return self.attention(x, tree, cache=cache, closes=closes, lengths=lengths), None


class HSAPreTrainedModel(PolyscaleModel):
    """Loading, saving and initial weights."""

    config_class = HSAConfig
    _no_split_modules = ("HSABlock",)


class HSAModel(SequenceModel, HSAPreTrainedModel):
    """Embeddings, blocks and a final norm: hidden states `[B, T, C]`."""

    cache_class = HSACache
    embeddings: nn.Embedding

    def __init__(self, config: HSAConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self._make_layers(config, HSABlock)

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
            **kwargs: `position_ids` must agree with the mask.
        """
        if cu_seqlens is not None or kwargs.get("cu_seq_lens_q") is not None:
            raise ValueError("cu_seqlens is not supported by HSA models: pass an attention_mask")
        if output_attentions:
            raise ValueError(
                "output_attentions is not supported by HSA models: see polyscale.hsa_matrix"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds to this model")
        if input_ids is not None:
            check_input_ids(input_ids)
            inputs_embeds = self.embeddings(input_ids)
        assert inputs_embeds is not None
        options = {
            "cu_seqlens": None,
            "use_cache": use_cache,
            "output_hidden_states": output_hidden_states,
            "output_attentions": False,
            **kwargs,
        }
        return self._encode(inputs_embeds, input_ids, attention_mask, past_key_values, options)

    def _structure(self, x: Tensor, input_ids: Tensor | None, inputs: ModelInputs) -> TextStructure:
        """The tree of a prompt, and the number of levels that close before each token."""
        batch, length = x.shape[:2]
        past = inputs.past
        if self.config.boundary_token_ids is None:
            position = inputs.positions(x, None).expand(batch, -1)
            columns = length + (0 if past is None else past.columns)
            closes = closes_by_windows(position, tower(self.config.windows, columns))
            if past is not None:
                return TextStructure(None, closes, inputs.lengths)
            tree = window_tree(length, tuple(self.config.windows), x.device)
            return TextStructure(tree, closes, inputs.lengths)
        if input_ids is None:
            raise ValueError("boundary_token_ids need input_ids, got inputs_embeds")
        ids = inputs.line_up(input_ids[..., None])[..., 0]
        before = torch.full_like(ids[:, :1], -1)
        if isinstance(past, HSACache) and past.last_token is not None:
            before = past.last_token[:, None]
        previous = torch.cat((before, ids[:, :-1]), dim=1)
        closes = closes_by_tokens(previous, self.config.boundary_token_ids)
        if past is not None:
            return TextStructure(None, closes, inputs.lengths)
        lengths = inputs.lengths
        if lengths is None:
            lengths = torch.full((batch,), length, device=x.device)
        tree = token_trees(closes, lengths, len(self.config.boundary_token_ids))
        return TextStructure(tree, closes, inputs.lengths)

    def _remember(self, state: HSACache, input_ids: Tensor, inputs: ModelInputs) -> None:
        """Store the last token of each row: the next call needs to know which levels it closes."""
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
