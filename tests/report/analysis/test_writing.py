import json
import os
from pathlib import Path

import pytest

from polyscale.report.analysis import analysis_page, write_analysis, writing

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
    write_text = Path.write_text

    def full_disk(self, *args, **options):
        if self.name == "report.json":
            raise OSError(28, "No space left on device")
        return write_text(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", full_disk)
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


def test_files_take_their_places_in_one_step(tmp_path, monkeypatch):
    moves = []
    replace = os.replace

    def watched(source, target):
        moves.append((Path(source).parent.parent, Path(target).name))
        replace(source, target)

    monkeypatch.setattr(writing.os, "replace", watched)
    write_analysis(hkt_sample(), tmp_path)
    assert moves == [(tmp_path, "report.html"), (tmp_path, "report.json")]
