import json
import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import polyscale
from polyscale.data import generated, listops_task
from polyscale.data.listops import T512
from polyscale.data.tasks import load_task

KEPT_FROM = listops_task._CACHED_FROM
SIZES = {"preset": "demo", "train": 300, "validation": 20, "test": 30}
CHILD = """
import os, resource, signal, warnings
from polyscale.data import listops_task
from polyscale.data.tasks import load_task
listops_task._CACHED_FROM = 0
{before}
task = load_task("listops", preset="demo", train=300, validation=20, test=30)
print(task.test.text(0))
"""


@pytest.fixture(autouse=True)
def keep_everything(monkeypatch):
    monkeypatch.setattr(listops_task, "_CACHED_FROM", 0)


@pytest.fixture
def made(monkeypatch):
    """How often data were generated."""
    calls = []
    make = listops_task.make_listops

    def counted(config, **options):
        calls.append(config)
        return make(config, **options)

    monkeypatch.setattr(listops_task, "make_listops", counted)
    return calls


def load(**options):
    return load_task("listops", **{**SIZES, **options})


def kept(suffix=""):
    folder = Path(os.environ["POLYSCALE_CACHE"])
    return sorted(path for path in folder.glob(f"*{suffix}")) if folder.exists() else []


def same(one, other):
    return all(
        torch.equal(getattr(getattr(one, part), column), getattr(getattr(other, part), column))
        for part in ("train", "validation", "test")
        for column in ("tokens", "offsets", "labels")
    )


def run_child(before):
    return subprocess.run(
        [sys.executable, "-c", CHILD.format(before=before)],
        cwd=Path(polyscale.__file__).parents[1],
        capture_output=True,
        text=True,
    )


def test_data_are_generated_once_and_then_read(made):
    first, second = load(), load()
    assert len(made) == 1
    assert same(first, second)
    assert first.source == second.source
    assert torch.equal(first.test.groups["depth"], second.test.groups["depth"])
    assert [path.suffix for path in kept()] == [".json", ".safetensors"]


def test_small_sets_are_not_kept(monkeypatch):
    monkeypatch.setattr(listops_task, "_CACHED_FROM", KEPT_FROM)
    load()
    assert not kept()
    assert T512.total * T512.max_length > KEPT_FROM


def test_other_settings_are_other_entries(made):
    load()
    load(seed=1)
    load(max_length=30)
    load(operators=["MIN"])
    assert len(made) == 4
    assert len(kept(".json")) == 4


def test_a_newer_generator_does_not_take_older_data(made, monkeypatch):
    load()
    monkeypatch.setattr(listops_task, "GENERATOR_VERSION", 2)
    load()
    assert len(made) == 2


def test_the_folder_is_in_the_home_directory_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.delenv("POLYSCALE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert generated.cache_folder() == Path.home() / ".cache" / "polyscale"
    monkeypatch.setenv("POLYSCALE_CACHE", "~/elsewhere")
    assert generated.cache_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv("POLYSCALE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert generated.cache_folder() == Path("/caches/polyscale")


@pytest.mark.parametrize("place", [0, 20, 0.5, -1])
def test_a_damaged_file_is_refused_with_its_name_and_what_to_do(place, made):
    load()
    (path,) = kept(".safetensors")
    content = bytearray(path.read_bytes())
    content[int(place * len(content)) if isinstance(place, float) else place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged .*: delete it, and") as error:
        load()
    assert str(path) in str(error.value)
    path.unlink()
    load()
    load()
    assert len(made) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"sha256": 1}'])
def test_a_damaged_card_is_refused_with_its_name_and_what_to_do(content, made):
    load()
    (path,) = kept(".json")
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"\.json is damaged: delete it"):
        load()
    path.unlink()
    assert same(load(), load())
    assert len(made) == 2


def test_the_card_of_other_data_is_refused():
    load()
    (path,) = kept(".json")
    card = json.loads(path.read_bytes())
    card["recipe"]["seed"] = 7
    path.write_text(json.dumps(card))
    with pytest.raises(ValueError, match="is of other data: delete it"):
        load()


def test_a_file_cut_short_is_refused():
    load()
    (path,) = kept(".safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="is damaged"):
        load()


@pytest.mark.parametrize("write", [1, 2])
def test_a_run_killed_in_the_middle_of_writing_leaves_nothing_that_is_taken_for_data(write, made):
    killed = run_child(
        f"""
writes = []
def fsync(number):
    writes.append(number)
    if len(writes) == {write}:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = fsync
"""
    )
    assert killed.returncode == -signal.SIGKILL
    assert kept(".unfinished")
    assert not kept(".json")
    first = load()
    assert len(made) == 1
    assert same(first, load())
    assert len(made) == 1


def test_what_killed_runs_left_is_cleared_away_after_an_hour():
    folder = Path(os.environ["POLYSCALE_CACHE"])
    load()
    (tensors,) = kept(".safetensors")
    old, new = (folder / f".{tensors.name}.{name}.unfinished" for name in ("old", "new"))
    for path, age in ((old, 2 * 3600), (new, 60)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age, time.time() - age))
    tensors.unlink()
    load()
    assert kept(".unfinished") == [new]


def test_on_a_full_disk_data_are_made_with_a_warning_and_earlier_entries_stay_whole():
    before = load(seed=5)
    # A limit on the size of files fails a write half way, as a full disk does.
    full = run_child("resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))")
    assert full.returncode == 0, full.stderr
    assert "not kept for the next run" in full.stderr
    assert os.environ["POLYSCALE_CACHE"] in full.stderr
    assert len(kept()) == 2  # those of seed 5, and nothing half written
    assert same(load(seed=5), before)
    assert full.stdout.strip() == load().test.text(0)


def test_a_folder_that_cannot_be_made_gives_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="cannot be written .* POLYSCALE_CACHE names another"):
        assert len(load().train) == 300


def test_two_runs_at_once_do_not_disturb_each_other(made):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD.format(before="")],
            cwd=Path(polyscale.__file__).parents[1],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    texts = {child.communicate()[0] for child in children}
    assert [child.returncode for child in children] == [0, 0]
    assert texts == {load().test.text(0) + "\n"}
    assert not made  # read from what the children wrote
    assert not kept(".unfinished")


def test_without_a_home_directory_data_are_made_with_a_warning(monkeypatch):
    def unknown(user):
        raise KeyError(user)

    for name in ("POLYSCALE_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.warns(UserWarning, match="not kept .* set HOME or POLYSCALE_CACHE"):
        assert len(load().train) == 300


def test_the_folder_is_private_whatever_the_umask():
    before = os.umask(0)
    try:
        load()
    finally:
        os.umask(before)
    assert Path(os.environ["POLYSCALE_CACHE"]).stat().st_mode & 0o777 == 0o700
