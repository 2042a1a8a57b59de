import io
import pickle
import tracemalloc
import zipfile

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from polyscale.data.images import to_grey
from polyscale.data.tasks import load_task

from .samples import accept, images, write, write_images

UNPICKLED = []


class Trap:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self):
        return (spring, ())


def spring():
    UNPICKLED.append("here")


@pytest.fixture
def load(tmp_path, monkeypatch):
    def load(**options):
        accept(monkeypatch, tmp_path)
        return load_task("scifar10", tmp_path, **options)

    return load


def test_pixels_are_normalised_by_the_training_images(tmp_path, load):
    write_images(tmp_path)
    task = load()
    pixels = task.train.pixels.numpy() / 255
    values = torch.stack([task.train[i]["input_values"] for i in range(len(task.train))])
    expected = (pixels - pixels.mean()) / pixels.std()
    assert np.allclose(values[..., 0].numpy(), expected, atol=1e-5)
    assert task.source["normalisation"] == pytest.approx(
        {"mean": pixels.mean(), "std": pixels.std()}
    )
    assert (task.input_channels, task.vocab_size, task.max_length) == (1, None, 1024)


def test_validation_is_a_tenth_of_every_class_and_test_is_the_official_one(tmp_path, load):
    write_images(tmp_path)
    task = load()
    assert torch.bincount(task.validation.labels).tolist() == [1] * 10
    assert len(task.train) == 90
    pixels, labels = images(20, 1)
    assert np.array_equal(task.test.pixels.numpy(), pixels)
    assert task.test.labels.tolist() == labels.tolist()


def test_pixels_can_be_tokens(tmp_path, load):
    write_images(tmp_path)
    task = load(tokens=True)
    assert (task.input_channels, task.vocab_size, task.pad_token_id) == (None, 256, None)
    assert task.test[3]["input_ids"].tolist() == images(20, 1)[0][3].tolist()
    batch = task.collate([task.test[0], task.test[1]])
    assert batch["input_ids"].shape == (2, 1024)
    assert batch["attention_mask"].all()


def test_an_image_of_one_shade_does_not_divide_by_zero(tmp_path, load):
    flat = np.zeros((100, 1024), dtype=np.uint8)
    flat[np.arange(100), np.arange(100)] = 1  # all different, or none could be held out
    write_images(tmp_path, x_train=flat)
    assert torch.isfinite(load().train[0]["input_values"]).all()


def test_grey_is_what_pillow_makes_of_a_colour():
    colours = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    expected = np.array(Image.fromarray(colours).convert("L"))
    assert np.array_equal(to_grey(torch.from_numpy(colours)).numpy(), expected)


def test_an_image_as_text_has_its_dark_and_light_places(tmp_path, load):
    picture = np.zeros((32, 32), dtype=np.uint8)
    picture[16:, 16:] = 255
    write_images(tmp_path, x_test=picture.reshape(1, 1024), y_test=np.array([3], dtype=np.uint8))
    task = load()
    lines = task.test.text(0).split("\n")
    assert lines == [" " * 32] * 8 + [" " * 16 + "@" * 16] * 8
    assert task.example.endswith("-> cat")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": None}, "x_train"),
        ({"y_test": None}, "y_test"),
        ({"x_train": np.zeros((100, 1024), dtype=np.float32)}, "x_train must be uint8"),
        ({"x_train": np.zeros((100, 3072), dtype=np.uint8)}, "x_train must be uint8"),
        ({"x_train": np.uint8(3)}, "x_train must be uint8"),
        ({"y_train": np.zeros(99, dtype=np.uint8)}, "y_train must be uint8"),
        ({"y_train": np.zeros((100, 1), dtype=np.uint8)}, "y_train must be uint8"),
        ({"y_train": np.full(100, 10, dtype=np.uint8)}, "row 0 must be from 0 to 9, got 10"),
        ({"x_test": np.zeros((0, 1024), dtype=np.uint8)}, "x_test must be uint8"),
    ],
)
def test_arrays_that_are_not_cifar_are_refused_by_name(changes, message, tmp_path, load):
    write_images(tmp_path, **changes)
    with pytest.raises(ValueError, match=r"cifar10_gray\.npz.*" + message):
        load()


def test_nothing_is_unpickled(tmp_path, load):
    objects = np.empty(100, dtype=object)
    objects[:] = [Trap() for _ in range(100)]
    write_images(tmp_path, y_train=objects)
    with pytest.raises(ValueError, match=r"cifar10_gray\.npz is damaged or not an \.npz"):
        load()
    write(tmp_path / "cifar10_gray.npz", pickle.dumps(Trap()))
    with pytest.raises(ValueError, match=r"cifar10_gray\.npz is damaged or not an \.npz"):
        load()
    assert UNPICKLED == []
    pickle.loads(pickle.dumps(Trap()))
    assert UNPICKLED == ["here"]  # so the trap does work


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_an_archive_cut_short_is_refused_by_name(kept, tmp_path, load):
    path = write_images(tmp_path)
    content = path.read_bytes()
    write(path, content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"cifar10_gray\.npz is damaged"):
        load()


@pytest.mark.parametrize("place", [0.001, 0.1, 0.3, 0.5, 0.8, 0.9])
def test_a_damaged_archive_is_refused_by_name(place, tmp_path, load):
    path = write_images(tmp_path)
    content = bytearray(path.read_bytes())
    start = int(place * len(content))
    content[start : start + 64] = bytes(64)
    write(path, bytes(content))
    with pytest.raises(ValueError, match=r"cifar10_gray\.npz is damaged"):
        load()


def test_one_array_instead_of_an_archive_is_refused(tmp_path, load):
    content = io.BytesIO()
    np.save(content, np.zeros((100, 1024), dtype=np.uint8))
    write(tmp_path / "cifar10_gray.npz", content.getvalue())
    with pytest.raises(ValueError, match=r"cifar10_gray\.npz is damaged"):
        load()


def test_an_archive_of_something_else_is_refused(tmp_path, load):
    with zipfile.ZipFile(tmp_path / "cifar10_gray.npz", "w") as archive:
        archive.writestr("x_train.npy", b"nothing of the kind")
    with pytest.raises(ValueError, match=r"cifar10_gray\.npz is damaged"):
        load()


def test_other_content_under_the_name_is_refused(tmp_path):
    write_images(tmp_path)
    with pytest.raises(ValueError, match=r"must have SHA-256 28151f70bb05.* got"):
        load_task("scifar10", tmp_path)


def colour_table(split):
    generator = np.random.default_rng(split == "train")
    count = 100 if split == "train" else 20
    pixels = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return datasets.Dataset.from_dict(
        {
            "img": [Image.fromarray(image) for image in pixels],
            "label": [i % 10 for i in range(count)],
        },
        features=datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")}),
    ), pixels


def test_the_hub_gives_grey_images_of_its_colours(monkeypatch):
    monkeypatch.setattr(
        datasets, "load_dataset", lambda path, *, split, revision: colour_table(split)[0]
    )
    task = load_task("scifar10")
    assert (len(task.train), len(task.validation), len(task.test)) == (90, 10, 20)
    expected = to_grey(torch.from_numpy(colour_table("test")[1])).flatten(1)
    assert torch.equal(task.test.pixels, expected)
    assert task.source["hub"]["repository"] == "uoft-cs/cifar10"


def test_an_image_of_another_size_from_the_hub_is_named(monkeypatch):
    table = [{"img": Image.new("L", (32, 32)), "label": 0}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: table)
    with pytest.raises(ValueError, match="uoft-cs/cifar10, train, row 0: img must be 32 x 32 RGB"):
        load_task("scifar10")


def write_declared(path, declared, held, kind="|u1"):
    """An archive whose first array declares another shape than the bytes it holds."""
    write_images(path.parent)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    stream = io.BytesIO()
    header = {"descr": kind, "fortran_order": False, "shape": declared}
    np.lib.format.write_array_header_1_0(stream, header)
    members["x_train.npy"] = stream.getvalue() + bytes(held)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("declared", "held", "kind"),
    [((2**22, 1024), 1024, "|u1"), ((1, 1024), 2048, "|u1"), ((2**60, 1024), 0, "|V0")],
)
def test_an_array_that_declares_more_than_it_holds_is_refused(declared, held, kind, tmp_path, load):
    write_declared(tmp_path / "cifar10_gray.npz", declared, held, kind)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=rf"damaged .* an array of \[{declared[0]}, 1024\]"):
            load()
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path, load):
    write_declared(tmp_path / "cifar10_gray.npz", (2**15, 1024), 2**25)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"must unpack to at most [\d,]+ bytes .64 times"):
            load()
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
