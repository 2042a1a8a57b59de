import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import polyscale as ps

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    module.name for module in pkgutil.walk_packages(ps.__path__, "polyscale.") if not module.ispkg
)
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout


def test_everything_in_all_can_be_had():
    for name in ps.__all__:
        assert getattr(ps, name) is not None
    assert set(ps.__all__) <= set(dir(ps))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ps.nothing


def test_dir_lists_public_names_and_nothing_that_the_module_imports_for_itself():
    public = [name for name in dir(ps) if not name.startswith("__")]
    assert public == sorted(ps.__all__)
    assert {"__version__", "__doc__", "__all__"} <= set(dir(ps))


def test_importing_polyscale_imports_no_extra():
    code = "import sys, polyscale; print([m for m in ('transformers', 'numpy.random', 'scipy', "
    code += "'matplotlib', 'typer', 'rich', 'entmax') if m in sys.modules and m != 'numpy.random'])"
    assert python(code).strip() == "[]"


def test_polyscale_adds_less_than_0_3_seconds_to_torch():
    code = "import time, torch; start = time.perf_counter(); import polyscale; "
    code += "print(time.perf_counter() - start)"
    assert min(float(python(code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_in_docstrings_are_true(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_the_snippets_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(snippets(page))
    exec(compile(code, page.name, "exec"), {"__name__": "snippets"})


@pytest.mark.parametrize("number", range(len(snippets(README))))
def test_each_snippet_of_the_first_page_runs_alone(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippets(README)[number], "README.md", "exec"), {"__name__": "snippet"})


def test_the_readme_has_a_snippet_for_every_height():
    code = "".join(snippets(README))
    for name in ("ps.hsa_attention(", "ps.HKTAttention(", "ps.HKTConfig("):
        assert name in code


def test_the_commands_of_the_readme_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    commands = re.findall(r"^make ([a-z-]+)", README.read_text(), re.MULTILINE)
    assert {"demo", "test"} <= set(commands)
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE), command


def test_the_version_is_the_same_everywhere():
    assert f'version = "{ps.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {ps.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {ps.__version__}" in (ROOT / "CHANGELOG.md").read_text()
