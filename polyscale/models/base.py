"""The base class of all Hugging Face models of polyscale: loading, saving and initial weights."""

import torch
from torch import nn
from transformers import PreTrainedModel, initialization


class PolyscaleModel(PreTrainedModel):
    """Initial weights of common modules; a model adds those of its own modules."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            initialization.normal_(module.weight, std=self.config.initializer_range)
            if getattr(module, "bias", None) is not None:
                initialization.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            initialization.ones_(module.weight)
            initialization.zeros_(module.bias)
        else:
            self._init_own_weights(module)

    def _init_own_weights(self, module: nn.Module) -> None:
        """Set the initial weights of a module that is neither linear, embedding nor norm."""
