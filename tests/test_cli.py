import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from filelock import FileLock
from typer.testing import CliRunner

import polyscale
from polyscale import _checkout
from polyscale.cli import make_app
from reproduction import find_study

ROOT = Path(polyscale.__file__).parents[1]
WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
sys.argv = ["polyscale", "demo"]
from polyscale.cli import main
main()
"""


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "polyscale.cli", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has them ignore interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def invoke(*arguments):
    """The same command in this process, where torch is loaded already."""
    return CliRunner().invoke(make_app(), arguments)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "new" / "run"
    process = start("demo", "--quick", "--seed", "3", "--output", str(folder))
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output, folder


def test_the_demo_ends_with_a_table_a_summary_and_the_path_of_the_report(demo):
    output, folder = demo
    for label in (
        "Standard attention",
        "HKT (3 levels)",
        "Test accuracy",
        "Majority-class rate",
        "Parameters",
        "Samples per second",
        "Attention score FLOPs",
        "1.000 x",
    ):
        assert label in output
    assert output.rstrip().endswith(f"Report: {folder / 'report.html'}")
    for name in ("standard", "hkt"):
        assert f"{name}, seed 3: step 20 of 20, validation" in output


def test_the_demo_writes_results_that_agree_with_the_table(demo):
    output, folder = demo
    results = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    standard, hkt = results["models"]
    assert (standard["levels"], hkt["levels"]) == (1, 3)
    assert standard["score_flop_ratio"] == 1.0
    assert 1.3 < hkt["score_flop_ratio"] <= 4 / 3
    assert f"{hkt['score_flop_ratio']:.3f} x" in output
    assert f"{hkt['scores'][0]:.1f}" in output
    assert f"{standard['parameters']:,}" in output
    runs = results["runs"]
    assert runs[0]["config"]["training"] == runs[1]["config"]["training"]
    assert {run["seed"] for run in runs} == {run["config"]["data_seed"] for run in runs} == {3}
    # Layers, heads, levels; the weights of a head are convex.
    layers = runs[1]["level_weights_curve"][-1]["weights"]
    assert [len(layers), len(layers[0]), len(layers[0][0])] == [2, 4, 3]
    assert all(sum(head) == pytest.approx(1.0) for layer in layers for head in layer)


def run_folder(folder, name, seed=3):
    return folder / "runs" / "listops" / f"{name}-seed-{seed}"


def test_the_models_differ_in_levels_alone(demo):
    _, folder = demo
    standard, hkt = (
        json.loads((run_folder(folder, name) / "config.json").read_text())
        for name in ("standard", "hkt")
    )
    assert (standard.pop("levels"), hkt.pop("levels")) == (1, 3)
    assert standard == hkt


def test_the_report_stands_alone_and_names_its_command(demo):
    _, folder = demo
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|<script|<link|<img|@import|src=", page)
    assert f"polyscale demo --output {folder} --seed 3 --quick" in page
    assert page.count("<svg") >= 3


def test_the_saved_models_load_again(demo):
    from polyscale.models import HKTForSequenceClassification

    _, folder = demo
    for name, levels in (("standard", 1), ("hkt", 3)):
        model = HKTForSequenceClassification.from_pretrained(run_folder(folder, name))
        assert model.config.levels == levels


def test_a_second_run_replaces_its_own_files_and_leaves_others_alone(demo):
    _, folder = demo
    (folder / "notes.txt").write_text("mine")
    (folder / "report.html").write_text("old")
    again = invoke("demo", "--quick", "--output", str(folder))
    assert again.exit_code == 0, again.output
    assert (folder / "notes.txt").read_text() == "mine"
    assert "<svg" in (folder / "report.html").read_text(encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "comparison.json",
        "comparison.md",
        "figures",
        "notes.txt",
        "report.html",
        "runs",
    ]


def test_an_output_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "below"):
        finished = invoke("demo", "--quick", "--output", str(output))
        assert finished.exit_code == 1
        assert finished.stderr.startswith(f"polyscale: cannot write to {output}: ")
        assert finished.stderr.count("\n") == 1


def test_an_interrupt_is_one_line_and_leaves_nothing_behind(tmp_path):
    process = start("demo", "--output", str(tmp_path / "run"))
    deadline = time.monotonic() + 300
    # The folder for unfinished work appears when the run itself begins.
    while not list(tmp_path.glob("run/.unfinished-*")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert errors == "polyscale: stopped; nothing was written\n"
    assert list((tmp_path / "run").iterdir()) == []


def test_the_version_is_that_of_the_package():
    assert invoke("--version").stdout == f"polyscale {polyscale.__version__}\n"


def test_help_names_every_command():
    finished = invoke("--help")
    assert finished.exit_code == 0
    for command in (
        "demo",
        "train",
        "evaluate",
        "compare",
        "reproduce",
        "status",
        "bench",
        "analyze",
        "inject",
    ):
        assert command in finished.stdout


def test_a_bad_option_is_refused():
    assert invoke("demo", "--seed", "-1").exit_code == 2
    assert invoke("demo", "--bogus").exit_code == 2


@pytest.mark.parametrize("missing", [["typer"], ["rich", "transformers"]])
def test_a_missing_package_is_one_line_that_names_the_extra(missing):
    finished = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(missing=missing)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 1
    assert finished.stdout == ""
    names = ", ".join(missing)
    assert finished.stderr == (
        f"polyscale: {names} not installed; run: pip install 'polyscale[train]'\n"
    )


def test_the_command_imports_nothing_heavy_before_it_runs():
    code = (
        "import sys; before = set(sys.modules); import polyscale; known = set(sys.modules); "
        "import polyscale.cli; new = {name.split('.')[0] for name in set(sys.modules) - known}; "
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert finished.stdout == "['polyscale']\n"


TINY = ("--set", "training.steps=4", "--set", "training.evaluate_every=2", "--preset", "tiny")


def test_train_then_evaluate_then_resume(tmp_path):
    folder = tmp_path / "run"
    arguments = ("--task", "copy", "--model", "hkt", "--levels", "2", "--output", str(folder))
    trained = invoke("train", *arguments, *TINY)
    assert trained.exit_code == 0, trained.output
    assert "copy, hkt, seed 0: test" in trained.stdout
    assert trained.stdout.rstrip().endswith(f"Run: {folder}")
    measured = invoke("evaluate", str(folder))
    assert measured.exit_code == 0, measured.output
    result = json.loads((folder / "result.json").read_text())
    assert json.loads(measured.stdout)["loss"] == pytest.approx(result["test"]["loss"], abs=1e-6)
    assert result["config"]["model_options"]["levels"] == 2
    again = invoke("train", *arguments, *TINY)
    assert again.exit_code == 1
    assert again.stderr == (
        f"polyscale: {folder} holds a finished run: resume it, or choose another folder\n"
    )
    resumed = invoke("train", str(folder / "config.yaml"), "--resume", "--output", str(folder))
    assert resumed.exit_code == 0, resumed.output
    assert resumed.stdout == trained.stdout[-len(resumed.stdout) :]


def test_compare_prints_a_table_and_writes_a_report(tmp_path):
    finished = invoke(
        "compare",
        "--task=copy",
        "--models=standard,hkt,hsa",
        "--seeds=0,1",
        *TINY,
        f"--output={tmp_path}",
    )
    assert finished.exit_code == 0, finished.output
    for text in ("Paired t-test", "HKT (3 levels)", f"Report: {tmp_path / 'report.html'}"):
        assert text in finished.stdout
    assert len(list(tmp_path.glob("runs/copy/*/result.json"))) == 6


def test_a_second_compare_leaves_the_report_to_the_process_that_is_not_done(tmp_path):
    runs = [tmp_path / "runs" / "copy" / f"{model}-seed-0" for model in ("standard", "hkt")]
    with ExitStack() as held:
        for run in runs:
            run.mkdir(parents=True)
            held.enter_context(FileLock(run / ".lock"))
        arguments = ("--task=copy", "--seeds=0", *TINY, f"--output={tmp_path}", "--resume")
        finished = invoke("compare", *arguments)
    assert finished.exit_code == 0, finished.output
    assert (
        "2 of 2 runs are locked by another process, which will write the comparison"
        in finished.stdout
    )
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--output=x"), "train takes --data, a YAML file, or --task and --model"),
        (("train", "--task=copy", "--model=gpt", "--output=x"), "model must be one of 'standard'"),
        (("train", "--task=go", "--model=hkt", "--output=x"), "task must be one of 'listops'"),
        (("train", "none.yaml", "--output=x"), "none.yaml: No such file"),
        (
            ("train", "--task=copy", "--model=hkt", "--output=x", "--set=training.lr=1"),
            "names of training must be one of steps",
        ),
        (("evaluate", "nowhere"), "nowhere must hold a run"),
        (
            ("compare", "--task=copy", "--seeds=a"),
            "--seeds must be integers such as 0,1,2, got 'a'",
        ),
        (("compare", "--task=copy", "--seeds=1,1"), "--seeds must not repeat a value, got 1,1"),
        (("reproduce", "gpt"), "study must be one of 'documents', 'hkt', 'hsa', 'hsa-zero-shot'"),
        (("status", "hkt", "--preset=gpu"), "preset must be one of 'cpu', 'paper', got 'gpu'"),
    ],
)
def test_a_bad_request_is_one_line_that_says_what_is_taken(
    arguments, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    finished = invoke(*arguments)
    assert finished.exit_code in (1, 2)
    assert finished.stderr.startswith("polyscale: ")
    assert message in finished.stderr
    assert finished.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_missing_data_are_one_line_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    finished = invoke(
        "train",
        "--task=imdb-char",
        "--model=hkt",
        "--preset=tiny",
        f"--output={tmp_path / 'run'}",
        f"--data-dir={tmp_path}",
    )
    assert finished.exit_code == 1
    assert finished.stderr.count("\n") == 1
    assert "imdb" in finished.stderr


def test_the_status_of_a_reproduction_that_has_not_begun(tmp_path):
    finished = invoke("status", "hkt", "--output", str(tmp_path))
    assert finished.exit_code == 0
    planned = len(find_study("hkt").plan("cpu"))
    assert f"0 of {planned} runs done; time left: unknown until a run" in finished.stdout


def test_tables_alone_are_written_from_finished_runs(tmp_path):
    finished = invoke("reproduce", "hkt", "--tables", "--output", str(tmp_path))
    assert finished.exit_code == 0, finished.output
    assert finished.stdout == f"Results: {tmp_path / 'RESULTS.md'}\n"
    assert "0 runs, 0.0 hours in all" in (tmp_path / "RESULTS.md").read_text()


@pytest.mark.parametrize("command", ["reproduce", "status", "bench"])
def test_a_plain_install_says_that_a_checkout_is_needed(command, tmp_path, monkeypatch):
    monkeypatch.setattr(_checkout, "__file__", str(tmp_path / "polyscale" / "_checkout.py"))
    finished = invoke(command, "hkt")
    assert finished.exit_code == 1
    assert "is not part of the installed package; clone the repository" in finished.stderr
    assert finished.stderr.count("\n") == 1


def test_analyze_writes_the_report_of_a_run(tmp_path):
    folder = tmp_path / "run"
    arguments = ("--task=listops", "--model=hkt", f"--output={folder}", *TINY)
    trained = invoke("train", *arguments, "--set=training.snapshots=1")
    assert trained.exit_code == 0, trained.output
    finished = invoke("analyze", str(folder), f"--output={tmp_path / 'look.html'}")
    assert finished.exit_code == 0, finished.output
    assert finished.stdout.rstrip().endswith(str(tmp_path / "look.json"))
    assert "- Score products cost" in finished.stdout
    analysis = json.loads((tmp_path / "look.json").read_text(encoding="utf-8"))
    assert {point["step"] for point in analysis["normality"]["over_training"]} == {0, 4}


def test_inject_plans_for_time_and_says_where_nothing_pays(tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    config = BertConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    BertModel(config).save_pretrained(tmp_path / "model")
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("a b c a b c a b\nb c a b c a b c a\n" * 4)
    finished = invoke(
        "inject",
        str(tmp_path / "model"),
        f"--plan={tmp_path / 'texts.txt'}",
        f"--output={tmp_path / 'cheaper'}",
        "--tolerance=1e-12",
    )
    assert finished.exit_code == 0, finished.output
    assert "8 texts read without an injection" in finished.stdout
    assert "nothing pays; leave it as it is" in finished.stdout
    assert finished.stdout.endswith("Nothing was written.\n")
    assert not (tmp_path / "cheaper").exists()
    refused = invoke("inject", "x", "--plan=x", "--output=x", "--budget=0.5")
    assert refused.exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("analyze", "nowhere"), "target must be a folder with a model, got 'nowhere'"),
        (("inject", "nowhere", "--plan=none.txt", "--output=x"), "none.txt"),
    ],
)
def test_what_is_not_there_is_named_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished = invoke(*arguments)
    assert finished.exit_code in (1, 2)
    assert message in finished.stderr
    assert finished.stderr.count("\n") == 1
