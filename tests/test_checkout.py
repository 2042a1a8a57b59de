import pytest

from polyscale import _checkout
from polyscale._checkout import import_from_checkout


def test_a_checkout_has_its_benchmarks():
    assert import_from_checkout("benchmarks.timing").machine()["torch"]


def test_a_checkout_has_its_studies():
    assert import_from_checkout("reproduction").STUDIES == (
        "documents",
        "hkt",
        "hsa",
        "hsa-zero-shot",
    )


def test_an_installed_package_says_what_is_needed(monkeypatch, tmp_path):
    monkeypatch.setattr(_checkout, "__file__", str(tmp_path / "polyscale" / "_checkout.py"))
    with pytest.raises(ImportError, match="benchmarks is not part of the installed package; clone"):
        import_from_checkout("benchmarks.timing")
