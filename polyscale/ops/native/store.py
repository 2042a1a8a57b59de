"""Built libraries in the user's cache. Code loaded from here runs, so everything is checked first.

Only this user can write to the folder, and a digest beside each library detects truncated files:
the linker maps a file as it is, and a missing page kills the process.
"""

import ctypes
import errno
import hashlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from polyscale._cache_folder import cache_folder, make_folder, why_not_private
from polyscale.ops.native.compiler import TIME_LIMIT, BuildError

_DIGEST = ".sha256"
_POLL = 0.05  # seconds


@dataclass(frozen=True)
class Store:
    """The cache folder, checked and held open.

    Files are opened relative to the descriptor. If another user can replace a parent folder, `path`
    may come to name another place; the descriptor does not.
    """

    path: Path
    descriptor: int

    def load(self, name: str) -> ctypes.CDLL | None:
        """The library of this name; None if there is none, or it is damaged, or not ours.

        An OSError quotes the linker if it rejects the library.
        """
        try:
            expected = self._read(name + _DIGEST).split()[:1]
            descriptor = self._open(name, os.O_RDONLY)
        except OSError:
            return None
        library = None
        try:
            with open(descriptor, "rb", closefd=False) as file:
                content = file.read()
            if [hashlib.sha256(content).hexdigest().encode()] == expected:
                library = _map(descriptor, content)
        finally:
            # Kept open while the library is in use: the linker identifies it by the descriptor's
            # name and would take the next library of that name for this one.
            if library is None:
                os.close(descriptor)
        return library

    def save(self, name: str, content: bytes) -> None:
        """Store a library and its digest. Readers see all of it or nothing, also after a crash."""
        digest = hashlib.sha256(content).hexdigest()
        self._write(name, content)
        self._write(name + _DIGEST, f"{digest}  {name}\n".encode())  # in the format of sha256sum
        os.fsync(self.descriptor)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """One process at a time; the lock ends with the process that holds it."""
        try:
            descriptor = self._open(name, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise OSError(f"{self.path / name} is a symbolic link: delete it") from None
        try:
            self._wait_for(name, descriptor)
            yield
        finally:
            os.close(descriptor)

    def _wait_for(self, name: str, descriptor: int) -> None:
        import fcntl  # not on Windows, where there is no native library

        deadline = time.monotonic() + TIME_LIMIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another process has held {self.path / name} for {TIME_LIMIT:g} s: "
                        "stop it, and start again"
                    ) from None
                time.sleep(_POLL)
            except OSError:
                return  # a file system without locks: several may build, which is harmless
            else:
                return

    def _open(self, name: str, flags: int) -> int:
        """Open a file of this user. Links are not followed, and opening a pipe does not block."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        status, path = os.fstat(descriptor), self.path / name
        reason = why_not_private(path, status)
        if not stat.S_ISREG(status.st_mode):
            reason = f"{path} is not a file: delete it"
        if reason is not None:
            os.close(descriptor)
            raise PermissionError(reason)
        return descriptor

    def _read(self, name: str) -> bytes:
        with open(self._open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def _write(self, name: str, content: bytes) -> None:
        unfinished = f".{name}.{secrets.token_hex(4)}.part"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(self._open(unfinished, flags), "wb") as file:
                file.write(content)
                file.flush()
                # Before the rename: otherwise a crash could leave the name with an empty file.
                os.fsync(file.fileno())
            directory = self.descriptor
            os.replace(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=self.descriptor)
            raise


@contextmanager
def open_store() -> Iterator[Store]:
    """The cache folder, created if missing; a `BuildError` says why it cannot be trusted."""
    try:
        path = cache_folder()
        make_folder(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BuildError(f"no folder for built libraries: {error}") from error
    try:
        # The open folder is checked, so that what is checked is what is used.
        reason = why_not_private(path, os.fstat(descriptor))
        if reason is not None:
            raise BuildError(reason)
        yield Store(path, descriptor)
    finally:
        os.close(descriptor)


def why_no_store() -> str | None:
    """Why libraries cannot be stored, as far as that is known without creating anything."""
    try:
        path = cache_folder()
        return why_not_private(path, path.stat())
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"no folder for built libraries: {error}"


def _map(descriptor: int, content: bytes) -> ctypes.CDLL:
    """Load the library whose content was checked, not another one that has taken its name."""
    # On Linux the linker opens this very file. Only this user could change it, and a newer library
    # is another file with the same name.
    by_descriptor = f"/proc/self/fd/{descriptor}"
    if os.path.exists(by_descriptor):
        return ctypes.CDLL(by_descriptor)
    # Elsewhere it opens a copy in a private folder, which can be deleted once it is mapped.
    with tempfile.TemporaryDirectory(prefix="polyscale-") as folder:
        copy = Path(folder) / "library.so"
        copy.write_bytes(content)
        return ctypes.CDLL(str(copy))
