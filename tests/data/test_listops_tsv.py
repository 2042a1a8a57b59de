import hashlib

import pytest
import torch

from polyscale.data import listops_task
from polyscale.data.listops import ListOpsConfig, make_listops
from polyscale.data.tasks import load_task

PARTS = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
CONFIG = ListOpsConfig(4, 40, 5, 5, train=60, validation=10, test=15)


def with_parentheses(text):
    """The binary form of the published files: every argument closes a pair around what is before.

    [MAX 2 9 ] becomes ( ( ( [MAX 2 ) 9 ) ] ).
    """
    tokens = text.split()

    def read(position):
        token = tokens[position]
        if not token.startswith("["):
            return token, position + 1
        built = token
        position += 1
        while tokens[position] != "]":
            argument, position = read(position)
            built = f"( {built} {argument} )"
        return f"( {built} ] )", position + 1

    return read(0)[0]


def write(folder, data, change=lambda lines: lines, ending="\n"):
    for part, name in PARTS.items():
        split = getattr(data, part)
        lines = ["Source\tTarget"]
        lines += [
            f"{with_parentheses(split.text(index))}\t{split.labels[index]}"
            for index in range(len(split))
        ]
        lines = change(lines) if part == "validation" else lines
        (folder / name).write_bytes("".join(line + ending for line in lines).encode())


@pytest.fixture(scope="module")
def data():
    return make_listops(CONFIG)


def test_the_example_of_the_published_form():
    assert with_parentheses("[MAX 2 9 ]") == "( ( ( [MAX 2 ) 9 ) ] )"


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_the_files_give_the_expressions_without_their_parentheses(data, tmp_path, ending):
    write(tmp_path, data, ending=ending)
    task = load_task("listops", tsv=str(tmp_path))
    for part in PARTS:
        expected, found = getattr(data, part), getattr(task, part)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.offsets, expected.offsets)
        assert torch.equal(found.labels, expected.labels)
        assert torch.equal(found.groups["depth"], expected.groups["depth"])
    assert task.max_length == max(int(getattr(data, part).lengths.max()) for part in PARTS)
    assert task.source["notes"] == []
    assert task.source["files"] == [
        {"name": name, "sha256": hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()}
        for name in PARTS.values()
    ]


def test_files_are_checked_once_and_then_come_out_of_the_cache(data, tmp_path, monkeypatch):
    write(tmp_path, data)
    first = load_task("listops", tsv=tmp_path)
    monkeypatch.setattr(listops_task, "read_tsv", None)
    assert torch.equal(load_task("listops", tsv=tmp_path).train.tokens, first.train.tokens)
    with (tmp_path / "basic_val.tsv").open("a") as stream:
        stream.write("( ( ( [MAX 2 ) 9 ) ] )\t9\n")
    with pytest.raises(TypeError, match="NoneType"):  # other content: it is read again
        load_task("listops", tsv=tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("( ( ( [MAX 2 ) 9 ) ] )\t8", "Target must be 9, got '8'"),
        ("( ( ( [MAX 2 ) 9 ) ] )\tx", "Target must be 9, got 'x'"),
        ("( ( ( [MAX 2 ) 9 ) ] )\t", "Target must be 9, got ''"),
        ("( ( ( [TOP 2 ) 9 ) ] )\t9", r"got '\[TOP'"),
        ("( ( [MAX 2 ) 9 )\t9", "expression"),
        ("\t9", "expression"),
        ("( ( ( [MAX 2 ) 9 ) ] )", "must have 2 columns, got 1"),
        ("a\tb\tc", "must have 2 columns, got 3"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(data, tmp_path, row, message):
    write(tmp_path, data, change=lambda lines: [*lines[:4], row, *lines[4:]])
    with pytest.raises(ValueError, match=rf"basic_val\.tsv, line 5.*{message}"):
        load_task("listops", tsv=tmp_path)


def test_other_columns_and_no_rows_are_refused(data, tmp_path):
    write(tmp_path, data, change=lambda lines: ["Text\tValue", *lines[1:]])
    with pytest.raises(ValueError, match=r"basic_val\.tsv, line 1 must name Source"):
        load_task("listops", tsv=tmp_path)
    for change in (lambda lines: lines[:1], lambda lines: []):
        write(tmp_path, data, change=change)
        with pytest.raises(ValueError, match=r"basic_val\.tsv has no rows"):
            load_task("listops", tsv=tmp_path)


def test_bytes_that_are_no_text_are_named_by_line(data, tmp_path):
    write(tmp_path, data)
    with (tmp_path / "basic_test.tsv").open("ab") as stream:
        stream.write(b"\xff\xfe\t1\n")
    with pytest.raises(ValueError, match=r"basic_test\.tsv, line 17"):
        load_task("listops", tsv=tmp_path)


def test_expressions_that_are_also_in_train_are_counted(data, tmp_path):
    repeated = f"{with_parentheses(data.train.text(0))}\t{data.train.labels[0]}"
    write(tmp_path, data, change=lambda lines: [*lines, repeated])
    notes = load_task("listops", tsv=tmp_path).source["notes"]
    assert notes == ["1 validation expressions are also in train"]


def test_a_missing_file_is_named(data, tmp_path):
    write(tmp_path, data)
    (tmp_path / "basic_test.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"tsv must be a folder .*test\.tsv is missing"):
        load_task("listops", tsv=tmp_path)
    with pytest.raises(TypeError, match="tsv must be a folder, got 3"):
        load_task("listops", tsv=3)


def test_files_go_without_limits_of_generation(tmp_path):
    with pytest.raises(ValueError, match="tsv must not be combined with max_length, train"):
        load_task("listops", tsv=tmp_path, max_length=100, train=10)
