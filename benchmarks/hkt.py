"""Speed and memory of HKT against standard attention and against peers.

`polyscale bench hkt` runs everything here and writes JSON, a Markdown table and a plot.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.hkt_accuracy import compare_accuracy
from benchmarks.hkt_limits import (
    STEP_HEADS,
    STEP_LAYERS,
    STEP_WIDTH,
    peak_rates,
    step_flops,
    step_limit,
    time_by_part,
)
from benchmarks.hkt_report import draw, to_markdown
from benchmarks.peers import compare_with_peers
from benchmarks.timing import added_memory, best_seconds, fitted_exponent, machine
from polyscale.cost.decoder import bytes_per_token, causal_attention_flops
from polyscale.layers.hkt import HKTAttention
from polyscale.ops.hkt.api import hkt_attention
from polyscale.ops.implementations import implementations
from polyscale.ops.layout import level_length

__all__ = ["draw", "run", "to_markdown"]

LEVELS = 3
Shape = tuple[int, int, int, int]  # B, H, T, D
Row = dict[str, Any]

SHAPES: tuple[Shape, ...] = (
    (8, 4, 512, 32),
    (8, 4, 512, 64),
    (4, 4, 1024, 32),
    (4, 4, 1024, 64),
    (1, 8, 2048, 32),
    (1, 8, 2048, 64),
    (1, 8, 4096, 32),
    (1, 8, 4096, 64),
    (1, 4, 8192, 32),
    (1, 4, 8192, 64),
)


def run(quick: bool = False, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure everything; `quick` measures small shapes only."""
    torch.manual_seed(0)
    shapes = SHAPES[:2] if quick else SHAPES
    rounds = 3 if quick else 9
    rows = []
    for shape in shapes:
        announce(f"operation, B, H, T, D = {shape}")
        rows += [compare_operation(shape, grad=grad, rounds=rounds) for grad in (False, True)]
    announce("a training step")
    step_shapes = ((8, 256),) if quick else ((16, 512), (4, 2048))
    # A step takes a second, in which other load is likely, and 1 % matters: more rounds.
    training = [
        training_of_processes(*shape, 3 * rounds, 1 if quick else 5) for shape in step_shapes
    ]
    announce("decoding")
    contexts = (1024,) if quick else (1024, 2048, 4096, 8192, 16384)
    decoding = [compare_decoding(context, rounds=4 * rounds) for context in contexts]
    announce("memory")
    memory_length = 1024 if quick else 8192
    memory = {name: peak_bytes(name, memory_length) for name in ("hkt", "sdpa")}
    announce("accuracy")
    accuracy = compare_accuracy(seeds=1 if quick else 8)
    announce("layers and peers")
    layers = [row for size in ((1024,) if quick else (1024, 4096)) for row in compare_layers(size)]
    forward = [row for row in rows if row["pass"] == "forward" and row["shape"][3] == 64]
    return {
        "benchmark": "hkt",
        "machine": machine(),
        "levels": LEVELS,
        "implementations": [list(found) for found in implementations()],
        "operation": rows,
        "exponent": _exponent(forward, "hkt_seconds"),
        "sdpa_exponent": _exponent(forward, "sdpa_seconds"),
        "training": training,
        "decoding": decoding,
        "peak_bytes": {"length": memory_length, **memory},
        "accuracy": accuracy,
        "layers": layers,
    }


def _exponent(rows: list[Row], name: str) -> float | None:
    """The exponent of the time per head and batch entry."""
    if len(rows) < 2:
        return None
    seconds = [row[name] / (row["shape"][0] * row["shape"][1]) for row in rows]
    return fitted_exponent([row["shape"][2] for row in rows], seconds)


def compare_operation(
    shape: Shape, *, grad: bool = False, causal: bool = True, impl: str = "auto", rounds: int = 9
) -> Row:
    """`hkt_attention` of three levels against `scaled_dot_product_attention`."""
    queries, keys, value, weights = _inputs(shape)
    everything = [*queries, *keys, value, weights]
    cotangent = torch.randn_like(value)

    def hkt() -> Tensor:
        return hkt_attention(queries, keys, value, weights, causal=causal, impl=impl)

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(queries[0], keys[0], value, is_causal=causal)

    def step(attend: Callable[[], Tensor], inputs: list[Tensor]) -> None:
        if grad:
            torch.autograd.grad(attend(), inputs, cotangent)
        else:
            with torch.no_grad():
                attend()

    seconds = best_seconds(
        {
            "hkt": partial(step, hkt, everything),
            "sdpa": partial(step, sdpa, [queries[0], keys[0], value]),
        },
        rounds,
    )
    return {
        "shape": list(shape),
        "pass": "forward+backward" if grad else "forward",
        "hkt_seconds": seconds["hkt"],
        "sdpa_seconds": seconds["sdpa"],
        "ratio": seconds["hkt"] / seconds["sdpa"],
        "gigaflops": causal_attention_flops(shape, LEVELS, backward=grad) / seconds["hkt"] / 1e9,
        "sdpa_gigaflops": causal_attention_flops(shape, 1, backward=grad) / seconds["sdpa"] / 1e9,
    }


def _inputs(shape: Shape) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    batch, heads, length, width = shape
    counts = [level_length(length, level) for level in range(LEVELS)]
    queries, keys = (
        [torch.randn(batch, heads, count, width).requires_grad_() for count in counts]
        for _ in range(2)
    )
    value = torch.randn(batch, heads, length, width).requires_grad_()
    return queries, keys, value, torch.full((heads, LEVELS), 1 / LEVELS).requires_grad_()


def compare_training(batch: int, length: int, rounds: int = 9) -> Row:
    """A training step of the same small causal transformer with three levels and with one."""
    from polyscale.models import HKTConfig, HKTForCausalLM

    ids = torch.randint(3, 259, (batch, length))
    steps: dict[str, Callable[[], object]] = {}
    for name, levels in (("hkt", LEVELS), ("standard", 1)):
        model = HKTForCausalLM(
            HKTConfig(
                hidden_size=STEP_WIDTH,
                num_hidden_layers=STEP_LAYERS,
                num_attention_heads=STEP_HEADS,
                levels=levels,
            )
        ).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        steps[name] = step
    seconds = best_seconds(steps, rounds)
    peak = peak_rates()
    flops = {"hkt": step_flops(batch, length, LEVELS), "standard": step_flops(batch, length, 1)}
    return {
        "batch": batch,
        "length": length,
        "hkt_seconds": seconds["hkt"],
        "standard_seconds": seconds["standard"],
        "ratio": seconds["hkt"] / seconds["standard"],
        "flop_ratio": flops["hkt"] / flops["standard"],
        "limit_ratio": step_limit(batch, length, LEVELS, seconds["standard"], peak),
        "peak": peak,
        "hkt_gigaflops": flops["hkt"] / seconds["hkt"] / 1e9,
        "standard_gigaflops": flops["standard"] / seconds["standard"] / 1e9,
        "hkt_parts": time_by_part(steps["hkt"]),
        "standard_parts": time_by_part(steps["standard"]),
    }


def training_of_processes(batch: int, length: int, rounds: int, processes: int) -> Row:
    """`compare_training` in fresh processes: the row of the median ratio, and all ratios.

    The placement of memory changes a ratio by hundredths from process to process, regardless of the
    number of rounds. Parts of a step, and peak rates, are the best of all processes.
    """
    code = (
        "import json; from benchmarks import hkt; from polyscale._memory import "
        "keep_freed_memory; keep_freed_memory(); "
        f"print(json.dumps(hkt.compare_training({batch}, {length}, {rounds})))"
    )
    rows: list[Row] = [json.loads(in_fresh_process(code)) for _ in range(processes)]
    rows.sort(key=lambda row: row["ratio"])
    median = rows[processes // 2]
    peak = _best_of(max, [row["peak"] for row in rows])
    return {
        **median,
        "ratios": [row["ratio"] for row in rows],
        "peak": peak,
        "limit_ratio": step_limit(batch, length, LEVELS, median["standard_seconds"], peak),
        "hkt_parts": _best_of(min, [row["hkt_parts"] for row in rows]),
        "standard_parts": _best_of(min, [row["standard_parts"] for row in rows]),
    }


def _best_of(best: Callable[..., float], found: list[dict[str, float]]) -> dict[str, float]:
    return {name: best(one[name] for one in found) for name in found[0]}


def in_fresh_process(code: str) -> str:
    """The last line that a program prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def compare_decoding(context: int, tokens: int = 32, rounds: int = 9) -> Row:
    """Tokens per second of a small model after `context` tokens, with three levels and with one."""
    from transformers import DynamicCache

    from polyscale.models import HKTConfig, HKTForCausalLM

    found, read = {}, {}
    prompt = torch.randint(3, 259, (1, context))
    states: dict[str, tuple[Any, Any]] = {}
    with torch.no_grad():
        for name, levels in (("hkt", LEVELS), ("standard", 1)):
            config = HKTConfig(
                hidden_size=512,
                num_hidden_layers=2,
                num_attention_heads=8,
                levels=levels,
                positions="rotary",
            )
            model = HKTForCausalLM(config).eval()
            cache = DynamicCache(config=config)
            model(prompt, past_key_values=cache, logits_to_keep=1)
            states[name] = model, cache
            found[name] = float("inf")
            read[name] = bytes_per_token(model, context)
        for _ in range(rounds + 1):
            for name, (model, cache) in states.items():
                begin = time.perf_counter()
                for _ in range(tokens):
                    model(prompt[:, :1], past_key_values=cache)
                found[name] = min(found[name], time.perf_counter() - begin)
    return {
        "context": context,
        "hkt_tokens_per_second": tokens / found["hkt"],
        "standard_tokens_per_second": tokens / found["standard"],
        "ratio": found["standard"] / found["hkt"],
        "bandwidth_ratio": read["standard"] / read["hkt"],
        "hkt_gigabytes_per_second": read["hkt"] * tokens / found["hkt"] / 1e9,
        "standard_gigabytes_per_second": read["standard"] * tokens / found["standard"] / 1e9,
    }


def peak_bytes(name: str, length: int) -> int:
    """The peak memory of a forward and backward pass in a fresh process."""
    code = f"from benchmarks.hkt import _peak_here; print(_peak_here({name!r}, {length}))"
    return int(in_fresh_process(code))


def _peak_here(name: str, length: int) -> int:
    def once(length: int) -> Callable[[], object]:
        queries, keys, value, weights = _inputs((1, 4, length, 64))
        if name == "sdpa":
            inputs = [queries[0], keys[0], value]
            output = partial(
                scaled_dot_product_attention, queries[0], keys[0], value, is_causal=True
            )
        else:
            inputs = [*queries, *keys, value, weights]
            output = partial(hkt_attention, queries, keys, value, weights)
        return lambda: torch.autograd.grad(output().sum(), inputs)

    once(64)()
    return added_memory(once(length))


def compare_layers(size: int, rounds: int = 5) -> list[Row]:
    """HKT, bidirectional, and every peer."""
    layer = HKTAttention(512, 8, LEVELS, causal=False)
    return compare_with_peers({f"HKT, {LEVELS} levels": layer}, size, 512, 8, rounds)
