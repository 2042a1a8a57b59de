import gzip
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

from polyscale.data.coco import IMAGE_FILE, TEXT_FILE
from polyscale.data.tasks import load_task

from .samples import COLOURS, accept, make_folder, write_records


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path / "data", monkeypatch)


def load(folder, **options):
    return load_task("coco18", folder, **{"embedding": "learned", **options})


def test_a_record_has_an_image_and_a_text_under_their_names(folder):
    task = load(folder)
    tree = task.train[0]["tree"]
    assert task.key_names == ("image", "text")
    assert tree.key_names == ("image", "text")
    assert [tree.DOMAINS[tree.domain[node]] for node in range(3)] == ["keyed", "grid2d", "sequence"]
    assert tree.leaf_count[1] == 64
    assert task.label_names == COLOURS
    assert task.modalities["image"] == {"width": 192}


@pytest.mark.parametrize("field", ["image", "text"])
def test_one_field_alone_leaves_the_other_out(folder, field):
    task, both = load(folder, fields=field), load(folder)
    sample = task.train[0]
    assert list(sample["inputs"]) == list(task.modalities) == [field]
    assert task.key_names == (field,)
    assert torch.equal(sample["inputs"][field], both.train[0]["inputs"][field])
    assert torch.equal(task.test.labels, both.test.labels)
    assert task.collate([sample, task.train[1]])["tree"].num_trees == 2


def test_patches_are_the_squares_of_the_image_normalised_by_the_training_images(folder):
    task = load(folder, fields="image")
    with np.load(folder / IMAGE_FILE) as archive:
        jpeg, offset = archive["jpeg"].tobytes(), archive["offset"]
    first = np.array(Image.open(io.BytesIO(jpeg[offset[60] : offset[61]])))  # test begins at 60
    normal = task.source["normalisation"]
    expected = (first / 255 - normal["mean"]) / normal["std"]  # [64, 64, 3]
    patch = torch.tensor(expected[8:16, 16:24].reshape(-1), dtype=torch.float32)
    torch.testing.assert_close(task.test[0]["inputs"]["image"][8 + 2], patch)
    every = torch.stack([task.train[i]["inputs"]["image"] for i in range(len(task.train))])
    assert every.mean().abs() < 1e-4


def test_records_without_a_single_label_are_left_out(folder):
    sizes = load(folder).source["splits"]
    assert sizes["train"] + sizes["validation"] == 54
    assert sizes["test"] == 18


def test_the_image_may_be_a_quadtree(folder):
    task = load(folder, layout="quadtree", fields="image")
    assert task.train[0]["tree"].max_depth == 4
    assert load(folder, fields="image").train[0]["tree"].max_depth == 2


def test_without_a_folder_it_says_what_it_needs(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"coco18 needs data_dir.*{IMAGE_FILE}"):
        load_task("coco18")
    write_records(tmp_path)
    accept(monkeypatch, tmp_path)
    (tmp_path / TEXT_FILE).unlink()
    with pytest.raises(FileNotFoundError, match=f"coco18 needs {TEXT_FILE} in"):
        load_task("coco18", tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"i": 0}', "must be an object with i, split, text and label"),
        ("nothing", "must be an object with i, split, text and label"),
        ('{"i": 80, "split": "train", "text": "a", "label": 0}', "must have i from 0 to 79"),
        ('{"i": 0, "split": "train", "text": "a", "label": 4}', "label null or from 0 to 3"),
        (
            '{"i": 0, "split": "dev", "text": "a", "label": 0}',
            "split must be one of 'train', 'test'",
        ),
        ('{"i": 0, "split": "train", "text": "a", "label": null}', "no labelled rows of .*train"),
    ],
)
def test_a_bad_line_is_named(folder, monkeypatch, line, message):
    (folder / TEXT_FILE).write_bytes(gzip.compress(line.encode()))
    accept(monkeypatch, folder)
    with pytest.raises(ValueError, match=message) as caught:
        load(folder)
    assert TEXT_FILE in str(caught.value)


def test_a_bad_image_is_named(folder, monkeypatch):
    with np.load(folder / IMAGE_FILE) as archive:
        arrays = dict(archive)
    arrays["jpeg"] = arrays["jpeg"].copy()
    arrays["jpeg"][: arrays["offset"][1]] = 0
    np.savez(folder / IMAGE_FILE, **arrays)
    accept(monkeypatch, folder)
    with pytest.raises(ValueError, match="image 0 cannot be read"):
        load(folder)
    (folder / IMAGE_FILE).write_bytes(b"PK nothing")
    accept(monkeypatch, folder)
    with pytest.raises(ValueError, match=r"is damaged or not an \.npz file"):
        load(folder)


def test_changed_files_are_refused_by_their_checksum(folder):
    path = folder / TEXT_FILE
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    row = json.loads(lines[0]) | {"label": 1}
    path.write_bytes(gzip.compress("\n".join([json.dumps(row), *lines[1:]]).encode()))
    with pytest.raises(ValueError, match="is damaged or another file"):
        load(folder)


def change_images(folder, monkeypatch, **changes):
    with np.load(folder / IMAGE_FILE) as archive:
        arrays = {**archive, **changes}
    np.savez(folder / IMAGE_FILE, **arrays)
    accept(monkeypatch, folder)


def test_a_small_file_of_a_large_image_is_refused_before_it_is_decoded(folder, monkeypatch):
    files = []
    for shade in range(80):
        stream = io.BytesIO()
        Image.new("RGB", (1_000, 1_000), (shade, shade, shade)).save(stream, "JPEG")
        files.append(stream.getvalue())
    jpeg = np.frombuffer(b"".join(files), dtype=np.uint8)
    change_images(folder, monkeypatch, jpeg=jpeg, offset=np.cumsum([0, *map(len, files)]))
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    with pytest.raises(ValueError, match=r"image \d+ must have 64 x 64 pixels, got \(1000, 1000\)"):
        load(folder)


def test_an_image_that_declares_more_than_pillow_takes_is_named(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
    with pytest.raises(ValueError, match=r"image \d+ cannot be read .*decompression bomb"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda offset: np.resize([0, offset[-1]], 82), "offset must ascend from 0"),
        (lambda offset: offset[1:], "offset must ascend from 0"),
        (lambda offset: offset[:0], "offset must ascend from 0"),
        (lambda offset: offset.astype(float), r"offset must be \[N\] of integer, got .* float64"),
        (lambda offset: offset[:, None], r"offset must be \[N\] of integer, got \[81, 1\]"),
    ],
)
def test_places_of_images_that_overlap_or_are_none_are_refused(
    change, message, folder, monkeypatch
):
    with np.load(folder / IMAGE_FILE) as archive:
        offset = change(archive["offset"])
    change_images(folder, monkeypatch, offset=offset)
    with pytest.raises(ValueError, match=message):
        load(folder)
