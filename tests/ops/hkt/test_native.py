"""The native kernel in float32 and bfloat16 against the reference in float64."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import polyscale as ps
from polyscale.ops.hkt.limits import MAX_LEVELS
from polyscale.ops.hkt.native import library as hkt_library
from polyscale.ops.hkt.native.library import LIBRARY
from polyscale.ops.hkt.native.op import _backward, _forward
from polyscale.ops.native.entry import TensorView
from tests.ops.hkt.cases import (
    GRADIENTS,
    LENGTHS,
    assert_native_equals_the_reference,
    error,
    gradients,
    in_double,
    random_case,
)

NO_KERNEL = LIBRARY.why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")


def side_padding(length, side):
    mask = torch.zeros(2, length, dtype=torch.bool)
    for row, amount in enumerate((length // 3, length - 1)):
        if amount:
            mask[row, slice(amount) if side == "left" else slice(-amount, None)] = True
    return mask


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [*LENGTHS, 96, 97])
def test_values_and_all_gradients_are_those_of_the_reference(length, levels, causal):
    assert_native_equals_the_reference(
        random_case(length, levels, dtype=torch.float32), causal=causal
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_padding_on_either_side(length, levels, side, causal):
    assert_native_equals_the_reference(
        random_case(length, levels, dtype=torch.float32),
        causal=causal,
        key_padding_mask=side_padding(length, side),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("sequences", [[1], [3, 1, 2], [8, 7, 64, 1, 20], [100, 157]])
def test_packed_sequences(sequences, levels, causal):
    assert_native_equals_the_reference(
        random_case(sum(sequences), levels, batch=1, sequences=sequences, dtype=torch.float32),
        causal=causal,
        cu_seqlens=torch.tensor([0, *sequences]).cumsum(0),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(1, 1), (7, 64), (8, 8), (16, 24), (32, 5), (64, 64), (256, 256)]
)
def test_any_head_dimension_up_to_256(head_dim, value_dim, causal):
    case = random_case(141, 3, batch=1, head_dim=head_dim, value_dim=value_dim, dtype=torch.float32)
    assert_native_equals_the_reference(case, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_many_blocks_of_queries_and_keys(causal):
    case = random_case(1001, 3, batch=1, heads=1, head_dim=32, value_dim=32, dtype=torch.float32)
    assert_native_equals_the_reference(case, causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("levels", [1, 3, 5])
@pytest.mark.parametrize("length", [1, 5, 64, 257])
@pytest.mark.parametrize("instructions", ["portable", "avx2"])  # the best are run everywhere else
def test_lesser_instructions_give_the_same(instructions, length, levels, causal, monkeypatch):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    case = random_case(length, levels, head_dim=40, value_dim=24, dtype=torch.float32)
    assert_native_equals_the_reference(case, causal=causal)


def test_a_row_of_nothing_but_padding_gives_zeros_and_no_gradient():
    case = random_case(6, 3, dtype=torch.float32)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1] = True
    output = ps.hkt_attention(*case, key_padding_mask=mask, impl="native")
    assert torch.count_nonzero(output[1]) == 0
    for gradient in gradients(output, case)[:-1]:
        assert torch.count_nonzero(gradient[1]) == 0
        assert torch.isfinite(gradient).all()


def test_nothing_leaks_from_padding_even_if_it_is_not_finite():
    case = random_case(100, 2, dtype=torch.float32)
    mask = torch.zeros(2, 100, dtype=torch.bool)
    mask[:, -2:] = True
    expected = ps.hkt_attention(*case, key_padding_mask=mask, impl="native")
    with torch.no_grad():
        for tensor in (case[0][0], case[1][0], case[2]):
            tensor[:, :, -2:] = float("nan")
    assert torch.equal(ps.hkt_attention(*case, key_padding_mask=mask, impl="native"), expected)


def test_what_is_not_a_number_stays_so():
    queries, keys, value, weights = random_case(40, 2, dtype=torch.float32)
    with torch.no_grad():
        keys[0][0, 0, 20] = float("nan")
    output = ps.hkt_attention(queries, keys, value, weights, impl="native")
    assert torch.isnan(output[0, 0, 20:]).all()
    assert torch.isfinite(output[0, 0, :20]).all()


def test_an_empty_batch_gives_an_empty_result():
    case = random_case(7, 3, batch=0, dtype=torch.float32)
    output = ps.hkt_attention(*case, impl="native")
    assert output.shape == (0, 2, 7, 3)
    assert [g.shape for g in gradients(output, case)[:-1]] == [
        x.shape for x in (*case[0], *case[1], case[2])
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "head_dim"), [(64, 32), (257, 64)])
def test_bfloat16_errs_at_most_twice_as_much_as_sdpa(causal, length, head_dim):
    for levels in (1, 2, 3, 4):
        case = random_case(
            length, levels, head_dim=head_dim, value_dim=head_dim, dtype=torch.bfloat16
        )
        case = (*case[:3], case[3].detach().float().requires_grad_())
        exact_case = in_double(case)
        exact = ps.hkt_attention(*exact_case, causal=causal, impl="reference")
        ours = ps.hkt_attention(*case, causal=causal, impl="native")
        inputs = [case[0][0], case[1][0], case[2]]
        exact_inputs = [exact_case[0][0], exact_case[1][0], exact_case[2]]
        standard = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        standard_exact = F.scaled_dot_product_attention(*exact_inputs, is_causal=causal)
        assert ours.dtype == torch.bfloat16
        assert error(ours, exact) <= 2 * error(standard, standard_exact)
        cotangent = torch.randn_like(standard)
        limit = max(
            error(one, other)
            for one, other in zip(
                torch.autograd.grad(standard, inputs, cotangent),
                torch.autograd.grad(standard_exact, exact_inputs, cotangent.double()),
                strict=True,
            )
        )
        for one, other in zip(gradients(ours, case), gradients(exact, exact_case), strict=True):
            assert error(one, other) <= 2 * limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 5])
def test_views_of_one_projection_give_what_copies_give(head_dim, dtype):
    batch, heads, length = 2, 3, 150
    counts = [150, 75, 38]
    every = torch.randn(batch, sum(counts), 2, heads, head_dim, dtype=dtype)
    queries, keys = (list(every[:, :, i].transpose(1, 2).split(counts, dim=2)) for i in range(2))
    value = torch.randn(batch, heads, head_dim, length, dtype=dtype).transpose(2, 3)
    weights = torch.tensor([0.5, 0.2, 0.3])
    results = []
    for copied in (False, True):
        tensors = [x.contiguous() if copied else x for x in (*queries, *keys, value)]
        tensors = [x.detach().requires_grad_() for x in tensors]
        output = ps.hkt_attention(tensors[:3], tensors[3:6], tensors[6], weights, impl="native")
        # A gradient that repeats one number has strides of zero.
        results.append([output, *torch.autograd.grad(output.sum(), tensors)])
    for view, copy in zip(*results, strict=True):
        assert torch.equal(view, copy)


@pytest.fixture
def _two_threads_afterwards_one():
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_two_threads_afterwards_one")
@pytest.mark.parametrize(("heads", "tolerance"), [(4, 0.0), (1, 1e-6)])
def test_several_threads_give_what_one_gives(heads, tolerance):
    # With more heads than threads to the last bit; else gradients are summed in another order.
    case = random_case(500, 3, batch=1, heads=heads, head_dim=16, value_dim=16, dtype=torch.float32)
    results = []
    for threads in (1, 3, 2, 2):
        torch.set_num_threads(threads)
        output = ps.hkt_attention(*case, impl="native")
        results.append([output, *gradients(output, case)])
    one, three, two, again = results
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[0], three[0])
    for first, second, third, fourth in zip(one, three, two, again, strict=True):
        assert torch.equal(third, fourth)
        assert error(second, first.double()) <= 1e-6
        assert error(third, first.double()) <= tolerance


def operation_arguments(dtype=torch.float32, *, lengths=None, sequences=None):
    batch, length = (2, 21) if sequences is None else (1, sum(sequences))
    queries, keys, value, weights = random_case(
        length, 3, batch=batch, dtype=dtype, sequences=sequences
    )
    boundaries = None
    if sequences is not None:
        ends = [[0] * (len(sequences) + 1) for _ in range(3)]
        for level in range(3):
            for number, count in enumerate(sequences):
                ends[level][number + 1] = ends[level][number] + -(-count // 2**level)
        boundaries = torch.tensor(ends)
    weights = weights.detach().float().requires_grad_()
    return queries, keys, value, weights, lengths, boundaries, True, 0.5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": torch.bfloat16},
        {"lengths": torch.tensor([21, 4])},
        {"sequences": [8, 3, 10]},
    ],
    ids=["float32", "bfloat16", "padded", "packed"],
)
def test_torch_finds_the_operations_well_made(options):
    arguments = operation_arguments(**options)
    torch.library.opcheck(_forward, arguments)
    with torch.no_grad():
        output, statistics = _forward(*arguments)
    queries, keys, value, weights, lengths, boundaries, causal, scale = arguments
    tensors = [x.detach() for x in (*queries, *keys, value, weights)]
    torch.library.opcheck(
        _backward,
        (
            torch.randn_like(output),
            tensors[:3],
            tensors[3:6],
            *tensors[6:],
            lengths,
            boundaries,
            output,
            statistics,
            causal,
            scale,
        ),
    )


@pytest.mark.parametrize("impl", ["native", "auto"])
@pytest.mark.parametrize("padded", [False, True])
def test_compiled_in_one_graph_it_gives_the_same(padded, impl):
    case = random_case(30, 3, dtype=torch.float32)
    mask = side_padding(30, "left") if padded else None

    def attend(queries, keys, value, weights):
        return ps.hkt_attention(queries, keys, value, weights, key_padding_mask=mask, impl=impl)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*case), attend(*case)
    assert torch.equal(actual, expected)
    for one, other in zip(gradients(actual, case), gradients(expected, case), strict=True):
        assert torch.equal(one, other)


def test_auto_is_native_wherever_that_runs():
    case = random_case(50, 3, dtype=torch.float32)
    automatic = ps.hkt_attention(*case)
    assert torch.equal(automatic, ps.hkt_attention(*case, impl="native"))
    assert "hkt_attention" in type(automatic.grad_fn).__name__


@pytest.mark.parametrize(
    ("options", "levels", "head_dim", "dtype", "reason"),
    [
        ({}, 3, 4, torch.float64, "float64"),
        ({}, 3, 4, torch.float16, "float16"),
        ({"relative_bias": [torch.zeros(2, 3)] * 3}, 3, 4, torch.float32, "relative_bias"),
        ({}, 3, 257, torch.float32, "up to 256, got 257"),
        ({}, 6, 4, torch.float32, "at most 5 levels, got 6"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name_and_left_to_sdpa(
    options, levels, head_dim, dtype, reason
):
    case = random_case(40, levels, head_dim=head_dim, dtype=dtype)
    with pytest.raises(ValueError, match=f"native.*{reason}"):
        ps.hkt_attention(*case, impl="native", **options)
    automatic = ps.hkt_attention(*case, **options)
    assert torch.equal(automatic, ps.hkt_attention(*case, impl="sdpa", **options))


def test_tensors_elsewhere_than_on_the_cpu_are_refused():
    x = torch.zeros(1, 2, 8, 4, device="meta")
    with pytest.raises(ValueError, match=r"native.*CPU.*meta"):
        ps.hkt_attention([x], [x], x, torch.ones(1, device="meta"), impl="native")


def test_transforms_it_has_no_rule_for_are_refused_and_left_to_others():
    fine, coarse, weights = torch.randn(2, 1, 12, 4), torch.randn(2, 1, 6, 4), torch.ones(2) / 2

    def loss(x, impl="auto"):
        levels = [x, coarse]
        return ps.hkt_attention(levels, levels, x, weights, impl=impl).square().sum()

    x = fine.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    assert error(torch.func.grad(loss)(fine), expected.double()) <= GRADIENTS
    with pytest.raises(ValueError, match=r"native.*reverse-mode"):
        torch.func.grad(lambda x: loss(x, "native"))(fine)
    with forward_ad.dual_level(), pytest.raises(ValueError, match=r"native.*reverse-mode"):
        loss(forward_ad.make_dual(fine, fine), "native")


def test_cpp_has_as_many_levels_as_python():
    assert LIBRARY.load().hkt_max_levels() == MAX_LEVELS
    assert hkt_library._Arguments.query.size == MAX_LEVELS * ctypes.sizeof(TensorView)
