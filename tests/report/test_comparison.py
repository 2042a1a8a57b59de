import json

import pytest

from polyscale.report.comparison import installed_versions
from tests.report.samples import comparison, result


def test_the_summary_is_one_sentence_with_all_rates():
    assert comparison().summary == (
        "Standard <attention> answers 61.3% of unseen expressions correctly, HKT (3 levels) 68.7%; "
        "always giving the most frequent class would score 12.5%."
    )


def test_json_holds_everything_needed_to_make_the_run_again(tmp_path):
    comparison().write_json(tmp_path / "results.json")
    loaded = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert loaded["seed"] == 7
    assert loaded["command"].startswith("polyscale demo")
    assert loaded["data"]["max_length"] == 24
    assert [entry["score_flop_ratio"] for entry in loaded["results"]] == [1.0, 1.3125]
    assert loaded["results"][1]["level_weights"][0][0] == pytest.approx([1 / 3] * 3)
    assert loaded["results"][0]["validation_curve"][1] == {
        "step": 40,
        "loss": 1.1,
        "accuracy": 0.613,
    }


def test_a_diverged_run_is_not_written_as_broken_json(tmp_path):
    broken = result("diverged", float("nan"), 1)
    with pytest.raises(ValueError, match="JSON"):
        comparison(results=(broken,), score_flop_ratios=(1.0,)).write_json(tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_a_comparison_needs_results_and_a_ratio_for_each():
    with pytest.raises(ValueError, match="results"):
        comparison(results=(), score_flop_ratios=())
    with pytest.raises(ValueError, match="score_flop_ratios"):
        comparison(score_flop_ratios=(1.0,))


def test_versions_name_python_and_torch():
    assert {"python", "polyscale", "torch", "transformers"} <= set(installed_versions())
