"""Native libraries: built once, and never a stranger's, a damaged one, or a wait without end."""

import hashlib
import os
import shlex
import subprocess
import time

import pytest

from polyscale.ops.native import compiler, store
from polyscale.ops.native.compiler import BuildError, find_compiler, missing_compiler
from polyscale.ops.native.library import NativeLibrary, Unit

REAL = find_compiler()
needs_a_compiler = pytest.mark.skipif(REAL is None, reason=f"{missing_compiler()}")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """A cache of its own, which is not there yet."""
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


def answering(source, *flags):
    """The library, in a process that has not asked for it."""
    return NativeLibrary("answer", (Unit(source, ("-fPIC", *flags)),), (), "answer")


def plant(folder, source):
    """A library under the very name, with a digest that fits; it answers 13 if it is taken."""
    name = answering(source).file_name(find_compiler())
    other = folder / "planted.cpp"
    other.write_text('extern "C" int answer() { return 13; }\n')
    target = folder / name
    subprocess.run([*find_compiler(), "-shared", "-fPIC", other, "-o", target], check=True)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    (folder / f"{name}.sha256").write_text(f"{digest}  {name}\n")
    return target


@needs_a_compiler
def test_a_library_is_built_once_and_then_read(cache, source, capsys):
    assert answering(source).load().answer() == 42
    assert capsys.readouterr().err.count("building the native library 'answer'") == 1
    assert answering(source).load().answer() == 42
    assert capsys.readouterr().err == ""
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".sha256", ".so"]


@needs_a_compiler
def test_two_libraries_in_one_process_stay_apart(tmp_path, source):
    other = tmp_path / "other.cpp"
    other.write_text('extern "C" int answer() { return 43; }\n')
    assert [answering(path).load().answer() for path in (source, other)] == [42, 43]


@needs_a_compiler
@pytest.mark.parametrize("change", ["source", "header", "flags"])
def test_a_change_of_what_it_is_built_from_is_another_library(tmp_path, source, change):
    header = tmp_path / "answer.h"
    header.write_text("")

    def name(*flags):
        made_from = NativeLibrary("answer", (Unit(source, flags),), (header,), "answer")
        return made_from.file_name(REAL)

    before = name()
    if change == "source":
        source.write_text("")
    elif change == "header":
        header.write_text("int more;")
    assert name(*(("-O1",) if change == "flags" else ())) != before


@needs_a_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_library_planted_where_others_can_write_does_not_run(cache, source, mode):
    cache.mkdir()
    plant(cache, source)
    cache.chmod(mode)
    with pytest.raises(BuildError, match=f"can be written by other users .mode {mode:o}.*chmod"):
        answering(source).load()
    assert "can be written by other users" in answering(source).why_unavailable()


@needs_a_compiler
def test_a_library_planted_by_another_user_does_not_run(cache, source, monkeypatch):
    cache.mkdir(mode=0o755)
    plant(cache, source)
    owner = cache.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    reason = rf"cache belongs to user id {owner}, not to yours .*POLYSCALE_CACHE"
    with pytest.raises(BuildError, match=reason):
        answering(source).load()
    assert "belongs to user id" in answering(source).why_unavailable()


@needs_a_compiler
def test_a_planted_file_in_a_folder_that_was_open_once_is_replaced(cache, source):
    cache.mkdir(mode=0o700)
    planted = plant(cache, source)
    planted.chmod(0o666)  # anyone could have written it
    assert answering(source).load().answer() == 42


@needs_a_compiler
def test_a_library_that_is_a_link_is_replaced_and_its_target_stays(tmp_path, cache, source):
    cache.mkdir(mode=0o700)
    planted = plant(cache, source)
    elsewhere = planted.rename(tmp_path / "elsewhere.so")
    planted.symlink_to(elsewhere)
    content = elsewhere.read_bytes()
    assert answering(source).load().answer() == 42
    assert not planted.is_symlink()
    assert elsewhere.read_bytes() == content


@needs_a_compiler
def test_whatever_the_umask_the_cache_is_private(cache, source):
    before = os.umask(0)
    try:
        assert answering(source).load().answer() == 42
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o077 for path in (cache, *cache.iterdir())}
    assert set(modes.values()) == {0}, modes


@needs_a_compiler
def test_a_folder_exchanged_after_the_check_is_not_read(tmp_path, cache, source):
    """What others can do where they may write further up: the open folder is not their folder."""
    with store.open_store() as opened:
        cache.rename(tmp_path / "away")
        cache.mkdir()
        planted = plant(cache, source)
        assert opened.load(planted.name) is None


@needs_a_compiler
def test_a_lock_that_is_a_link_is_refused_and_its_target_stays(tmp_path, cache, source):
    cache.mkdir(mode=0o700)
    target = tmp_path / "precious"
    target.write_text("data")
    lock = answering(source).file_name(REAL).replace(".so", ".lock")
    (cache / lock).symlink_to(target)
    with pytest.raises(BuildError, match=rf"{lock} is a symbolic link: delete it"):
        answering(source).load()
    assert target.read_text() == "data"


@needs_a_compiler
def test_a_lock_keeps_its_content(cache, source):
    cache.mkdir(mode=0o700)
    lock = cache / answering(source).file_name(REAL).replace(".so", ".lock")
    lock.write_text("data")
    answering(source).load()
    assert lock.read_text() == "data"


@needs_a_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "digest", "no digest", "not a library"])
def test_a_damaged_library_is_built_again(cache, source, damage):
    answering(source).load()
    (built,) = cache.glob("*.so")
    (digest,) = cache.glob("*.sha256")
    content = built.read_bytes()
    # As another file: the one that this process has mapped stays whole.
    built.unlink()
    changed = bytearray(content)
    changed[-1] ^= 1
    kept = {"cut": content[:5000], "empty": b"", "bit": bytes(changed), "not a library": b"text"}
    built.write_bytes(kept.get(damage, content))
    if damage == "digest":
        digest.write_text("")
    elif damage == "no digest":
        digest.unlink()
    assert answering(source).load().answer() == 42
    assert built.read_bytes() != kept.get(damage)
    assert hashlib.sha256(built.read_bytes()).hexdigest() in digest.read_text()


@needs_a_compiler
def test_a_library_without_its_function_is_named(source):
    wrong = NativeLibrary("answer", (Unit(source, ("-fPIC",)),), (), "question")
    with pytest.raises(BuildError, match="was built but has no function question"):
        wrong.load()


@needs_a_compiler
def test_what_the_linker_does_not_take_is_told_in_its_words(source, monkeypatch):
    def refuse(descriptor, content):
        raise OSError("failed to map segment")  # as where nothing may be executed

    monkeypatch.setattr(store, "_map", refuse)
    with pytest.raises(BuildError, match="failed to map segment"):
        answering(source).load()


@needs_a_compiler
def test_a_library_is_on_the_disk_before_it_has_its_name(source, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (events.append("sync"), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda *a, **k: (events.append("rename"), replace(*a, **k)))
    answering(source).load()
    assert events == ["sync", "rename", "sync", "rename", "sync"]


@needs_a_compiler
def test_without_proc_the_checked_bytes_are_loaded_from_a_private_copy(source, monkeypatch):
    exists = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: not str(path).startswith("/proc") and exists(path)
    )
    loaded = answering(source).load()
    assert loaded.answer() == 42
    assert not loaded._name.startswith("/proc")


@needs_a_compiler
def test_a_compiler_may_come_with_options(source, monkeypatch):
    monkeypatch.setenv("CXX", f"{shlex.join(REAL)} -g '-DSPACE= '")
    assert find_compiler() == (*REAL, "-g", "-DSPACE= ")
    assert answering(source).load().answer() == 42


def test_a_compiler_may_stand_in_a_folder_with_a_space(tmp_path, monkeypatch):
    program = tmp_path / "my tools" / "g++"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert find_compiler() == (str(program),)


@pytest.mark.parametrize("chosen", ["g++ 'unmatched", "  ", "/nowhere/g++ -m64"])
def test_a_compiler_that_cannot_be_read_is_quoted(chosen, monkeypatch):
    monkeypatch.setenv("CXX", chosen)
    assert find_compiler() is None
    assert missing_compiler() == f"$CXX is {chosen!r}, which does not begin with a program"


@pytest.mark.parametrize("hangs_at", ["--version", "-c"])
def test_a_compiler_that_hangs_is_stopped_with_all_it_started(
    tmp_path, source, monkeypatch, hangs_at
):
    program, noted = tmp_path / "slow", tmp_path / "pid"
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *{hangs_at}*) sleep 60 & echo $! > {noted}; wait;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    monkeypatch.setattr(compiler, "TIME_LIMIT", 0.5)
    started = time.monotonic()
    with pytest.raises(BuildError, match=r"slow did not finish within 0\.5 s.* another compiler"):
        answering(source).load()
    assert time.monotonic() - started < 20
    assert not is_running(int(noted.read_text()))


def is_running(process):
    """Whether it runs: one that has ended may still be listed until its parent asks."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True)
    return found.stdout.strip() not in (b"",) and not found.stdout.strip().startswith(b"Z")


def test_a_lock_held_for_too_long_is_told(monkeypatch, cache):
    monkeypatch.setattr(store, "TIME_LIMIT", 0.2)
    message = r"another process has held .*it\.lock for 0\.2 s"
    with (
        store.open_store() as one,
        store.open_store() as other,
        one.lock("it.lock"),
        pytest.raises(BuildError, match=message),
        other.lock("it.lock"),
    ):
        raise AssertionError("two hold one lock")
    with store.open_store() as later, later.lock("it.lock"):
        pass


def test_what_fails_is_asked_once(tmp_path, source, monkeypatch):
    program = tmp_path / "broken"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "calls"}\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    broken = answering(source)
    reasons = {broken.why_not_built() for _ in range(3)}
    assert reasons == {"building failed: no message"}
    assert (tmp_path / "calls").read_text() == "--version\n"
