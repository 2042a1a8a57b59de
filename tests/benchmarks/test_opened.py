"""The benchmark of opened attention: its rows, and the ways to choose it compares."""

import pytest
import torch

from benchmarks import opened
from benchmarks.opened_peers import CHOOSERS, audit_of, kept_by, open_by, settings_of
from polyscale.ops.opened import opened_attention


def test_a_size_gives_a_row():
    row = opened.compare(256, rounds=1)
    assert row["speedup"] == pytest.approx(row["sdpa_seconds"] / row["opened_seconds"])
    assert row["share"] == row["kept"] == pytest.approx(1)
    assert row["strict_share"] == row["strict_kept"] == pytest.approx(1)


def test_the_sampled_mass_of_the_corner_is_what_the_operation_chooses():
    query, key = opened.grouped_tokens(512, steady=True)
    chosen = settings_of(opened.WIDTH, heavy=64)
    found = open_by(CHOOSERS["sampled mass (ours)"], query, key, chosen)
    assert (found != audit_of(query, key, chosen)).sum() <= 2
    # What is kept is the audit's figure, of every query.
    _, audit = opened_attention(query, key, key, heavy=64, return_audit=True)
    kept = kept_by(audit.opened, query, key, chosen)[:, :, audit.rows[0]]
    torch.testing.assert_close(kept, audit.kept, atol=1e-5, rtol=1e-4)


def test_no_choice_keeps_more_than_the_true_mass():
    rows = opened._compare_choices(512, 64, steady=True)
    kept = {row["chooser"]: row["kept"] for row in rows}
    assert len(kept) == 6
    assert kept["true mass (limit)"] == max(kept.values())
    assert all(0 < value <= 1 for value in kept.values())


def test_everything_stands_in_the_table(tmp_path):
    row = opened.compare(128, rounds=1)
    row["bar"] = 1.3
    result = {
        "machine": opened.machine(),
        "heads": 9,
        "key_heads": 3,
        "width": 64,
        "operation": [row],
        "flops_bar": 1.6,
        "endings": [opened.compare_endings(256, last=64)],
        "flex": [
            {
                "size": 128,
                "flex_seconds": 1.0,
                "opened_seconds": 0.5,
                "heads_timed": 3,
                "tiles": 0.5,
            }
        ],
        "choices": opened._compare_choices(256, 64, steady=False),
        "peak_bytes": {"128": 2**20},
    }
    table = opened.to_markdown(result)
    for text in (
        "| 128 | forward |",
        "1.3x",
        "| 128 | 1 MiB | 8.0 KiB |",
        "| 128 | 1,000.0 ms (from 3 heads) | 500.0 ms | 50.0% |",
        "changing, heavy 64",
    ):
        assert text in table
    opened.draw(result, tmp_path / "opened.svg")
    assert (tmp_path / "opened.svg").stat().st_size > 1000
