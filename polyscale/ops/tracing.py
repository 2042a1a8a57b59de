"""Whether the values of a tensor can be read."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def has_values(*tensors: Tensor) -> bool:
    """Whether each can be read: none is on the meta device, fake, traced or batched by vmap.

    >>> has_values(torch.zeros(2)), has_values(torch.zeros(2, device="meta"))
    (True, False)
    """
    if torch.compiler.is_compiling():
        return False
    # Fake tensors are a subclass, whatever device they name.
    return all(
        x.device.type != "meta" and type(x) in (Tensor, nn.Parameter) and not _is_batched(x)
        for x in tensors
    )


def is_cheap_to_read(x: Tensor) -> bool:
    """Whether reading is free; an accelerator would have to synchronise."""
    return x.device.type == "cpu" and has_values(x)


def has_only_a_shape(x: Tensor) -> bool:
    """Whether this is a fake or meta tensor outside of a trace: results have a shape and no values.

    >>> has_only_a_shape(torch.zeros(2)), has_only_a_shape(torch.zeros(2, device="meta"))
    (False, True)
    """
    if torch.compiler.is_compiling():
        return False
    traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
    return not traced and (x.device.type == "meta" or isinstance(x, FakeTensor))


def counts_flops() -> bool:
    """Whether a FLOP counter of torch watches what runs."""
    if torch.compiler.is_compiling():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(type(mode).__module__ == "torch.utils.flop_counter" for mode in modes)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Operations keep their dtypes. The meta device has no autocast to switch off."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _is_batched(x: Tensor) -> bool:
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False
