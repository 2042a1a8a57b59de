from __future__ import annotations

from pathlib import Path

import pytest

from polyscale.data import files
from tests.reproduction.zero_shot.samples import write_model, write_texts


@pytest.fixture(autouse=True, scope="session")
def _small_files_are_known() -> object:
    """The files of these tests have the names of the real ones, but not their checksums."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "CHECKSUMS", {})
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("zero-shot") / "small-bert")


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("zero-shot") / "data")
