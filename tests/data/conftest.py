import pytest


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch, tmp_path):
    """No data folder, no cache and no network of the machine the tests run on."""
    monkeypatch.delenv("POLYSCALE_DATA", raising=False)
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
