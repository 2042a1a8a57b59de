import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from polyscale.trees import SignalTree
from tests.trees.strategies import trees

SUFFIXES = (".json", ".safetensors")


def sample() -> SignalTree:
    record = SignalTree.from_records({"title": 3, "photo": SignalTree.from_image(4, 4, 2)})
    padded = SignalTree.from_windows(6, (2,)).prune(torch.tensor([True] * 4 + [False] * 2))
    return SignalTree.batch([record, padded])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_tree_comes_back_as_it_was_saved(tmp_path: Path, suffix: str) -> None:
    tree = sample()
    tree.save(tmp_path / f"tree{suffix}")
    found = SignalTree.load(str(tmp_path / f"tree{suffix}"))
    assert found == tree
    assert found.key_names == tree.key_names
    assert found.modality_names == tree.modality_names
    assert found.tree_rows == tree.tree_rows


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.one_of(trees(), trees(ordered=False)), suffix=st.sampled_from(SUFFIXES))
def test_any_tree_survives_saving(tmp_path: Path, tree: SignalTree, suffix: str) -> None:
    tree.save(tmp_path / f"tree{suffix}")
    assert SignalTree.load(tmp_path / f"tree{suffix}") == tree


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"tree{suffix}"
    tree = sample()
    tree.save(path)

    def fail(*paths: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        SignalTree.from_windows(9).save(path)
    assert os.listdir(tmp_path) == [path.name]
    assert SignalTree.load(path) == tree


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, suffix: str, share: float) -> None:
    path = tmp_path / f"cut{suffix}"
    sample().save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ValueError, match=f"cut{suffix}: not a tree: "):
        SignalTree.load(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(suffix=st.sampled_from(SUFFIXES), data=st.data())
def test_a_damaged_file_is_refused_or_still_a_valid_tree(
    tmp_path: Path, suffix: str, data: st.DataObject
) -> None:
    path = tmp_path / f"damaged{suffix}"
    sample().save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(content))
    reason = f"{path}: not a tree: "
    try:
        SignalTree.load(path).validate()
    except ValueError as error:
        reason = str(error)
    assert reason.startswith(f"{path}: not a tree: ")


def changed(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": "other"}, "does not say that its format is polyscale.SignalTree"),
        ({"version": 2}, "its version is 2"),
        ({"parent": None}, "parent is missing"),
        ({"parent": []}, "parent is missing"),
        ({"parent": [-1, 0, 0.0]}, "parent is not a list of whole numbers"),
        ({"parent": [-1, 0, True]}, "parent is not a list of whole numbers"),
        ({"parent": [-1, 0, 2**70]}, "parent is not a list of whole numbers"),
        ({"parent": [-1, 0, 5]}, "parent of node 2 must be"),
        ({"parent": [-1, 2, 1]}, "node 1 is its own ancestor"),
        ({"parent": [-1, -1, 0]}, "2 roots"),
        ({"parent": [1, -1, 1]}, "parent is not breadth-first|roots"),
        ({"parent": [-1, 0]}, "leaf_row must have shape"),
        ({"leaf_row": [-1, 0, 0]}, "duplicate leaves: nodes 1 and 2"),
        ({"leaf_row": [-1, 0, -1]}, "node 2 has no children and carries no row"),
        ({"leaf_row": [-1, 0, 7]}, "outside the 2 rows"),
        ({"position": [[0, 0], [0], [0, 0]]}, "position must hold"),
        ({"position": [0, 0, 0]}, "position must hold pairs, got 0"),
        ({"domain": [9, -1, -1]}, r"domain of node 0 must be .* got 9"),
        ({"modality": [-1, 0, 4]}, r"modality of node 2 must be .* got 4"),
        ({"modality_names": [3]}, "modality_names is missing, or not a list of str"),
        ({"tree_rows": [0]}, "tree_rows must have two or more"),
        ({"tree_rows": [0, 2**50]}, "tree_rows must end at"),
        ({"tree_rows": [1, 2]}, "tree_rows must"),
    ],
)
def test_a_file_that_holds_no_tree_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    path = tmp_path / "tree.json"
    SignalTree.from_windows(2).save(path)
    changed(path, **changes)
    with pytest.raises(ValueError, match=rf"tree\.json: not a tree: .*({reason})"):
        SignalTree.load(path)


@pytest.mark.parametrize("content", ["null", "[]", "3", "{", "[" * 100_000, "\x00", "{}"])
def test_json_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"other\.json: not a tree"):
        SignalTree.load(path)


def test_safetensors_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tree.safetensors"
    path.write_bytes(save({"weight": torch.zeros(3)}))
    with pytest.raises(ValueError, match="does not say that its format"):
        SignalTree.load(path)
    SignalTree.from_windows(2).save(path)
    tensors = load(path.read_bytes())
    size = int.from_bytes(path.read_bytes()[:8], "little")
    metadata = json.loads(path.read_bytes()[8 : 8 + size])["__metadata__"]
    path.write_bytes(save({**tensors, "key": tensors["key"].float()}, metadata))
    with pytest.raises(ValueError, match=r"key must have dtype int64, got torch\.float32"):
        SignalTree.load(path)
    path.write_bytes(save({"parent": tensors["parent"]}, metadata))
    with pytest.raises(ValueError, match="leaf_row is missing"):
        SignalTree.load(path)


def test_other_suffixes_and_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path must be a name ending in .*, got .*tree\.pickle"):
        SignalTree.from_windows(2).save(tmp_path / "tree.pickle")
    with pytest.raises(ValueError, match="must be a name ending in"):
        SignalTree.load(tmp_path / "tree.pt")
    with pytest.raises(FileNotFoundError):
        SignalTree.load(tmp_path / "tree.json")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_of_padding_are_limited_by_the_size_of_the_file(tmp_path: Path, suffix: str) -> None:
    small = SignalTree.from_windows(2)
    path = tmp_path / f"tree{suffix}"

    def padded(rows: int) -> SignalTree:
        return replace(small, tree_rows=(0, rows), row_node=torch.zeros(1).expand(rows))

    with pytest.raises(
        ValueError, match=r"tree_rows must end at 1 to 1,048,576 in .* got 268,435,456"
    ):
        padded(2**28).save(path)
    assert not path.exists()
    padded(2**20).save(path)
    assert SignalTree.load(path).num_rows == 2**20


def test_a_small_file_that_declares_many_rows_is_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tree.json"
    SignalTree.from_windows(2).save(path)
    changed(path, tree_rows=[0, 2**28])
    monkeypatch.setattr("polyscale.trees.storage.assemble", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(ValueError, match=r"tree_rows must end .* \d+ bytes, got 268,435,456"):
        SignalTree.load(path)


def test_a_large_file_may_declare_as_many_rows_as_fit_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyscale.trees.storage.HARMLESS_ROWS", 0)
    path = tmp_path / "tree.json"
    SignalTree.from_windows(2).save(path)
    changed(path, tree_rows=[0, 9999])
    size = path.stat().st_size
    most = 16 * size  # four digits too, so that the file keeps its size
    changed(path, tree_rows=[0, most])
    assert SignalTree.load(path).num_rows == most
    changed(path, tree_rows=[0, most + 1])
    with pytest.raises(ValueError, match=f"must end at 1 to {most:,} in a file of {size:,} bytes"):
        SignalTree.load(path)
