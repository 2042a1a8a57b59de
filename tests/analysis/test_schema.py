"""The schema of an analysis, against the committed reports and the samples of the page's tests."""

import copy
import json
from pathlib import Path

import pytest

from polyscale.analysis import analyze_hkt, check_schema
from polyscale.analysis.schema import FORMAT, Analysis
from tests.analysis.properties import assert_sound
from tests.report.analysis.samples import (
    hkt_sample,
    hostile_sample,
    hsa_sample,
    transformer_sample,
)
from tests.theory.helpers import draw, random_layer

ROOT = Path(__file__).resolve().parents[2]
REPORTS = sorted((ROOT / "experiments" / "theory").glob("*/report.json"))


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_committed_reports_follow_the_schema(path):
    assert_sound(json.loads(path.read_text(encoding="utf-8")))


def test_there_are_committed_reports_of_both_kinds_of_models():
    kinds = {json.loads(path.read_text(encoding="utf-8"))["meta"]["kind"] for path in REPORTS}
    assert kinds == {"hkt", "hsa"}


@pytest.mark.parametrize("sample", [hkt_sample, hsa_sample, transformer_sample, hostile_sample])
def test_the_samples_of_the_page_follow_the_schema(sample):
    check_schema(sample())


@pytest.fixture(scope="module")
def analysis():
    return json.loads(json.dumps(analyze_hkt(random_layer(), draw(1, 8, 16))))


def edited(analysis, path, value):
    """A copy with one value replaced, or removed if the value is Ellipsis."""
    found = copy.deepcopy(analysis)
    entry = found
    for key in path[:-1]:
        entry = entry[key]
    if value is ...:
        del entry[path[-1]]
    else:
        entry[path[-1]] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("summary",), ..., r"analysis must have the key 'summary'"),
        (("meta", "layers"), "2", r"analysis\['meta'\]\['layers'\] must be int, got '2'"),
        (("meta", "layers"), True, r"must be int, got True"),
        (("meta", "colour"), "red", r"analysis\['meta'\] must not have the key 'colour'"),
        (("kernel", "forms", 1, "psd"), 1, r"\['forms'\]\[1\]\['psd'\] must be bool, got 1"),
        (("kernel", "scores", 0, "level"), None, r"\['level'\] must be int \| str, got None"),
        (("error", "rows", 3, "drift"), ..., r"\['rows'\]\[3\] must have the key 'drift'"),
        (("error", "decay"), {}, r"\['decay'\] must be .*, got dict"),
        (("attention", 0, "map", 2, 1), float("nan"), r"\['map'\]\[2\]\[1\] must be .*, got nan"),
        (("normality", "levels", 0, "qq"), [[1, "2"]], r"\['qq'\]\[0\]\[1\]"),
        (("versions",), {}, "must not have the key 'versions'; it takes format, meta"),
    ],
)
def test_what_does_not_follow_the_schema_is_named(analysis, path, value, message):
    with pytest.raises(ValueError, match=message):
        check_schema(edited(analysis, path, value))


def test_sections_may_be_absent_and_numbers_missing(analysis):
    check_schema(edited(analysis, ("kernel",), ...))
    check_schema(edited(analysis, ("error", "rows", 0, "drift"), None))


def test_the_format_is_part_of_every_analysis(analysis):
    assert analysis["format"] == FORMAT
    assert Analysis.__required_keys__ == {"format", "meta", "summary"}
