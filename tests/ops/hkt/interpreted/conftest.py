"""What runs the kernels in Triton's interpreter. `test_triton.py` starts the files beside this one
in a process of their own, with TRITON_INTERPRET=1: it counts when triton is first imported.
"""

import numpy as np
import pytest
import torch

from polyscale.ops.hkt import triton as implementation


@pytest.fixture(autouse=True)
def _ready(monkeypatch):
    import triton.language as tl
    from triton.runtime import interpreter

    # At every call of a device function the interpreter replaces all of triton.language by its
    # own, which takes nearly all of its time, although once per launch is enough.
    patch = interpreter._patch_lang

    def patch_once(function):
        languages = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        unpatched = any(tl.core.is_builtin(language.load) for language in languages)
        return patch(function) if unpatched else None

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


@pytest.fixture
def tiles(monkeypatch):
    """Sets the tile sizes: small ones, so that short sequences have many."""

    def choose(rows, columns):
        monkeypatch.setattr(implementation, "tile_sizes", lambda *_: [(rows, columns)])

    return choose


@pytest.fixture
def _bfloat16(monkeypatch):
    """What the interpreter lacks: it multiplies the bits of bfloat16, and cuts instead of rounding.

    Both are replaced by torch's own conversions; the kernels are run as they are.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def round_cast(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            bits = rounded.view(torch.int16).numpy().view(np.uint16)
            return interpreter.TensorHandle(bits.reshape(source.data.shape), tl.bfloat16)
        return cast(self, widened(source), target)

    def widened_dot(self, left, right, sums, *options):
        return dot(self, widened(left), widened(right), sums, *options)

    monkeypatch.setattr(builder, "cast_impl", round_cast)
    monkeypatch.setattr(builder, "create_dot", widened_dot)
    monkeypatch.setattr(builder, "create_fp_ext", round_cast)
    monkeypatch.setattr(builder, "create_fp_trunc", round_cast)
    monkeypatch.setattr(implementation, "INTERPRETED_DTYPES", implementation.DTYPES)
