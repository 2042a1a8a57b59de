"""Native libraries: built on first use, once per machine and version, or the reason why not.

A library is stored in the user's cache, under a name that is a hash of everything it depends on. Of
several processes that start together, one builds and the others wait. The file is moved into place
atomically, so no process sees an incomplete one, even where files cannot be locked.
"""

import ctypes
import hashlib
import platform
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from polyscale.ops.native.compiler import (
    BuildError,
    Command,
    find_compiler,
    missing_compiler,
    run_together,
)
from polyscale.ops.native.store import Store, open_store, why_no_store

_LINKED = ("-shared", "-pthread") + (("-ldl",) if sys.platform.startswith("linux") else ())


@dataclass(frozen=True)
class Unit:
    """A source file and the options it is compiled with; one file may make several units."""

    source: Path
    flags: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class NativeLibrary:
    """What a library is built from, and the loaded library once it is asked for.

    `headers` are the files that the sources include; changing them makes another library.
    `symbol` is the name of a function that the library has, `include` the folder that includes
    are relative to.
    """

    name: str
    units: tuple[Unit, ...]
    headers: tuple[Path, ...]
    symbol: str
    include: Path | None = None

    def load(self) -> ctypes.CDLL:
        """The library, built if need be; `BuildError` says why there is none."""
        loaded = self._loaded()
        if isinstance(loaded, str):
            raise BuildError(loaded)
        return loaded

    def why_unavailable(self) -> str | None:
        """Why there can be no library, as far as that is known without building it."""
        if self in _LOADED:
            return self.why_not_built()
        return missing_compiler() if find_compiler() is None else why_no_store()

    def why_not_built(self) -> str | None:
        """Build the library if need be. Why there is none; None if there is."""
        loaded = self._loaded()
        return loaded if isinstance(loaded, str) else None

    def file_name(self, compiler: Command) -> str:
        """The name of what this compiler builds, which depends on everything that goes into it."""
        (version,) = run_together([(*compiler, "--version")])
        parts = [*compiler, version, platform.machine(), platform.system(), *_LINKED]
        parts += [str((unit.source.name, unit.flags)) for unit in self.units]
        for path in sorted({*self.headers, *(unit.source for unit in self.units)}):
            parts += [path.name, path.read_text(encoding="utf-8")]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
        return f"{self.name}-{key}.so"

    def _loaded(self) -> ctypes.CDLL | str:
        """The library, or why there is none. Once per process, either way."""
        if self not in _LOADED:
            try:
                _LOADED[self] = self._load_or_build()
            except BuildError as error:
                _LOADED[self] = str(error)
            except OSError as error:
                _LOADED[self] = f"building failed: {error}"
        return _LOADED[self]

    def _load_or_build(self) -> ctypes.CDLL | str:
        compiler = find_compiler()
        if compiler is None:
            return missing_compiler()
        with open_store() as store:
            name = self.file_name(compiler)
            library = self._stored(store, name)
            if library is not None:
                return library
            with store.lock(f"{Path(name).stem}.lock"):
                library = self._stored(store, name)
                if library is None:
                    store.save(name, self._build(compiler))
                    library = store.load(name)
            if library is None or not hasattr(library, self.symbol):
                return f"{store.path / name} was built but has no function {self.symbol}"
            return library

    def _stored(self, store: Store, name: str) -> ctypes.CDLL | None:
        """The library of an earlier build, if it can still be used."""
        try:
            library = store.load(name)
        except OSError:  # such as one built on a machine with a newer system
            return None
        return library if hasattr(library, self.symbol) else None

    def _build(self, compiler: Command) -> bytes:
        """Compile all units side by side, link them, and return the library."""
        print(
            f"polyscale: building the native library {self.name!r} with {shlex.join(compiler)} "
            "(once) ...",
            file=sys.stderr,
        )
        # In the system's temporary folder, not in the cache: private, and cleared at a restart.
        with tempfile.TemporaryDirectory(prefix="polyscale-build-") as folder:
            objects = [str(Path(folder) / f"{number}.o") for number in range(len(self.units))]
            include = () if self.include is None else ("-I", str(self.include))
            run_together(
                [
                    (*compiler, *unit.flags, *include, "-c", str(unit.source), "-o", made)
                    for unit, made in zip(self.units, objects, strict=True)
                ]
            )
            library = Path(folder) / "library.so"
            run_together([(*compiler, "-o", str(library), *objects, *_LINKED)])
            return library.read_bytes()


_LOADED: dict[NativeLibrary, ctypes.CDLL | str] = {}
