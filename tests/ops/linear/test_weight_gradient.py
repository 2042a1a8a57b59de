"""The gradient of a projection's weight by the native kernel."""

import pytest
import torch

from polyscale.ops.linear.native import op
from polyscale.ops.linear.native.library import LIBRARY
from polyscale.ops.linear.native.op import weight_gradient_native
from polyscale.ops.linear.weight_gradient import WEIGHT_GRADIENT
from tests.ops.hkt.cases import error

NO_KERNEL = LIBRARY.why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")

VALUES = 2e-6
every_variant = pytest.mark.parametrize("instructions", [None, "portable", "avx2"])


def weight_gradient_case(rows, width, outputs):
    """Of one or two inputs, with a mean that is not zero, so that sums grow with the rows."""
    generator = torch.Generator().manual_seed(width)
    inputs = [torch.randn(count, width, generator=generator) + 1.0 for count in rows]
    pairs = zip(rows, outputs, strict=True)
    return inputs, [torch.randn(count, made, generator=generator) + 0.5 for count, made in pairs]


@every_variant
@pytest.mark.parametrize(
    ("rows", "width", "outputs"),
    [
        ((1,), 1, (1,)),
        ((193,), 5, (7,)),
        ((385,), 64, (24,)),
        ((500, 375), 96, (150, 100)),
        ((64, 1), 130, (13, 13)),
        ((3000, 2250), 256, (768, 512)),
        ((200, 0), 700, (40, 3)),  # sums of so many channels stay in the cache for few outputs
        ((0,), 8, (12,)),
    ],
)
def test_the_gradient_of_a_weight_is_the_sum_over_all_inputs(
    rows, width, outputs, instructions, monkeypatch
):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    inputs, grads = weight_gradient_case(rows, width, outputs)
    weight, bias = torch.zeros(outputs[0], width).double(), torch.zeros(outputs[0]).double()
    for x, grad in zip(inputs, grads, strict=True):
        weight[: grad.shape[1]] += grad.double().t() @ x.double()
        bias[: grad.shape[1]] += grad.double().sum(0)
    found_weight, found_bias = weight_gradient_native(inputs, grads)
    assert error(found_weight, weight) <= VALUES
    assert error(found_bias, bias) <= VALUES


@pytest.mark.usefixtures("_one_thread_afterwards")
def test_several_threads_sum_the_gradient_of_a_weight_like_one():
    case = weight_gradient_case((400, 300), 72, (100, 60))
    results = []
    for threads in (1, 2, 3, 100):
        torch.set_num_threads(threads)
        results.append(weight_gradient_native(*case))
    for weight, bias in results[1:]:
        assert torch.equal(weight, results[0][0])
        assert torch.equal(bias, results[0][1])


def test_what_is_not_a_number_stays_in_its_channel_of_the_gradient_of_a_weight():
    inputs, grads = weight_gradient_case((200,), 20, (30,))
    inputs[0][150, 3], grads[0][7, 5] = float("nan"), float("inf")
    weight, bias = weight_gradient_native(inputs, grads)
    finite = torch.isfinite(weight)
    assert not finite[:, 3].any()
    assert not finite[5].any()
    assert finite.sum() == 29 * 19
    assert torch.isinf(bias[5])
    assert torch.isfinite(bias).sum() == 29


def test_torch_finds_the_gradient_of_a_weight_well_made():
    inputs, grads = weight_gradient_case((12, 6), 5, (7, 4))
    torch.library.opcheck(op._weight_gradient, (inputs, grads))
    across = [x.t().contiguous().t() for x in inputs]  # rows that are not contiguous
    for one, other in zip(
        weight_gradient_native(across, grads),
        weight_gradient_native(inputs, grads),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_the_kernel_has_no_gradients_and_says_so():
    case = weight_gradient_case((12, 6), 5, (7, 4))
    assert "no gradients of its own" in WEIGHT_GRADIENT.why_not("native", *case)
    with torch.no_grad():
        assert WEIGHT_GRADIENT.choose("auto", *case).name == "native"
        double = [[x.double() for x in part] for part in case]
        assert "float64" in WEIGHT_GRADIENT.why_not("native", *double)


@pytest.fixture
def _one_thread_afterwards():
    yield
    torch.set_num_threads(1)
