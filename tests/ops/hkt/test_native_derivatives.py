"""Derivatives beyond the kernel's own: of gradients, in forward mode, under torch.func."""

import pytest
import torch
from torch.autograd import forward_ad

import polyscale as ps
from polyscale.ops.downsample.native.op import _differentiable, downsample_native
from polyscale.ops.hkt.api import AttentionMask, attend_projected
from polyscale.ops.hkt.native.library import LIBRARY
from polyscale.ops.layout import PackedLayout
from tests.ops.hkt.cases import error, in_double, random_case

NO_KERNEL = LIBRARY.why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")

TOLERANCE = 1e-5


def orders(function, inputs, count=2):
    """Gradients of a function of the outputs, of a function of those, and so on."""
    found = []
    made = [function(*inputs)]
    for _ in range(count):
        loss = sum(x.sin().sum() for x in made)
        made = torch.autograd.grad(loss, inputs, create_graph=True)
        found += made
    return found


def assert_close(found, expected):
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert error(one, other) <= TOLERANCE, number


MASK = torch.arange(21) >= torch.tensor([[21], [5]])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"key_padding_mask": MASK},
        {"cu_seqlens": torch.tensor([0, 8, 11, 21])},
    ],
    ids=["causal", "all", "padded", "packed"],
)
def test_gradients_of_gradients_are_those_of_the_reference(options):
    packed = {"batch": 1, "sequences": [8, 3, 10]} if "cu_seqlens" in options else {}
    case = random_case(21, 3, dtype=torch.float32, **packed)
    found, expected = (
        orders(
            lambda *x, impl=impl: ps.hkt_attention(x[:3], x[3:6], *x[6:], impl=impl, **options),
            [*queries, *keys, value, weights],
            3,
        )
        for impl, (queries, keys, value, weights) in (
            ("native", case),
            ("reference", in_double(case)),
        )
    )
    assert_close(found, expected)


def test_an_input_that_stands_at_two_places_gets_both_second_derivatives():
    x, coarse = (torch.randn(1, 2, n, 4, requires_grad=True) for n in (12, 6))
    weights = torch.tensor([0.6, 0.4])
    exact = [x.detach().double().requires_grad_(), coarse.detach().double().requires_grad_()]
    found, expected = (
        orders(
            lambda x, coarse, impl=impl: ps.hkt_attention(
                [x, coarse], [x * 2, coarse], x, weights.to(x.dtype), impl=impl
            ),
            given,
        )
        for impl, given in (("native", [x, coarse]), ("reference", exact))
    )
    assert_close(found, expected)


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_the_gradients_of_projections(levels, packed):
    sizes, layout = [21, 11, 6][:levels], None
    if packed:
        layout = PackedLayout.from_cu_seqlens(torch.tensor([0, 8, 21]), levels)
        sizes = [bounds[-1] for bounds in layout.boundaries]
    inputs = [
        torch.randn(1, sizes[0], 24),
        torch.randn(1, sum(sizes[1:]), 16),
        torch.rand(2, levels),
    ]
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    if levels == 1:
        inputs, exact = inputs[::2], exact[::2]

    def attend(*given, impl):
        coarse = given[1] if levels > 1 else None
        mask = AttentionMask(causal=True, packed=layout)
        return attend_projected(given[0], coarse, sizes[1:], given[-1], mask, impl=impl)

    found = orders(lambda *x: attend(*x, impl="native"), inputs)
    assert_close(found, orders(lambda *x: attend(*x, impl="reference"), exact))


@pytest.mark.parametrize("width", [1, 2, 3])
def test_gradients_of_the_gradients_of_downsampling(width):
    inputs = [
        torch.randn(2, 11, 4, requires_grad=True),
        torch.randn(2, width, 4, requires_grad=True),
    ]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(_differentiable, exact)
    assert torch.autograd.gradgradcheck(_differentiable, exact)
    found, expected = (
        orders(lambda *x, f=function: torch.cat(f(*x), dim=1), given)
        for function, given in (
            (downsample_native, inputs),
            (_differentiable, exact),
        )
    )
    assert_close(found, expected)


def test_a_layer_has_second_derivatives():
    torch.manual_seed(0)
    layer = ps.HKTAttention(16, 2, bias=False)
    exact = ps.HKTAttention(16, 2, bias=False, impl="reference").double()
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 40, 16)
    found, expected = (
        orders(lambda x, *_, f=one: f(x), [x.to(dtype).requires_grad_(), *one.parameters()])
        for one, dtype in ((layer, torch.float32), (exact, torch.float64))
    )
    assert_close(found, expected)


def of_weights(case):
    """The attention as a function of the level weights alone."""
    queries, keys, value, _ = case
    tensors = [x.detach() for x in queries], [x.detach() for x in keys], value.detach()
    return lambda weights, impl="auto": ps.hkt_attention(*tensors, weights, impl=impl)


def test_a_tangent_of_the_level_weights_reaches_the_output():
    case = random_case(21, 3, dtype=torch.float32)
    attend, weights, tangent = of_weights(case), case[3].detach(), torch.randn(2, 3)
    exact = of_weights(in_double(case))
    _, expected = torch.func.jvp(
        lambda x: exact(x, "reference"), (weights.double(),), (tangent.double(),)
    )
    assert error(torch.func.jvp(attend, (weights,), (tangent,))[1], expected) <= TOLERANCE
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weights, tangent)
        assert error(forward_ad.unpack_dual(attend(dual)).tangent, expected) <= TOLERANCE
        with pytest.raises(ValueError, match=r"native.*forward mode"):
            attend(dual, "native")


def test_tangents_reach_the_output_of_compiled_code():
    case = random_case(9, 2, dtype=torch.float32)
    attend, weights, tangent = of_weights(case), case[3].detach(), torch.randn(2, 2)
    _, expected = torch.func.jvp(attend, (weights,), (tangent,))
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch.func.jvp(attend, (x,), (tangent,))[1], backend="eager", fullgraph=True
    )
    assert error(compiled(weights), expected.double()) <= TOLERANCE
    compiled = torch.compile(attend, backend="eager")
    compiled(weights)  # a graph without tangents must not serve those with
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(compiled(forward_ad.make_dual(weights, tangent))).tangent
        assert error(found, expected.double()) <= TOLERANCE


def test_tangents_within_a_backward_pass_are_refused():
    case = random_case(9, 2, dtype=torch.float32)
    output = ps.hkt_attention(*case, impl="native")
    _, coarse = downsample_native(torch.randn(1, 8, 4), torch.rand(1, 2, 4).requires_grad_())
    with forward_ad.dual_level():
        for made, one in ((output, case[2]), (coarse, None)):
            ones = forward_ad.make_dual(torch.ones_like(made), torch.ones_like(made))
            with pytest.raises(NotImplementedError, match="impl='reference'"):
                torch.autograd.grad(made, one, ones) if one is not None else made.backward(ones)


def test_torch_func_takes_every_order():
    case = random_case(9, 2, dtype=torch.float32)
    attend, weights = of_weights(case), case[3].detach()

    def loss(weights):
        return attend(weights).sin().sum()

    expected = torch.autograd.functional.hessian(loss, weights).double()  # by the native kernel
    assert error(torch.func.hessian(loss)(weights), expected) <= TOLERANCE
    twice = torch.func.jacrev(torch.func.grad(loss))(weights)
    assert error(twice, expected) <= TOLERANCE
