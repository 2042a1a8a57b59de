"""Projections by oneDNN, and by torch where oneDNN cannot or must not run."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from polyscale.ops.linear import onednn
from polyscale.ops.linear.api import LINEAR, linear, linear_together
from polyscale.ops.linear.weight_gradient import WEIGHT_GRADIENT

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
    apply = onednn._Linear.apply
    monkeypatch.setattr(onednn._Linear, "apply", lambda *x: seen.append(1) or apply(*x))
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


def two_inputs():
    x, weight, bias = inputs()
    return [x, torch.randn(3, 30, 24), weight, bias]


def together(x, other, weight, bias):
    return linear_together(x, other, weight, bias, 16)


def apart(x, other, weight, bias):
    return F.linear(x, weight, bias), F.linear(other, weight[:16], bias[:16])


@needs_onednn
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("kernel", [True, False])
def test_two_inputs_of_one_weight_are_those_apart(used, kernel, runs, monkeypatch):
    if not kernel:
        without = replace(WEIGHT_GRADIENT._by_name["native"], why_unavailable=lambda: "not now")
        monkeypatch.setitem(WEIGHT_GRADIENT._by_name, "native", without)
    tensors = two_inputs()
    cotangents = [torch.randn(3, 50, 40), torch.randn(3, 30, 16)]
    found, expected = [], []
    for results, function, dtype in (
        (found, together, torch.float32),
        (expected, apart, torch.float64),
    ):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        outputs = function(*leaves)
        results += outputs
        made = [outputs[number] for number in used]
        given = [cotangents[number].to(dtype) for number in used]
        gradients = torch.autograd.grad(made, leaves, given, materialize_grads=True)
        results += [gradient for gradient in gradients if gradient.any()]
    assert_close(found, expected)
    assert runs


@needs_onednn
def test_inputs_need_not_be_contiguous(runs):
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


def summed(outputs):
    return sum(output.sin().sum() for output in outputs)


@needs_onednn
@pytest.mark.parametrize(
    ("ours", "torchs", "tensors"),
    [
        (lambda *x: [linear(*x)], lambda *x: [F.linear(*x)], inputs()),
        (together, apart, two_inputs()),
    ],
)
def test_gradients_of_gradients(ours, torchs, tensors, runs):
    leaves = [x.clone().requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    found, expected = (
        torch.autograd.grad(
            sum(
                (gradient**2).sum()
                for gradient in torch.autograd.grad(
                    summed(function(*given)), given, create_graph=True
                )
            ),
            given,
        )
        for function, given in ((ours, leaves), (torchs, exact))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3 * other.abs().max())
    assert runs


def test_what_watches_or_transforms_a_product_sees_torchs_own(runs):
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
def test_a_product_asked_for_by_name_runs_or_says_why_not(runs):
    x, weight, bias = inputs()
    linear(x, weight, bias, impl="reference")
    assert not runs
    linear(x, weight, bias, impl="native")
    assert runs
    with pytest.raises(ValueError, match="impl='native' cannot run linear: it takes float32, got"):
        linear(x.double(), weight.double(), bias.double(), impl="native")
    with torch.backends.mkldnn.flags(enabled=False):
        assert "switched off" in LINEAR.why_not("native", x, None, weight, bias, 0)
