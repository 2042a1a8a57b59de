"""What every analysis must look like."""

import json
import math
from typing import Any

PLACE = {"layer", "head"}
SPECTRUM = {"eigenvalues", "fraction_negative", "negative_share", "smallest", "psd", "margin"}
META = {
    "title",
    "model",
    "kind",
    "layers",
    "heads",
    "levels",
    "tokens",
    "text",
    "length",
    "rows_used",
    "notes",
    "versions",
    "seconds",
}
ERROR = PLACE | {
    "levels_used",
    "stride",
    "kl",
    "resolution",
    "drift",
    "non_gaussian",
    "third_cumulant_term",
    "fourth_cumulant_term",
    "total_variation",
}
NORMALITY = PLACE | {"level", "n", "dimensions", "skewness", "skewness_p", "kurtosis"}
NORMALITY |= {"kurtosis_p", "qq"}
FAMILY = {"node", "parent", "depth", "leaves", "label", "kl", "energy", "dilution"}


def assert_follows_schema(analysis: dict[str, Any]) -> None:
    json.dumps(analysis, allow_nan=False)
    assert analysis["format"] == 1
    assert set(analysis["meta"]) == META
    assert all(isinstance(line, str) for line in analysis["summary"] + analysis["meta"]["notes"])
    assert analysis["summary"]
    for entry in analysis.get("kernel", {}).get("forms", []):
        assert PLACE | SPECTRUM | {"level"} <= set(entry)
        assert entry["eigenvalues"] == sorted(entry["eigenvalues"], reverse=True)
        assert isinstance(entry["psd"], bool)
    for entry in analysis.get("kernel", {}).get("scores", []):
        assert PLACE | SPECTRUM | {"level"} <= set(entry)
        assert len(entry["eigenvalues"]) <= 64
    for entry in analysis.get("symmetry", {}).get("parts", []):
        assert set(entry) == PLACE | {"level", "reciprocal", "directional", "energy"}
        shares = [entry["reciprocal"], entry["directional"]]
        assert None in shares or math.isclose(sum(shares), 1, abs_tol=1e-5)
    for entry in analysis.get("symmetry", {}).get("maps", []):
        assert_square(entry["symmetric"])
        assert_square(entry["antisymmetric"])
    for entry in analysis.get("attention", []):
        assert set(entry) == PLACE | {"level", "map", "pooled_from"}
        assert_square(entry["map"])
    error = analysis.get("error", {})
    for entry in error.get("rows", []) + error.get("strides", []):
        assert set(entry) == ERROR
        assert entry["kl"] >= 0
        total = entry["resolution"] + entry["drift"] + entry["non_gaussian"]
        assert math.isclose(total, entry["kl"], rel_tol=1e-3, abs_tol=1e-4)
    for entry in error.get("tail", []):
        assert entry["measured"] <= entry["bound"] * (1 + 1e-5)
    for entry in analysis.get("normality", {}).get("levels", []):
        assert set(entry) >= NORMALITY
        assert len(entry["qq"]) <= 64
        assert entry["skewness_p"] is None or 0 <= entry["skewness_p"] <= 1
    for layer in analysis.get("hsa", {}).get("layers", []):
        assert {"layer", "head", "kl_total", "families", "finer"} <= set(layer)
        for family in layer["families"]:
            assert set(family) == FAMILY
        for finer in layer["finer"]:
            assert {"node", "kl_before", "kl_after"} <= set(finer)
            assert finer["kl_after"] <= finer["kl_before"] * (1 + 1e-5) + 1e-9
    if "cost" in analysis:
        assert {"levels", "standard", "ratio"} <= set(analysis["cost"])


def assert_square(matrix: list[list[float]]) -> None:
    assert 1 <= len(matrix) <= 128
    assert all(len(row) == len(matrix) for row in matrix)
