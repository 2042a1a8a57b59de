"""The benchmark runs, on sizes too small to mean anything."""

import pytest

from benchmarks import hsa


def test_every_comparison_gives_two_times() -> None:
    rows = [
        hsa.compare_windows(64, repeats=1),
        hsa.compare_windows(64, grad=True, repeats=2),
        hsa.compare_windows(64, tie="columns", causal=True, repeats=1),
        hsa.compare_text(3, repeats=1),
        hsa.compare_text(3, grad=True, repeats=1),
    ]
    assert [row["case"] for row in rows] == ["windows", "windows", "columns-causal", "text", "text"]
    assert [row["pass"] for row in rows[:2]] == ["forward", "forward+backward"]
    assert all(row["hsa_seconds"] > 0 and row["sdpa_seconds"] > 0 for row in rows)
    assert rows[3]["tokens"] <= rows[3]["padded_tokens"]


def test_the_exponent_is_the_slope_of_log_time() -> None:
    rows = [{"size": size, "hsa_seconds": 3e-6 * size**1.1} for size in (1024, 8192, 65536)]
    assert hsa.exponent(rows) == pytest.approx(1.1)


def test_the_table_shows_each_row_and_its_bar() -> None:
    row = {
        "case": "windows",
        "size": 8192,
        "pass": "forward",
        "hsa_seconds": 0.05,
        "sdpa_seconds": 2.0,
        "sdpa_heads_timed": 1,
        "speedup": 40.0,
        "bar": 10.0,
    }
    result = {
        "torch": "2",
        "threads": 1,
        "heads": 8,
        "width": 64,
        "rows": [row],
        "exponent": 1.0,
        "exponent_bar": 1.15,
        "peak_bytes": {"8192": 2**27},
    }
    table = hsa.to_markdown(result)
    assert (
        "| windows | 8,192 | forward | 50.0 ms | 2,000.0 ms (from 1 head) | 40.0x | 10x |" in table
    )
    assert "8,192 rows: 128 MiB (16.0 KiB per row)" in table
