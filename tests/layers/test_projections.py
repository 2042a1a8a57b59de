from dataclasses import replace

import pytest
import torch
from torch import nn

import polyscale as ps
from polyscale.layers.hkt_levels import project, project_together
from polyscale.ops.linear import onednn
from polyscale.ops.linear.weight_gradient import WEIGHT_GRADIENT

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


@pytest.fixture
def runs(monkeypatch):
    """How often oneDNN was asked."""
    seen = []
    apply = onednn._Linear.apply
    monkeypatch.setattr(onednn._Linear, "apply", lambda *x: seen.append(1) or apply(*x))
    return seen


@needs_onednn
def test_projections_side_by_side_are_those_one_by_one(runs):
    torch.manual_seed(0)
    parts = [nn.Linear(24, 24), nn.Linear(24, 16)]
    for rows in (10, 200):
        x = torch.randn(2, rows, 24)
        expected = torch.cat([part(x) for part in parts], dim=-1)
        torch.testing.assert_close(project(x, parts), expected)
    assert len(runs) == 1  # few rows are projected one by one


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [10, 200])
def test_another_input_takes_the_first_projections(rows, bias, impl, runs):
    torch.manual_seed(0)
    parts = [nn.Linear(24, 24, bias), nn.Linear(24, 16, bias), nn.Linear(24, 8, bias)]
    x, other = torch.randn(2, rows, 24), torch.randn(2, rows // 2, 24)
    found = project_together(x, other, parts, 2, impl)
    torch.testing.assert_close(found[0], torch.cat([part(x) for part in parts], dim=-1))
    torch.testing.assert_close(found[1], torch.cat([part(other) for part in parts[:2]], dim=-1))
    assert impl == "auto" or not runs


@needs_onednn
def test_the_gradients_of_a_layers_projections_are_one_pass_of_the_kernel(monkeypatch):
    native = WEIGHT_GRADIENT._by_name["native"]
    if native.why_unprepared() is not None:
        pytest.skip("no native kernel")
    seen = []

    def note(inputs, grads):
        seen.append(len(inputs))
        return native.run(inputs, grads)

    monkeypatch.setitem(WEIGHT_GRADIENT._by_name, "native", replace(native, run=note))
    for impl, levels in (("auto", 3), ("auto", 1), ("sdpa", 3)):
        layer = ps.HKTAttention(16, 2, levels, impl=impl)
        layer(torch.randn(1, 70, 16)).sum().backward()
    assert seen == [2, 1]  # inputs: the levels above 0 are one; by another name it does not run


def test_one_level_may_have_projections_of_its_own():
    layer = ps.HKTAttention(16, 2, levels=1, shared_projections=False)
    assert layer(torch.randn(1, 70, 16)).shape == (1, 70, 16)
