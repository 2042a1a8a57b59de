"""What holds for every analysis beyond its schema."""

import json
import math
from typing import Any

from polyscale.analysis import check_schema

META = {"title", "model", "kind", "layers", "heads", "levels", "tokens", "text", "length"}
META |= {"rows_used", "notes", "versions", "seconds"}


def assert_sound(analysis: dict[str, Any]) -> None:
    """The schema, and the relations between the numbers."""
    check_schema(json.loads(json.dumps(analysis, allow_nan=False)))
    assert set(analysis["meta"]) == META
    assert analysis["summary"]
    for entry in analysis.get("kernel", {}).get("forms", []):
        assert entry["eigenvalues"] == sorted(entry["eigenvalues"], reverse=True)
    for entry in analysis.get("kernel", {}).get("scores", []):
        assert len(entry["eigenvalues"]) <= 64
    for entry in analysis.get("symmetry", {}).get("parts", []):
        shares = [entry["reciprocal"], entry["directional"]]
        assert None in shares or math.isclose(sum(shares), 1, abs_tol=1e-5)
    for entry in analysis.get("symmetry", {}).get("maps", []):
        assert_square(entry["symmetric"])
        assert_square(entry["antisymmetric"])
    for entry in analysis.get("attention", []):
        assert_square(entry["map"])
    error = analysis.get("error", {})
    for entry in error.get("rows", []) + error.get("strides", []):
        assert entry["kl"] >= 0
        total = entry["resolution"] + entry["drift"] + entry["non_gaussian"]
        assert math.isclose(total, entry["kl"], rel_tol=1e-3, abs_tol=1e-4)
    for entry in error.get("tail", []):
        assert entry["measured"] <= entry["bound"] * (1 + 1e-5)
    for entry in analysis.get("normality", {}).get("levels", []):
        assert len(entry["qq"]) <= 64
        assert entry["skewness_p"] is None or 0 <= entry["skewness_p"] <= 1
    for layer in analysis.get("hsa", {}).get("layers", []):
        for finer in layer["finer"]:
            assert finer["kl_after"] <= finer["kl_before"] * (1 + 1e-5) + 1e-9


def assert_square(matrix: list[list[float]]) -> None:
    assert 1 <= len(matrix) <= 128
    assert all(len(row) == len(matrix) for row in matrix)
