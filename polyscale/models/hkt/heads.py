"""HKT models for a task: classification of sequences and tokens, and language modelling."""

from typing import Any

from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationMixin,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    CausalLMOutputWithPast,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from polyscale.layers.pooling import pool
from polyscale.models.hkt.configuration import HKTConfig
from polyscale.models.hkt.modeling import HKTModel, HKTPreTrainedModel


class _HKTClassifier(HKTPreTrainedModel):
    def __init__(self, config: HKTConfig) -> None:
        super().__init__(config)
        self.model = HKTModel(config)
        self.main_input_name = self.model.main_input_name
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class HKTForSequenceClassification(_HKTClassifier):
    """A class (or several, or a number) for a whole sequence."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Logits `[B, num_labels]`, one row per packed sequence with `cu_seqlens`."""
        cu_seqlens = _packed(cu_seqlens, kwargs)
        output = self.model(
            input_ids,
            attention_mask,
            None,
            inputs_embeds,
            input_values,
            cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **kwargs,
        )
        padding = None if attention_mask is None else attention_mask == 0
        pooled = pool(output.last_hidden_state, self.config.pooling, padding, cu_seqlens)
        logits = self.classifier(self.dropout(pooled))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                labels=labels, pooled_logits=logits, config=self.config, **_for_loss(kwargs)
            )
        return SequenceClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class HKTForTokenClassification(_HKTClassifier):
    """A class for every token."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        input_values: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits `[B, T, num_labels]`; labels of -100 do not count."""
        output = self.model(
            input_ids,
            attention_mask,
            None,
            inputs_embeds,
            input_values,
            cu_seqlens,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **kwargs,
        )
        logits = self.classifier(self.dropout(output.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config, **_for_loss(kwargs))
        return TokenClassifierOutput(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class HKTForCausalLM(HKTPreTrainedModel, GenerationMixin):
    """A causal language model that works with `generate`."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: HKTConfig) -> None:
        if not config.causal:
            raise ValueError("HKTForCausalLM needs config.causal=True, got False")
        if config.input_channels is not None:
            raise ValueError(
                f"HKTForCausalLM needs token ids (input_channels=None), "
                f"got input_channels={config.input_channels}"
            )
        super().__init__(config)
        self.model = HKTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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
        cu_seqlens = _packed(cu_seqlens, kwargs)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seqlens is None
        output = self.model(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            None,
            cu_seqlens,
            use_cache,
            output_hidden_states,
            output_attentions,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            if cu_seqlens is not None:
                # The first token of a packed sequence follows from nothing.
                labels = labels.index_fill(1, cu_seqlens[:-1].long(), -100)
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, **_for_loss(kwargs)
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


def _packed(cu_seqlens: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
    """`cu_seqlens` by our name or by that of Hugging Face's collators."""
    return kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens


def _for_loss(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: kwargs[key] for key in ("num_items_in_batch",) if key in kwargs}


AutoConfig.register("hkt", HKTConfig)
AutoModel.register(HKTConfig, HKTModel)
AutoModelForCausalLM.register(HKTConfig, HKTForCausalLM)
AutoModelForSequenceClassification.register(HKTConfig, HKTForSequenceClassification)
AutoModelForTokenClassification.register(HKTConfig, HKTForTokenClassification)
