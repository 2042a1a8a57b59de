"""The base of causal language models: the head, its loss, and generation."""

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple


class LanguageModel:
    """A base `model` and an `lm_head` whose weight is tied to the token embedding.

    A mixin before a `PreTrainedModel`, whose `__init__` makes the two, and `GenerationMixin`, which
    transformers requires to be a direct base.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012
    config: Any
    training: bool
    loss_function: Any
    model: nn.Module
    lm_head: nn.Linear

    def get_output_embeddings(self) -> nn.Module:
        """The language-model head."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the language-model head."""
        self.lm_head = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits `[B, T, vocab_size]` of the next token; labels are shifted here."""
        cu_seqlens = packed_bounds(cu_seqlens, kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seqlens is None
        output = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            cu_seqlens=cu_seqlens,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            if cu_seqlens is not None:
                # The first token of a packed sequence has no context.
                labels = labels.index_fill(1, cu_seqlens[:-1].long(), -100)
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, **for_loss(kwargs)
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


def packed_bounds(cu_seqlens: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
    """`cu_seqlens`, or `cu_seq_lens_q` of Hugging Face's collators."""
    return kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens


def for_loss(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the Trainer for the loss."""
    return {key: kwargs[key] for key in ("num_items_in_batch",) if key in kwargs}
