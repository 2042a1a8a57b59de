import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import polyscale as ps
from polyscale.ops.layout import level_length
from tests.ops.hkt.cases import LENGTHS, by_loops, close, gradients, random_case


def assert_implementations_agree(case, **options):
    reference = ps.hkt_attention(*case, impl="reference", **options)
    fast = ps.hkt_attention(*case, impl="sdpa", **options)
    assert close(fast, reference, 1e-10)
    for actual, expected in zip(gradients(fast, case), gradients(reference, case), strict=True):
        assert close(actual, expected, 1e-10)


def side_padding(length: int, side: str) -> torch.Tensor:
    """Two rows with different amounts of padding on one side; the first real token stays."""
    mask = torch.zeros(2, length, dtype=torch.bool)
    for row, amount in enumerate((length // 3, length - 1)):
        if amount:
            mask[row, slice(amount) if side == "left" else slice(-amount, None)] = True
    return mask


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 11])
def test_the_reference_is_the_definition_written_in_loops(length, levels, causal):
    case = random_case(length, levels, batch=1)
    queries, keys, value, weights = case
    expected = by_loops([q[0] for q in queries], [k[0] for k in keys], value[0], weights, causal)
    actual = ps.hkt_attention(*case, causal=causal, impl="reference")
    assert close(actual[0], expected, 1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_sdpa_equals_the_reference_in_values_and_all_gradients(length, levels, causal):
    assert_implementations_agree(random_case(length, levels), causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("length", LENGTHS)
def test_sdpa_equals_the_reference_with_padding_on_either_side(length, levels, side, causal):
    mask = side_padding(length, side)
    assert_implementations_agree(random_case(length, levels), causal=causal, key_padding_mask=mask)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("sequences", [[1], [3, 1, 2], [8, 7, 64, 1, 20], [100, 157]])
def test_sdpa_equals_the_reference_on_packed_sequences(sequences, levels, causal):
    case = random_case(sum(sequences), levels, batch=1, sequences=sequences)
    bounds = torch.tensor([0, *sequences]).cumsum(0)
    assert_implementations_agree(case, causal=causal, cu_seqlens=bounds)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value_dim", [1, 4, 16])
def test_sdpa_equals_the_reference_with_a_relative_bias_and_other_value_widths(
    value_dim, causal, padded
):
    case = random_case(21, 3, value_dim=value_dim)
    bias = [torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    mask = side_padding(21, "left") if padded else None
    results = []
    for impl in ("reference", "sdpa"):
        output = ps.hkt_attention(
            *case, causal=causal, key_padding_mask=mask, relative_bias=bias, impl=impl
        )
        results.append([output, *torch.autograd.grad(output.square().sum(), bias)])
    for actual, expected in zip(*results, strict=True):
        assert close(actual, expected, 1e-10)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("start", [0, 3])
def test_a_padded_row_is_what_its_real_tokens_give_alone(impl, causal, start):
    queries, keys, value, weights = random_case(13, 3, batch=1)
    real = slice(start, start + 10)
    mask = torch.ones(1, 13, dtype=torch.bool)
    mask[:, real] = False
    padded = ps.hkt_attention(
        queries, keys, value, weights, causal=causal, key_padding_mask=mask, impl=impl
    )
    counts = [level_length(10, level) for level in range(3)]
    alone = ps.hkt_attention(
        [
            queries[0][:, :, real],
            *(q[:, :, :n] for q, n in zip(queries[1:], counts[1:], strict=True)),
        ],
        [keys[0][:, :, real], *(k[:, :, :n] for k, n in zip(keys[1:], counts[1:], strict=True))],
        value[:, :, real],
        weights,
        causal=causal,
        impl=impl,
    )
    assert close(padded[:, :, real], alone, 1e-12)
    assert torch.count_nonzero(padded[:, :, mask[0]]) == 0


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_padding_between_real_tokens_counts_for_nothing(impl):
    queries, keys, value, weights = random_case(9, 2, batch=1)
    mask = torch.zeros(1, 9, dtype=torch.bool)
    mask[0, [2, 3, 6]] = True
    kept = [0, 1, 4, 5, 7, 8]
    padded = ps.hkt_attention(queries, keys, value, weights, key_padding_mask=mask, impl=impl)
    alone = ps.hkt_attention(
        [queries[0][:, :, kept], queries[1][:, :, :3]],
        [keys[0][:, :, kept], keys[1][:, :, :3]],
        value[:, :, kept],
        weights,
        impl=impl,
    )
    assert close(padded[:, :, kept], alone, 1e-12)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_are_what_each_gives_alone(impl, causal):
    sequences = [5, 1, 8, 7]
    case = random_case(21, 3, batch=1, sequences=sequences)
    queries, keys, value, weights = case
    bounds = torch.tensor([0, *sequences]).cumsum(0)
    together = ps.hkt_attention(*case, causal=causal, cu_seqlens=bounds, impl=impl)
    starts = [0, 0, 0]
    for number, count in enumerate(sequences):
        ends = [start + level_length(count, level) for level, start in enumerate(starts)]
        pieces = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        alone = ps.hkt_attention(
            [q[:, :, piece] for q, piece in zip(queries, pieces, strict=True)],
            [k[:, :, piece] for k, piece in zip(keys, pieces, strict=True)],
            value[:, :, pieces[0]],
            weights,
            causal=causal,
            impl=impl,
        )
        assert close(together[:, :, bounds[number] : bounds[number + 1]], alone, 1e-12)
        starts = ends


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_row_of_nothing_but_padding_gives_zeros_and_no_gradient(impl, causal):
    case = random_case(6, 3)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1] = True
    output = ps.hkt_attention(*case, causal=causal, key_padding_mask=mask, impl=impl)
    assert torch.count_nonzero(output[1]) == 0
    for gradient in gradients(output, case)[:-1]:
        assert torch.isfinite(gradient).all()
        assert torch.count_nonzero(gradient[1]) == 0


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_nothing_leaks_from_padding_even_if_it_is_not_finite(impl):
    case = random_case(6, 2)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[:, -2:] = True
    expected = ps.hkt_attention(*case, key_padding_mask=mask, impl=impl)
    with torch.no_grad():
        for tensor in (case[0][0], case[1][0], case[2]):
            tensor[:, :, -2:] = float("nan")
    assert torch.equal(ps.hkt_attention(*case, key_padding_mask=mask, impl=impl), expected)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_an_empty_batch_gives_an_empty_result(impl):
    queries, keys, value, weights = random_case(7, 3, batch=0)
    assert ps.hkt_attention(queries, keys, value, weights, impl=impl).shape == (0, 2, 7, 3)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("fine_alone", [False, True])
def test_one_level_or_all_weight_on_the_fine_level_is_standard_attention(impl, causal, fine_alone):
    queries, keys, value, weights = random_case(33, 3 if fine_alone else 1)
    weights = torch.zeros_like(weights)
    weights[:, 0] = 1.0
    inputs = [queries[0], keys[0], value]
    hkt = ps.hkt_attention(queries, keys, value, weights, causal=causal, impl=impl)
    standard = F.scaled_dot_product_attention(*inputs, is_causal=causal)
    assert close(hkt, standard, 1e-12)
    cotangent = torch.randn_like(value)
    for actual, expected in zip(
        torch.autograd.grad(hkt, inputs, cotangent),
        torch.autograd.grad(standard, inputs, cotangent),
        strict=True,
    ):
        assert close(actual, expected, 1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_sdpa_runs_on_a_kernel_whose_memory_is_linear(causal, padded):
    case = random_case(40, 3, dtype=torch.float32)
    mask = side_padding(40, "left") if padded else None
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # refuses to run in any other way
        output = ps.hkt_attention(*case, causal=causal, key_padding_mask=mask, impl="sdpa")
        gradients(output, case)


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "head_dim"), [(64, 32), (257, 64)])
def test_half_precision_errs_at_most_twice_as_much_as_sdpa(impl, dtype, causal, length, head_dim):
    for levels in (1, 2, 3, 4):
        queries, keys, value, weights = random_case(
            length, levels, head_dim=head_dim, value_dim=head_dim, dtype=dtype
        )
        weights = weights.float()
        exact = ps.hkt_attention(
            [q.double() for q in queries],
            [k.double() for k in keys],
            value.double(),
            weights.double(),
            causal=causal,
            impl="reference",
        )
        ours = ps.hkt_attention(queries, keys, value, weights, causal=causal, impl=impl)
        inputs = [queries[0], keys[0], value]
        standard = F.scaled_dot_product_attention(*inputs, is_causal=causal)
        standard_exact = F.scaled_dot_product_attention(
            *(x.double() for x in inputs), is_causal=causal
        )
        limit = 2 * (standard.double() - standard_exact).abs().max()
        assert (ours.double() - exact).abs().max() <= limit


@pytest.mark.parametrize("impl", ["reference", "sdpa"])
def test_huge_scores_stay_finite(impl):
    queries, keys, value, weights = random_case(17, 3, dtype=torch.float32)
    queries = [(q * 1e4).detach().requires_grad_() for q in queries]
    output = ps.hkt_attention(queries, keys, value, weights, impl=impl)
    assert torch.isfinite(output).all()
    for gradient in gradients(output, (queries, keys, value, weights)):
        assert torch.isfinite(gradient).all()


def test_auto_is_an_implementation_that_is_listed():
    case = random_case(12, 3)
    automatic = ps.hkt_attention(*case)
    listed = {
        found.name: found.available
        for found in ps.implementations()
        if found.operation == "hkt_attention"
    }
    assert any(
        torch.equal(automatic, ps.hkt_attention(*case, impl=name))
        for name, available in listed.items()
        if available
    )
