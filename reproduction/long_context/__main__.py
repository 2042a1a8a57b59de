"""`python -m reproduction.long_context MEASURE --model FOLDER --data-dir FOLDER --output DIR`."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch
import transformers

from reproduction.long_context import measures, timing
from reproduction.long_context.articles import long_articles
from reproduction.long_context.reading import Reader, load_model
from reproduction.long_context.report import write_report
from reproduction.long_context.results import Results
from reproduction.long_context.settings import DENSE, find_settings

MEASURES = ("perplexity", "needles", "continuations", "first-token", "decoding", "report")


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m reproduction.long_context")
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--model", type=Path, help="folder of a decoder")
    parser.add_argument(
        "--data-dir",
        type=Path,
        help="folder with enwik8; without, Python's standard library is read",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--work-dir", type=Path, help="where read prompts are kept for reuse")
    parser.add_argument("--settings", nargs="+", default=[DENSE])
    parser.add_argument("--articles", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="articles to pass over")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--following", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read", help="a setting that reads all prompts")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args()


def main() -> None:
    """Measure, or write the report."""
    options = parse()
    if options.measure == "report":
        print(write_report(options.output))
        return
    if options.model is None:
        raise SystemExit("--model must be a folder for every measure, got none")
    settings = find_settings(options.settings)
    model, tokenizer = load_model(options.model, options.dtype)
    print(
        f"{type(model).__name__} of {options.model.name}, {options.dtype}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads, {platform.machine()}",
        flush=True,
    )
    work_dir = options.work_dir and options.work_dir / f"{options.model.name}-{options.dtype}"
    if options.read is not None:
        find_settings([options.read])
    reader = Reader(model, work_dir, options.read)
    kind = "timing" if options.measure in ("first-token", "decoding") else options.measure
    results = Results(options.output, kind)
    if options.measure in ("first-token", "decoding"):
        prompt = long_articles(options.data_dir, tokenizer, 1, options.prompt)[0]
        if options.measure == "first-token":
            timing.measure_first_token(reader, results, settings, prompt, options.rounds)
        else:
            sizes = options.batch, options.steps, options.rounds
            timing.measure_decoding(reader, results, settings, prompt, *sizes)
        return
    length = options.prompt + options.following + 1
    if options.measure == "needles":
        length = max(options.lengths)
    texts = long_articles(options.data_dir, tokenizer, options.articles, length, options.first)
    # An article has the same number in every draw, in the results and in the files of `--work-dir`.
    numbered = dict(enumerate(texts, start=options.first))
    if options.measure == "perplexity":
        measures.measure_perplexity(reader, results, settings, numbered, options.prompt)
    elif options.measure == "needles":
        measures.measure_needles(reader, results, settings, texts, tokenizer, options.lengths)
    else:
        measures.measure_continuations(
            reader, results, settings, numbered, options.prompt, options.following
        )


if __name__ == "__main__":
    main()
