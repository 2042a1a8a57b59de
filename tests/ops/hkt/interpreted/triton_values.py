"""Values and gradients of the Triton kernels against the reference, in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

import polyscale as ps
from polyscale.ops.hkt import triton as implementation
from polyscale.ops.hkt.mask import AttentionMask
from tests.ops.hkt.cases import gradients, random_case
from tests.ops.hkt.test_values import side_padding


def in_float32(case):
    queries, keys, value, weights = case

    def copy(x):
        return x.detach().float().requires_grad_()

    return [copy(q) for q in queries], [copy(k) for k in keys], copy(value), copy(weights)


def assert_agrees(case, **options):
    """float32 against the reference in float64: values to 1e-5, all gradients to 1e-4."""
    exact = ps.hkt_attention(*case, impl="reference", **options)
    rounded = in_float32(case)
    actual = ps.hkt_attention(*rounded, impl="triton", **options)
    torch.testing.assert_close(actual.double(), exact, atol=1e-5, rtol=0)
    for ours, expected in zip(gradients(actual, rounded), gradients(exact, case), strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_short_sequences_equal_the_reference_in_values_and_all_gradients(
    length, levels, causal, tiles
):
    tiles(16, 16)
    assert_agrees(random_case(length, levels, batch=1, heads=1), causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("levels", [1, 3, 5])
@pytest.mark.parametrize(("length", "size"), [(63, (64, 64)), (35, (16, 32)), (64, (64, 32))])
def test_many_tiles_equal_the_reference_in_values_and_all_gradients(
    length, size, levels, causal, tiles
):
    tiles(*size)
    assert_agrees(random_case(length, levels, batch=1, heads=1), causal=causal)


@pytest.mark.parametrize(("length", "causal"), [(100, True), (100, False), (257, True)])
def test_long_sequences_equal_the_reference(length, causal, tiles):
    tiles(64, 64)
    assert_agrees(random_case(length, 3, batch=1, heads=1), causal=causal)


def test_batches_and_heads_with_weights_of_their_own_equal_the_reference(tiles):
    tiles(16, 16)
    assert_agrees(random_case(17, 2, batch=2, heads=2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("length", "levels"), [(3, 2), (21, 1), (21, 3), (21, 5)])
def test_padding_on_either_side_equals_the_reference(length, levels, side, causal, tiles):
    tiles(16, 16)
    case = random_case(length, levels, heads=1)
    assert_agrees(case, causal=causal, key_padding_mask=side_padding(length, side))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("sequences", "levels"),
    [([1], 3), ([3, 1, 2], 4), ([8, 33, 1], 1), ([8, 33, 1], 3), ([7, 20], 5)],
)
def test_packed_sequences_equal_the_reference(sequences, levels, causal, tiles):
    tiles(32, 16)
    case = random_case(sum(sequences), levels, batch=1, heads=1, sequences=sequences)
    assert_agrees(case, causal=causal, cu_seqlens=torch.tensor([0, *sequences]).cumsum(0))


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(1, 1), (5, 16), (17, 40), (64, 3), (256, 256)]
)
def test_other_widths_equal_the_reference(head_dim, value_dim, tiles):
    tiles(16, 16)
    assert_agrees(random_case(20, 3, batch=1, heads=1, head_dim=head_dim, value_dim=value_dim))


@pytest.mark.parametrize("weights", [[0.2, 0.0, 0.8], [1.0, 0.0, 0.0], [0.5, -0.3, 1.4]])
def test_weights_of_zero_or_below_and_a_given_scale_equal_the_reference(weights, tiles):
    tiles(16, 16)
    queries, keys, value, _ = random_case(20, 3, batch=1, heads=1)
    shared = torch.tensor(weights, dtype=torch.float64, requires_grad=True)  # [L]
    assert_agrees((queries, keys, value, shared), scale=0.7)


def test_views_of_one_projection_are_taken_as_they_are(tiles):
    tiles(16, 16)
    width, heads, sizes = 8, 2, (20, 10, 5)
    case = random_case(20, 3, batch=1, heads=heads, head_dim=width, value_dim=width)

    def view(x):
        """The same numbers, as `[B, T, H, D]` inside something wider."""
        wide = torch.full((1, x.shape[2], heads, 3 * width), float("nan"))
        wide[..., width : 2 * width] = x.detach().transpose(1, 2)
        return wide.transpose(1, 2)[..., width : 2 * width].requires_grad_()

    queries, keys, value, weights = case
    assert [q.shape[2] for q in queries] == list(sizes)
    views = [view(q) for q in queries], [view(k) for k in keys], view(value)
    assert not views[2].is_contiguous()
    views = (*views, weights.detach().float().requires_grad_())
    exact = ps.hkt_attention(*case, impl="reference")
    actual = ps.hkt_attention(*views, impl="triton")
    torch.testing.assert_close(actual.double(), exact, atol=1e-5, rtol=0)
    for ours, expected in zip(gradients(actual, views), gradients(exact, case), strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=0)


def test_channels_that_do_not_stand_side_by_side_and_expanded_gradients_are_taken(tiles):
    tiles(16, 16)
    case = random_case(9, 2, head_dim=4, value_dim=4)
    results = []
    for impl in ("reference", "triton"):
        inputs = case if impl == "reference" else in_float32(case)
        queries, keys, value, weights = inputs
        turned = [q.mT.contiguous().mT for q in queries]
        assert turned[0].stride(-1) != 1
        output = ps.hkt_attention(turned, keys, value.mT.contiguous().mT, weights, impl=impl)
        results.append(torch.autograd.grad(output.sum(), [*queries, *keys, value, weights]))
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_of_nothing_but_padding_gives_zeros_and_no_gradient(causal, tiles):
    tiles(16, 16)
    case = random_case(6, 3, dtype=torch.float32)
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1] = True
    output = ps.hkt_attention(*case, causal=causal, key_padding_mask=mask, impl="triton")
    assert torch.count_nonzero(output[1]) == 0
    for gradient in gradients(output, case)[:-1]:
        assert torch.isfinite(gradient).all()
        assert torch.count_nonzero(gradient[1]) == 0


@pytest.mark.parametrize("causal", [True, False])
def test_nothing_leaks_from_padding_even_if_it_is_not_finite(causal, tiles):
    tiles(16, 16)
    case = random_case(18, 2, heads=1, dtype=torch.float32)
    lengths = torch.tensor([16, 5])
    mask = AttentionMask(causal, lengths)
    expected = implementation.hkt_attention_triton(*case, mask, 0.5)
    expected_gradients = gradients(expected, case)
    assert torch.count_nonzero(expected[1, :, 5:]) == 0
    for gradient in (expected_gradients[0], expected_gradients[2], expected_gradients[4]):
        assert torch.count_nonzero(gradient[1, :, 5:]) == 0  # fine queries, fine keys, value
    with torch.no_grad():
        for row, length in enumerate(lengths.tolist()):
            for tensor in (case[0][0], case[1][0], case[2]):
                tensor[row, :, length:] = float("nan")
            for tensor in (case[0][1], case[1][1]):
                tensor[row, :, -(-length // 2) :] = float("nan")
    actual = implementation.hkt_attention_triton(*case, mask, 0.5)
    assert torch.equal(actual, expected)
    for ours, before in zip(gradients(actual, case), expected_gradients, strict=True):
        assert torch.equal(ours, before)


def test_an_empty_batch_gives_an_empty_result():
    case = random_case(7, 3, batch=0, dtype=torch.float32)
    output = ps.hkt_attention(*case, impl="triton")
    assert output.shape == (0, 2, 7, 3)
    *others, weights = gradients(output, case)
    assert all(gradient.numel() == 0 for gradient in others)
    assert torch.count_nonzero(weights) == 0


@pytest.mark.parametrize("causal", [True, False])
def test_one_level_is_standard_attention(causal, tiles):
    tiles(16, 16)
    queries, keys, value, weights = random_case(33, 1, dtype=torch.float32)
    hkt = ps.hkt_attention(
        queries, keys, value, torch.ones_like(weights), causal=causal, impl="triton"
    )
    standard = F.scaled_dot_product_attention(queries[0], keys[0], value, is_causal=causal)
    torch.testing.assert_close(hkt, standard, atol=1e-6, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_huge_scores_equal_the_reference(causal, tiles):
    tiles(16, 16)
    queries, keys, value, weights = random_case(17, 3, batch=1, heads=1, dtype=torch.float32)
    queries = [(q * 1e4).detach().requires_grad_() for q in queries]
    case = (queries, keys, value, weights)
    output = ps.hkt_attention(*case, causal=causal, impl="triton")
    exact = ps.hkt_attention(
        [q.double() for q in queries],
        [k.double() for k in keys],
        value.double(),
        weights.double(),
        causal=causal,
        impl="reference",
    )
    torch.testing.assert_close(output.double(), exact, atol=1e-2, rtol=0)
    for gradient in gradients(output, case):
        assert torch.isfinite(gradient).all()
