"""Fair timing: candidates take turns in one process, and the best of several rounds counts."""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from polyscale._files import write_text
from polyscale._memory import keeps_freed_memory


def best_seconds(
    candidates: Mapping[str, Callable[[], object]], rounds: int = 9, warm_up: int = 1
) -> dict[str, float]:
    """The best time of each candidate over `rounds` turns, after a warm-up.

    >>> sorted(best_seconds({"a": lambda: None, "b": lambda: None}, rounds=2))
    ['a', 'b']
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    for _ in range(warm_up):
        for candidate in candidates.values():
            candidate()
    best = dict.fromkeys(candidates, math.inf)
    for _ in range(rounds):
        for name, candidate in candidates.items():
            begin = time.perf_counter()
            candidate()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def milliseconds(seconds: float) -> str:
    """A time for a table.

    >>> milliseconds(1.5)
    '1,500.0 ms'
    """
    return f"{seconds * 1e3:,.1f} ms"


def fitted_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent of the growth of time with size: the slope in logarithms.

    >>> fitted_exponent([1, 2, 4], [3.0, 12.0, 48.0])
    2.0
    """
    if len(sizes) < 2 or len(sizes) != len(seconds):
        raise ValueError(f"sizes and seconds must have two or more points, got {len(sizes)}")
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def added_memory(step: Callable[[], object]) -> int:
    """Bytes by which a step raises the peak memory of this process (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {field}")


def machine() -> dict[str, Any]:
    """The machine and the versions that a measurement depends on."""
    return {
        "date": date.today().isoformat(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "keeps_freed_memory": keeps_freed_memory(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    vector = [flag for flag in ("avx2", "avx512f") if flag in flags]
    return " ".join([names[0] if names else platform.machine(), *vector])


def write_results(result: dict[str, Any], table: str, output: Path) -> list[Path]:
    """Write `output`.json and `output`.md, each in one step."""
    written = []
    for suffix, text in ((".json", json.dumps(result, indent=2) + "\n"), (".md", table)):
        path = output.with_name(output.name + suffix)
        write_text(path, text)
        written.append(path)
    return written
