"""Decoding by the native kernel, and by the implementations it is compared with."""

import pytest
import torch

from polyscale.ops.hkt.decode import DECODE, NewTokens, hkt_decode
from polyscale.ops.hkt.native.library import LIBRARY
from polyscale.ops.layout import level_length

NO_KERNEL = LIBRARY.why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")

VALUES = 2e-6
every_variant = pytest.mark.parametrize("instructions", [None, "portable", "avx2"])


def error(actual, expected):
    """Largest difference over the largest expected number."""
    assert actual.shape == expected.shape
    assert torch.isfinite(actual).all()
    difference = (actual.detach().double() - expected.detach()).abs().max()
    return float(difference / expected.detach().abs().max().clamp(min=1e-3))


def decode_case(length, levels, queries, width, value_width, dtype=torch.float32, heads=2):
    """Caches with spare room at their ends, as they grow; two rows filled differently."""
    generator = torch.Generator().manual_seed(length)

    def normal(rows, columns):
        made = torch.randn(2, heads, rows + 3, columns, generator=generator).to(dtype)
        made[:, :, rows:] = float("nan")  # nobody may look there
        return made[:, :, :rows]

    query = [normal(queries, width) for _ in range(levels)]
    keys = [normal(level_length(length, level), width) for level in range(levels)]
    weights = torch.rand(heads, levels, generator=generator).softmax(-1)
    position = torch.randint(-1, length, (2, queries), generator=generator)
    position[0, 0] = length - 1
    return query, keys, normal(length, value_width), weights, position


def exact_decode(query, keys, value, weights, position):
    return hkt_decode(
        [x.double() for x in query],
        [x.double() for x in keys],
        value.double(),
        weights.double(),
        position=position,
        scale=0.3,
    )


@every_variant
@pytest.mark.parametrize(
    ("length", "levels", "queries", "width", "value_width"),
    [
        (1, 1, 1, 1, 1),
        (5, 3, 1, 64, 64),
        (512, 2, 1, 8, 24),
        (513, 3, 2, 64, 64),
        (1300, 5, 3, 7, 5),
        (1100, 3, 16, 32, 100),
    ],
)
def test_decoding_is_its_definition(
    length, levels, queries, width, value_width, instructions, monkeypatch
):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    case = decode_case(length, levels, queries, width, value_width)
    assert DECODE.why_not("native", NewTokens(*case, 0.3)) is None
    actual = hkt_decode(*case[:4], position=case[4], scale=0.3)
    assert error(actual, exact_decode(*case)) <= VALUES
    nowhere = (case[4] < 0)[:, None, :, None].expand_as(actual)
    assert torch.count_nonzero(actual[nowhere]) == 0


def test_decoding_in_bfloat16_rounds_only_its_result():
    case = decode_case(700, 3, 2, 32, 32, torch.bfloat16)
    actual = hkt_decode(*case[:4], position=case[4], scale=0.3)
    assert actual.dtype == torch.bfloat16
    assert error(actual, exact_decode(*case)) <= 2**-8


def test_what_is_not_a_number_stays_so_in_decoding():
    query, keys, value, weights, position = decode_case(600, 2, 1, 8, 8)
    keys[0][0, 0, 520] = float("nan")
    output = hkt_decode(query, keys, value, weights, position=position, scale=0.3)
    assert torch.isnan(output[0, 0]).all()
    assert torch.isfinite(output[0, 1]).all()


def test_scores_of_ten_thousand_lose_nothing_in_decoding():
    query, keys, value, _, position = decode_case(900, 1, 1, 16, 16)
    keys[0].copy_((keys[0] * 8).round() / 8)
    query[0].copy_((query[0] * 8).round() / 8)
    query[0][..., 0], keys[0][..., 0] = 128.0, 256.0
    case = query, keys, value, torch.ones(2, 1), position
    actual = hkt_decode(*case[:4], position=position, scale=0.25)
    exact = hkt_decode(
        [query[0].double()],
        [keys[0].double()],
        value.double(),
        torch.ones(2, 1).double(),
        position=position,
        scale=0.25,
    )
    assert error(actual, exact) <= VALUES


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("gradient", "no gradients"),
        ("gradient of the weights", "no gradients"),
        ("dtype", "float64"),
        ("relative", "relative_bias"),
    ],
)
def test_what_the_kernel_cannot_decode_is_refused_by_name_and_left_to_torch(change, reason):
    query, keys, value, weights, position = decode_case(40, 2, 1, 8, 8)
    options = {"position": position, "scale": 0.3}
    if change == "gradient":
        query[0].requires_grad_()
    if change == "gradient of the weights":
        weights.requires_grad_()
    if change == "dtype":
        query, keys = [x.double() for x in query], [x.double() for x in keys]
        value = value.double()
    if change == "relative":
        options["relative_bias"] = [torch.zeros(2, 3)] * 2
    case = query, keys, value, weights
    with pytest.raises(ValueError, match=f"native.*cannot run hkt_decode.*{reason}"):
        hkt_decode(*case, impl="native", **options)
    found = hkt_decode(*case, **options)
    assert torch.equal(found, hkt_decode(*case, impl="reference", **options))
    assert found.requires_grad == ("gradient" in change)


def test_many_queries_are_decoded_by_products_unless_the_kernel_is_named():
    *case, position = decode_case(40, 2, 17, 8, 8)
    expected = hkt_decode(*case, position=position, scale=0.3, impl="reference")
    assert torch.equal(hkt_decode(*case, position=position, scale=0.3), expected)
    named = hkt_decode(*case, position=position, scale=0.3, impl="native")
    assert not torch.equal(named, expected)
    assert error(named, exact_decode(*case, position)) <= VALUES


@pytest.mark.parametrize("relative", [False, True])
def test_sdpa_decodes_what_the_definition_says(relative):
    query, keys, value, weights, position = decode_case(41, 3, 4, 8, 40)
    bias = [torch.randn(2, 5) for _ in range(3)] if relative else None
    found, exact = (
        hkt_decode(
            [x.to(dtype) for x in query],
            [x.to(dtype) for x in keys],
            value.to(dtype),
            weights.to(dtype),
            position=position,
            scale=0.3,
            relative_bias=bias and [table.to(dtype) for table in bias],
            impl=impl,
        )
        for impl, dtype in (("sdpa", torch.float32), ("reference", torch.float64))
    )
    assert error(found, exact) <= VALUES
    nowhere = (position < 0)[:, None, :, None].expand_as(found)
    assert torch.count_nonzero(found[nowhere]) == 0


def test_triton_has_no_kernel_for_decoding():
    query, keys, value, weights, position = decode_case(5, 2, 1, 8, 8)
    with pytest.raises(ValueError, match="got 'triton'; these compute hkt_decode"):
        hkt_decode(query, keys, value, weights, position=position, scale=0.3, impl="triton")


@pytest.mark.usefixtures("_one_thread_afterwards")
def test_several_threads_decode_what_one_decodes():
    query, keys, value, weights, position = decode_case(3000, 3, 2, 64, 64)
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(hkt_decode(query, keys, value, weights, position=position, scale=0.3))
    assert torch.equal(*results)


@pytest.fixture
def _one_thread_afterwards():
    yield
    torch.set_num_threads(1)
