import gzip
import json
import sys
import tracemalloc
from dataclasses import replace

import datasets
import pytest
import torch

from polyscale.data import files, texts
from polyscale.data.splits import decode_bytes
from polyscale.data.tasks import load_task, load_texts
from polyscale.data.validation import choose_validation

from .samples import TEXT_FILES, accept, rows, write, write_rows, write_texts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    for name in TEXT_FILES:
        write_texts(folder, name)
    accept(monkeypatch, folder)
    return folder


def sides(splits):
    return splits.train, splits.validation, splits.test


@pytest.mark.parametrize(("name", "share"), [("imdb-char", 0.1), ("agnews", 0.1), ("sst2", 0.05)])
def test_validation_is_its_share_of_every_class_and_test_is_whole(name, share, folder):
    splits = load_texts(name, folder)
    classes = TEXT_FILES[name][2]
    each = 200 // classes
    assert torch.bincount(splits.validation.labels).tolist() == [round(share * each)] * classes
    assert len(splits.train) == 200 - len(splits.validation)
    assert splits.test.texts == [row["text"] for row in rows(40, classes, start=1000)]


@pytest.mark.parametrize("name", TEXT_FILES)
def test_every_row_keeps_its_label(name, folder):
    classes = TEXT_FILES[name][2]
    known = {row["text"]: row["label"] for row in rows(200, classes) + rows(40, classes, 1000)}
    found = {}
    for side in sides(load_texts(name, folder)):
        found.update(zip(side.texts, side.labels.tolist(), strict=True))
    assert found == known


@pytest.mark.parametrize("name", TEXT_FILES)
def test_bytes_make_a_round_trip_with_letters_of_every_width(name, folder):
    splits = load_texts(name, folder)
    task = load_task(name, folder, length=100)
    for side, split in zip(sides(splits), (task.train, task.validation, task.test), strict=True):
        for index, text in enumerate(side.texts):
            ids = split[index]["input_ids"]
            assert ids.tolist() == [byte + 1 for byte in text.encode()]
            assert split.text(index) == text == decode_bytes(ids.tolist())
    assert any("🙂" in text for text in splits.test.texts)


def test_long_texts_lose_their_end_and_the_source_says_how_many(tmp_path, monkeypatch):
    test = [{"text": "é" * 10, "label": 0}, {"text": "short", "label": 1}]
    write_texts(tmp_path, "imdb-char", test=test)
    accept(monkeypatch, tmp_path)
    task = load_task("imdb-char", tmp_path, length=7)
    assert task.test.lengths.tolist() == [7, 5]
    assert task.test.text(0) == "ééé\ufffd"  # the seventh byte is half a letter
    assert task.source["cut_to_length"]["test"] == 1
    assert task.max_length == 7


def test_texts_that_are_equal_once_cut_are_counted_in_the_source(tmp_path, monkeypatch):
    train = [{"text": f"same{i}", "label": i % 2} for i in range(20)]
    write_texts(tmp_path, "imdb-char", train=train, test=[{"text": "same!", "label": 0}])
    accept(monkeypatch, tmp_path)
    cut = load_task("imdb-char", tmp_path, length=4).source["equal_to_a_training_text_once_cut"]
    assert cut == {"validation": 1, "test": 1}
    whole = load_task("imdb-char", tmp_path, length=9).source["equal_to_a_training_text_once_cut"]
    assert whole == {"validation": 0, "test": 0}


def test_training_texts_that_are_also_in_test_are_left_out_and_counted(tmp_path, monkeypatch):
    shared = rows(5, 2, start=1000)
    write_texts(tmp_path, "imdb-char", train=rows(100, 2) + shared + shared[:1])
    accept(monkeypatch, tmp_path)
    splits = load_texts("imdb-char", tmp_path)
    assert len(splits.train) + len(splits.validation) == 100
    assert not {row["text"] for row in shared} & {*splits.train.texts, *splits.validation.texts}
    assert any(note.startswith("6 training rows are left out") for note in splits.source["notes"])


def test_copies_of_a_text_stay_on_one_side(tmp_path, monkeypatch):
    train = [{"text": f"text {i // 3}", "label": (i // 3) % 2} for i in range(600)]
    write_texts(tmp_path, "imdb-char", train=train)
    accept(monkeypatch, tmp_path)
    for seed in range(5):
        splits = load_texts("imdb-char", tmp_path, seed=seed)
        assert not set(splits.train.texts) & set(splits.validation.texts)
        assert len(splits.validation) == 60


def test_the_choice_does_not_depend_on_the_order_of_the_rows():
    contents = [str(i).encode() for i in range(100)]
    labels = [i % 3 for i in range(100)]
    chosen = choose_validation(contents, labels, 0.2, seed=4)
    turned = choose_validation(contents[::-1], labels[::-1], 0.2, seed=4)
    assert turned[::-1] == chosen
    assert choose_validation(contents, labels, 0.2, seed=5) != chosen


def test_too_few_rows_for_validation_are_refused():
    with pytest.raises(ValueError, match="10% of 3 training samples cannot be held out"):
        choose_validation([b"a", b"b", b"c"], [0, 1, 0], 0.1, seed=0)


def test_a_part_of_ag_news_is_said_to_be_one_and_the_whole_is_preferred(folder):
    notes = load_texts("agnews", folder).source["notes"]
    assert notes == ["train has 200 rows; the official one 120,000"]
    write_rows(folder / "agnews_train.jsonl.gz", rows(320, 4))
    own = load_texts("agnews", folder).source
    assert own["files"][0]["name"] == "agnews_train.jsonl.gz"
    assert own["files"][0]["rows"] == 320
    assert own["notes"] == ["train has 320 rows; the official one 120,000"]


def test_a_whole_ag_news_has_nothing_to_be_said_about(folder, monkeypatch):
    assert texts._ORIGINS["agnews"].official_rows == 120_000
    smaller = replace(texts._ORIGINS["agnews"], official_rows=320)
    monkeypatch.setitem(texts._ORIGINS, "agnews", smaller)
    write_rows(folder / "agnews_train.jsonl.gz", rows(320, 4))
    assert load_texts("agnews", folder).source["notes"] == []


def test_other_content_under_a_known_name_is_refused_with_both_checksums(folder):
    path = folder / "imdb_test.jsonl.gz"
    expected = files.CHECKSUMS[path.name]
    write_rows(path, rows(41, 2, start=1000))
    with pytest.raises(ValueError, match="is damaged or another file") as caught:
        load_task("imdb-char", folder)
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_the_known_checksums_are_the_published_ones():
    assert len(files.CHECKSUMS) == 10
    assert all(len(checksum) == 64 for checksum in files.CHECKSUMS.values())
    assert files.CHECKSUMS["imdb_train.jsonl.gz"].startswith("bfdcb58d2cf7aca8144bb2810fb16a50")


@pytest.mark.parametrize("kept", [0, 5, 30, -8, -1])
def test_a_gzip_file_cut_short_is_refused_by_name(kept, folder):
    path = folder / "agnews_train.jsonl.gz"  # a name without a checksum
    write_rows(path, rows(100, 4))
    write(path, path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"agnews_train\.jsonl\.gz (is|has)"):
        load_task("agnews", folder)


@pytest.mark.parametrize("place", [0, 3, 40, -6, -2])
def test_a_damaged_gzip_file_is_refused_by_name(place, folder):
    path = folder / "agnews_train.jsonl.gz"
    write_rows(path, rows(100, 4))
    content = bytearray(path.read_bytes())
    content[place] ^= 0xFF
    write(path, bytes(content))
    with pytest.raises(ValueError, match=r"agnews_train\.jsonl\.gz"):
        load_task("agnews", folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a", "label": 0', "must be JSON in UTF-8"),
        (b"\xff\xfe", "must be JSON in UTF-8"),
        (b"[1, 2]", "must be an object with text and label"),
        (b'{"text": "a"}', "must be an object with text and label"),
        (b'{"text": "", "label": 0}', "text must be a non-empty string, got ''"),
        (b'{"text": 5, "label": 0}', "text must be a non-empty string, got 5"),
        (b'{"text": "\\ud800", "label": 0}', "text must be UTF-8, got half a surrogate pair"),
        (b'{"text": "a", "label": 4}', "label must be from 0 to 3, got 4"),
        (b'{"text": "a", "label": -1}', "label must be from 0 to 3, got -1"),
        (b'{"text": "a", "label": "1"}', "label must be from 0 to 3, got '1'"),
        (b'{"text": "a", "label": true}', "label must be from 0 to 3, got True"),
        (b'{"text": "a", "label": 1.0}', "label must be from 0 to 3, got 1.0"),
        (b'{"text": "a", "label": NaN}', "label must be from 0 to 3, got nan"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(line, message, folder):
    good = json.dumps({"text": "fine", "label": 1}).encode()
    write(folder / "agnews_train.jsonl.gz", gzip.compress(b"\n".join([good, good, line, good])))
    with pytest.raises(ValueError, match=f"agnews_train.jsonl.gz, line 3:? {message}"):
        load_task("agnews", folder)


def test_a_file_without_rows_is_refused(folder):
    write(folder / "agnews_train.jsonl.gz", gzip.compress(b"\n"))
    with pytest.raises(ValueError, match=r"agnews_train\.jsonl\.gz has no rows"):
        load_task("agnews", folder)


def test_an_unknown_set_of_texts_is_refused():
    with pytest.raises(
        ValueError, match="name must be one of 'imdb-char', 'agnews', 'sst2', got 'copy'"
    ):
        load_texts("copy")


HUB = {
    "imdb-char": ("stanfordnlp/imdb", "text", "test"),
    "agnews": ("fancyzhx/ag_news", "text", "test"),
    "sst2": ("stanfordnlp/sst2", "sentence", "validation"),
}


@pytest.mark.parametrize("name", HUB)
def test_the_hub_gives_the_same_task_as_the_files_whatever_the_order_of_rows(
    name, folder, monkeypatch
):
    repository, column, test_split = HUB[name]
    classes = TEXT_FILES[name][2]
    asked = []

    def load_dataset(path, *, split, revision):
        asked.append((path, split, revision))
        found = rows(200, classes)[::-1] if split == "train" else rows(40, classes, start=1000)
        ending = " " if name == "sst2" else ""
        return datasets.Dataset.from_dict(
            {
                column: [row["text"] + ending for row in found],
                "label": [row["label"] for row in found],
            }
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    from_hub, from_files = load_task(name), load_task(name, folder)
    for part in ("train", "validation", "test"):
        one, other = getattr(from_hub, part), getattr(from_files, part)
        assert {one.text(i) for i in range(len(one))} == {other.text(i) for i in range(len(other))}
    assert [(path, split) for path, split, _ in asked] == [
        (repository, "train"),
        (repository, test_split),
    ]
    assert all(len(revision) == 40 for _, _, revision in asked)  # a commit, not a branch
    assert from_hub.source["hub"]["repository"] == repository
    assert from_hub.source["hub"]["revision"] == asked[0][2]


def test_a_bad_row_from_the_hub_is_named(monkeypatch):
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, -1]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: table)
    with pytest.raises(ValueError, match="stanfordnlp/imdb, train, row 1: label must be"):
        load_task("imdb-char")


@pytest.mark.parametrize("error", [ConnectionError("no\nnetwork"), ValueError("no such revision")])
def test_without_folder_and_hub_one_line_says_what_to_do(error, monkeypatch):
    def load_dataset(*args, **kwargs):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(FileNotFoundError) as caught:
        load_task("imdb-char")
    message = str(caught.value)
    assert "\n" not in message
    for part in ("stanfordnlp/imdb", "--data-dir", "POLYSCALE_DATA", "imdb_train.jsonl.gz"):
        assert part in message


def test_without_the_datasets_library_the_message_names_both_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"--data-dir.*needs datasets.*pip install 'polyscale"):
        load_task("sst2")


@pytest.mark.parametrize("line", [b"\n", b" ", b"0\n", b'{"text": "a", "label": 0}\n'])
def test_a_gzip_file_that_unpacks_to_far_more_than_its_size_is_refused_early(line, folder):
    path = write(folder / "agnews_train.jsonl.gz", gzip.compress(line * (2**25 // len(line))))
    limit = max(2**20, 64 * path.stat().st_size)
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError, match=f"train.jsonl.gz must unpack to at most {limit:,} bytes"
        ):
            load_task("agnews", folder)
        assert tracemalloc.get_traced_memory()[1] < 2**24  # half of what it unpacks to
    finally:
        tracemalloc.stop()


def test_a_text_that_is_repeated_a_lot_is_no_attack(folder):
    row = json.dumps({"text": 60 * "again ", "label": 1}) + "\n"
    content = "".join(row.replace("again", f"again{i}", 1) for i in range(500))
    path = write(folder / "agnews_train.jsonl.gz", gzip.compress(content.encode()))
    assert len(content) > 30 * path.stat().st_size
    assert len(load_task("agnews", folder).train) == 450


def test_blank_lines_count_but_are_no_rows(folder):
    path = folder / "agnews_train.jsonl.gz"
    write(path, gzip.compress(b'\n\r\n{"text": "a", "label": 0}\r\n  \n[]\n'))
    with pytest.raises(ValueError, match=r"jsonl\.gz, line 5 must be an object .* got b'\[\]'"):
        load_task("agnews", folder)
