"""Calls functions of a native library: tensors become pointers and strides."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from polyscale.ops.native.instructions import NAMES
from polyscale.ops.native.library import NativeLibrary


class TensorView(ctypes.Structure):
    """`[B, H, T, D]` for the library: an address and strides. Mirrors `Tensor` in common.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("head", ctypes.c_int64),
        ("row", ctypes.c_int64),
    )


class Entry:
    """The functions of one library that take one struct each and return 0 when they are done.

    Args:
        library: whose functions are called `NAME_function`.
        structs: by name. The library says the size of each by a function `NAME_struct_size`.
    """

    def __init__(self, library: NativeLibrary, structs: dict[str, type[ctypes.Structure]]) -> None:
        self.library, self.structs = library, structs
        self._loaded: ctypes.CDLL | None = None
        self._functions: dict[str, Any] = {}

    def run(self, function: str, arguments: ctypes.Structure) -> None:
        """Compute; the interpreter's lock is released meanwhile."""
        called = self._functions.get(function)
        if called is None:  # the linker's search takes longer than a small problem
            called = getattr(self._checked(), f"{self.library.name}_{function}")
            self._functions[function] = called
        if called(ctypes.byref(arguments)) != 0:
            raise MemoryError(
                f"{self.library.name}_{function}: not enough memory for the scratch space of "
                "every thread"
            )

    def best_instructions(self) -> str:
        """The best set this processor has: `"portable"`, `"avx2"` or `"avx512"`."""
        return NAMES[getattr(self._checked(), f"{self.library.name}_best_variant")()]

    def _checked(self) -> ctypes.CDLL:
        """The library, after a check that its structs have the sizes of ours."""
        if self._loaded is None:
            loaded = self.library.load()
            for name, struct in self.structs.items():
                size = getattr(loaded, f"{self.library.name}_{name}_size")
                size.restype = ctypes.c_int64
                if size() != ctypes.sizeof(struct):
                    raise RuntimeError(
                        f"struct {name} of the native library {self.library.name!r} must have the "
                        f"size of its Python twin, {ctypes.sizeof(struct)} bytes, got {size()}"
                    )
            self._loaded = loaded
        return self._loaded


class Views:
    """Tensors handed to the library, kept alive while it runs."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def address(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor."""
        self.tensors.append(tensor)
        return tensor.data_ptr()

    def read(self, tensor: Tensor) -> TensorView:
        """`[B, H, T, D]`; copied only if its channels are not contiguous."""
        return self.write(tensor if has_contiguous_channels(tensor) else tensor.contiguous())

    def write(self, tensor: Tensor) -> TensorView:
        """`[B, H, T, D]` for a result, which is never copied."""
        if not has_contiguous_channels(tensor):
            raise ValueError(f"channels must be contiguous, got strides {tensor.stride()}")
        self.tensors.append(tensor)
        return TensorView(tensor.data_ptr(), *tensor.stride()[:3])


def has_contiguous_channels(tensor: Tensor) -> bool:
    """Whether the last axis is contiguous, whatever the others are."""
    if tensor.numel() == 0:  # whatever its strides, which `contiguous` leaves as they are
        return True
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def threads() -> int:
    """The number of threads that torch uses."""
    return torch.get_num_threads()
