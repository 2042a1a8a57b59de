"""Recorded outputs of a model's blocks, so that later injections do not run them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from polyscale.inject.modules import attention_layers


class BlockOutputs:
    """The outputs of every block but the last, batch by batch, of a model without an injection.

    An injection changes nothing before its first layer: `replay` returns the recorded outputs of
    the blocks up to there, and the rest of the model runs. Batches must come in the same order.
    """

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []  # [batch][block]

    @contextmanager
    def record(self, model: PreTrainedModel) -> Iterator[None]:
        """Record the outputs of the blocks on one batch."""
        outputs: list[Any] = []
        hooks = [
            block.register_forward_hook(lambda _block, _inputs, output: outputs.append(output))
            for block in blocks(model)[:-1]
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.batches.append(outputs)

    @contextmanager
    def replay(self, model: PreTrainedModel, batch: int, first: int) -> Iterator[None]:
        """Return the recorded outputs of a batch instead of running the blocks before `first`."""
        skipped = blocks(model)[:first]
        for block, output in zip(skipped, self.batches[batch], strict=False):
            block.forward = lambda *_inputs, _output=output, **_named: _output
        try:
            yield
        finally:
            for block in skipped:
                del block.forward  # restores the method of the class


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of a model, one for each attention layer."""
    layers = attention_layers(model)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(layers):
            pairs = zip(module, layers, strict=True)
            if all(any(part is layer for part in block.modules()) for block, layer in pairs):
                return list(module)
    raise ValueError(
        "model must have an nn.ModuleList with one block for each layer, got "
        f"{type(model).__name__}"
    )
