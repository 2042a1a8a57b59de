import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from polyscale import _files as files
from polyscale._files import write_json, write_together
from polyscale.training.checkpoint import save_checkpoint
from polyscale.training.locks import locked_folder


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder):
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}


def test_reports_written_at_the_same_time_leave_each_other_alone(tmp_path, monkeypatch):
    write_text = files.write_text
    depth = 0

    def write_while_another_process_does(path, text):
        nonlocal depth
        write_text(path, text)
        if depth == 0:
            depth = 1
            write_together({tmp_path / "a": "2", tmp_path / "b": "2"})

    monkeypatch.setattr(files, "write_text", write_while_another_process_does)
    write_together({tmp_path / "a": "1", tmp_path / "b": "1"})
    assert [(tmp_path / name).read_text() for name in "ab"] == ["1", "1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_unfinished_report_of_a_killed_process_is_removed_after_a_while(tmp_path):
    old, new = (tmp_path / f"{files._UNFINISHED_REPORT}{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
    long_ago = time.time() - 2 * files._ABANDONED
    os.utime(old, (long_ago, long_ago))
    write_together({tmp_path / "a": "1"})
    assert not old.exists()
    assert new.exists()


def test_the_last_writer_has_read_what_the_others_wrote(tmp_path):
    total = tmp_path / "total"
    total.write_text("0")

    def add(_):
        with locked_folder(tmp_path):
            number = int(total.read_text())
            time.sleep(0.001)
            total.write_text(str(number + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(20)))
    assert total.read_text() == "20"


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_all_files_have_the_mode_of_any_new_file(tmp_path, mask, mode):
    with umask(mask):
        write_json(tmp_path / "a.json", {})
        write_together({tmp_path / "b": "1"})
        weights = {"weight": torch.zeros(2)}
        save_checkpoint(tmp_path, 4, weights, weights, {})
    assert modes(tmp_path) == {mode}
