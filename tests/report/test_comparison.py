import json
import math
import os
import resource
from contextlib import contextmanager
from dataclasses import replace

import pytest
from scipy import stats

from polyscale.report.comparison import Comparison
from polyscale.training.result import RunResult
from tests.training.fake_results import make_language_result, make_result, make_results


def compare(results=None, **options):
    return Comparison.from_results(make_results() if results is None else results, **options)


def with_config(result, **changes):
    return replace(result, config={**result.config, **changes})


def test_rows_hold_mean_spread_and_every_seed():
    standard, hkt = compare().rows()
    assert (standard.model, hkt.model) == ("standard", "hkt")
    assert (standard.name, hkt.name) == ("Standard attention", "HKT (3 levels)")
    assert hkt.scores == pytest.approx([66.0, 69.0, 68.0])
    assert hkt.seeds == [0, 1, 2]
    assert hkt.score.mean == pytest.approx(67.6667, abs=1e-4)
    assert hkt.score.standard_deviation == pytest.approx(stats.tstd([66, 69, 68]))


def test_differences_to_the_baseline_are_paired_by_seed_as_scipy_does_it():
    results = make_results()
    difference = compare(results[::-1]).rows()[1].difference
    expected = stats.ttest_rel([66, 69, 68], [60, 62, 61])
    interval = expected.confidence_interval(0.95)
    assert difference.mean == pytest.approx(20 / 3)
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))
    assert difference.t_p == pytest.approx(expected.pvalue)
    assert difference.wilcoxon_p == 0.25


def test_the_rate_of_filters_is_a_choice_of_the_model():
    # Standard attention has no filters. Older runs do not name the rate: it was 1.
    def with_rate(result, rate):
        return with_config(result, training={**result.config["training"], "filter_rate": rate})

    results = [with_rate(run, 0.25) if run.model == "hkt" else run for run in make_results()]
    assert compare(results).notes == compare().notes
    hkt = [number for number, run in enumerate(results) if run.model == "hkt"]
    results[hkt[1]] = with_rate(results[hkt[1]], 1.0)
    with pytest.raises(ValueError, match="filter_rate"):
        compare(results)
    results[hkt[0]] = make_results()[hkt[0]]
    results[hkt[2]] = make_results()[hkt[2]]
    assert compare(results).notes == compare().notes


def test_the_baseline_comes_first_and_has_no_difference():
    rows = compare([*make_results()[3:], *make_results()[:3]]).rows()
    assert [row.model for row in rows] == ["standard", "hkt"]
    assert rows[0].difference is None
    assert [row.model for row in compare(baseline="hkt").rows()] == ["hkt", "standard"]
    assert compare(baseline="hkt").rows()[1].difference.mean == pytest.approx(-20 / 3)


def test_without_a_baseline_there_are_no_differences_and_no_ratios():
    for row in compare(baseline=None).rows():
        assert (row.difference, row.flop_ratio, row.seconds_ratio) == (None, None, None)


def test_costs_stand_beside_the_scores():
    standard, hkt = compare().rows()
    assert standard.parameters == 70_300
    assert (standard.flop_ratio, hkt.flop_ratio) == (1.0, 1.25)
    assert (standard.seconds_ratio, hkt.seconds_ratio) == (1.0, 1.25)
    assert (standard.score_flop_ratio, hkt.score_flop_ratio) == (1.0, 1.3125)
    assert hkt.majority_rate == 12.5
    assert standard.test_standard_error == pytest.approx(100 * math.sqrt(0.61 * 0.39 / 500))


def test_a_missing_seed_is_named_and_left_out_of_the_difference():
    comparison = compare(make_results()[:-1])
    assert any("Without seed 2: hkt." in note for note in comparison.notes)
    difference = comparison.rows()[1].difference
    assert difference.count == 2
    assert difference.mean == pytest.approx((66 - 60 + 69 - 62) / 2)


def test_models_without_a_common_seed_have_no_difference():
    rows = compare([make_result("standard", 0), make_result("hkt", 1)]).rows()
    assert rows[1].difference is None


def test_runs_of_another_budget_are_refused_by_the_first_thing_that_differs():
    standard, hkt = make_result("standard"), make_result("hkt")
    longer = with_config(hkt, training={"steps": 80, "batch_size": 64})
    with pytest.raises(
        ValueError, match=r"config\.training\.steps is 40 in standard, seed 0 and 80"
    ):
        compare([standard, longer])
    notes = compare([standard, longer], allow_differences=True).notes
    assert notes[0].startswith("Not the same: config.training.steps is 40")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"config": {"data_seed": 1}}, r"config\.data_seed"),
        ({"config": {"task_options": {"preset": "lra"}}}, r"config\.task_options\.preset"),
        ({"config": {"model_options": {"hidden_size": 128}}}, r"model_options\.hidden_size"),
        ({"data": {"splits": {"test": 400}}}, r"data\.splits\.test"),
    ],
)
def test_other_data_and_other_sizes_are_refused_too(changes, named):
    hkt = make_result("hkt")
    changed = replace(
        hkt, **{part: {**getattr(hkt, part), **change} for part, change in changes.items()}
    )
    with pytest.raises(ValueError, match=named):
        compare([make_result("standard"), changed])


def test_seeds_of_one_model_must_be_one_model():
    other = with_config(make_result("hkt", 1), model_options={"hidden_size": 64, "levels": 2})
    with pytest.raises(
        ValueError, match=r"config\.model_options\.levels is 3 in hkt, seed 0 and 2"
    ):
        compare([make_result("standard"), make_result("hkt", 0), other])


def test_models_may_differ_in_their_attention():
    variant = with_config(
        make_result("hkt-mean"),
        model="hkt",
        model_options={"hidden_size": 64, "levels": 3, "downsampling": "mean"},
    )
    assert [row.name for row in compare([*make_results(), variant]).rows()] == [
        "Standard attention",
        "HKT (3 levels)",
        "hkt-mean",
    ]


def test_lists_and_tuples_of_a_record_read_again_are_the_same():
    tuples = with_config(make_result("standard"), task_options={"operators": ("MAX", "MIN")})
    lists = with_config(make_result("hkt"), task_options={"operators": ["MAX", "MIN"]})
    assert compare([tuples, lists]).models == ["standard", "hkt"]


def test_runs_that_cannot_be_compared_at_all_are_refused():
    with pytest.raises(ValueError, match="at least one RunResult"):
        compare([])
    with pytest.raises(ValueError, match="two of hkt, seed 0"):
        compare([make_result("standard"), make_result("hkt"), make_result("hkt")])
    with pytest.raises(ValueError, match="task is 'listops' in standard, seed 0 and 'copy'"):
        compare([make_result("standard"), make_result("hkt", task="copy")], allow_differences=True)
    with pytest.raises(ValueError, match=r"baseline must be one of .*\(hkt\).*'standard'"):
        compare([make_result("hkt")])
    with pytest.raises(ValueError, match="nan in hkt, seed 0"):
        compare([make_result("standard"), make_result("hkt", accuracy=math.nan)])


def test_what_makes_times_incomparable_is_noted():
    results = [make_result("standard"), make_result("hkt", threads=1, steps=20, git_commit="abc")]
    notes = " ".join(compare(results).notes)
    assert "do not compare times" in notes
    assert "early stopping" in notes
    assert "different commits" in notes


def test_a_clear_difference_is_claimed_for_this_setting_alone():
    summary = compare().summary
    assert "Standard attention answers 61.0% of the test samples right" in summary
    assert "67.7%, 6.7 points more than standard attention" in summary
    assert "leaves out zero, so it was better in this setting" in summary
    assert "most frequent class would score 12.5%." in summary


def test_a_difference_inside_the_noise_is_not_claimed():
    summary = compare(make_results([0.60, 0.64, 0.61], [0.62, 0.61, 0.63])).summary
    assert "includes zero: no difference could be shown with 3 seeds" in summary
    assert "better" not in summary


def test_the_same_difference_in_every_seed_has_no_interval_and_no_claim():
    comparison = compare(make_results([0.60, 0.61], [0.62, 0.63]))
    assert comparison.rows()[1].difference.low is None
    assert "in every one of 2 seeds, so with no interval" in comparison.summary
    assert "better" not in comparison.summary


def test_one_seed_gives_no_intervals_and_says_so():
    comparison = compare(make_results([0.6], [0.66]))
    assert "One seed: a demonstration, not a benchmark" in " ".join(comparison.notes)
    assert "one seed cannot tell whether that is more than chance" in comparison.summary
    row = comparison.rows()[1]
    assert (row.score.standard_deviation, row.difference.low) == (None, None)
    assert "demonstration" not in " ".join(compare().notes)


def test_three_seeds_are_told_what_wilcoxon_cannot_do_and_six_are_not():
    assert any("cannot give a p-value below 0.25" in note for note in compare().notes)
    six = make_results([0.6, 0.61, 0.62, 0.6, 0.63, 0.6], [0.7, 0.72, 0.7, 0.71, 0.7, 0.73])
    assert not any("Wilcoxon" in note for note in compare(six).notes)


def test_several_models_are_warned_of_chance():
    results = make_results() + [make_result("hkt-mean", seed, 0.64 + seed / 100) for seed in (0, 1)]
    notes = " ".join(compare(results).notes)
    assert "2 models are tested against one baseline" in notes
    assert "With 2 seeds Wilcoxon's test cannot give a p-value below 0.5" in notes


def test_a_model_that_learnt_nothing_is_named():
    summary = compare(make_results([0.6], [0.13])).summary
    assert summary.endswith("would score 12.5%; HKT (3 levels) is not above that.")


def test_fewer_bits_per_token_are_better():
    results = [
        make_language_result(model, seed, bits + 0.01 * seed + noise * seed**2)
        for model, bits, noise in (("standard", 2.0, 0.0), ("hkt", 1.9, 0.001))
        for seed in range(3)
    ]
    comparison = compare(results)
    assert comparison.rows()[1].difference.mean == pytest.approx(-0.1 + 0.001 * 5 / 3)
    assert "needs 2.010 bits per token" in comparison.summary
    assert "so it was better in this setting" in comparison.summary
    worse = compare(results, baseline="hkt").summary
    assert "so it was worse in this setting" in worse
    assert comparison.rows()[0].majority_rate is None


def test_json_holds_everything_and_its_runs_can_be_read_again(tmp_path):
    comparison = compare(command="polyscale compare --task listops")
    comparison.write(tmp_path)
    loaded = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert loaded["command"] == "polyscale compare --task listops"
    assert loaded["metric"] == "accuracy"
    assert loaded["models"][1]["scores"] == pytest.approx([66.0, 69.0, 68.0])
    assert loaded["models"][1]["difference"]["wilcoxon_p"] == 0.25
    assert loaded["summary"] == comparison.summary
    assert [RunResult(**run) for run in loaded["runs"]] == list(comparison.results)


def test_a_training_loss_that_diverged_becomes_null_and_a_note(tmp_path):
    curve = [{"step": 10, "loss": 2.0}, {"step": 20, "loss": math.nan}, {"step": 30, "loss": None}]
    comparison = compare([make_result("standard"), make_result("hkt", train_curve=curve)])
    assert any("not finite in hkt, seed 0" in note for note in comparison.notes)
    comparison.write(tmp_path)
    loaded = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert [point["loss"] for point in loaded["runs"][1]["train_curve"]] == [2.0, None, None]


def test_all_files_are_written_and_the_page_comes_first(tmp_path):
    written = compare().write(tmp_path / "new" / "folder")
    names = [str(path.relative_to(tmp_path / "new" / "folder")) for path in written]
    assert names[0] == "report.html"
    assert set(names) == {
        "report.html",
        "comparison.json",
        "comparison.md",
        "figures/validation.svg",
        "figures/training-loss.svg",
        "figures/accuracy-by-length.svg",
        "figures/accuracy-by-depth.svg",
        "figures/level-weights-hkt.svg",
        "figures/level-weights-over-training-hkt.svg",
    }
    assert all(path.stat().st_size for path in written)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "comparison.json",
        "comparison.md",
        "figures",
        "report.html",
    ]


def small(accuracy):
    """One model: fewer figures to draw."""
    return compare([make_result("standard", accuracy=accuracy)])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def disk_that_takes(size):
    """No file may grow beyond this: what a full disk does, from within one process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_the_files_of_before_whole(tmp_path):
    small(0.6).write(tmp_path)
    before = contents(tmp_path)
    changed = small(0.3)
    # Figures and tables fit, the page does not.
    with disk_that_takes(30_000), pytest.raises(OSError, match="large"):
        changed.write(tmp_path)
    assert contents(tmp_path) == before
    changed.write(tmp_path)
    assert contents(tmp_path) != before


def test_what_a_process_killed_long_ago_left_is_removed_by_the_next_one(tmp_path):
    left = tmp_path / ".unfinished-report-killed"
    left.mkdir()
    (left / "report.html").write_text("half")
    os.utime(left, (0, 0))
    compare([make_result("standard")]).write(tmp_path)
    assert not left.exists()


def test_an_interruption_between_two_files_leaves_each_of_them_whole(tmp_path, monkeypatch):
    small(0.6).write(tmp_path)
    before = contents(tmp_path)
    small(0.3).write(tmp_path / "other")
    after = contents(tmp_path / "other")
    moved, real = [], os.replace

    def interrupted(source, target):
        if target.parent in (tmp_path, tmp_path / "figures"):
            if len(moved) == 3:
                raise KeyboardInterrupt
            moved.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        small(0.3).write(tmp_path)
    assert len(moved) == 3
    for path in tmp_path.rglob("*"):
        if path.is_file() and "other" not in path.parts:
            assert path.read_bytes() in (before[path.name], after.get(path.name))
    assert not list(tmp_path.glob(".unfinished*"))


def test_a_title_names_the_models_unless_they_are_many():
    assert compare().title == "Standard attention and HKT (3 levels) on listops"
    many = make_results() + [make_result(f"hkt-{k}") for k in range(3)]
    assert compare(many).title == "5 models on listops"
    assert compare(title="Mine").title == "Mine"


def test_cells_of_a_model_are_text_and_a_foreign_model_is_refused():
    assert compare().cells("hkt") == {
        "score": "67.7 ± 1.5 %",
        "difference": "+6.7 points [+5.2, +8.1]",
        "seeds": "0, 1, 2",
        "majority": "12.5%",
    }
    with pytest.raises(ValueError, match="model must be one of standard, hkt, got 'hsa'"):
        compare().cells("hsa")
