"""What a model's blocks gave on a set of texts, kept so that later injections need not run them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from polyscale.inject.modules import attention_layers


class BlockOutputs:
    """The outputs of every block but the last, batch by batch, of a model without an injection.

    An injection changes nothing before its first layer: `replay` lets the blocks up to there give
    what they gave before, and the rest of the model runs as ever. Batches have to come in the same
    order each time.
    """

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []  # [batch][block]

    @contextmanager
    def record(self, model: PreTrainedModel) -> Iterator[None]:
        """Keep what the blocks give on one batch."""
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
        """Give the outputs of a batch again in place of running the blocks before `first`."""
        skipped = blocks(model)[:first]
        for block, output in zip(skipped, self.batches[batch], strict=False):
            block.forward = lambda *_inputs, _output=output, **_named: _output
        try:
            yield
        finally:
            for block in skipped:
                del block.forward  # the class's own is seen again


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The blocks of a model, one for each attention layer."""
    layers = attention_layers(model)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(layers):
            pairs = zip(module, layers, strict=True)
            if all(any(part is layer for part in block.modules()) for block, layer in pairs):
                return list(module)
    raise ValueError(f"model: {type(model).__name__} has no list with a block for each layer")
