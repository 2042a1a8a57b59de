"""What was tried to make the sample of opened attention cheaper, and not kept: on a real model.

    python -m benchmarks.opened_trials --model FOLDER --data-dir FOLDER --output benchmarks/results

(and `--seconds` for the time of two stages)
captures queries and keys of some layers for the longest article of enwik8 and compares choices: by
8-bit sampled scores; in two stages, where summaries of key blocks propose and samples decide; and
how many tiles of scores no sampled row could need. Emulated in PyTorch: it says what is chosen, and
how far an audit made from such scores would be off. `docs/opened.md` has the times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.opened_peers import kept_by, open_by, sampled_mass, settings_of
from benchmarks.timing import best_seconds, machine
from polyscale._files import write_text
from polyscale.ops.opened.fused import attend_to_choice
from polyscale.ops.opened.places import Places
from polyscale.ops.opened.settings import Settings

LAYERS = (1, 8, 15, 22, 29)
SINKS = 16
KEYS_OF_A_TILE, ROWS_OF_A_TILE = 8, 16  # of the native kernel, with AVX-512 and three heads
Row = dict[str, Any]


def eight_bits(x: Tensor) -> Tensor:
    """Rounded to 127 steps of each row's largest number, symmetrically."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


def by_token(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for each key: parts of a prompt and strict mode stay what they are."""
    return eight_bits(query), eight_bits(key)


def by_channel(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for each channel of the keys less their mean, folded into the queries.

    The mean adds the same to all scores of a row. The scales come from all keys, later ones too.
    """
    centred = key - key.mean(2, keepdim=True)
    scale = centred.abs().amax(2, keepdim=True).clamp(min=1e-30) / 127  # [B, Hk, 1, D]
    wide = scale.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    # Scaled back, so that scores have their size.
    return eight_bits(query * wide) / wide, (centred / scale).round() * scale


Rounding = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def sampled_probability(query: Tensor, key: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Softmax of the sampled rows, `[B, H, R, N]`, and their log Z."""
    rows = torch.arange(settings.sample - 1, query.shape[2], settings.sample)
    wide = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query[:, :, rows] @ wide.mT * settings.scale
    scores = scores.masked_fill(torch.arange(key.shape[2]) > rows[:, None], -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def rounded_mass(rounding: Rounding) -> Callable[[Tensor, Tensor, Settings], Tensor]:
    """A way to choose: the sampled mass of rounded queries and keys."""

    def choose(query: Tensor, key: Tensor, settings: Settings) -> Tensor:
        return sampled_mass(*rounding(query, key), settings)

    return choose


def two_stages(
    candidates: int, bounds: bool = False
) -> Callable[[Tensor, Tensor, Settings], Tensor]:
    """A way to choose: summaries of key blocks propose `candidates` blocks, samples decide.

    The summaries are mean keys, or minima and maxima (`bounds`), scored by the sampled rows alone.
    """

    def choose(query: Tensor, key: Tensor, settings: Settings) -> Tensor:
        group = query.shape[1] // key.shape[1]
        rows = torch.arange(settings.sample - 1, query.shape[2], settings.sample)
        picked = query[:, :, rows]
        blocks = key.repeat_interleave(group, 1).unflatten(2, (-1, settings.key_block))
        if bounds:
            low, high = blocks.amin(3), blocks.amax(3)
            scores = picked.clamp(min=0) @ high.mT + picked.clamp(max=0) @ low.mT
        else:
            scores = picked @ blocks.mean(3).mT  # [B, H, R, C]
        begin = torch.arange(blocks.shape[2]) * settings.key_block
        scores = (scores * settings.scale).masked_fill(begin > rows[:, None], -torch.inf)
        coarse = _by_unit(scores.softmax(-1), group, settings)  # [B, Hk, Q, C]
        first = torch.arange(coarse.shape[2])[:, None] * settings.block
        seen = (begin + settings.key_block > first - settings.near) | (begin < SINKS)
        best = coarse.masked_fill(seen, -1.0).topk(min(candidates, coarse.shape[3]), -1).indices
        allowed = torch.zeros_like(seen.expand_as(coarse)).scatter(-1, best, True) | seen
        # What was not proposed is not in the samples' softmax either.
        allowed = _to_pairs(allowed, group, settings)
        allowed &= torch.arange(key.shape[2]) <= rows[:, None]
        exact = picked @ key.repeat_interleave(group, 1).mT * settings.scale
        weights = exact.masked_fill_(~allowed, -torch.inf).softmax(-1)
        return _by_unit(weights.unflatten(3, (-1, settings.key_block)).sum(4), group, settings)

    return choose


def _by_unit(weights: Tensor, group: int, settings: Settings) -> Tensor:
    """Of sampled rows `[B, H, R, C]`, summed over query blocks and groups: `[B, Hk, Q, C]`."""
    weights = weights.unflatten(2, (-1, settings.samples)).sum(3)
    return weights.unflatten(1, (-1, group)).sum(2)


def _to_pairs(blocks: Tensor, group: int, settings: Settings) -> Tensor:
    """Of query blocks and key blocks `[B, Hk, Q, C]`, for rows and keys: `[B, H, R, N]`."""
    pairs = blocks.repeat_interleave(settings.samples, 2).repeat_interleave(settings.key_block, 3)
    return pairs.repeat_interleave(group, 1)


def audit_errors(query: Tensor, key: Tensor, opened: Tensor, settings: Settings) -> dict[str, Row]:
    """How far `kept` and `kl` are from exact if they come from rounded scores, for one choice."""
    exact, _ = sampled_probability(query, key, settings)
    view = _seen_by_samples(opened, query, settings)
    kept = (exact * view).sum(-1)
    found = {}
    for name, rounding in ROUNDINGS.items():
        rounded, _ = sampled_probability(*rounding(query, key), settings)
        error = ((rounded * view).sum(-1) - kept).abs()
        ratio = ((rounded * view).sum(-1) / kept).log().abs()
        found[name] = {
            "kept_mean": float(error.mean()),
            "kept_worst": float(error.max()),
            "kl_worst": float(ratio.max()),
        }
    return found


def needless_tiles(query: Tensor, key: Tensor, settings: Settings, weight: float = 1e-6) -> float:
    """The share of tiles of scores none of whose pairs could change a mass by `weight`."""
    probability, _ = sampled_probability(query, key, settings)
    count = probability.shape[3]
    rows = torch.arange(settings.sample - 1, query.shape[2], settings.sample)
    small = probability < weight / count
    later = (torch.arange(count) > rows[:, None]).expand_as(small)

    def tiles(x: Tensor) -> Tensor:
        x = x.unflatten(1, (key.shape[1], -1)).all(2)
        return x.unflatten(3, (-1, KEYS_OF_A_TILE)).all(4).unflatten(2, (-1, ROWS_OF_A_TILE)).all(3)

    needed = ~tiles(later)
    return float((tiles(small) & needed).sum() / needed.sum())


ROUNDINGS: dict[str, Rounding] = {
    "8 bits by token": by_token,
    "8 bits by channel, mean taken off": by_channel,
}


def compare(query: Tensor, key: Tensor, heavy: int) -> dict[str, Row]:
    """Each way to choose: the share chosen as by exact samples, and the mass that queries keep."""
    settings = settings_of(query.shape[3], heavy=heavy)
    choosers = {
        "exact samples": sampled_mass,
        **{name: rounded_mass(rounding) for name, rounding in ROUNDINGS.items()},
        **{
            f"two stages, {summary} propose {times} times as many": two_stages(
                times * heavy // settings.key_block, bounds=summary == "bounds"
            )
            for summary in ("means", "bounds")
            for times in (2, 4)
        },
    }
    expected, found = None, {}
    for name, chooser in choosers.items():
        opened = open_by(chooser, query, key, settings)
        expected = opened if expected is None else expected
        kept = kept_by(opened, query, key, settings)[..., query.shape[2] // 2 :]
        found[name] = {
            "same": float((opened & expected).sum() / expected.sum()),
            "kept": float(kept.mean()),
            "worst_percent": float(kept.flatten().kthvalue(kept.numel() // 100)[0]),
        }
    return found


def stage_seconds(size: int, proposed: int = 2048) -> Row:
    """What two stages would take at least, by the products of the kernel that attends.

    First all sampled rows against the summaries that they see on average, then each query block's
    sampled rows against the keys that were proposed.
    """
    rows = size // 8
    query, key = torch.randn(1, 9, rows, 64), torch.randn(1, 3, size, 64)
    summaries = key[:, :, : size // 32].contiguous()
    queries_first = query[:, :, : size // 32].contiguous()  # a view needs a key for each query
    first = settings_of(64, causal=False, near=0, heavy=0)
    everything = torch.ones(1, 3, queries_first.shape[2] // 64, size // 32 // 16, dtype=torch.bool)
    second = settings_of(64, causal=False, near=0, heavy=0, block=16)
    chosen = torch.zeros(1, 3, rows // 16, size // 16, dtype=torch.bool)
    best = torch.rand(chosen.shape).topk(proposed // 16, -1).indices
    chosen.scatter_(-1, best, True)
    seconds = best_seconds(
        {
            "propose": lambda: attend_to_choice(
                queries_first,
                summaries,
                summaries[..., :1].contiguous(),
                everything,
                places_of_rows(queries_first, summaries),
                first,
            ),
            "decide": lambda: attend_to_choice(
                query, key, key[..., :1].contiguous(), chosen, places_of_rows(query, key), second
            ),
        },
        rounds=3,
    )
    # A quarter of the sampled rows stood for all in the first stage.
    return {
        "size": size,
        "propose_seconds": 4 * seconds["propose"],
        "decide_seconds": seconds["decide"],
    }


def places_of_rows(query: Tensor, key: Tensor) -> Places:
    """The queries are the last positions; no sinks."""
    return Places.of_rows(1, query.shape[2], key.shape[2], None, query.device)


def capture(model_dir: Path, data_dir: Path, length: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries and keys of some layers, rotated, for the longest article."""
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from reproduction.long_context.articles import long_articles

    found: dict[int, tuple[Tensor, Tensor]] = {}

    def record(module: Any, query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        if module.layer_idx in LAYERS:
            found[module.layer_idx] = (query.clone(), key.clone())
        return sdpa_attention_forward(module, query, key, *rest, **options)

    AttentionInterface.register("recording", record)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.config._attn_implementation = "recording"
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    (ids,) = long_articles(data_dir, tokenizer, 1, length)
    with torch.no_grad():
        model.model(ids)
    return found


def _seen_by_samples(opened: Tensor, query: Tensor, settings: Settings) -> Tensor:
    """The view of each sampled row, bool `[B, H, R, N]`."""
    first = torch.arange(opened.shape[2])[:, None] * settings.block
    begin = torch.arange(opened.shape[3]) * settings.key_block
    near = (begin >= first - settings.near) & (begin < first + settings.block)
    group = query.shape[1] // opened.shape[1]
    return _to_pairs(opened | near | (begin < SINKS), group, settings)


def run(tensors: dict[int, tuple[Tensor, Tensor]], heavy: int) -> list[Row]:
    """All comparisons, layer by layer."""
    rows = []
    for layer, (query, key) in tensors.items():
        settings = settings_of(query.shape[3], heavy=heavy)
        opened = open_by(sampled_mass, query, key, settings)
        rows.append(
            {
                "layer": layer,
                "ways": compare(query, key, heavy),
                "audit": audit_errors(query, key, opened, settings),
                "needless_tiles": needless_tiles(query, key, settings),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Write or complete opened_trials.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--seconds", action="store_true", help="time two stages, no model")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heavy", type=int, default=512)
    options = parser.parse_args()
    path = options.output / "opened_trials.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    with torch.no_grad():
        if options.seconds:
            result["two_stages"] = [stage_seconds(size) for size in (32768, 65536)]
        else:
            result |= {
                "benchmark": "opened_trials",
                "machine": machine(),
                "model": "SmolLM2-135M-Instruct",
                "length": options.length,
                "heavy": options.heavy,
                "layers": run(
                    capture(options.model, options.data_dir, options.length), options.heavy
                ),
            }
    write_text(path, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
