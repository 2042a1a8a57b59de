import gzip
import hashlib

import pytest
import torch

from polyscale.data import stream
from polyscale.data.splits import WindowSplit
from polyscale.data.tasks import load_task

from .samples import accept, stream_bytes, write

PARTS = ("train", "validation", "test")


@pytest.fixture
def load(tmp_path, monkeypatch):
    def load(**options):
        accept(monkeypatch, tmp_path)
        return load_task("enwik8", tmp_path, **options)

    return load


def all_bytes(split):
    return b"".join(
        bytes(token - 1 for token in split[index]["input_ids"].tolist())
        for index in range(len(split))
    )


@pytest.mark.parametrize("name", ["enwik8", "enwik8.gz", "enwik8_20mb.gz"])
def test_the_windows_of_the_three_splits_are_the_file_in_order(name, tmp_path, load):
    content = stream_bytes()
    write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    task = load(length=64)
    assert b"".join(all_bytes(getattr(task, part)) for part in PARTS) == content
    assert task.source["bytes"] == {"train": 1_800, "validation": 100, "test": 100}
    assert task.train.lengths.tolist() == [64] * 28 + [8]
    assert task.vocab_size == 257
    assert "caf" in task.test.text(0)


def test_every_byte_is_its_own_label_and_padding_is_not(tmp_path, load):
    write(tmp_path / "enwik8", stream_bytes())
    task = load(length=64)
    full, short = task.train[0], task.train[28]
    assert torch.equal(full["labels"], full["input_ids"])
    batch = task.collate([full, short])
    assert (batch["labels"][1, 8:] == -100).all()
    assert (batch["input_ids"][1, 8:] == task.pad_token_id).all()
    assert batch["attention_mask"].sum(1).tolist() == [64, 8]
    assert batch["input_ids"][:, :8].min() > 0


def test_one_byte_alone_makes_no_window():
    split = WindowSplit(torch.arange(9).byte(), 4)
    assert split.lengths.tolist() == [4, 4]
    assert WindowSplit(torch.arange(10).byte(), 4).lengths.tolist() == [4, 4, 2]


def test_a_part_of_the_file_is_said_to_be_one(tmp_path, load):
    write(tmp_path / "enwik8_20mb.gz", gzip.compress(stream_bytes()))
    assert any("2,000 of 100,000,000 bytes" in note for note in load().source["notes"])


def test_the_whole_file_is_preferred_to_the_part(tmp_path, load):
    write(tmp_path / "enwik8_20mb.gz", gzip.compress(stream_bytes(1_000)))
    write(tmp_path / "enwik8", stream_bytes())
    assert load().source["files"][0]["name"] == "enwik8"


@pytest.mark.parametrize("name", ["enwik8", "enwik8.gz"])
def test_other_content_under_the_name_of_the_whole_is_refused(name, tmp_path):
    content = stream_bytes()
    write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(ValueError, match="is damaged or another file") as caught:
        load_task("enwik8", tmp_path)
    assert hashlib.md5(content).hexdigest() in str(caught.value)
    assert stream.OFFICIAL_MD5 in str(caught.value)


@pytest.mark.parametrize("kept", [0, 10, 100, -4])
def test_a_gzip_file_cut_short_is_refused_by_name(kept, tmp_path, load):
    write(tmp_path / "enwik8.gz", gzip.compress(stream_bytes())[:kept])
    with pytest.raises(ValueError, match=r"enwik8\.gz (is|must)"):
        load()


def test_a_file_too_short_to_split_is_refused(tmp_path, load):
    write(tmp_path / "enwik8_20mb.gz", gzip.compress(b"too short"))
    with pytest.raises(ValueError, match="must have at least 40 bytes, got 9"):
        load()


def test_forty_bytes_are_enough(tmp_path, load):
    write(tmp_path / "enwik8_20mb.gz", gzip.compress(stream_bytes(40)))
    assert [len(getattr(load(), part)) for part in PARTS] == [1, 1, 1]


def test_without_a_folder_one_line_says_where_the_file_is_found():
    with pytest.raises(FileNotFoundError) as caught:
        load_task("enwik8")
    message = str(caught.value)
    assert "\n" not in message
    for part in ("--data-dir", "POLYSCALE_DATA", "enwik8.gz", "mattmahoney.net"):
        assert part in message


def test_a_gzip_file_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, load):
    write(tmp_path / "enwik8_20mb.gz", gzip.compress(bytes(2**21)))
    with pytest.raises(ValueError, match=r"20mb\.gz must unpack to at most 1,048,576 bytes"):
        load()
