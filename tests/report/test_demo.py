import pytest
import torch

from polyscale.data.tasks import load_task
from polyscale.report import demo
from polyscale.training.builders import model_for_task
from polyscale.training.compare import plan_comparison


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_demo_runs_on_one_thread_and_gives_the_others_back(two_threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with demo._one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_a_number_of_threads_asked_for_is_respected(two_threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with demo._one_thread():
        assert torch.get_num_threads() == 2


def test_a_run_that_fails_leaves_the_finished_one_whole(tmp_path, monkeypatch):
    (tmp_path / "report.html").write_text("finished")

    def fail(*arguments, **options):
        raise RuntimeError("no luck")

    monkeypatch.setattr(demo, "run_all", fail)
    with pytest.raises(RuntimeError, match="no luck"):
        demo.run_demo(tmp_path, quick=True, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "finished"


def test_both_models_share_every_weight_but_those_of_the_levels():
    data = load_task("listops", **demo.QUICK.task_options)
    planned = plan_comparison(demo.QUICK, ("standard", "hkt"), (0,), demo.LEVELS)
    standard, hkt = (
        model_for_task(one.config.model, one.config.model_options, data).build() for one in planned
    )
    shapes = [
        {name: weight.shape for name, weight in m.named_parameters()} for m in (standard, hkt)
    ]
    extra = {name for name in shapes[1] if shapes[0].get(name) != shapes[1][name]}
    assert set(shapes[0]) <= set(shapes[1])
    # Two layers, each with level weights and the filters of two coarse levels.
    assert all("level" in name or "downsampl" in name for name in extra), extra
