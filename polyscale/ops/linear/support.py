"""Which tensors the fast paths of a projection take."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyscale.ops.native.derivatives import transformed


def why_not_float32_on_cpu(tensors: Sequence[Tensor]) -> str | None:
    """Why these are more than float32 numbers on a CPU, or are watched while they are used.

    Autocast, modes such as a FLOP counter, torch.func and a compiler must see torch's own products.
    """
    # First, as a compiler that traces the rest would break its graph here.
    if torch.compiler.is_compiling():
        return "a compiled graph keeps torch's own products"
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"it runs on the CPU, got a tensor on {tensor.device}"
        if tensor.dtype != torch.float32:
            return f"it takes float32, got {tensor.dtype}"
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"it takes no subclasses of tensors, got {type(tensor).__name__}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast chooses the dtype of torch's own products only"
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode, such as a FLOP counter, knows torch's own products only"
    if transformed(tensors):
        return "it has reverse-mode gradients only: no torch.func transforms, no forward mode"
    return None
