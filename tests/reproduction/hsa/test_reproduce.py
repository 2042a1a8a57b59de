from dataclasses import replace

import pytest

from polyscale.training.compare import read_results
from reproduction.hsa import HSAStudy
from tests.data.samples import make_folder

TINY = {
    "training.steps": 2,
    "training.batch_size": 8,
    "training.warmup_steps": 1,
    "training.evaluate_every": 2,
    "task.embedding": "learned",
    "model.hidden_size": 12,
    "model.intermediate_size": 12,
}


CHOSEN = (
    ("imdb-word2vec", "fsa"),
    ("imdb-word2vec", "hsa"),
    ("coco18", "fsa"),
    ("coco18", "hsa-image-only"),
)


@pytest.fixture
def planned():
    """Four of the runs, all small; the documents have fewer texts than the plan asks for."""
    chosen = []
    for one in HSAStudy().plan("cpu"):
        if one.config.seed == 0 and (one.table, one.config.name) in CHOSEN:
            sizes = {} if one.table == "coco18" else {"train": 40, "validation": 9, "test": 10}
            config = one.config.with_values(TINY)
            config = replace(config, task_options=config.task_options | sizes)
            chosen.append(replace(one, config=config))
    return chosen


def test_runs_go_end_to_end_and_a_second_time_changes_nothing(planned, tmp_path, monkeypatch):
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    data, output = make_folder(tmp_path / "data", monkeypatch), tmp_path / "output"
    options = {"preset": "cpu", "data_dir": data, "progress": False}
    HSAStudy().run(planned, output, **options)
    results = read_results(output)
    assert sorted((r.task, r.model) for r in results) == sorted(
        (one.config.task, one.config.name) for one in planned
    )
    assert len(results) == 4
    text = (output / "RESULTS.md").read_text()
    for heading in ("## Documents", "## Records", "## Does it matter which tree?"):
        assert heading in text
    assert "macro-F1" in text
    with pytest.raises(FileExistsError, match="resume, or choose another folder"):
        HSAStudy().run(planned, output, **options)
    # Nothing is run again: without the files nothing could be.
    for file in data.iterdir():
        file.unlink()
    HSAStudy().run(planned, output, **options, resume=True)
    assert read_results(output) == results
    assert (output / "RESULTS.md").read_text() == text
