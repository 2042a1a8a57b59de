"""What is read of a user's data, what is left out, and what is refused."""

import gzip
import json
import re

import pytest
from PIL import Image

from polyscale.data.own import files, tables
from polyscale.data.own.reading import Wanted, read_source
from polyscale.data.own.splitting import split_own
from tests.data.own.samples import (
    as_csv,
    rows,
    write_csv,
    write_images,
    write_json_lines,
    write_pages,
)


def read(path, **wanted):
    return read_source(str(path), Wanted(**wanted))["train"]


def contents(items):
    return [(item.content, item.label) for item in items.items]


def test_csv_tsv_semicolons_json_lines_json_and_gzip_give_the_same_items(tmp_path):
    write_csv(tmp_path / "a.csv")
    write_json_lines(tmp_path / "a.jsonl")
    (tmp_path / "a.tsv").write_text(as_csv(rows(), delimiter="\t"))
    (tmp_path / "semicolons.csv").write_text("\ufeff" + as_csv(rows(), delimiter=";"))
    (tmp_path / "a.json").write_text(json.dumps([{"text": t, "label": y} for t, y in rows()]))
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    for name in ("a.csv", "a.jsonl", "a.tsv", "semicolons.csv", "a.json", "a.csv.gz"):
        items = read(tmp_path / name)
        assert contents(items) == rows(), name
        assert (items.text, items.label, items.left_out) == (("text",), "label", [])


def test_a_quoted_field_may_have_commas_newlines_and_quotes(tmp_path):
    text = 'one, "two"\nthree'
    (tmp_path / "a.csv").write_text(as_csv([(text, "x"), ("four", "y")]))
    items = read(tmp_path / "a.csv")
    assert contents(items) == [(text, "x"), ("four", "y")]
    assert [item.where for item in items.items] == ["line 2", "line 4"]


def test_columns_are_guessed_by_their_names_or_by_what_is_in_them(tmp_path):
    table = [(n, text, label) for n, (text, label) in enumerate(rows())]
    for header in (("id", "Review", "Sentiment"), ("id", "what_was_said", "who")):
        (tmp_path / "a.csv").write_text(as_csv(table, header))
        items = read(tmp_path / "a.csv")
        assert (items.text, items.label) == ((header[1],), header[2])
        assert contents(items) == rows()


def test_several_columns_of_text_are_the_fields_of_a_record(tmp_path):
    (tmp_path / "a.csv").write_text(as_csv([("A", "b c", "x")], ("title", "body", "label")))
    items = read(tmp_path / "a.csv", text=("title", "body"))
    assert items.media == "record"
    assert items.items[0].content == {"title": "A", "body": "b c"}
    assert items.items[0].text == "A\nb c"


def test_damaged_rows_are_counted_and_named_and_left_out(tmp_path):
    good = as_csv(rows())
    path = tmp_path / "a.csv"
    path.write_text(good + '"no label",\n,sky\n\na,b,c\nit "is",sky\n"x"y,sky\n')
    items = read(path)
    assert contents(items)[:40] == rows()
    assert items.notes() == [
        f"{path}: left out 5 of 46 rows: line 42 (no label), line 43 (no text), line 44 (empty), "
        "line 45 (3 fields, not 2), line 47 (misplaced quotes)"
    ]
    path = tmp_path / "a.jsonl"
    path.write_text(
        write_json_lines(path).read_text()
        + '{"text": \n[1]\n{"text": "a", "label": null}\n{"text": ["a"], "label": "sky"}\n'
        + '{"text": "\\ud800", "label": "sky"}\n'
    )
    assert read(path).notes() == [
        f"{path}: left out 5 of 45 rows: line 41 (not JSON), line 42 (not a JSON object), line 43 "
        "(no label), line 44 (text is a list, not a text), line 45 (half a surrogate pair)"
    ]


BAD_FILES = {
    "empty.csv": (b"", "must have some text, got an empty file"),
    "blank.csv": (b" \n\n", "must have some text, got an empty file"),
    "header.csv": (b"text,label\n", "must have some rows, got only the names of columns"),
    "latin.csv": (
        "text,label\nfine,x\ncaf\u00e9,y\n".encode("latin-1"),
        "must be UTF-8, got the byte 0xe9 in line 3; convert it",
    ),
    "utf16.csv": ("text,label\na,b\n".encode("utf-16"), "must be UTF-8, got UTF-16"),
    "nul.csv": (b"text,label\na\0b,x\n", "must be text, got a NUL byte in line 2"),
    "cut.csv.gz": (
        gzip.compress(as_csv(rows()).encode())[:-30],
        "is truncated: the end of its gzip data is missing",
    ),
    "other.csv.gz": (b"text,label\na,x\n", "is damaged or not a gzip file"),
    "open.csv": (
        b'text,label\na,x\n"b,y\nc,z\n',
        "line 3: a quoted field must end, got no closing quote",
    ),
    "twice.csv": (b"text,text\na,x\n", "must name its columns in the first line, each once"),
    "damaged.jsonl": (
        b'{"text": "a", "label": "x"}\nb\nc\n',
        "must be a table, got 2 damaged rows and 1 good ones; the first is line 2: not JSON",
    ),
    "nested.json": (b"[" * 100_000, "must be JSON, got"),
    "one.json": (b"[1, 2", "must be JSON, got"),
    "none.csv": (b"text,label\n,\n,x\n", "must be a table|must have rows with a text and a label"),
    "model.pkl": (b"\x80\x04", "data must be a table .* got .*model.pkl"),
    "image.png": (b"\x89PNG\r\n\x1a\n12", "must be an image that can be read, got"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(name, tmp_path):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_huge_line_is_an_error_not_a_row(tmp_path, monkeypatch):
    for module in (files, tables):
        monkeypatch.setattr(module, "MAX_LINE", 1_000)
    (tmp_path / "a.csv").write_text(as_csv([("a", "x"), ("b" * 1_001, "y")]))
    with pytest.raises(ValueError, match=r"a.csv must have lines of at most 1,000 .* in line 3"):
        read(tmp_path / "a.csv")


def test_a_column_that_is_missing_is_an_error_that_offers_the_nearest(tmp_path):
    path = write_csv(tmp_path / "a.csv", header=("review", "sentiment"))
    with pytest.raises(ValueError, match=r"--text-column must be a column .*did you mean 'review'"):
        read(path, text=("reviews",))
    with pytest.raises(ValueError, match=r"--label-column .* got 'x1'$"):
        read(path, label="x1")
    (tmp_path / "b.csv").write_text(as_csv([("a b", "c d"), ("e f", "g h")], ("one", "two")))
    with pytest.raises(ValueError, match=r"must have a column of labels, got 'one', 'two'"):
        read(tmp_path / "b.csv")


def test_a_name_of_nothing_is_not_taken_for_a_dataset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("missing.csv", "no/such/folder/a.txt", str(tmp_path / "nothing")):
        with pytest.raises(FileNotFoundError, match=r"must be a file or folder that exists, got"):
            read(name)


def test_a_dataset_of_the_hub_is_read_by_name_and_runs_no_code(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(*arguments, **options):
        asked.append((arguments, options))
        if arguments[0] == "nobody/nothing":
            raise ConnectionError("no network")
        content = {"text": [t for t, _ in rows()], "label": [y for _, y in rows()]}
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict(content)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert contents(read("owner/words:plain")) == rows()
    with pytest.raises(FileNotFoundError, match=r"not be loaded from there .*no network"):
        read("nobody/nothing")
    assert asked == [(("owner/words", "plain"), {}), (("nobody/nothing", None), {})]


@pytest.mark.parametrize(("ending", "media"), [("md", "markdown"), ("html", "html")])
def test_a_folder_for_each_class_is_read(ending, media, tmp_path):
    folder = write_pages(tmp_path / "pages", ending=ending)
    (folder / "sea" / "empty.md").write_bytes(b"")
    (folder / "sea" / f"bad.{ending}").write_bytes(b"\xff\xfe")
    (folder / f"top.{ending}").write_text("In no folder")
    (folder / "sea" / ".hidden.md").write_text("x")
    items = read(folder)
    assert (items.media, len(items.items)) == (media, 24)
    assert {item.label for item in items.items} == {"sea", "sky"}
    note = " ".join(items.notes())
    assert f"top.{ending} (in no folder of a class)" in note
    assert f"bad.{ending} (must be UTF-8, got UTF-16)" in note


def test_a_folder_with_a_table_of_labels_is_read_and_never_left(tmp_path):
    folder = tmp_path / "pages"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("outside")
    table = []
    for number, (text, label) in enumerate(rows()):
        (folder / f"{number}.txt").write_text(text)
        table.append((f"{number}.txt", label))
    table += [("../secret.txt", "sea"), ("none.txt", "sky"), ("0.txt", "")]
    (folder / "labels.csv").write_text(as_csv(table, ("file_name", "label")))
    for source in (folder, folder / "labels.csv"):
        items = read(source)
        assert contents(items) == rows()
        assert [where for where, _ in items.left_out] == ["line 42", "line 43", "line 44"]
        assert "no file '../secret.txt'" in items.notes()[0]
    (folder / "labels.csv").rename(tmp_path / "other.csv")
    assert contents(read(folder, table=str(tmp_path / "other.csv"))) == rows()
    with pytest.raises(ValueError, match=r"must have a folder for each class, or a table"):
        read(folder)
    assert len(read(folder, labelled=False).items) == 40


def test_images_that_cannot_be_read_are_named_and_left_out(tmp_path):
    folder = write_images(tmp_path / "images")
    whole = (folder / "dark" / "0.png").read_bytes()
    (folder / "dark" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "dark" / "text.jpg").write_text("no image")
    items = read(folder)
    assert (items.media, len(items.items)) == ("image", 24)
    assert sorted(where for where, _ in items.left_out) == ["dark/cut.png", "dark/text.jpg"]
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"must have files that can be read, got 26 that cannot"):
        read(folder)


def test_a_saved_dataset_is_read_with_its_splits_and_names_of_labels(tmp_path):
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["sea", "sky"])}
    )
    content = {
        "text": [text for text, _ in rows()],
        "label": [("sea", "sky").index(label) for _, label in rows()],
    }
    train = datasets.Dataset.from_dict(content, features=kinds)
    secret = datasets.Dataset.from_dict({"text": ["a"], "label": [-1]}, features=kinds)
    whole = datasets.DatasetDict({"train": train, "validation": train.select([0]), "test": secret})
    whole.save_to_disk(str(tmp_path / "saved"))
    parts = read_source(str(tmp_path / "saved"), Wanted())
    assert contents(parts["train"]) == rows()
    assert contents(parts["validation"]) == rows()[:1]
    assert "test" not in parts
    assert "is ignored: it has no labels" in parts["train"].notes()[0]
    train.save_to_disk(str(tmp_path / "one"))
    assert contents(read(tmp_path / "one")) == rows()


def test_images_of_a_saved_dataset_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    images = [Image.new("RGB", (4, 4), (n, 0, 0)) for n in range(6)]
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    data = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 3}, features=kinds)
    data.save_to_disk(str(tmp_path / "saved"))
    items = read(tmp_path / "saved")
    assert (items.media, items.text) == ("image", ("image",))
    assert [item.label for item in items.items] == ["0", "1"] * 3


def split(path, seed=0, **options):
    return split_own(str(path), Wanted(), seed, **options)


def test_every_label_is_held_out_in_proportion_and_no_text_is_on_two_sides(tmp_path):
    many = rows(120) + [(f"more {n} of the sea", "sea") for n in range(40)]
    (tmp_path / "a.csv").write_text(as_csv(many))
    own = split(tmp_path / "a.csv")
    sizes = {
        part: [sum(item.label == name for item in found) for name in own.label_names]
        for part, found in own.items.items()
    }
    assert sizes == {"train": [80, 48], "validation": [10, 6], "test": [10, 6]}
    seen = [item.content for found in own.items.values() for item in found]
    assert len(seen) == len(set(seen)) == 160
    again = split(tmp_path / "a.csv")
    other = split(tmp_path / "a.csv", seed=1)
    assert again.items == own.items
    assert other.items["test"] != own.items["test"]
    assert other.digest == own.digest


def test_the_held_out_rows_do_not_depend_on_the_order_of_the_file(tmp_path):
    (tmp_path / "a.csv").write_text(as_csv(rows()))
    (tmp_path / "b.csv").write_text(as_csv(rows()[::-1]))
    one, other = (
        {item.content for item in split(tmp_path / name).items["test"]}
        for name in ("a.csv", "b.csv")
    )
    assert one == other


def test_copies_are_left_out_and_contents_with_two_labels_are_named(tmp_path):
    text = rows()[0][0]
    table = [*rows(), rows()[1], rows()[1], (text, "sky")]
    (tmp_path / "a.csv").write_text(as_csv(table))
    own = split(tmp_path / "a.csv")
    assert sum(len(found) for found in own.items.values()) == 39
    notes = " / ".join(own.notes)
    assert "left out 2 copies of other rows" in notes
    assert "left out 2 rows whose content has several labels: line 2 (sea), line 44 (sky)" in notes


def test_a_test_set_that_is_given_is_used_whole_and_taken_out_of_training(tmp_path):
    (tmp_path / "a.csv").write_text(as_csv(rows()))
    (tmp_path / "test.csv").write_text(as_csv([*rows()[:3], ("new sea", "sea")]))
    own = split(tmp_path / "a.csv", test=str(tmp_path / "test.csv"))
    assert [item.content for item in own.items["test"]] == [*(t for t, _ in rows()[:3]), "new sea"]
    assert "left out 3 training rows that are also held out" in own.notes
    held = {item.content for item in own.items["test"]}
    assert not held & {item.content for item in own.items["train"] + own.items["validation"]}
    (tmp_path / "test.csv").write_text(as_csv([("new", "land")]))
    with pytest.raises(ValueError, match=r"labels of test must be among .*got 'land' in line 2"):
        split(tmp_path / "a.csv", test=str(tmp_path / "test.csv"))


def test_too_few_labels_or_rows_are_errors(tmp_path):
    cases = {
        "must have at least two labels, got only 'x' in 'label'": [(f"t {n}", "x") for n in "abcd"],
        "label 'y' must have at least 3 different rows (for train, test, validation), got 1": [
            *[(f"t {n}", "x") for n in "abcdef"],
            ("t z", "y"),
        ],
        "'label' must be a column of classes, got 9 different values in 9 rows": [
            (f"t {n}", n) for n in "abcdefghi"
        ],
    }
    for message, table in cases.items():
        (tmp_path / "a.csv").write_text(as_csv(table))
        with pytest.raises(ValueError, match=re.escape(message)):
            split(tmp_path / "a.csv")


def test_changed_data_are_refused_by_their_digest(tmp_path):
    path = write_csv(tmp_path / "a.csv")
    digest = split(path).digest
    assert split(path, digest=digest).digest == digest
    path.write_text(path.read_text().replace("fish", "frog"))
    with pytest.raises(ValueError, match=rf"as they were when the run began \(digest {digest}\)"):
        split(path, digest=digest)
