import subprocess
import sys

from polyscale._import_hook import once_imported


def test_what_is_imported_already_is_acted_on_at_once():
    found = []
    once_imported("sys", found.append)
    assert found == [sys]


def test_what_is_imported_later_is_acted_on_once_it_is(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders, found = list(sys.meta_path), []
    once_imported("imported_later", lambda module: found.append(module.value))
    assert found == []
    import imported_later  # noqa: F401

    assert found == [3]
    assert sys.meta_path == finders
    del sys.modules["imported_later"]


def test_our_package_does_not_import_transformers_for_its_warning():
    code = "import sys, polyscale; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
