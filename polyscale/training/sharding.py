"""Models whose weights are sharded over the processes (FSDP 2)."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel


def shard(model: PreTrainedModel, device: torch.device, processes: int, *, bf16: bool) -> None:
    """Shard the weights of a model on the CPU, their gradients and moments, over `processes`.

    Blocks are moved to the device and sharded one after the other, so that the device never holds
    all of them. With `bf16`, weights are gathered in bfloat16 and gradients reduced in float32.
    """
    if processes < 2:
        raise ValueError(
            f"shard must have at least 2 processes, got {processes}; use torchrun "
            "--nproc-per-node 2 or shard=False"
        )
    mesh = init_device_mesh(device.type, (processes,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # autocast decides; activations between blocks stay float32
    )
    for module in list(model.modules()):
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
