"""The Triton kernels of HKT attention: run in Triton's interpreter, compiled for real GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polyscale as ps
from polyscale.ops.hkt import triton as implementation
from polyscale.ops.hkt.mask import AttentionMask
from polyscale.ops.hkt.triton import hkt_attention_triton
from polyscale.ops.layout import PackedLayout
from tests.ops.hkt.cases import random_case

# There is no triton for other systems to install.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="triton is for Linux")
ROOT = Path(__file__).parents[3]
CAUSAL = AttentionMask(causal=True)


def test_the_kernels_pass_every_check_in_tritons_interpreter():
    # The variable counts when triton is first imported, so it takes a process of its own.
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-W", "error::RuntimeWarning",  # from numpy: an overflow or a NaN
         "tests/ops/hkt/interpreted/triton_values.py",
         "tests/ops/hkt/interpreted/triton_operator.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    summary = run.stdout.strip().splitlines()[-1]
    assert run.returncode == 0, run.stdout + run.stderr
    assert "passed" in summary
    assert "skipped" not in summary


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """The kernels as a GPU would get them, whatever this process was started with."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return implementation._kernels()


class Compiler:
    """Stands for the kernels: compiles them for what they are launched with, and runs nothing."""

    def __init__(self, kernels):
        self.kernels, self.triton, self.compiled = kernels, kernels.triton, {}

    def __getattr__(self, name):
        def launch(*arguments, **settings):
            kernel = getattr(self.kernels, name)
            self.compiled[name] = kernel.warmup(*arguments, grid=(1,), **settings)

        return {(1,): launch}


@pytest.mark.parametrize(
    ("target", "dtype", "levels", "packed", "causal", "language", "product"),
    [
        (("cuda", 90, 32), torch.bfloat16, 3, False, True, "ptx", "wgmma.mma_async"),
        (("hip", "gfx942", 64), torch.float16, 5, True, False, "amdgcn", "v_mfma"),
    ],
)
def test_the_kernels_compile_for_gpus_as_they_are_launched(
    target, dtype, levels, packed, causal, language, product, kernels, monkeypatch
):
    # Without this the interpreter would be the only witness, and it takes more than a compiler.
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        """A GPU of that kind, as far as compilation asks for it."""

        get_current_device = staticmethod(lambda: target)  # compiled kernels are kept by this
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: GPUTarget(*target))

    compiler = Compiler(kernels)
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setattr(implementation, "_kernels", lambda: compiler)
    monkeypatch.setattr(implementation, "_check_device", lambda value: None)
    monkeypatch.setattr(implementation, "tile_sizes", lambda *_: [(64, 64)])
    queries, keys, value, weights = random_case(
        12, levels, batch=1, heads=1, head_dim=16, value_dim=16, dtype=dtype,
        sequences=[12] if packed else None,
    )  # fmt: skip
    layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 12]), levels) if packed else None
    mask = AttentionMask(causal, packed=layout)
    hkt_attention_triton(queries, keys, value, weights, mask, 0.5).sum().backward()
    names = {"forward_kernel", "query_gradient_kernel", "key_gradient_kernel"}
    assert set(compiler.compiled) == names
    for kernel in compiler.compiled.values():
        assert product in kernel.asm[language]  # the matrix units are used


@pytest.mark.usefixtures("kernels")
def test_tensors_on_a_cpu_are_refused_outside_the_interpreter():
    case = random_case(8, 2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"value must be on a CUDA or ROCm device.*got cpu"):
        hkt_attention_triton(*case, CAUSAL, 0.5)


def refusal(case, **options):
    with pytest.raises(ValueError, match="impl='triton' cannot run hkt_attention") as caught:
        ps.hkt_attention(*case, impl="triton", **options)
    return str(caught.value)


def test_what_the_kernels_do_not_take_is_refused_by_name():
    case = random_case(8, 2, dtype=torch.float32)
    bias = [torch.zeros(2, 5), torch.zeros(2, 5)]
    assert "it takes no relative_bias" in refusal(case, relative_bias=bias)
    assert "float32, float16 and bfloat16, got torch.float64" in refusal(random_case(8, 2))
    deep = random_case(8, 6, dtype=torch.float32)
    assert "it takes at most 5 levels, got 6" in refusal(deep)
    wide = random_case(8, 2, head_dim=257, dtype=torch.float32)
    assert "it takes head dimensions up to 256, got 257" in refusal(wide)
    wide = random_case(8, 2, value_dim=300, dtype=torch.float32)
    assert "it takes head dimensions up to 256, got 300" in refusal(wide)


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert implementation.why_unavailable() == "needs triton: pip install 'polyscale[triton]'"
    case = random_case(8, 2, dtype=torch.float32)
    assert "needs triton: pip install 'polyscale[triton]'" in refusal(case)


def test_without_a_gpu_it_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "needs a CUDA or ROCm device" in implementation.why_unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert implementation.why_unavailable() is None
