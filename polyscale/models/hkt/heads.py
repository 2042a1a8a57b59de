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
from transformers.modeling_outputs import (
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from polyscale.layers.pooling import pool
from polyscale.models.hkt.configuration import HKTConfig
from polyscale.models.hkt.modeling import HKTModel, HKTPreTrainedModel
from polyscale.models.language import LanguageModel, for_loss, packed_bounds


class _HKTClassifier(HKTPreTrainedModel):
    def __init__(self, config: HKTConfig) -> None:
        super().__init__(config)
        self.model = HKTModel(config)
        self.main_input_name = self.model.main_input_name
        self.dropout = nn.Dropout(config.dropout)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

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
    ) -> SequenceClassifierOutput | TokenClassifierOutput:
        """Logits of what is classified, and the loss if there are labels."""
        cu_seqlens = packed_bounds(cu_seqlens, kwargs)
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
        found = self._classified(output.last_hidden_state, attention_mask, cu_seqlens)
        logits = self.classifier(self.dropout(found))
        loss = None
        if labels is not None:
            loss = self._loss(logits, labels, for_loss(kwargs))
        return self.output_class(
            loss=loss,
            logits=logits,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


class HKTForSequenceClassification(_HKTClassifier):
    """A class (or several, or a number) for a whole sequence.

    Logits are `[B, num_labels]`, one row per packed sequence with `cu_seqlens`.
    """

    output_class = SequenceClassifierOutput

    def _classified(
        self, hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        return pool(hidden, self.config.pooling, padding, cu_seqlens)

    def _loss(self, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        return self.loss_function(
            labels=labels, pooled_logits=logits, config=self.config, **options
        )


class HKTForTokenClassification(_HKTClassifier):
    """A class for every token: logits `[B, T, num_labels]`; labels of -100 do not count."""

    output_class = TokenClassifierOutput

    def _classified(
        self, hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        return hidden

    def _loss(self, logits: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        return self.loss_function(logits, labels, self.config, **options)


class HKTForCausalLM(LanguageModel, HKTPreTrainedModel, GenerationMixin):
    """A causal language model that works with `generate`."""

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


AutoConfig.register("hkt", HKTConfig)
AutoModel.register(HKTConfig, HKTModel)
AutoModelForCausalLM.register(HKTConfig, HKTForCausalLM)
AutoModelForSequenceClassification.register(HKTConfig, HKTForSequenceClassification)
AutoModelForTokenClassification.register(HKTConfig, HKTForTokenClassification)
