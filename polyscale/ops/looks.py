"""Whether the numbers in a tensor can be looked at."""

import torch
from torch import Tensor, nn
from torch._C import _functorch


def has_numbers(*tensors: Tensor) -> bool:
    """Whether each can be read: none is on the meta device, fake, traced or batched by vmap.

    >>> has_numbers(torch.zeros(2)), has_numbers(torch.zeros(2, device="meta"))
    (True, False)
    """
    if torch.compiler.is_compiling():
        return False
    # Fake tensors are a subclass, whatever device they name.
    return all(
        x.device.type != "meta" and type(x) in (Tensor, nn.Parameter) and not _is_batched(x)
        for x in tensors
    )


def can_look(x: Tensor) -> bool:
    """Whether a look costs nothing: an accelerator would have to wait."""
    return x.device.type == "cpu" and has_numbers(x)


def _is_batched(x: Tensor) -> bool:
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False
