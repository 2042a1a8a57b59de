import json
import math
import sys

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import hkt, hsa, levels
from benchmarks.hkt_accuracy import (
    GRADIENT_BAR,
    VALUE_BAR,
    accuracy_lines,
    compare_accuracy,
)
from benchmarks.hkt_limits import downsampling_bytes, step_flops, step_limit
from benchmarks.peers import peers, positions_seen
from benchmarks.timing import (
    added_memory,
    best_seconds,
    fitted_exponent,
    machine,
    write_results,
)
from polyscale.cli import make_app


def test_candidates_take_turns_after_a_warm_up():
    order = []
    seconds = best_seconds(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=3, warm_up=1
    )
    assert order == ["a", "b"] * 4
    assert all(0 <= value < 1 for value in seconds.values())


def test_the_exponent_of_a_power_is_found():
    assert fitted_exponent([10, 100, 1000], [2e-3, 2e-2, 2e-1]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="two or more points"):
        fitted_exponent([1], [1])


def test_results_name_the_machine_and_are_written_whole(tmp_path):
    result = {"machine": machine(), "rows": [1.5]}
    written = write_results(result, "# table\n", tmp_path / "new" / "hsa")
    assert [path.name for path in written] == ["hsa.json", "hsa.md"]
    assert json.loads(written[0].read_text()) == result
    assert {"processor", "threads", "torch", "date"} <= set(result["machine"])
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["hsa.json", "hsa.md"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_that_a_step_takes_is_seen():
    assert added_memory(lambda: torch.ones(2**24).sum()) >= 2**26 * 0.9


def test_peers_that_are_not_installed_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "local_attention", None)
    found = {peer.name: peer for peer in peers(64, 32, 2)}
    assert found["local-attention"].run is None
    assert "not installed" in found["local-attention"].note
    x = torch.randn(1, 64, 32)
    for name in ("softmax attention", "plain einsum"):
        assert found[name].run(x).shape == x.shape
        assert positions_seen(found[name].run, x) == 1.0


def test_every_measurement_of_hsa_gives_a_row():
    windows = hsa.compare_windows(64, tie="columns", causal=True, rounds=1)
    assert windows["case"] == "columns, causal"
    assert windows["hsa_seconds"] > 0
    assert windows["sdpa_seconds"] > 0
    texts = hsa.compare_texts(3, grad=True, rounds=1)
    assert texts["tokens"] <= texts["padded_tokens"]
    layers = hsa.compare_layers(1024, rounds=1)
    assert {"HSA, blocks", "HSA, columns", "softmax attention"} <= {row["layer"] for row in layers}
    seen = {row["layer"]: row["positions_seen"] for row in layers}
    assert seen["HSA, blocks"] == 1.0
    decode = hsa.decode_seconds(100, tokens=4, rounds=1)
    assert decode["entries"] < 100
    chunk = hsa.chunk_seconds(100, 8, rounds=1)
    assert chunk["seconds"] > 0
    assert chunk["stepwise_seconds"] > 0


def test_level_attention_is_measured_against_both_dense_caches(monkeypatch, tmp_path):
    monkeypatch.setattr(levels, "LAYERS", 2)
    rows = [levels.compare(model, 300, rounds=1) for model in levels.SHAPES]
    assert all(seconds > 0 for row in rows for seconds in row["seconds"].values())
    assert rows[0]["bytes_held"]["(4, 4), 8bit"] < rows[0]["dense_bytes"]
    assert rows[0]["bar"] == 256
    result = {
        "machine": machine(),
        "layers": 2,
        "opened": {"near": 64, "sinks": 16, "heavy": 64},
        "bars": {str(size): bar for size, bar in levels.BARS.items()},
        "memory_bar": levels.MEMORY_BAR,
        "rows": rows,
    }
    assert "| 9/3/64 | 300 |" in levels.to_markdown(result)
    levels.draw(result, tmp_path / "levels.svg")
    assert (tmp_path / "levels.svg").exists()


def test_errors_on_ordinary_and_hard_inputs_are_within_the_bars():
    rows = {row["case"]: row for row in compare_accuracy(seeds=2)}
    for row in rows.values():
        assert row["native"]["values"] <= VALUE_BAR
        assert row["native"]["gradients"] <= GRADIENT_BAR
    # That is not for want of hard ones: attention in float32 throughout is far off.
    huge = rows["scores of ±10,000"]
    assert huge["standard attention"]["values"] > 100 * VALUE_BAR
    table = "\n".join(accuracy_lines(list(rows.values())))
    assert table.count("\n| ") == 1 + len(rows)


def test_every_measurement_of_hkt_gives_a_row():
    for grad in (False, True):
        row = hkt.compare_operation((1, 2, 64, 8), grad=grad, rounds=1)
        assert row["ratio"] == row["hkt_seconds"] / row["sdpa_seconds"]
        assert row["gigaflops"] > 0
    training = hkt.compare_training(1, 16, rounds=1)
    assert training["ratio"] > 0
    # Two of twelve squares more for three quarters of the tokens: 1.125, attention and head aside.
    assert 1.1 < training["flop_ratio"] < 1.15
    assert training["limit_ratio"] > 1.0
    assert training["hkt_parts"].keys() == training["standard_parts"].keys()
    assert training["hkt_parts"]["matrix products"] > 0
    training = hkt.training_of_processes(1, 16, rounds=1, processes=3)
    assert training["ratios"] == sorted(training["ratios"])
    assert training["ratio"] == training["ratios"][1]
    decoding = hkt.compare_decoding(20, tokens=2, rounds=1)
    assert decoding["ratio"] > 0
    assert 0.7 < decoding["bandwidth_ratio"] < 1
    layers = {row["layer"]: row for row in hkt.compare_layers(1024, rounds=1)}
    assert layers["HKT, 3 levels"]["positions_seen"] == 1.0


def test_parts_of_a_step_are_the_best_of_all_processes(monkeypatch):
    rows = [
        {
            "ratio": ratio,
            "standard_seconds": 1.0,
            "peak": {"gigaflops": rate, "gigabytes_per_second": 40.0},
            "hkt_parts": {"matrix products": seconds},
            "standard_parts": {"matrix products": 0.4},
            "limit_ratio": 9.0,
        }
        for ratio, rate, seconds in ((1.3, 200.0, 0.5), (1.1, 100.0, 0.7), (1.2, 150.0, 0.6))
    ]
    answers = iter([json.dumps(row) for row in rows])
    monkeypatch.setattr(hkt, "in_fresh_process", lambda code: next(answers))
    found = hkt.training_of_processes(16, 512, rounds=1, processes=3)
    assert found["ratio"] == 1.2
    assert found["ratios"] == [1.1, 1.2, 1.3]
    assert found["peak"]["gigaflops"] == 200.0
    assert found["hkt_parts"] == {"matrix products": 0.5}
    assert found["limit_ratio"] == step_limit(16, 512, 3, 1.0, found["peak"])


def test_the_limit_of_a_step_is_its_products_and_what_downsampling_moves():
    products, bytes_moved = step_flops(2, 64, 1), 4 * 2 * 2 * (4 * 64 + 3 * 48) * 256
    assert downsampling_bytes(2, 64, 3) == bytes_moved
    assert downsampling_bytes(2, 64, 1) == 0
    # A machine whose standard step runs at its peak and takes a second, and one slow to move bytes.
    quick = {"gigaflops": products / 1e9, "gigabytes_per_second": math.inf}
    slow = {"gigaflops": math.inf, "gigabytes_per_second": bytes_moved / 1e9}
    assert step_limit(2, 64, 3, 1.0, quick) == pytest.approx(step_flops(2, 64, 3) / products)
    assert step_limit(2, 64, 3, 1.0, slow) == pytest.approx(2.0)


def test_an_unknown_benchmark_is_refused():
    result = CliRunner().invoke(make_app(), ["bench", "speed"])
    assert result.exit_code == 2
    message = "what must be one of hkt, hsa, opened, levels, got 'speed'"
    assert message in result.output + result.stderr
