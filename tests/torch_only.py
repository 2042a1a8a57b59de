"""Run in an environment that has torch, polyscale and nothing else: see `make test-torch-only`."""

import importlib.util
import subprocess
import sys

import torch

import polyscale as ps

for package in ("transformers", "numpy", "typer", "matplotlib"):
    assert importlib.util.find_spec(package) is None, f"{package} is installed: nothing is shown"

layer = ps.HKTAttention(16, 2)
x = torch.randn(2, 9, 16, requires_grad=True)
layer(x).sum().backward()
assert x.grad is not None
fine, coarse = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 4, 4)
ps.hkt_attention([fine, coarse], [fine, coarse], fine, torch.tensor([0.5, 0.5]))
available = {found.name for found in ps.implementations() if found.available}
assert {"reference", "sdpa", "torch"} <= available, available
tree = ps.SignalTree.from_windows(20, (2, 4))
leaves = torch.randn(1, 2, 20, 4)
assert ps.hsa_attention(leaves, leaves, leaves, tree).shape == leaves.shape
assert ps.opened_attention(leaves, leaves, leaves).shape == leaves.shape
store = ps.LevelStore.empty(1, 2, 4)
store.append(leaves, leaves)
assert ps.level_attention(leaves[:, :, -1:], store).shape == (1, 2, 1, 4)

for use in ("HKTConfig", "HKTForCausalLM"):
    try:
        getattr(ps, use)
    except ImportError as error:
        message = str(error)
    else:
        raise AssertionError(f"{use} needs transformers, and said nothing")
    assert "pip install 'polyscale[hf]'" in message, message
run = subprocess.run(
    [sys.executable, "-m", "polyscale.cli", "--version"], capture_output=True, text=True
)
assert run.returncode == 1, run
assert "pip install 'polyscale[train]'" in run.stdout + run.stderr, run
print("1 passed, 0 failed")
