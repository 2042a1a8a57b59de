"""Small random models of each architecture, with attention far from uniform."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 60
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,  # large, so that attention is peaked and a lost mask shows
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def bert(**changes: Any) -> PreTrainedModel:
    return _ready(BertForMaskedLM(BertConfig(**{**SIZES, **changes})))


def roberta() -> PreTrainedModel:
    return _ready(RobertaForMaskedLM(RobertaConfig(**SIZES, pad_token_id=0)))


def distilbert() -> PreTrainedModel:
    config = DistilBertConfig(
        vocab_size=VOCABULARY, dim=32, n_layers=3, n_heads=4, hidden_dim=40, initializer_range=0.3
    )
    return _ready(DistilBertForMaskedLM(config))


def gpt2(**changes: Any) -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=130,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        **changes,
    )
    return _ready(GPT2LMHeadModel(config))


def llama(**changes: Any) -> PreTrainedModel:
    return _ready(LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **changes})))


def qwen2(**changes: Any) -> PreTrainedModel:
    return _ready(Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "num_key_value_heads": 2, **changes})))


def mistral(**changes: Any) -> PreTrainedModel:
    sizes = {**SIZES, "num_key_value_heads": 2, "sliding_window": 8, **changes}
    return _ready(MistralForCausalLM(MistralConfig(**sizes)))


def vit() -> PreTrainedModel:
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=40,
        image_size=24,
        patch_size=4,
        initializer_range=0.3,
        num_labels=7,
    )
    return _ready(ViTForImageClassification(config))


def _ready(model: PreTrainedModel) -> PreTrainedModel:
    # Twice the digits, so that a rounding error is not taken for a wrong weight, nor the reverse.
    return model.eval().double()


MODELS = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
}
ENCODERS = ("bert", "roberta", "distilbert")
DECODERS = ("gpt2", "llama")


def text(batch: int = 2, length: int = 21, seed: int = 0) -> Tensor:
    """Token ids `[batch, length]`, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCABULARY, (batch, length), generator=generator)


def inputs(name: str) -> dict[str, Tensor]:
    if name == "vit":
        generator = torch.Generator().manual_seed(0)
        return {"pixel_values": torch.randn(2, 3, 24, 24, generator=generator).double()}
    return {"input_ids": text()}


@torch.no_grad()
def logits(model: PreTrainedModel, **given: Any) -> Tensor:
    return model(**given).logits
