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

from polyscale.layers.hsa import HSAAttention
from polyscale.layers.hsa_cache import HSACache
from polyscale.models.base import PolyscaleModel
from polyscale.models.hsa.configuration import HSAConfig
from polyscale.models.inputs import ModelInputs
from polyscale.models.language import LanguageModel, packed_bounds
from polyscale.models.sequence import SequenceBlock, SequenceModel
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

    def _encode(
        self,
        embedded: Tensor,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        options: dict[str, Any],
    ) -> BaseModelOutputWithPast:
        """As of any sequence model, but without packed rows and attention matrices."""
        if packed_bounds(options["cu_seqlens"], options) is not None:
            raise ValueError("cu_seqlens is not supported by HSA models: pass an attention_mask")
        if options["output_attentions"]:
            raise ValueError(
                "output_attentions is not supported by HSA models: see polyscale.hsa_matrix"
            )
        options["output_attentions"] = False  # whatever the configuration says
        return super()._encode(embedded, input_ids, attention_mask, past_key_values, options)

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
