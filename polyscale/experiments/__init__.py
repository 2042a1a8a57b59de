"""The tables of the papers, run again: `polyscale reproduce`."""

from __future__ import annotations

from pathlib import Path

from polyscale.experiments import hkt, hsa, zero_shot
from polyscale.training.compare import PlannedRun
from polyscale.training.processes import join_processes

REPRODUCTIONS = ("hkt", "hsa", "hsa-zero-shot")


def plan(what: str, preset: str = "cpu") -> list[PlannedRun]:
    """All training runs of `hkt` or `hsa`, in their order.

    >>> len(plan("hkt")), len(plan("hsa"))
    (32, 69)
    """
    check_name(what)
    return hkt.plan_hkt(preset) if what == "hkt" else hsa.plan_hsa(preset)


def reproduce(
    what: str,
    preset: str,
    output: Path,
    *,
    data_dir: Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> None:
    """Do all runs, one after the other; the tables in `output` are up to date after each."""
    check_name(what)
    if what == "hsa-zero-shot":
        processes = join_processes().num_processes
        if processes > 1:
            raise ValueError(
                f"hsa-zero-shot takes one process, got {processes}; start it without torchrun"
            )
        zero_shot.reproduce(output, data_dir=data_dir, preset=preset, resume=resume)
        return
    planned = plan(what, preset)
    module = hkt if what == "hkt" else hsa
    module.reproduce(
        planned,
        output,
        command=f"polyscale reproduce {what} --preset {preset}",
        data_dir=data_dir,
        resume=resume,
        progress=progress,
    )


def check_name(what: str) -> None:
    """Raise a ValueError that names what there is."""
    if what not in REPRODUCTIONS:
        raise ValueError(f"reproduce takes one of {', '.join(REPRODUCTIONS)}; got {what!r}")
