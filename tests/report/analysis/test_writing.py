import json
from pathlib import Path

import pytest

from polyscale import _files as files
from polyscale.report.analysis import analysis_page, write_analysis

from .samples import hkt_sample, hostile_sample


def test_the_page_and_its_json_are_written_into_a_folder(tmp_path):
    analysis = hostile_sample()
    written = write_analysis(analysis, tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["report.html", "report.json"]
    assert written[0].read_text(encoding="utf-8") == analysis_page(analysis)
    assert json.loads(written[1].read_text(encoding="utf-8")) == analysis


def test_a_file_name_is_taken_as_it_is(tmp_path):
    written = write_analysis(hkt_sample(), tmp_path / "mine.html")
    assert written == [tmp_path / "mine.html", tmp_path / "mine.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.html", "mine.json"]


def test_an_earlier_report_stays_whole_if_writing_fails(tmp_path, monkeypatch):
    write_analysis({"meta": {"title": "first"}}, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    write_text = files.write_text

    def full_disk(path, text):
        if not text.startswith("<!DOCTYPE"):
            raise OSError(28, "No space left on device")
        write_text(path, text)

    monkeypatch.setattr(files, "write_text", full_disk)
    with pytest.raises(OSError, match="No space left"):
        write_analysis({"meta": {"title": "second"}}, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_bad_analysis_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="meta"):
        write_analysis({}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_folder_should_be_is_named(tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(OSError, match="taken"):
        write_analysis(hkt_sample(), tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


def test_both_are_finished_before_the_first_takes_its_place(tmp_path, monkeypatch):
    steps = []
    for name in ("write_text", "replace"):
        home = files if name == "write_text" else files.os
        original = getattr(home, name)

        def watched(*arguments, name=name, original=original):
            # Writing a file ends with a move of its own, inside the folder of unfinished files.
            if name == "write_text" or Path(arguments[1]).parent == tmp_path:
                steps.append(name)
            original(*arguments)

        monkeypatch.setattr(home, name, watched)
    write_analysis(hkt_sample(), tmp_path)
    assert steps == ["write_text", "write_text", "replace", "replace"]
