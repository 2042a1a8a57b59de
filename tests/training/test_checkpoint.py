import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from polyscale.training import checkpoint
from polyscale.training.checkpoint import (
    gather_moments,
    gather_weights,
    list_checkpoints,
    load_checkpoint,
    read_state,
    save_checkpoint,
)


def make(seed=0):
    """A small model with tied weights, after three steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step(model, optimizer, 3)
    return model, optimizer


def step(model, optimizer, count):
    for number in range(count):
        model(torch.full((2, 4), float(number + 1))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def save(output, number, model, optimizer):
    weights, moments = gather_weights(model), gather_moments(model, optimizer)
    return save_checkpoint(output, number, weights, moments, {"step": number})


def test_a_loaded_checkpoint_goes_on_bit_for_bit(tmp_path):
    model, optimizer = make()
    folder = save(tmp_path, 3, model, optimizer)
    step(model, optimizer, 2)
    other, other_optimizer = make(seed=1)
    assert read_state(folder) == {"step": 3}
    load_checkpoint(folder, other, other_optimizer)
    step(other, other_optimizer, 2)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name])


def test_a_checkpoint_loads_into_a_new_optimiser(tmp_path):
    model, optimizer = make()
    folder = save(tmp_path, 3, model, optimizer)
    fresh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fresh[1].weight = fresh[0].weight
    new = torch.optim.AdamW(fresh.parameters(), lr=0.1, fused=True)
    load_checkpoint(folder, fresh, new)
    step(model, optimizer, 2)
    step(fresh, new, 2)
    assert torch.equal(model[0].weight, fresh[0].weight)


class Gated(nn.Module):
    """Its second layer is used from the third step on."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.first(x) if self.calls < 3 else self.second(self.first(x))


def test_a_parameter_that_was_not_used_yet_has_no_moments_and_needs_none(tmp_path):
    torch.manual_seed(0)
    model = Gated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step(model, optimizer, 2)
    folder = save(tmp_path, 2, model, optimizer)
    fresh = Gated()
    new = torch.optim.AdamW(fresh.parameters(), lr=0.1, fused=True)
    load_checkpoint(folder, fresh, new)
    fresh.calls = model.calls
    step(model, optimizer, 3)
    step(fresh, new, 3)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, fresh.state_dict()[name]), name


def test_moments_of_another_model_are_refused(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step(model, optimizer, 1)
    weights, moments = gather_weights(model), gather_moments(model, optimizer)
    strange = save_checkpoint(tmp_path, 1, weights, moments | {"other/step": torch.zeros(())}, {})
    with pytest.raises(ValueError, match="does not fit the model: other/step"):
        load_checkpoint(strange, model, optimizer)
    moments.pop("weight/exp_avg")
    partial = save_checkpoint(tmp_path, 2, weights, moments, {})
    with pytest.raises(ValueError, match="does not fit the model: weight/exp_avg"):
        load_checkpoint(partial, model, optimizer)


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    folder = save(tmp_path, 3, *make())
    assert sorted(path.suffix for path in folder.iterdir()) == [".json"] * 2 + [".safetensors"] * 2


def test_the_last_two_checkpoints_stay(tmp_path):
    for number in (5, 10, 1_000_000, 15):
        save(tmp_path, number, *make())
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "checkpoint-000015",
        "checkpoint-1000000",
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["truncated", "one bit", "missing"])
def test_a_damaged_file_is_named_and_refused(tmp_path, name, damage):
    folder = save(tmp_path, 3, *make())
    content = (folder / name).read_bytes()
    if damage == "truncated":
        (folder / name).write_bytes(content[:-1])
    elif damage == "one bit":
        (folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        (folder / name).unlink()
    with pytest.raises(ValueError, match=f"checkpoint-000003 is damaged: {name}"):
        read_state(folder)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"state.json": 1}'])
def test_a_damaged_manifest_is_named_and_refused(tmp_path, content):
    folder = save(tmp_path, 3, *make())
    (folder / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"checkpoint-000003 is damaged: manifest\.json"):
        read_state(folder)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    folder = save(tmp_path, 3, *make())
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises((ValueError, RuntimeError), match=r"does not fit|size mismatch|0\.weight"):
        load_checkpoint(folder, other, torch.optim.AdamW(other.parameters(), lr=0.1))


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path, monkeypatch):
    model, optimizer = make()
    save(tmp_path, 3, model, optimizer)
    write = checkpoint.save_tensors

    def fill_up(tensors, path):
        if path.name == "optimizer.safetensors":
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(checkpoint, "save_tensors", fill_up)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 4, model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000003"]
    assert read_state(tmp_path / "checkpoint-000003") == {"step": 3}


LIMITED = """
import resource, signal, sys, torch
from pathlib import Path
from polyscale.training.checkpoint import save_checkpoint
output = Path(sys.argv[1])
save_checkpoint(output, 1, {"a": torch.zeros(10)}, {}, {})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_checkpoint(output, 2, {"a": torch.zeros(10_000)}, {}, {})
except OSError as error:
    print("refused:", error)
"""


def test_a_file_the_system_refuses_to_write_is_an_oserror_that_names_it(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "refused: model.safetensors cannot be written" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001"]


def test_what_a_killed_process_left_half_written_is_no_checkpoint(tmp_path):
    (tmp_path / ".checkpoint-000009.partial").mkdir()
    (tmp_path / ".checkpoint-000009.partial" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "checkpoint-notes").mkdir()
    assert list_checkpoints(tmp_path) == []
    folder = save(tmp_path, 9, *make())
    assert isinstance(json.loads((Path(folder) / "manifest.json").read_text()), dict)
