import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polyscale.layers import projections
from polyscale.layers.projections import linear, project

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN"
)


def inputs(rows=(3, 50), width=24, out=40, bias=True):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, width, generator=generator)
    weight = torch.randn(out, width, generator=generator)
    return [x, weight, torch.randn(out, generator=generator) if bias else None]


def with_gradients(function, tensors, cotangent, dtype):
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in tensors]
    output = function(*leaves)
    given = [x for x in leaves if x is not None]
    return [output, *torch.autograd.grad(output, given, cotangent.to(dtype))]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < 2e-6


@pytest.fixture
def runs(monkeypatch):
    """How often oneDNN was asked."""
    seen = []
    apply = projections._Linear.apply
    monkeypatch.setattr(projections._Linear, "apply", lambda *x: seen.append(1) or apply(*x))
    return seen


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(3, 50), (1, 65), (129,), (2, 5, 7)])
def test_a_product_by_onednn_is_the_product_with_its_gradients(rows, bias, runs):
    tensors = inputs(rows, bias=bias)
    cotangent = torch.randn(*rows, 40)
    found = with_gradients(linear, tensors, cotangent, torch.float32)
    assert_close(found, with_gradients(F.linear, tensors, cotangent, torch.float64))
    assert len(runs) == 2  # forward, and the gradient of the input


@needs_onednn
def test_inputs_need_not_lie_side_by_side(runs):
    x, weight, bias = inputs()
    across = x.transpose(0, 1).contiguous().transpose(0, 1)
    cotangent = torch.randn(40, 50, 3).permute(2, 1, 0)
    found = with_gradients(linear, [across, weight.t().contiguous().t(), bias], cotangent, x.dtype)
    expected = with_gradients(F.linear, [x, weight, bias], cotangent, torch.float64)
    assert_close(found, expected)
    assert runs


@needs_onednn
def test_only_the_gradients_asked_for_are_made(runs):
    x, weight, bias = inputs()
    weight.requires_grad_()
    linear(x, weight, bias).sum().backward()
    assert_close([weight.grad], [x.double().sum((0, 1)).expand(40, -1)])
    assert len(runs) == 1


@needs_onednn
def test_gradients_of_gradients(runs):
    leaves = [x.requires_grad_() for x in inputs()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found, expected = (
        torch.autograd.grad(
            sum(
                (gradient**2).sum()
                for gradient in torch.autograd.grad(
                    function(*tensors).sin().sum(), tensors, create_graph=True
                )
            ),
            tensors,
        )
        for function, tensors in ((linear, leaves), (F.linear, exact))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3 * other.abs().max())
    assert runs


def test_whoever_looks_on_sees_torchs_own_product(runs):
    x, weight, bias = inputs()
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 150 * 24 * 40
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    torch.testing.assert_close(
        torch.func.vmap(linear, (0, None, None))(x, weight, bias), F.linear(x, weight, bias)
    )
    _, tangent = torch.func.jvp(lambda x: linear(x, weight, bias), (x,), (x,))
    torch.testing.assert_close(tangent, F.linear(x, weight))
    assert linear(x.double(), weight.double(), bias.double()).dtype == torch.float64
    assert linear(x.to("meta"), weight.to("meta"), None).shape == (3, 50, 40)
    with torch.backends.mkldnn.flags(enabled=False):
        linear(x, weight, bias)
    assert not runs


def test_a_compiled_product_is_one_graph(runs):
    tensors = inputs()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for rows in (50, 70, 90):  # sizes that differ become symbols
        tensors[0] = torch.randn(3, rows, 24)
        torch.testing.assert_close(compiled(*tensors), F.linear(*tensors))
    assert not runs


@needs_onednn
def test_projections_side_by_side_are_those_one_by_one(runs):
    torch.manual_seed(0)
    parts = [nn.Linear(24, 24), nn.Linear(24, 16)]
    for rows in (10, 200):
        x = torch.randn(2, rows, 24)
        expected = torch.cat([part(x) for part in parts], dim=-1)
        torch.testing.assert_close(project(x, parts), expected)
    assert len(runs) == 1  # few rows are projected one by one
