import os
import tempfile

import pytest
import torch

# Generated data are cached: not where the user of this machine has theirs.
_CACHE = tempfile.TemporaryDirectory(prefix="polyscale-tests-")
os.environ["POLYSCALE_CACHE"] = _CACHE.name

# Tests run side by side, one thread each: the tensors are small.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)
