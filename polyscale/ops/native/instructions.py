"""Instruction sets: how the inner part of a kernel is compiled for each, and which one runs."""

import platform
from collections.abc import Mapping
from pathlib import Path

from polyscale.ops.native.library import NativeLibrary, Unit

NAMES = ("portable", "avx2", "avx512")
# None: the best set that the processor has. A test may ask for a lesser one.
wanted: str | None = None

_COMMON = Path(__file__).parent
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-ffp-contract=fast"),
    *("-fno-math-errno", "-fno-trapping-math", "-w"),
)
_SETS: dict[str, tuple[str, ...]] = {"portable": ()}
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
if _IS_X86:
    _SETS |= {
        "avx2": ("-mavx2", "-mfma"),
        "avx512": ("-mavx512f", "-mavx2", "-mfma", "-mprefer-vector-width=512"),
    }


def wanted_variant() -> int:
    """The number of the instruction set that a kernel is asked for; -1 for the best one."""
    return -1 if wanted is None else NAMES.index(wanted)


def kernel_library(
    name: str, sources: Path, constants: Mapping[str, int] | None = None
) -> NativeLibrary:
    """A library made of `variant.cpp`, compiled once per instruction set, and `kernel.cpp`.

    `variant.cpp` defines the table `POLYSCALE_VARIANT`, which becomes `NAME_avx2` and so on;
    `kernel.cpp` shares the work among threads and exports functions named `NAME_...`, among them
    `NAME_best_variant`. Both see the headers below `polyscale/ops`, such as `native/common.h`, and
    the `constants`, which thus need not be written down in Python and in C++.
    """
    flags = (*_FLAGS, *(f"-D{constant}={value}" for constant, value in (constants or {}).items()))
    variants = [
        Unit(
            sources / "variant.cpp",
            (*flags, "-fvisibility=hidden", *options, f"-DPOLYSCALE_VARIANT={name}_{instructions}"),
        )
        for instructions, options in _SETS.items()
    ]
    kernel = Unit(sources / "kernel.cpp", (*flags, "-DPOLYSCALE_X86") if _IS_X86 else flags)
    return NativeLibrary(
        name=name,
        units=(*variants, kernel),
        headers=tuple(sorted([*sources.rglob("*.h"), *_COMMON.rglob("*.h")])),
        symbol=f"{name}_best_variant",
        include=_COMMON.parent,
    )
