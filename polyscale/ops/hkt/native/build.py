"""What the library of HKT is built from: the kernel, and its inner part for several processors."""

import platform
from pathlib import Path

from polyscale.ops.native.library import NativeLibrary, Unit

SOURCES = Path(__file__).parent
FLAGS: tuple[str, ...] = ("-O3", "-std=c++17", "-fPIC", "-ffp-contract=fast")
FLAGS += ("-fno-math-errno", "-fno-trapping-math", "-w")
VARIANTS: dict[str, tuple[str, ...]] = {"hkt_portable": ()}
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
if _IS_X86:
    VARIANTS |= {
        "hkt_avx2": ("-mavx2", "-mfma"),
        "hkt_avx512": ("-mavx512f", "-mavx2", "-mfma", "-mprefer-vector-width=512"),
    }


def _units() -> tuple[Unit, ...]:
    hidden = (*FLAGS, "-fvisibility=hidden")
    variants = [
        Unit(SOURCES / "variant.cpp", (*hidden, *flags, f"-DHKT_VARIANT={name}"))
        for name, flags in VARIANTS.items()
    ]
    kernel = Unit(SOURCES / "kernel.cpp", (*FLAGS, "-DHKT_X86") if _IS_X86 else FLAGS)
    return (*variants, kernel)


LIBRARY = NativeLibrary(
    name="hkt",
    units=_units(),
    headers=tuple(sorted(SOURCES.glob("*.h"))),
    symbol="hkt_problem_size",
)


load = LIBRARY.load
why_not_built = LIBRARY.why_not_built


def availability() -> tuple[bool, str]:
    """Whether the kernel is there or may be expected, without building it."""
    return LIBRARY.availability("fused, CPU, float32 and bfloat16")
