"""The native kernel on hard inputs: huge scores, equal keys, one key that has all the attention."""

import itertools

import pytest
import torch

import polyscale as ps
from polyscale.ops.hkt.decode import hkt_decode
from polyscale.ops.hkt.native.library import LIBRARY
from tests.ops.hkt.cases import (
    GRADIENTS,
    VALUES,
    assert_native_equals_the_reference,
    error,
    gradients,
    in_double,
    random_case,
)

NO_KERNEL = LIBRARY.why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")
every_variant = pytest.mark.parametrize("instructions", [None, "portable", "avx2"])


def exact_scores(offset, length=200, levels=3):
    """Scores near `offset` that float32 holds exactly, so that only the kernel can err."""
    generator = torch.Generator().manual_seed(2)

    def eighths(rows, first):
        x = torch.randint(-8, 9, (1, 2, rows, 16), generator=generator) / 8
        x[..., 0] = first
        return x.requires_grad_()

    counts = [-(-length // 2**level) for level in range(levels)]
    size = abs(offset) ** 0.5 * 2
    queries = [eighths(n, size) for n in counts]
    keys = [eighths(n, size if offset > 0 else -size) for n in counts]
    value = torch.randn(1, 2, length, 16, generator=generator).requires_grad_()
    return queries, keys, value, torch.tensor([0.5, 0.25, 0.25]).requires_grad_()


def with_dominant_key(case, place, gap):
    """One key, or several, whose scores in the first head are `gap` above the rest, near zero."""
    queries, keys, _, weights = case
    with torch.no_grad():
        queries[0][..., 0] = 4.0
        keys[0][..., 1:] *= 0.1
        keys[0][..., 0] = 0.0
        keys[0][:, :, place, 0] = gap / weights.flatten()[0]


def assert_every_gradient_is_exact_by_its_own_size(case, **options):
    """Each gradient relative to its own largest entry, however small beside those of others."""
    exact_case = in_double(case)
    exact = ps.hkt_attention(*exact_case, impl="reference", **options)
    output = ps.hkt_attention(*case, impl="native", **options)
    assert error(output, exact) <= VALUES
    pairs = zip(gradients(output, case), gradients(exact, exact_case), strict=True)
    for number, (one, other) in enumerate(pairs):
        assert error(one, other) <= GRADIENTS, number


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("offset", [10_000, -10_000])
def test_scores_of_ten_thousand_lose_nothing(offset, causal):
    assert_native_equals_the_reference(exact_scores(offset), causal=causal)


@pytest.mark.parametrize("causal", [True, False])
def test_scores_between_minus_and_plus_ten_thousand(causal):
    case = exact_scores(10_000)
    with torch.no_grad():
        for key in case[1]:
            key[..., ::3, 0] *= -1
            key[..., 1::3, 0] /= 2
    assert_native_equals_the_reference(case, causal=causal)


@every_variant
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 5, 150, 300])
def test_huge_random_scores_are_as_exact_as_any(length, causal, instructions, monkeypatch):
    # Scores in float32 would be rounded by a thousandth, however they are summed.
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    for head_dim in (16, 13):
        case = random_case(length, 3, head_dim=head_dim, value_dim=16, dtype=torch.float32)
        case = ([(q * 1e4).detach().requires_grad_() for q in case[0]], *case[1:])
        assert_native_equals_the_reference(case, causal=causal)


@pytest.mark.parametrize("levels", [2, 4, 5])
def test_huge_scores_at_every_number_of_levels(levels):
    case = random_case(200, levels, head_dim=8, value_dim=8, dtype=torch.float32)
    case = ([(q * 1e4).detach().requires_grad_() for q in case[0]], *case[1:])
    assert_native_equals_the_reference(case, causal=True)


@pytest.mark.parametrize("causal", [True, False])
def test_huge_scores_of_one_level(causal):
    # The gradient of the only weight is a sum of scores that cancel but for a thousandth.
    case = random_case(200, 1, head_dim=8, value_dim=8, dtype=torch.float32)
    case = ([(q * 1e4).detach().requires_grad_() for q in case[0]], *case[1:])
    assert_every_gradient_is_exact_by_its_own_size(case, causal=causal)


def test_huge_scores_with_a_level_that_has_no_weight():
    queries, keys, value, _ = random_case(200, 3, head_dim=8, value_dim=8, dtype=torch.float32)
    queries = [(q * 1e4).detach().requires_grad_() for q in queries]
    weights = torch.tensor([0.5, 0.0, 0.5]).requires_grad_()
    assert_native_equals_the_reference((queries, keys, value, weights), causal=True)


@pytest.mark.parametrize("side", ["left", "right"])
def test_huge_scores_with_padding(side):
    case = random_case(150, 3, head_dim=8, value_dim=8, dtype=torch.float32)
    case = ([(q * 1e4).detach().requires_grad_() for q in case[0]], *case[1:])
    padding = torch.zeros(2, 150, dtype=torch.bool)
    padding[0, slice(40) if side == "left" else slice(110, None)] = True
    assert_native_equals_the_reference(case, key_padding_mask=padding)


def test_huge_scores_of_packed_sequences():
    sequences = [7, 130, 1, 62]
    case = random_case(
        200, 3, batch=1, head_dim=8, value_dim=8, dtype=torch.float32, sequences=sequences
    )
    case = ([(q * 1e4).detach().requires_grad_() for q in case[0]], *case[1:])
    bounds = torch.tensor([0, *sequences]).cumsum(0)
    assert_native_equals_the_reference(case, cu_seqlens=bounds)


@pytest.mark.parametrize("size", [5, 10, 20, 40, 80, 160, 1_000])
def test_one_key_many_times_as_long_on_random_inputs(size):
    # On either side of the length from which scores are summed in double precision.
    for seed in range(3):
        case = random_case(
            512, 3, batch=1, head_dim=64, value_dim=64, dtype=torch.float32, seed=seed
        )
        with torch.no_grad():
            case[1][0][:, :, 128] *= size
        assert_native_equals_the_reference(case, causal=True)


@every_variant
@pytest.mark.parametrize("gap", [1.0, 4.0, 8.0, 12.0, 15.0, 17.0, 20.0, 25.0])
@pytest.mark.parametrize("levels", [1, 3])
def test_what_one_key_leaves_of_the_attention_is_not_rounded_away(
    levels, gap, instructions, monkeypatch
):
    # A hundred weights of 1e-7 count together, though none of them does beside a weight of one.
    # Of the gradient of a level weight, a sum over all queries, a 300th is left with seed 1 and a
    # 500th with seed 13.
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    for seed, mean in itertools.product((0, 1, 13), (0.0, 1.0)):
        case = random_case(
            512, levels, batch=1, head_dim=16, value_dim=16, dtype=torch.float32, seed=seed
        )
        with_dominant_key(case, 128, gap)
        with torch.no_grad():
            case[2].add_(mean)
        for causal in (True, False):
            assert_every_gradient_is_exact_by_its_own_size(case, causal=causal)


@every_variant
@pytest.mark.parametrize("levels", [2, 3, 5])
@pytest.mark.parametrize("gap", [4.0, 12.0, 17.0, 25.0])
def test_neighbours_of_the_dominant_key_share_its_coarse_scores(
    gap, levels, instructions, monkeypatch
):
    # With little weight on level 0 they have nearly its attention. In the gradients of coarse
    # queries and keys they cancel, and what is left comes from all the others.
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    for seed in range(4):
        queries, keys, value, weights = random_case(
            500, levels, batch=1, head_dim=16, value_dim=16, dtype=torch.float32, seed=seed
        )
        with torch.no_grad():
            for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
                query[..., 0] = 4.0
                key *= 0.1
                key[..., 0] = 0.0
                key[:, :, 131 >> level, 0] = gap
        case = (queries, keys, value, weights)
        for causal in (True, False):
            assert_every_gradient_is_exact_by_its_own_size(case, causal=causal)


def with_dominant_block(levels, gap, *, equal=False, seed=0):
    """One key of the coarsest level `gap` above the rest: its fine keys share the attention."""
    queries, keys, value, weights = random_case(
        500, levels, batch=1, head_dim=16, value_dim=16, dtype=torch.float32, seed=seed
    )
    top = levels - 1
    with torch.no_grad():
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            query[..., 0] = 4.0
            key *= 0.1
            key[..., 0] = 0.0
            if equal:
                first, end = 128 >> level, (128 + 2**top) >> level
                key[:, :, first:end] = key[:, :, first : first + 1]
        keys[top][:, :, 128 >> top, 0] = gap / weights.flatten()[top]
    return queries, keys, value, weights


@every_variant
@pytest.mark.parametrize("levels", [2, 3, 5])
def test_keys_of_one_block_share_nearly_all_the_attention(levels, instructions, monkeypatch):
    # None of them has half. From scores of 12 on, rounding of the coarse score itself shows.
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    for seed, gap in itertools.product(range(4), (2.0, 4.0, 6.0, 8.0)):
        case = with_dominant_block(levels, gap, seed=seed)
        for causal in (True, False):
            assert_every_gradient_is_exact_by_its_own_size(case, causal=causal)


@every_variant
@pytest.mark.parametrize("levels", [2, 3, 5])
def test_equal_keys_share_nearly_all_the_attention(levels, instructions, monkeypatch):
    # Each has the largest score; one of them stands for the block.
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    for seed, gap in itertools.product(range(3), (2.0, 4.0, 8.0, 12.0)):
        case = with_dominant_block(levels, gap, equal=True, seed=seed)
        for causal in (True, False):
            assert_every_gradient_is_exact_by_its_own_size(case, causal=causal)


def with_equal_keys(levels, gap, places, seed=0):
    """Equal keys whose scores in the first head are `gap` above the rest."""
    case = random_case(
        500, levels, batch=1, head_dim=16, value_dim=16, dtype=torch.float32, seed=seed
    )
    with_dominant_key(case, places, gap)
    with torch.no_grad():
        case[1][0][:, :, places] = case[1][0][:, :, places[:1]].clone()
    return case


@every_variant
@pytest.mark.parametrize("levels", [1, 2, 3, 5])
@pytest.mark.parametrize("gap", [2.0, 8.0, 12.0, 16.0, 20.0])
def test_equal_keys_far_apart_share_nearly_all_the_attention(
    gap, levels, instructions, monkeypatch
):
    # So far that the kernel meets them in different tiles. The gradients of queries that see them
    # are a millionth of those of keys. Queries before the first of them see none.
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    case = with_equal_keys(levels, gap, [60, 300, 450])
    with torch.no_grad():
        for coarse in case[1][1:]:
            coarse.zero_()
    for causal in (True, False):
        assert_every_gradient_is_exact_by_its_own_size(case, causal=causal)


@every_variant
@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("count", [20, 100])
def test_a_run_of_equal_keys_has_nearly_all_the_attention(count, levels, instructions, monkeypatch):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    for seed, gap in itertools.product(range(3), (8.0, 12.0, 16.0, 20.0)):
        case = with_equal_keys(levels, gap, list(range(100, 100 + count)), seed)
        for causal in (True, False):
            assert_every_gradient_is_exact_by_its_own_size(case, causal=causal)


@pytest.mark.parametrize("size", [5, 20, 80])
def test_equal_keys_many_times_as_long_on_random_inputs(size):
    # What is right for queries that attend to them would be wrong for the others.
    for seed in range(3):
        case = random_case(
            512, 3, batch=1, head_dim=64, value_dim=64, dtype=torch.float32, seed=seed
        )
        with torch.no_grad():
            case[1][0][:, :, [128, 300]] = size * case[1][0][:, :, [128]]
        for causal in (True, False):
            assert_every_gradient_is_exact_by_its_own_size(case, causal=causal)


def test_keys_that_differ_in_few_channels():
    # All alike where the kernel looks first.
    case = random_case(300, 2, batch=1, head_dim=16, value_dim=16, dtype=torch.float32)
    with torch.no_grad():
        for key in case[1]:
            key[..., 1:] = key[:, :, :1, 1:]
            key[..., 0] = 0.0
            key[..., 3] = torch.arange(key.shape[2]) / 100
    assert_native_equals_the_reference(case, causal=True)


@pytest.mark.parametrize("levels", [2, 3, 5])
def test_what_is_not_covered_errs_by_little_more(levels):
    # docs/hkt.md, "Accuracy": large scores that several keys share by one coarse score.
    for causal, equal in itertools.product((True, False), (True, False)):
        for seed, gap in itertools.product(range(3), (12.0, 16.0, 20.0)):
            case = with_dominant_block(levels, gap, equal=equal, seed=seed)
            values, by_own_size = errors(case, causal)
            assert values <= 4e-6
            assert by_own_size <= 1e-4


def errors(case, causal):
    """Of values, and of the gradients each by its own size."""
    exact_case = in_double(case)
    exact = ps.hkt_attention(*exact_case, causal=causal, impl="reference")
    output = ps.hkt_attention(*case, causal=causal, impl="native")
    pairs = zip(gradients(output, case), gradients(exact, exact_case), strict=True)
    return error(output, exact), max(error(*pair) for pair in pairs)


@pytest.mark.parametrize("length", [1, 2, 100, 193, 500])
@pytest.mark.parametrize("gap", [4.0, 17.0, 30.0])
def test_every_query_has_a_dominant_key_of_its_own(length, gap):
    queries, keys, value, weights = random_case(
        length, 2, batch=1, head_dim=64, value_dim=16, dtype=torch.float32
    )
    with torch.no_grad():
        weights.copy_(torch.tensor([0.8, 0.2]))
        direction = torch.nn.functional.normalize(keys[0], dim=-1)
        for tensor in (queries[0], keys[0]):
            tensor.copy_(direction * (gap / 0.8 * 8) ** 0.5)
    case = (queries, keys, value, weights)
    for causal in (True, False):
        assert_native_equals_the_reference(case, causal=causal)


def test_dominant_keys_of_padded_and_packed_sequences():
    sequences = [7, 130, 1, 262]
    case = random_case(
        400, 3, batch=1, head_dim=16, value_dim=16, dtype=torch.float32, sequences=sequences
    )
    with_dominant_key(case, slice(None, None, 90), 17.0)
    bounds = torch.tensor([0, *sequences]).cumsum(0)
    assert_every_gradient_is_exact_by_its_own_size(case, cu_seqlens=bounds)

    case = random_case(300, 3, head_dim=16, value_dim=16, dtype=torch.float32)
    with_dominant_key(case, 60, 17.0)
    padding = torch.zeros(2, 300, dtype=torch.bool)
    padding[0, :40] = padding[1, 250:] = True
    assert_every_gradient_is_exact_by_its_own_size(case, key_padding_mask=padding)


def test_a_dominant_key_in_bfloat16():
    # Outputs are rounded to a 256th. Taken from them, the gradients of queries would be noise.
    case = random_case(256, 1, batch=1, head_dim=16, value_dim=16, dtype=torch.bfloat16)
    with_dominant_key(case, 128, 12.0)
    exact_case = in_double(case)
    exact = ps.hkt_attention(*exact_case, causal=False, impl="reference")
    output = ps.hkt_attention(*case, causal=False, impl="native")
    for one, other in zip(gradients(output, case), gradients(exact, exact_case), strict=True):
        assert error(one, other) <= 3e-2


@every_variant
def test_decoding_with_huge_scores(instructions, monkeypatch):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    case = random_case(700, 3, head_dim=24, dtype=torch.float32)
    queries, keys, value, weights = [q.detach() * 1e4 for q in case[0]], *case[1:]
    exact = ps.hkt_attention(
        *in_double((queries, keys, value, weights)), causal=True, impl="reference"
    )
    for position in (0, 3, 511, 512, 699):
        output = hkt_decode(
            [q[:, :, position >> level][:, :, None] for level, q in enumerate(queries)],
            [key.detach() for key in keys],
            value.detach(),
            weights.detach(),
            position=torch.full((2, 1), position),
            scale=24**-0.5,
            impl="native",
        )
        assert error(output, exact[:, :, position : position + 1]) <= VALUES


@every_variant
@pytest.mark.parametrize("gap", [8.0, 15.0, 17.0, 20.0])
def test_decoding_keeps_what_one_key_leaves_of_the_attention(gap, instructions, monkeypatch):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    case = random_case(2048, 1, head_dim=16, value_dim=16, dtype=torch.float32)
    with_dominant_key(case, 128, gap)
    queries, keys, value, weights = (
        [tensor.detach() for tensor in part] if isinstance(part, list) else part.detach()
        for part in case
    )
    value += 1.0
    exact = ps.hkt_attention(*in_double((queries, keys, value, weights)), impl="reference")
    for position in (300, 511, 700, 2047):
        output = hkt_decode(
            [queries[0][:, :, position][:, :, None]],
            keys,
            value,
            weights,
            position=torch.full((2, 1), position),
            scale=0.25,
            impl="native",
        )
        assert error(output, exact[:, :, position : position + 1]) <= VALUES


@pytest.mark.parametrize("causal", [True, False])
def test_long_runs_of_equal_keys(causal):
    queries, keys, value, weights = random_case(
        600, 3, batch=1, head_dim=16, value_dim=16, dtype=torch.float32
    )
    with torch.no_grad():
        for level, key in enumerate(keys):
            key[:, :, : 500 >> level] = key[:, :, :1]
    assert_native_equals_the_reference((queries, keys, value, weights), causal=causal)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [4.0, 64.0, 40_000.0])
@pytest.mark.parametrize("place", [0, 130, 199])
def test_one_dominant_key(place, size, causal):
    case = exact_scores(1)
    with torch.no_grad():
        for query in case[0]:
            query[..., 0] = 1.0
        case[1][0][:, :, place, 0] = size
    assert_native_equals_the_reference(case, causal=causal)
