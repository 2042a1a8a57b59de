"""Builds the native kernel on first use, once per machine and version, and remembers why it cannot.

The library lands in a cache directory of the user, under a name made from everything it depends on.
Of several processes that start together one builds and the others wait. The library is moved to its
place in one step, so that even where files cannot be locked nobody sees half of it.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from polyscale._cache import cache_folder

SOURCES = Path(__file__).parent
FLAGS: tuple[str, ...] = ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast")
FLAGS += ("-fno-math-errno", "-fno-trapping-math", "-w")
X86_VARIANTS = {
    "hkt_portable": (),
    "hkt_avx2": ("-mavx2", "-mfma"),
    "hkt_avx512": ("-mavx512f", "-mavx2", "-mfma", "-mprefer-vector-width=512"),
}
VARIANTS: dict[str, tuple[str, ...]] = {"hkt_portable": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS = X86_VARIANTS


class BuildError(RuntimeError):
    """Why there is no native kernel."""


def find_compiler() -> str | None:
    """`$CXX` if it is set, else the first of g++, clang++ and c++ that is there."""
    if os.name == "nt":
        return None
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found:
            return found
    return None


def missing_compiler() -> str:
    """Why `find_compiler` found none."""
    if os.name == "nt":
        return "native needs a POSIX system"
    chosen = os.environ.get("CXX")
    if chosen:
        return f"$CXX is {chosen!r}, which is not a program"
    return "no C++ compiler found (looked for $CXX, g++, clang++, c++)"


def library_path(compiler: str) -> Path:
    """The file a build with this compiler makes; its name changes with all that goes into it."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    parts = [compiler, version.stdout, platform.machine(), platform.system()]
    parts += [*FLAGS, *(str(item) for item in VARIANTS.items())]
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        parts += [source.name, source.read_text(encoding="utf-8")]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    return cache_folder() / f"hkt-{key}.so"


def build(compiler: str, target: Path) -> None:
    """Compile and put the library in its place, or raise `BuildError` with what went wrong."""
    print(f"polyscale: building the native kernel with {compiler} (once) ...", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
            objects = _compile(compiler, Path(folder))
            library = Path(folder) / target.name
            _wait([_start([compiler, "-shared", "-pthread", "-o", str(library), *objects, *_DL])])
            os.replace(library, target)
    except OSError as error:
        raise BuildError(f"building failed: {error}") from error


_DL = ("-ldl",) if sys.platform.startswith("linux") else ()


def _compile(compiler: str, folder: Path) -> list[str]:
    jobs, objects = [], []
    for name, flags in VARIANTS.items():
        objects.append(str(folder / f"{name}.o"))
        source = str(SOURCES / "variant.cpp")
        definition = f"-DHKT_VARIANT={name}"
        jobs.append(_start([compiler, *FLAGS, *flags, definition, "-c", source, "-o", objects[-1]]))
    objects.append(str(folder / "kernel.o"))
    definitions = ["-DHKT_X86"] if VARIANTS is X86_VARIANTS else []
    source = str(SOURCES / "kernel.cpp")
    visible = [flag for flag in FLAGS if not flag.startswith("-fvisibility")]
    jobs.append(_start([compiler, *visible, *definitions, "-c", source, "-o", objects[-1]]))
    _wait(jobs)
    return objects


def _start(command: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )


def _wait(jobs: list[subprocess.Popen]) -> None:
    """All of them, then the first complaint, so that nothing is left running."""
    complaints = []
    for job in jobs:
        _, errors = job.communicate()
        if job.returncode != 0:
            lines = [line for line in errors.splitlines() if "error" in line.lower()]
            complaints.append((lines or errors.splitlines() or ["no message"])[0])
    if complaints:
        raise BuildError(f"building failed: {complaints[0]}")


def _open(path: Path) -> ctypes.CDLL | None:
    """The library, or None if there is no such file, or it is not ours."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    return library if hasattr(library, "hkt_problem_size") else None


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it."""
    import fcntl  # not on Windows, where there is no native kernel

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        with suppress(OSError):  # a file system without locks: several may build, none is harmed
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def _load() -> ctypes.CDLL | str:
    """The library, or why there is none. Once per process, either way."""
    compiler = find_compiler()
    if compiler is None:
        return missing_compiler()
    try:
        path = library_path(compiler)
        library = _open(path)
        if library is None:
            with _alone(path):
                library = _open(path)
                if library is None:
                    build(compiler, path)
                    library = _open(path)
    except (BuildError, OSError) as error:
        return str(error)
    return library if library is not None else f"{path} was built but cannot be loaded"


def load() -> ctypes.CDLL:
    """The library, built if need be; `BuildError` says why there is none."""
    loaded = _load()
    if isinstance(loaded, str):
        raise BuildError(loaded)
    return loaded


def why_not_built() -> str | None:
    """Builds if need be. None: the kernel is there; else why it is not."""
    loaded = _load()
    return loaded if isinstance(loaded, str) else None


def availability() -> tuple[bool, str]:
    """Whether the kernel is there or may be expected, without building it."""
    if _load.cache_info().currsize:
        reason = why_not_built()
        return reason is None, reason or "fused, CPU, float32 and bfloat16"
    compiler = find_compiler()
    if compiler is None:
        return False, missing_compiler()
    return True, f"fused, CPU, float32 and bfloat16; {compiler} builds it on first use"
