"""A real model with several caches: tokens per second read and written, and the caches' bytes.

    python -m benchmarks.levels_generate SMOLLM2_FOLDER --rows caches
    python -m benchmarks.levels_generate SMOLLM2_FOLDER --gguf FILE --rows "llama.cpp f16"

Rows are added to `benchmarks/results/levels_generate.json`, so that each can be measured while the
machine is idle. Those of llama.cpp need `xllamacpp`, an optional peer that is no dependency of this
project, and read the weights as the GGUF file has them, in 4 bits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache

import polyscale as ps
from benchmarks.timing import machine, write_results

OUTPUT = Path(__file__).parent / "results" / "levels_generate"
STEPS, ROUNDS = 8, 3
USUAL = "usual cache"
LEVELS: dict[str, dict[str, Any]] = {
    "levels (4, 4)": {},
    "levels (4, 2)": {"bits": (4, 2)},
    "levels (4, 4), 8bit": {"exact": "8bit"},
}
CACHES: dict[str, Callable[[Any, int], Any]] = {
    USUAL: lambda config, tokens: DynamicCache(config=config),
    "static cache": lambda config, tokens: StaticCache(config, max_cache_len=tokens + 64),
    "quanto 4 bits": lambda config, tokens: QuantizedCache("quanto", config, nbits=4),
    "quanto 2 bits": lambda config, tokens: QuantizedCache("quanto", config, nbits=2),
}
SLOW = 0.5  # seconds of a step from which one more is enough
BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}  # of a number in llama.cpp's caches
Row = dict[str, Any]


def measure_caches(model: Any, tokens: int, names: list[str], batch: int) -> dict[str, Row]:
    """Write tokens from each cache in turn; the caches hold random numbers, as long as a prompt."""
    config = model.config
    rounds: dict[str, list[float]] = {}
    warm: dict[str, float] = {}
    key_heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    dense = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        key, value = torch.randn(2, batch, key_heads, tokens, width, dtype=model.dtype)
        dense.update(key, value, layer)
    caches: dict[str, Any] = {}
    for name in names:
        if name in LEVELS:
            caches[name] = ps.LevelCache.from_cache(dense, config, **LEVELS[name])
            continue
        caches[name] = CACHES[name](config, tokens)
        for number, layer in enumerate(dense.layers):
            caches[name].update(layer.keys, layer.values, number)
    del dense
    for turn in range(ROUNDS + 1):
        for name, cache in caches.items():
            slow = turn and warm[name] > SLOW
            if slow and turn > 1:
                continue
            if name in LEVELS:
                ps.inject_opened(model)
            seconds = _step(model, cache, batch, STEPS if turn and not slow else 1)
            if name in LEVELS:
                ps.restore(model)
            if turn:
                rounds.setdefault(name, []).append(seconds)
            else:
                warm[name] = seconds
    return {
        name: {
            "write": batch / min(rounds[name]),
            "rounds": rounds[name],
            "held": _bytes(cache),
        }
        for name, cache in caches.items()
    }


def _step(model: Any, cache: Any, batch: int, count: int) -> float:
    new = torch.randint(10, 1000, (batch, 1))
    with torch.no_grad():
        begin = time.perf_counter()
        for _ in range(count):
            logits = model(new, past_key_values=cache, logits_to_keep=1).logits
            new = logits[:, -1].argmax(-1, keepdim=True)
        return (time.perf_counter() - begin) / count


def measure_reading(model: Any, tokens: int) -> dict[str, float]:
    """Read a prompt by softmax and by opened attention; tokens per second."""
    ids = torch.randint(10, 1000, (1, tokens))
    found: dict[str, float] = {}
    for name in (USUAL, *LEVELS):
        if len(found) < 2:
            if name != USUAL:
                ps.inject_opened(model)
            begin = time.perf_counter()
            with torch.no_grad():
                model(ids, logits_to_keep=1)
            found[name] = tokens / (time.perf_counter() - begin)
            ps.restore(model)
    return found


def measure_llama(path: Path, config: Any, tokens: int, kind: str, threads: int) -> Row:
    """Read a prompt and write tokens by llama.cpp with keys and values of a kind."""
    xllamacpp = import_module("xllamacpp")  # an optional peer
    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx, options.n_parallel = tokens + 128, 1
    number = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind.upper()}")
    options.cache_type_k = options.cache_type_v = number
    for cpu in (options.cpuparams, options.cpuparams_batch):
        cpu.n_threads = threads
    options.warmup = False
    server = xllamacpp.Server(options)
    ids = torch.randint(10, 1000, (tokens,)).tolist()
    request = {"prompt": ids, "n_predict": 48, "temperature": 0, "ignore_eos": True}
    found: list[Any] = []
    server.handle_completions(json.dumps(request), found.append)
    answer = found[-1]
    answer = json.loads(answer) if isinstance(answer, str | bytes) else answer
    answer = answer[-1] if isinstance(answer, list) else answer
    timings = answer["timings"]
    if timings["prompt_n"] != tokens:
        raise ValueError(f"llama.cpp must read {tokens} tokens, got {timings['prompt_n']}")
    width = config.hidden_size // config.num_attention_heads
    numbers = 2 * tokens * config.num_hidden_layers * config.num_key_value_heads * width
    return {
        "read": timings["prompt_per_second"],
        "write": timings["predicted_per_second"],
        "held": numbers * BYTES[kind],
    }


def _bytes(cache: Any) -> int:
    if isinstance(cache, ps.LevelCache):
        return cache.report()["bytes_held"]
    names = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(_size(getattr(layer, name, None)) for layer in cache.layers for name in names)


def _size(x: Any) -> int:
    if not isinstance(x, Tensor):
        return 0
    if hasattr(x, "__tensor_flatten__"):  # quantized: codes, scales and shifts
        return sum(_size(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    return x.nbytes


def to_markdown(result: dict[str, Any]) -> str:
    """The table that stands beside the JSON."""
    about = result["machine"]
    lines = [
        "# A model with several caches",
        "",
        f"{about['processor']}, {about['threads']} threads, torch {about['torch']}, "
        f"{about['date']}. Tokens per second read (a whole prompt) and written after so many "
        f"tokens, the best of {ROUNDS} rounds of {STEPS} (one token, where that takes more than "
        f"{SLOW} s); bytes the cache holds. Caches take turns in one process. Made by "
        "`python -m benchmarks.levels_generate`.",
        "",
        "llama.cpp (by xllamacpp) also has its weights in 4 bits (Q4_1) and kernels of its own for "
        "them, where transformers has the same weights unpacked to the dtype named: its speed is "
        "that of weights and cache together, so compare its rows with each other. They are one run "
        "each, and with fewer tokens they were not steady on this machine.",
        "",
        "| model | cache | dtype | batch | tokens | read/s | written/s | of the usual | held |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        same = [one for one in result["rows"] if _place(one) == _place(row)]
        usual = next((one["write"] for one in same if one["cache"] == USUAL), None)
        ratio = "" if usual is None else f"{row['write'] / usual:.2f}x"
        read = f"{row['read']:,.0f}" if "read" in row else ""
        lines.append(
            f"| {row['model']} | {row['cache']} | {row['dtype']} | {row['batch']} | "
            f"{row['tokens']:,} | {read} | {row['write']:.1f} | {ratio} | "
            f"{row['held'] / 2**20:,.1f} MiB |"
        )
    return "\n".join(lines) + "\n"


def _place(row: Row) -> tuple[str, str, int, int]:
    return row["model"], row["dtype"], row["batch"], row["tokens"]


def main() -> None:
    """Measure the rows asked for and add them to what is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--rows", default="caches", help="caches, reading, or names, by semicolons")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()
    config, threads = model.config, torch.get_num_threads()
    names = [*CACHES, *LEVELS] if options.rows == "caches" else options.rows.split(";")
    path = OUTPUT.with_suffix(".json")
    result: dict[str, Any] = {"machine": machine(), "rows": []}
    if path.is_file():
        result["rows"] = json.loads(path.read_text())["rows"]
    place = {
        "model": options.model.name,
        "dtype": options.dtype,
        "batch": options.batch,
        "tokens": options.tokens,
    }
    found: dict[str, Row] = {}
    if names == ["reading"]:
        found = {name: {"read": x} for name, x in measure_reading(model, options.tokens).items()}
    elif names[0].startswith("llama.cpp"):
        del model
        place["dtype"] = "Q4_1"
        for name in names:
            kind = name.split()[-1]
            found[name] = measure_llama(options.gguf, config, options.tokens, kind, threads)
    else:
        found = measure_caches(model, options.tokens, names, options.batch)
    for name, row in found.items():
        known = [one for one in result["rows"] if {**one, "cache": name, **place} == one]
        if known:
            known[0].update(row)
        else:
            result["rows"].append({"cache": name, **place, **row})
    write_results(result, to_markdown(result), OUTPUT)
    print(to_markdown(result))


if __name__ == "__main__":
    main()
