"""Measures parts of `benchmarks.hsa` again and puts them into its committed results.

`python -m benchmarks.hsa_parts operation texts` does so for these two, for a machine that is not
left alone as long as `polyscale bench hsa` takes; without a name it lists the parts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import hsa
from benchmarks.timing import write_results
from polyscale._files import write_text


def main() -> None:
    """Measure, merge, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*hsa.PARTS, []], help="what to measure")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if not options.parts:
        print(*hsa.PARTS, sep="\n")
        return
    path = options.output / "hsa.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    result = {**known, **hsa.run(parts=options.parts)}
    write_text(path, json.dumps(result, indent=2) + "\n")  # before anything can fail
    write_results(result, hsa.to_markdown(result), options.output / "hsa")
    if "operation" in result:
        hsa.draw(result, options.output / "hsa.svg")


if __name__ == "__main__":
    main()
