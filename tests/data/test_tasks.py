import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import polyscale
from polyscale.data.tasks import (
    LANGUAGE_TASKS,
    TASKS,
    TREE_TASKS,
    Split,
    TaskData,
    load_task,
    task_options,
)

from .samples import make_folder

SMALL = {
    "listops": {"preset": "demo", "train": 120, "validation": 20, "test": 30},
    "scifar10": {},
    "imdb-char": {"length": 32},
    "agnews": {"length": 32},
    "sst2": {"length": 32},
    "enwik8": {"length": 16},
    "mqar": {"pairs": [2, 3], "length": 20, "train": 60, "validation": 10, "test": 20},
    "copy": {"length": 6, "train": 60, "validation": 10, "test": 20},
    "imdb-words": {"embedding": "learned", "train": 60, "validation": 10, "test": 20},
    "agnews-words": {"embedding": "learned", "train": 60, "validation": 10, "test": 20},
    "sst2-words": {"embedding": "learned", "train": 60, "validation": 10, "test": 20},
    "coco18": {"embedding": "learned"},
}
SEQUENCE_TASKS = tuple(name for name in TASKS if name not in TREE_TASKS)
PARTS = ("train", "validation", "test")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return make_folder(tmp_path / "data", monkeypatch)


@pytest.fixture
def load(folder):
    return lambda name, **options: load_task(name, folder, **{**SMALL[name], **options})


def content(split):
    """What the samples of a split look like to a model."""
    if "tree" in split[0]:
        return [
            b"".join(values.numpy().tobytes() for values in split[index]["inputs"].values())
            for index in range(len(split))
        ]
    key = "input_ids" if "input_ids" in split[0] else "input_values"
    return [split[index][key].numpy().tobytes() for index in range(len(split))]


def test_there_are_twelve_tasks():
    assert TASKS == (
        "listops",
        "scifar10",
        "imdb-char",
        "agnews",
        "sst2",
        "enwik8",
        "mqar",
        "copy",
        "imdb-words",
        "agnews-words",
        "sst2-words",
        "coco18",
    )
    assert tuple(SMALL) == TASKS


@pytest.mark.parametrize("name", TASKS)
def test_the_lists_of_kinds_of_tasks_are_true(name, load):
    task = load(name)
    assert (task.modalities is not None) == (name in TREE_TASKS)
    assert (task.kind == "language") == (name in LANGUAGE_TASKS)


@pytest.mark.parametrize("name", SEQUENCE_TASKS)
def test_a_task_keeps_its_promises(name, load):
    task = load(name)
    assert isinstance(task, TaskData)
    assert task.name == name
    assert (task.vocab_size is None) != (task.input_channels is None)
    for part in PARTS:
        split = getattr(task, part)
        assert isinstance(split, Split)
        assert len(split) == len(split.lengths) == task.source["splits"][part] > 0
        assert split.lengths.dtype == torch.int64
        assert split.lengths.max() <= task.max_length
        for values in split.groups.values():
            assert values.dtype == torch.int64
            assert values.shape == (len(split),)
        assert torch.equal(split.groups["length"], split.lengths)
        for index in range(len(split)):
            sample = split[index]
            if task.input_channels is None:
                ids = sample["input_ids"]
                assert set(sample) == {"input_ids", "labels"}
                assert ids.dtype == torch.int64
                assert ids.min() >= 0
                assert ids.max() < task.vocab_size
                assert ids.shape == (split.lengths[index],)
            else:
                assert set(sample) == {"input_values", "labels"}
                assert sample["input_values"].dtype == torch.float32
                assert sample["input_values"].shape == (split.lengths[index], task.input_channels)
            assert sample["labels"].dtype == torch.int64
            if task.kind == "language":
                asked = sample["labels"] != -100
                assert asked[1:].any()
                assert torch.equal(sample["labels"][asked], sample["input_ids"][asked])
            else:
                assert sample["labels"].shape == ()
                assert sample["labels"] == split.labels[index]
                assert 0 <= sample["labels"] < task.num_labels
            assert split.text(index)
        if task.kind == "language":
            assert split.labels is None
            assert task.num_labels is None
        else:
            assert split.labels.dtype == torch.int64
            assert len(task.label_names) == task.num_labels
    assert " -> " in task.example.replace("\n-> ", " -> ")


# Texts that differ in rare words alone have the same word ids; their split is that of the texts.
@pytest.mark.parametrize("name", [*SEQUENCE_TASKS, "coco18"])
def test_no_sample_is_in_two_splits(name, load):
    # Long enough for no text to be cut and no window of markup to come up again.
    whole = {"length": 100} if name in ("imdb-char", "agnews", "sst2", "enwik8") else {}
    task = load(name, **whole)
    seen = [set(content(getattr(task, part))) for part in PARTS]
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]


@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_gives_the_same_data_and_another_seed_does_not(name, load):
    first, again, other = load(name), load(name), load(name, seed=1)
    for part in PARTS:
        assert content(getattr(first, part)) == content(getattr(again, part))
    assert first.source == again.source
    if name != "enwik8":  # nothing in it is random
        assert content(first.validation) != content(other.validation)
        assert other.source["seed"] == 1


@pytest.mark.parametrize("name", TASKS)
def test_the_global_random_state_is_neither_used_nor_changed(name, load):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = content(load(name).validation)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert content(load(name).validation) == first


@pytest.mark.parametrize("name", SEQUENCE_TASKS)
def test_a_batch_has_the_samples_padded_and_masked(name, load):
    task = load(name)
    samples = [task.test[index] for index in range(4)]
    batch = task.collate(samples)
    longest = int(task.test.lengths[:4].max())
    for row, sample in enumerate(samples):
        length = int(task.test.lengths[row])
        if "input_values" in sample:
            assert torch.equal(batch["input_values"][row], sample["input_values"])
            assert torch.equal(batch["labels"][row], sample["labels"])
            continue
        assert batch["input_ids"].shape == (4, longest)
        assert torch.equal(batch["input_ids"][row, :length], sample["input_ids"])
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (longest - length)
        if task.kind == "language":
            assert torch.equal(batch["labels"][row, :length], sample["labels"])
            assert (batch["labels"][row, length:] == -100).all()
        else:
            assert batch["labels"][row] == sample["labels"]


@pytest.mark.parametrize("name", TASKS)
def test_a_task_can_be_sent_to_another_process(name, load):
    task = load(name)
    copy = pickle.loads(pickle.dumps(task))  # our own bytes, as a data loader's workers get them
    assert content(copy.test) == content(task.test)
    assert copy.test.text(0) == task.test.text(0)
    assert len(pickle.dumps(task.test)) < 0.7 * len(pickle.dumps(task))
    collate = pickle.loads(pickle.dumps(task.collate))
    assert collate is task.collate or name in TREE_TASKS


@pytest.mark.parametrize("name", TASKS)
def test_options_and_source_are_ready_for_json(name, load):
    task = load(name)
    assert json.loads(json.dumps(task.source)) == task.source
    options = task_options(name)
    assert json.loads(json.dumps(options)) == options
    assert task.source["options"] == {**options, **SMALL[name]}


@pytest.mark.parametrize(
    "name", ["scifar10", "imdb-char", "agnews", "sst2", "enwik8", "imdb-words", "coco18"]
)
def test_files_are_recorded_with_their_checksums(name, load):
    for record in load(name).source["files"]:
        assert record["name"].endswith(("z", "enwik8"))
        assert len(record["sha256"]) == 64


@pytest.mark.parametrize("name", TASKS)
def test_an_unknown_option_is_refused_with_the_options_there_are(name):
    with pytest.raises(ValueError, match=f"nonsense is not an option of {name}") as caught:
        load_task(name, nonsense=1)
    for option in task_options(name):
        assert f"{option}=" in str(caught.value)


def test_an_unknown_task_is_refused_with_the_tasks_there_are():
    for call in (load_task, task_options):
        with pytest.raises(ValueError, match=r"'listops', 'scifar10'.* got 'mnist'"):
            call("mnist")
        with pytest.raises(ValueError, match="name must be one of"):
            call(["listops"])


@pytest.mark.parametrize(("seed", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_a_seed_that_is_none_is_refused(seed, error):
    with pytest.raises(error, match="seed must be"):
        load_task("copy", seed=seed)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("imdb-char", {"length": 0}, "length must be an integer of at least 1, got 0"),
        ("imdb-char", {"length": "8"}, "length must be an integer of at least 1, got '8'"),
        ("enwik8", {"length": 1}, "length must be an integer of at least 2, got 1"),
        ("scifar10", {"tokens": 1}, "tokens must be True or False, got 1"),
        ("listops", {"preset": "lar"}, "preset must be one of 'lra', 't512', 'demo', got 'lar'"),
        ("listops", {"operators": ["MIN", "ADD"]}, "operators must be names out of"),
        ("listops", {"operators": 3}, "operators must be"),
        ("listops", {"max_depth": 0}, "max_depth must be an integer of at least 2, got 0"),
        ("listops", {"train": 0}, "train must be an integer of at least 1, got 0"),
        ("mqar", {"pairs": 0}, "pairs must be an integer of at least 1, got 0"),
        ("mqar", {"pairs": []}, "pairs must be an integer or a list"),
        (
            "mqar",
            {"pairs": 17},
            "length must be an integer of at least 68, got 64; 17 pairs need that",
        ),
        ("mqar", {"vocab": 19}, "vocab must be an integer of at least 20, got 19; 8 pairs"),
        ("mqar", {"power": 0}, "power must be above 0"),
        ("mqar", {"power": "x"}, "power must be a finite number from 0 to 1, got 'x'"),
        ("mqar", {"test": 0}, "test must be an integer of at least 1, got 0"),
        ("copy", {"length": 0}, "length must be an integer of at least 1, got 0"),
        ("copy", {"vocab": 2}, "vocab must be an integer of at least 3, got 2"),
        ("copy", {"train": None}, "train must be an integer of at least 1, got None"),
        (
            "imdb-words",
            {"tree": "oak"},
            "tree must be one of 'semantic', 'windows', 'random', got 'oak'",
        ),
        (
            "imdb-words",
            {"embedding": "glove"},
            "embedding must be one of 'word2vec', .*got 'glove'",
        ),
        ("imdb-words", {"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ("imdb-words", {"width": 0}, "width must be an integer of at least 1, got 0"),
        (
            "sst2-words",
            {"embedding": "learned", "test": 41},
            "test must be an integer from 1 to 40, got 41",
        ),
        (
            "sst2-words",
            {"embedding": "learned", "train": 0},
            "train must be .* got 0; None takes all",
        ),
        (
            "coco18",
            {"fields": "sound"},
            "fields must be one of 'both', 'image', 'text', got 'sound'",
        ),
        ("coco18", {"layout": "spiral"}, "layout must be one of 'flat', 'quadtree', 'rows'"),
        ("coco18", {"embedding": 3}, "embedding must be one of"),
    ],
)
def test_a_bad_option_is_refused_by_name(name, options, message, folder):
    with pytest.raises((ValueError, TypeError), match=message):
        load_task(name, folder, **options)


def test_the_folder_can_be_named_by_the_environment(folder, monkeypatch):
    monkeypatch.setenv("POLYSCALE_DATA", str(folder))
    assert len(load_task("enwik8").train) > 0
    monkeypatch.setenv("POLYSCALE_DATA", str(folder / "nowhere"))
    with pytest.raises(FileNotFoundError, match="POLYSCALE_DATA must be a folder"):
        load_task("enwik8")
    assert len(load_task("enwik8", folder).train) > 0  # the argument comes first
    with pytest.raises(FileNotFoundError, match="data_dir must be a folder"):
        load_task("enwik8", folder / "nowhere")
    with pytest.raises(TypeError, match="data_dir must be a path or None, got 3"):
        load_task("enwik8", 3)


@pytest.mark.parametrize(
    "name", ["scifar10", "imdb-char", "agnews", "sst2", "enwik8", "imdb-words", "coco18"]
)
def test_a_missing_file_is_named_in_one_line_with_what_to_do(name, tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        load_task(name, tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{name} needs ")
    assert str(tmp_path) in message
    assert "z in " in message
    assert "there" in message


def test_progress_is_shown_on_request_only(load, capsys):
    load("listops", progress=True)
    assert "100%" in capsys.readouterr().out
    load("listops")
    assert capsys.readouterr().out == ""


def test_generated_tasks_need_no_package_but_torch():
    code = """
import sys
for package in ("numpy", "safetensors", "datasets", "transformers", "rich", "pandas"):
    sys.modules[package] = None  # importing it fails
from polyscale.data import load_task
sizes = {"train": 20, "validation": 2, "test": 2}
for name, options in (("listops", {"preset": "demo"}), ("mqar", {}), ("copy", {})):
    task = load_task(name, **options, **sizes)
    task.collate([task.train[0], task.train[1]])
    print(task.name)
"""
    root = Path(polyscale.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.stdout.split() == ["listops", "mqar", "copy"], run.stderr


def test_the_signature_is_the_documented_one():
    parameters = inspect.signature(load_task).parameters
    assert list(parameters) == ["name", "data_dir", "seed", "progress", "options"]
    assert task_options("listops")["preset"] == "t512"
