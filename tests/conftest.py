import pytest
import torch

# Tests run side by side, one thread each: the tensors are small.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers, whatever ran before it."""
    torch.manual_seed(0)
