"""Finite in, finite out, up to the largest float; what is not a number is so everywhere."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyscale as ps
from polyscale.ops.hkt.decode import hkt_decode
from polyscale.ops.hkt.native.library import LIBRARY
from tests.ops.hkt.cases import (
    VALUES,
    assert_native_equals_the_reference,
    error,
    gradients,
    in_double,
    random_case,
)

NO_KERNEL = LIBRARY.why_not_built()
needs_kernel = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")
every_impl = pytest.mark.parametrize(
    "impl", ["reference", "sdpa", pytest.param("native", marks=needs_kernel)]
)
every_variant = pytest.mark.parametrize("instructions", [None, "portable", "avx2"])
LARGEST = torch.finfo(torch.float32).max


def long_case(size, length=300, dtype=torch.float32, **options):
    """Queries and keys `size` times as long as normal ones."""
    queries, keys, value, weights = random_case(length, 3, dtype=dtype, **options)
    with torch.no_grad():
        for x in (*queries, *keys):
            x *= size
    return queries, keys, value, weights


def assert_finite(output, case):
    assert torch.isfinite(output).all()
    for gradient in gradients(output, case):
        assert torch.isfinite(gradient).all()


@every_impl
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1e3, 3e4, 1e6, 1e12, 1e18])  # scores up to 1e37
def test_finite_scores_give_finite_values_and_gradients(size, causal, impl):
    case = long_case(size)
    assert_finite(ps.hkt_attention(*case, causal=causal, impl=impl), case)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [2e4, 1e10, 1e18])  # scores of 1e9, 1e20 and 1e37
def test_compiled_gradients_of_huge_scores_are_those_of_the_reference(size, causal):
    """Where the fused kernel behind sdpa gives NaN: heads 32 wide on more tokens than a block."""
    case = long_case(size, head_dim=32, value_dim=32)

    def attend(queries, keys, value, weights):
        return ps.hkt_attention(queries, keys, value, weights, causal=causal, impl="sdpa")

    exact = gradients(ps.hkt_attention(*case, causal=causal, impl="reference"), case)
    for one, other in zip(gradients(compiled(attend)(*case), case), exact, strict=True):
        assert error(one, other, 1.0) <= 1e-6


@pytest.mark.parametrize("size", [1, 1e10])
@pytest.mark.parametrize("options", ["padding", "bias", "padding and bias"])
def test_compiled_gradients_with_masks_are_those_of_the_reference(options, size):
    case = long_case(size, head_dim=32, value_dim=32)
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(2, 9, generator=generator).requires_grad_() for _ in range(3)]
    padding = torch.zeros(2, 300, dtype=torch.bool)
    padding[1, 250:] = True
    masks = {
        "key_padding_mask": padding if "padding" in options else None,
        "relative_bias": tables if "bias" in options else None,
    }

    def attend(impl):
        return lambda *given: ps.hkt_attention(*given, causal=False, impl=impl, **masks)

    inputs = [*case[0], *case[1], *case[2:], *(tables if "bias" in options else [])]
    exact = torch.autograd.grad(attend("reference")(*case).square().sum(), inputs)
    found = torch.autograd.grad(compiled(attend("sdpa"))(*case).square().sum(), inputs)
    for one, other in zip(found, exact, strict=True):
        assert error(one, other, 1.0) <= 1e-5


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", [compiled, lambda f: torch.func.vmap(f)])
def test_functional_gradients_of_huge_scores_are_finite(transform):
    queries, keys, value, weights = long_case(1e10, head_dim=32, value_dim=32)
    fixed = [x.detach() for x in (keys[0], value, weights[:, :1])]

    def loss(query):
        key, value, weights = fixed
        return ps.hkt_attention([query], [key], value, weights, impl="sdpa").square().sum()

    query = queries[0].detach()
    if transform is not compiled:
        query = query.expand(2, *query.shape)
    assert torch.isfinite(transform(torch.func.grad(loss))(query)).all()


def test_the_plain_kernel_behind_a_trace_may_be_differentiated_twice():
    """Tensors without numbers take the way of accelerators, where a user may choose the kernel."""
    queries, keys, value, weights = random_case(6, 2, dtype=torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        case = [[fake.from_tensor(x) for x in level] for level in (queries, keys)]
        case += [fake.from_tensor(x) for x in (value, weights)]
        with sdpa_kernel(SDPBackend.MATH):
            output = ps.hkt_attention(*case, impl="sdpa")
        (gradient,) = torch.autograd.grad(output.sum(), case[0][0], create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), case[1][0])
    assert second.shape == keys[0].shape


@every_impl
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, -1)])
def test_scores_of_the_largest_float(signs, impl):
    query = torch.tensor([LARGEST, LARGEST, -LARGEST, 0.0])[None, None, :, None].requires_grad_()
    key = torch.tensor([*signs, 0.0, 1.0])[None, None, :, None].requires_grad_()
    case = (
        [query],
        [key],
        torch.randn(1, 1, 4, 2).requires_grad_(),
        torch.ones(1, 1).requires_grad_(),
    )
    for causal in (True, False):
        output = ps.hkt_attention(*case, causal=causal, scale=1.0, impl=impl)
        assert torch.isfinite(output).all()
        # Gradients of queries and values alone: those of keys are as large as the queries.
        for gradient in torch.autograd.grad(output.sum(), [query, case[2]]):
            assert torch.isfinite(gradient).all()


@every_impl
@pytest.mark.parametrize("grad", [False, True])
def test_products_may_overflow_where_scores_do_not(grad, impl):
    """At the usual scale of 1/8 a product of 8 times the largest score is no float."""
    query, key = torch.zeros(2, 1, 1, 70, 64)
    query[..., 0], key[..., 0] = (8e38) ** 0.5, torch.linspace(-1, 1, 70) * 8e38**0.5
    case = [x.requires_grad_(grad) for x in (query, key, torch.randn(1, 1, 70, 3))]
    output = ps.hkt_attention([case[0]], [case[1]], case[2], torch.ones(1, 1), impl=impl)
    assert torch.allclose(output, case[2])  # every query sees its own key as the greatest
    if grad:
        assert all(x.isfinite().all() for x in torch.autograd.grad(output.sum(), case))


@needs_kernel
@every_variant
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [3e4, 1e6])
def test_scores_beyond_a_thousand_million_are_as_exact_as_any(
    size, causal, instructions, monkeypatch
):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    case = long_case(size)
    assert_native_equals_the_reference(case, causal=causal)


@needs_kernel
@pytest.mark.parametrize("instructions", [None, "portable", "avx2"])
def test_huge_scores_that_differ_little_share_the_attention(instructions, monkeypatch):
    """All scores of a row are near 1e10, where floats are 1,024 apart, and differ by a few."""
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    queries, keys, value, weights = random_case(600, 1, head_dim=2, dtype=torch.float32)
    with torch.no_grad():
        queries[0][..., 0] = keys[0][..., 0] = 1e5
    assert_native_equals_the_reference((queries, keys, value, weights), scale=1.0)
    assert_native_equals_the_reference((queries, keys, value, weights), causal=False, scale=1.0)


@every_impl
@pytest.mark.parametrize("size", [1e3, 1e6, 1e18])
def test_finite_scores_of_bfloat16(size, impl):
    case = long_case(size, dtype=torch.bfloat16)
    output = ps.hkt_attention(*case, impl=impl)
    assert_finite(output, case)


@needs_kernel
@every_variant
@pytest.mark.parametrize("offset", [0.0, 1e5])
def test_decoding_with_scores_of_any_size(offset, instructions, monkeypatch):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    queries, keys, value, weights = random_case(1300, 1, head_dim=2, dtype=torch.float32)
    with torch.no_grad():
        if offset:
            queries[0][..., 0] = keys[0][..., 0] = offset
        else:
            queries[0].mul_(1e6)
    case = [queries[0].detach()], [keys[0].detach()], value.detach(), weights.detach()
    exact = ps.hkt_attention(*in_double(case), impl="reference", scale=1.0)
    for at in (0, 600, 1299):
        place = torch.full((2, 1), at)
        output = hkt_decode(
            [case[0][0][:, :, at : at + 1]], *case[1:], position=place, scale=1.0, impl="native"
        )
        assert error(output, exact[:, :, at : at + 1]) <= VALUES


@every_impl
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_may_be_zero_or_negative(scale, causal, impl):
    case = random_case(20, 3, dtype=torch.float32)
    output = ps.hkt_attention(*case, causal=causal, scale=scale, impl=impl)
    exact_case = in_double(case)
    exact = ps.hkt_attention(*exact_case, causal=causal, scale=scale, impl="reference")
    assert error(output, exact) <= 1e-5
    for one, other in zip(gradients(output, case), gradients(exact, exact_case), strict=True):
        assert error(one, other, 1.0) <= 1e-5


@every_impl
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_entries_that_no_token_uses_reach_no_gradient(bad, causal, impl):
    queries, keys, *_ = case = random_case(9, 3, dtype=torch.float32)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        for levels in (queries, keys):
            levels[1][1, :, 2:] = levels[2][1, :, 1:] = bad
    output = ps.hkt_attention(*case, causal=causal, key_padding_mask=padding, impl=impl)
    assert_finite(output, case)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("level", [0, 1])
@every_impl
def test_a_query_that_is_not_finite_makes_its_own_tokens_nan(impl, level, bad, causal):
    queries, keys, value, weights = random_case(9, 3, dtype=torch.float32)
    with torch.no_grad():
        queries[level][0, 0, 1, 0] = bad
    output = ps.hkt_attention(queries, keys, value, weights, causal=causal, impl=impl)
    expected = torch.zeros(output.shape, dtype=torch.bool)
    expected[0, 0, 1 << level : 2 << level] = True
    assert torch.equal(output.isnan(), expected)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@every_impl
def test_a_new_token_whose_query_is_not_finite_is_nan(impl, bad):
    queries, keys, value, weights = random_case(9, 1, dtype=torch.float32)
    query = queries[0].detach()[:, :, :1].clone()
    query[0, 0, 0, 0] = bad
    output = hkt_decode(
        [query],
        [keys[0].detach()],
        value.detach(),
        weights.detach(),
        position=torch.full((2, 1), 8),
        scale=0.5,
        impl=impl,
    )
    assert output[0, 0].isnan().all()
    assert torch.isfinite(output[0, 1]).all()
    assert torch.isfinite(output[1]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_impl
def test_autocast_leaves_the_dtype_of_the_value(impl, dtype):
    case = random_case(9, 3, dtype=dtype)
    plain = ps.hkt_attention(*case, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ps.hkt_attention(*case, impl=impl)
    assert output.dtype == plain.dtype == dtype
    assert torch.equal(output, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_impl
def test_an_empty_batch_may_have_channels_with_strides(impl, dtype):
    def strided(length):
        return torch.randn(0, 2, 4, length, dtype=dtype).transpose(2, 3).requires_grad_()

    fine, coarse, weights = strided(9), strided(5), torch.ones(2) / 2
    output = ps.hkt_attention([fine, coarse], [fine, coarse], fine, weights, impl=impl)
    assert output.shape == (0, 2, 9, 4)
    output.sum().backward()
    assert fine.grad.shape == fine.shape


@pytest.mark.parametrize("impl", ["auto", "reference", "sdpa"])
def test_fake_and_meta_tensors_give_shapes(impl):
    def shape(device):
        fine = torch.zeros(2, 2, 9, 4, device=device, requires_grad=True)
        levels = [fine, fine[:, :, :5]]
        weights = torch.ones(2, device=device) / 2
        padding = torch.zeros(2, 9, dtype=torch.bool, device=device)
        plain = ps.hkt_attention(levels, levels, fine, weights, impl=impl)
        padded = ps.hkt_attention(
            levels, levels, fine, weights, key_padding_mask=padding, impl=impl
        )
        assert plain.device.type == device
        return plain.shape, padded.shape

    assert shape("meta") == ((2, 2, 9, 4), (2, 2, 9, 4))
    with FakeTensorMode():
        assert shape("cpu") == ((2, 2, 9, 4), (2, 2, 9, 4))
