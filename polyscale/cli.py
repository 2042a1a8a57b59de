"""The `polyscale` command: parses, calls, prints.

Only the standard library is imported here, so that the command starts fast and can say what is
missing; everything else is imported by the command that uses it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from polyscale._memory import keep_freed_memory

if TYPE_CHECKING:
    import typer

    from polyscale.report.comparison import Comparison
    from polyscale.training.compare import PlannedRun
    from polyscale.training.config import RunConfig

_NEEDED = (
    "typer",
    "rich",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "matplotlib",
    "yaml",
    "tensorboard",
)

_BENCHMARKS = ("hkt", "hsa", "opened")


def main() -> None:
    """Entry point of the `polyscale` command."""
    missing = [module for module in _NEEDED if find_spec(module) is None]
    if missing:
        names = ", ".join(missing)
        _stop(f"{names} not installed; run: pip install 'polyscale[train]'", code=1)
    keep_freed_memory()
    _make_app()(prog_name="polyscale")


def _make_app() -> typer.Typer:
    import typer

    app = typer.Typer(
        help="Multi-scale attention for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            from polyscale import __version__

            print(f"polyscale {__version__}")
            raise typer.Exit

    data_dir_option = typer.Option(
        None, envvar="POLYSCALE_DATA", help="Folder with the data files; else the Hub is asked."
    )
    preset_option = typer.Option("small", help="Size and budget: tiny, small or paper.")
    set_option = typer.Option(
        [],
        "--set",
        metavar="NAME=VALUE",
        help="Change a value, such as training.steps=200, model.levels=2 or task.length=512.",
    )
    resume_option = typer.Option(
        False, "--resume", help="Go on with what is there; finished runs stay."
    )

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", help="Show the version.", callback=show_version, is_eager=True
        ),
    ) -> None:
        pass

    @app.command()
    def demo(
        output: Path = typer.Option(Path("runs/demo"), help="Folder for the report."),  # noqa: B008
        seed: int = typer.Option(0, min=0, help="Seed of the data, the weights and the order."),
        quick: bool = typer.Option(False, "--quick", help="Seconds instead of minutes."),
    ) -> None:
        """Train HKT and standard attention on ListOps and compare them."""
        command = ["polyscale", "demo", "--output", str(output), "--seed", str(seed)]
        _run_demo(output, seed, quick, shlex.join(command + ["--quick"] * quick))

    @app.command()
    def train(
        config: Path | None = typer.Argument(None, help="A YAML file, instead of task and model."),  # noqa: B008
        task: str | None = typer.Option(None, help="Task, such as listops or imdb-char."),
        model: str | None = typer.Option(None, help="standard, hkt or hsa."),
        levels: int | None = typer.Option(None, min=1, help="Levels of hkt (3)."),
        preset: str = preset_option,
        seed: int | None = typer.Option(None, min=0, help="Of weights, order and dropout (0)."),
        output: Path = typer.Option(..., help="Folder of the run."),  # noqa: B008
        changes: list[str] = set_option,
        data_dir: Path | None = data_dir_option,
        resume: bool = resume_option,
    ) -> None:
        """Train one model on one task."""
        with _one_line_errors(resumable=True):
            run_config = _read_run(config, task, model, levels, preset, seed, changes)
            _run_train(run_config, output, data_dir, resume)

    @app.command()
    def evaluate(
        folder: Path = typer.Argument(help="Folder of a run."),  # noqa: B008
        split: str = typer.Option("test", help="train, validation or test."),
        data_dir: Path | None = data_dir_option,
    ) -> None:
        """Measure a trained model; prints JSON."""
        with _one_line_errors():
            from polyscale.training.run import evaluate_run

            print(json.dumps(evaluate_run(folder, split=split, data_dir=data_dir)))

    @app.command()
    def compare(
        task: str = typer.Option(..., help="Task, such as listops or imdb-char."),
        models: str = typer.Option("standard,hkt", help="Models, the baseline first."),
        seeds: str = typer.Option("0,1,2", help="Seeds; every model runs with each."),
        levels: int = typer.Option(3, min=1, help="Levels of hkt."),
        preset: str = preset_option,
        output: Path | None = typer.Option(None, help="Folder (runs/compare-TASK)."),  # noqa: B008
        changes: list[str] = set_option,
        data_dir: Path | None = data_dir_option,
        resume: bool = resume_option,
    ) -> None:
        """Train several models under one budget and compare them."""
        with _one_line_errors(resumable=True):
            command = shlex.join(["polyscale", *sys.argv[1:]])
            _run_compare(
                task,
                models,
                seeds,
                levels,
                preset,
                output or Path("runs") / f"compare-{task}",
                changes,
                data_dir,
                resume,
                command,
            )

    @app.command()
    def reproduce(
        what: str = typer.Argument(help="hkt, hsa or hsa-zero-shot."),
        preset: str = typer.Option("cpu", help="cpu or paper."),
        output: Path | None = typer.Option(None, help="Folder (experiments/WHAT)."),  # noqa: B008
        data_dir: Path | None = data_dir_option,
        resume: bool = resume_option,
    ) -> None:
        """Run the tables of a paper again."""
        with _one_line_errors(resumable=True):
            from polyscale.experiments import reproduce
            from polyscale.training.processes import join_processes

            folder = output or Path("experiments") / what
            reproduce(what, preset, folder, data_dir=data_dir, resume=resume)
            if join_processes().is_main_process:
                print(f"Results: {folder / 'RESULTS.md'}")

    @app.command()
    def status(
        what: str = typer.Argument(help="hkt, hsa or hsa-zero-shot."),
        preset: str = typer.Option("cpu", help="cpu or paper."),
        output: Path | None = typer.Option(None, help="Folder (experiments/WHAT)."),  # noqa: B008
    ) -> None:
        """Show what of a reproduction is done, and the time left."""
        with _one_line_errors():
            from polyscale.experiments import plan, zero_shot

            folder = output or Path("experiments") / what
            if what == "hsa-zero-shot":
                print(zero_shot.status(folder))
            else:
                _show_status(plan(what, preset), folder)

    @app.command()
    def analyze(
        target: str = typer.Argument(help="Folder of a run, or of any Hugging Face model."),
        data: str | None = typer.Option(None, help="Text file or task; else that of the run."),
        output: Path = typer.Option(Path("report.html"), help="Folder, or HTML file."),  # noqa: B008
        examples: int = typer.Option(8, min=1, help="Samples of a task to look at."),
        max_length: int = typer.Option(1024, min=1, help="Tokens of a text to look at."),
        data_dir: Path | None = data_dir_option,
    ) -> None:
        """Look into a model: levels, kernel, symmetry, error, normality, attention."""
        with _one_line_errors():
            from polyscale.report.analysis.command import run_analyze

            analysis, written = run_analyze(
                target,
                data,
                output,
                data_dir=data_dir,
                examples=examples,
                max_length=max_length,
                say=lambda text: print(f"{text} ...", flush=True),
            )
            for sentence in analysis.get("summary", ()):
                print(f"- {sentence}")
            print("Report:", *written)

    @app.command()
    def inject(
        model: str = typer.Argument(help="Folder or Hub name of a Hugging Face model."),
        plan: Path = typer.Option(..., help="Texts to plan with, one a line."),  # noqa: B008
        output: Path = typer.Option(..., help="Folder for the injected model."),  # noqa: B008
        budget: float | None = typer.Option(None, help="Share of attention FLOPs to keep (0.5)."),
        tolerance: float | None = typer.Option(None, help="Tolerated change of the output."),
    ) -> None:
        """Make a pretrained model cheaper with HSA, with no training."""
        with _one_line_errors():
            from polyscale.inject.command import run_inject

            chosen = run_inject(
                model,
                plan,
                output,
                budget=budget,
                tolerance=tolerance,
                say=lambda text: print(text, flush=True),
            )
            print(chosen)
            print(f"Model: {output}")

    @app.command()
    def bench(
        what: str = typer.Argument(help="What to measure: hkt, hsa or opened."),
        output: Path = typer.Option(Path("benchmarks/results"), help="Folder for the results."),  # noqa: B008
        quick: bool = typer.Option(False, "--quick", help="Small sizes only."),
    ) -> None:
        """Measure speed and memory, best with nothing else running."""
        _run_bench(what, output, quick)

    return app


def _read_run(
    path: Path | None,
    task: str | None,
    model: str | None,
    levels: int | None,
    preset: str,
    seed: int | None,
    changes: list[str],
) -> RunConfig:
    from polyscale.training.config import RunConfig, read_assignment
    from polyscale.training.presets import preset_config

    if path is not None:
        if task or model or levels:
            raise ValueError("give either a YAML file or --task and --model (change it with --set)")
        config = RunConfig.from_yaml(path)
        if seed is not None:
            config = config.with_seed(seed)
    elif task and model:
        config = preset_config(task, model, preset, seed=seed or 0, levels=levels)
    else:
        raise ValueError("train takes a YAML file, or --task and --model")
    return config.with_values(dict(map(read_assignment, changes)))


def _run_train(config: RunConfig, output: Path, data_dir: Path | None, resume: bool) -> None:
    from polyscale.training.processes import join_processes
    from polyscale.training.run import run

    result = run(config, output, data_dir=data_dir, resume=resume)
    if not join_processes().is_main_process:
        return
    unit = " %" if result.higher_is_better else " bits per token"
    print(f"{config.task}, {config.name}, seed {config.seed}: test {result.score:.2f}{unit}")
    print(f"Run: {output}")


def _run_compare(
    task: str,
    models: str,
    seeds: str,
    levels: int,
    preset: str,
    output: Path,
    changes: list[str],
    data_dir: Path | None,
    resume: bool,
    command: str,
) -> None:
    from polyscale.report.comparison import Comparison
    from polyscale.training.compare import plan_comparison, run_all
    from polyscale.training.config import read_assignment
    from polyscale.training.presets import preset_config
    from polyscale.training.processes import join_processes

    names = models.split(",")
    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise ValueError(f"--seeds takes numbers such as 0,1,2; got {seeds!r}") from None
    for what, given in (("--models", names), ("--seeds", numbers)):
        if len(set(given)) != len(given):
            raise ValueError(f"{what} takes each one once, got {given}")
    config = preset_config(task, names[0], preset).with_values(dict(map(read_assignment, changes)))
    planned = plan_comparison(config, names, numbers, levels)
    results = run_all(planned, output, data_dir=data_dir, resume=resume)
    if not join_processes().is_main_process:
        return
    if len(results) < len(planned):
        print(
            f"{len(planned) - len(results)} of {len(planned)} runs are locked by another process, "
            "which compares all of them when it is done; if it is stopped, --resume goes on"
        )
        return
    comparison = Comparison.from_results(results, baseline=names[0], command=command)
    written = comparison.write(output)
    _show_comparison(comparison, written[0])


def _show_status(planned: list[PlannedRun], output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from polyscale.training.compare import seconds_left, status

    found = status(planned, output)
    table = Table()
    for column in ("task", "run", "seed", "steps", "minutes"):
        table.add_column(column, justify="left" if column in ("task", "run") else "right")
    for one in found:
        config = one.planned.config
        table.add_row(
            config.task,
            config.name,
            str(config.seed),
            "done" if one.finished else f"{one.steps} of {config.training.steps}",
            "-" if one.seconds is None else f"{one.seconds / 60:.0f}",
        )
    Console().print(table)
    left = seconds_left(found)
    done = sum(one.finished for one in found)
    time_left = "unknown until a run is finished" if left is None else f"{left / 3600:.1f} hours"
    print(f"{done} of {len(found)} runs done; time left: {time_left}")


def _run_bench(what: str, output: Path, quick: bool) -> None:
    if what not in _BENCHMARKS:
        _stop(f"bench takes one of {', '.join(_BENCHMARKS)}, got {what!r}", code=2)
    from polyscale._checkout import import_from_checkout

    with _one_line_errors():
        benchmark = import_from_checkout(f"benchmarks.{what}")
        timing = import_from_checkout("benchmarks.timing")
        result = benchmark.run(
            quick=quick, say=lambda text: print(f"measuring: {text}", flush=True)
        )
        table = benchmark.to_markdown(result)
        written = timing.write_results(result, table, output / what)
        benchmark.draw(result, output / f"{what}.svg")
    print(table)
    print("Results:", *written, output / f"{what}.svg")


def _run_demo(output: Path, seed: int, quick: bool, command: str) -> None:
    from rich.console import Console

    try:
        with Console().status("Loading torch and transformers"):
            from polyscale.report.comparison import PAGE_NAME
            from polyscale.report.demo import run_demo
        comparison = run_demo(output, seed=seed, quick=quick, command=command)
    except KeyboardInterrupt:
        _stop("stopped; nothing was written", code=130)
    except OSError as error:
        _stop(f"cannot write to {output}: {error.strerror or error}", code=1)
    _show_comparison(comparison, output / PAGE_NAME)


def _show_comparison(comparison: Comparison, page: Path) -> None:
    from rich.console import Console

    from polyscale.report.tables import terminal_table

    console = Console()
    console.print(terminal_table(comparison))
    console.print(comparison.summary)
    # Not through the console: it would break a long path into lines.
    print(f"Report: {page}")


@contextmanager
def _one_line_errors(*, resumable: bool = False) -> Iterator[None]:
    """What a user can put right is said in one line; everything else is a bug and shows where."""
    try:
        yield
    except KeyboardInterrupt:
        _stop("stopped" + ("; --resume goes on" if resumable else ""), code=130)
    except (ValueError, TypeError, FloatingPointError) as error:
        _stop(str(error), code=2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename and error.strerror else ""
        _stop(f"{where}{error.strerror or error}", code=1)
    except ImportError as error:
        _stop(str(error), code=1)


def _stop(message: Any, *, code: int) -> NoReturn:
    print(f"polyscale: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
