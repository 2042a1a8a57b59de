import pytest

from polyscale.training.settings import TrainingSettings


def test_the_learning_rate_rises_then_follows_its_schedule_to_zero():
    for schedule, middle in (("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)):
        settings = TrainingSettings(
            steps=110, warmup_steps=10, learning_rate=1.0, schedule=schedule, evaluate_every=110
        )
        rates = [settings.learning_rate_at(step) for step in range(110)]
        assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
        assert rates[60] == pytest.approx(middle)
        assert rates[-1] == pytest.approx(1.0 if schedule == "constant" else 0.0, abs=0.02)
        assert rates[-1] > 0, "the last step moves the weights too"


def test_a_run_without_warm_up_starts_at_the_full_rate():
    assert TrainingSettings(warmup_steps=0, learning_rate=0.5).learning_rate_at(0) == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch_size", 0),
        ("accumulate", 0),
        ("log_every", 0),
        ("evaluate_every", 0),
        ("evaluate_every", 2_000),
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("max_grad_norm", -1.0),
        ("weight_decay", -0.1),
        ("weight_decay", float("nan")),
        ("patience", -1),
        ("snapshots", -1),
        ("schedule", "exponential"),
    ],
)
def test_a_bad_value_is_named_with_what_it_takes(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .*got"):
        TrainingSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("steps", 10.0), ("bf16", 1), ("steps", True), ("schedule", None)]
)
def test_a_value_of_another_type_is_refused(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be of type"):
        TrainingSettings(**{name: value})


def test_the_last_step_is_evaluated_and_needs_no_checkpoint():
    settings = TrainingSettings(steps=25, evaluate_every=10)
    assert [s for s in range(1, 26) if settings.is_evaluation(s)] == [10, 20, 25]
    assert [s for s in range(1, 26) if settings.is_checkpoint(s)] == [10, 20]


def test_checkpoints_can_come_at_their_own_pace_and_the_curve_has_a_point_at_each():
    settings = TrainingSettings(steps=25, evaluate_every=10, save_every=7, log_every=5)
    assert [s for s in range(1, 26) if settings.is_checkpoint(s)] == [7, 14, 21]
    assert [s for s in range(1, 26) if settings.is_log(s)] == [5, 7, 10, 14, 15, 20, 21, 25]


def test_snapshots_are_spread_from_the_start_to_the_end():
    settings = TrainingSettings(steps=100, snapshots=4)
    assert [s for s in range(101) if settings.is_snapshot(s)] == [0, 25, 50, 75, 100]
    assert not any(TrainingSettings(steps=100).is_snapshot(s) for s in range(101))
