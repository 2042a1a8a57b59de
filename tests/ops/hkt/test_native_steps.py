"""The native kernel's lesser operations: decoding, downsampling, projections, their gradients."""

import pytest
import torch

import polyscale as ps
from polyscale.layers.hierarchy import Hierarchy
from polyscale.ops.hkt.api import attend, attend_projected
from polyscale.ops.hkt.decode import hkt_decode
from polyscale.ops.hkt.layout import PackedLayout, level_length
from polyscale.ops.hkt.native import decode, downsample, projected, weight_gradient
from polyscale.ops.hkt.native.build import why_not_built

NO_KERNEL = why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")

VALUES, GRADIENTS = 2e-6, 2e-5
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
    assert decode.why_not(*case[:4], None) is None
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
    with pytest.raises(ValueError, match=f"native.*cannot decode.*{reason}"):
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
    with pytest.raises(ValueError, match=r"got 'triton'.*no kernel"):
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


@every_variant
@pytest.mark.parametrize("mode", ["depthwise", "mean"])
@pytest.mark.parametrize(
    ("batch", "length", "channels", "levels", "width"),
    [
        (2, 11, 5, 3, 2),
        (3, 512, 40, 3, 2),
        (2, 1, 40, 5, 3),
        (1, 100, 17, 4, 1),
        (1, 257, 33, 2, 5),
    ],
)
def test_downsampling_and_its_gradients_are_those_of_the_filters(
    batch, length, channels, levels, width, mode, instructions, monkeypatch
):
    monkeypatch.setattr("polyscale.ops.native.instructions.wanted", instructions)
    ours = Hierarchy(channels, levels, mode, width)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter)
    exact = Hierarchy(channels, levels, mode, width).double()
    exact.load_state_dict(ours.state_dict())
    # Not contiguous, as it may come from elsewhere.
    x = torch.randn(batch, length, 2 * channels)[..., ::2].requires_grad_()
    wide = x.detach().double().requires_grad_()
    made, coarse, sizes = ours.fine_and_coarse(x)
    assert torch.equal(made, x)
    assert made.data_ptr() == x.data_ptr()
    assert "Downsample" in type(coarse.grad_fn).__name__
    assert sizes == [level_length(length, level) for level in range(1, levels)]
    expected = torch.cat(exact(wide)[1:], 1)
    assert error(coarse, expected) <= VALUES
    cotangents = [torch.randn_like(coarse), torch.randn_like(made)]
    in_double = [cotangent.double() for cotangent in cotangents]
    for outputs in (1, 2):  # of the coarse levels alone, and of level 0, too
        actual = torch.autograd.grad(
            [coarse, made][:outputs],
            [x, *ours.parameters()],
            cotangents[:outputs],
            retain_graph=True,
        )
        wanted = torch.autograd.grad(
            [expected, wide * 1.0][:outputs],
            [wide, *exact.parameters()],
            in_double[:outputs],
            retain_graph=True,
        )
        for one, other in zip(actual, wanted, strict=True):
            assert error(one, other) <= GRADIENTS


def test_torch_finds_downsampling_well_made():
    x, weights = torch.randn(2, 9, 4), torch.randn(2, 3, 4)
    torch.library.opcheck(downsample._downsample, (x, weights))
    _, coarse = downsample.downsample(x, weights)
    gradients = torch.randn_like(x), torch.randn_like(coarse)
    torch.library.opcheck(downsample._backward, (*gradients, x, weights, coarse))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_downsampled_by_torch(dtype):
    hierarchy = Hierarchy(4, 3).to(dtype)
    _, coarse, _ = hierarchy.fine_and_coarse(torch.randn(1, 9, 4, dtype=dtype))
    assert coarse.dtype == dtype
    assert "ownsample" not in type(coarse.grad_fn).__name__


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
    found_weight, found_bias = weight_gradient.weight_gradient(inputs, grads)
    assert error(found_weight, weight) <= VALUES
    assert error(found_bias, bias) <= VALUES


@pytest.mark.usefixtures("_one_thread_afterwards")
def test_several_threads_sum_the_gradient_of_a_weight_like_one():
    case = weight_gradient_case((400, 300), 72, (100, 60))
    results = []
    for threads in (1, 2, 3, 100):
        torch.set_num_threads(threads)
        results.append(weight_gradient.weight_gradient(*case))
    for weight, bias in results[1:]:
        assert torch.equal(weight, results[0][0])
        assert torch.equal(bias, results[0][1])


def test_what_is_not_a_number_stays_in_its_channel_of_the_gradient_of_a_weight():
    inputs, grads = weight_gradient_case((200,), 20, (30,))
    inputs[0][150, 3], grads[0][7, 5] = float("nan"), float("inf")
    weight, bias = weight_gradient.weight_gradient(inputs, grads)
    finite = torch.isfinite(weight)
    assert not finite[:, 3].any()
    assert not finite[5].any()
    assert finite.sum() == 29 * 19
    assert torch.isinf(bias[5])
    assert torch.isfinite(bias).sum() == 29


def test_torch_finds_the_gradient_of_a_weight_well_made():
    inputs, grads = weight_gradient_case((12, 6), 5, (7, 4))
    torch.library.opcheck(weight_gradient._weight_gradient, (inputs, grads))
    across = [x.t().contiguous().t() for x in inputs]  # rows that do not lie side by side
    for one, other in zip(
        weight_gradient.weight_gradient(across, grads),
        weight_gradient.weight_gradient(inputs, grads),
        strict=True,
    ):
        assert torch.equal(one, other)


def projections(batch, sizes, heads=2, width=16, dtype=torch.float32):
    fine = torch.randn(batch, sizes[0], 3 * heads * width).to(dtype).requires_grad_()
    if len(sizes) == 1:
        return fine, None
    coarse = torch.randn(batch, sum(sizes[1:]), 2 * heads * width).to(dtype)
    return fine, coarse.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["plain", "one level", "padded", "packed"])
def test_whole_projections_give_what_their_parts_give(kind, causal, dtype):
    batch, lengths, packed, sizes = 2, None, None, [150, 75, 38]
    if kind == "one level":
        sizes = [150]
    if kind == "padded":
        lengths = torch.tensor([150, 33])
    if kind == "packed":
        packed = PackedLayout.from_cu_seqlens(torch.tensor([0, 100, 101, 150]), 3)
        batch, sizes = 1, [bounds[-1] for bounds in packed.boundaries]
    fine, coarse = projections(batch, sizes, dtype=dtype)
    weights = torch.rand(2, len(sizes)).softmax(-1).requires_grad_()
    inputs = [x for x in (fine, coarse, weights) if x is not None]
    masks = {"causal": causal, "lengths": lengths, "packed": packed}
    together = attend_projected(fine, coarse, sizes[1:], weights, **masks)
    parts = projected.split_projections(fine, coarse, sizes[1:], 2)
    apart = attend(*parts, weights, **masks)
    assert torch.equal(together, apart)
    cotangent = torch.randn_like(together)
    for one, other in zip(
        torch.autograd.grad(together, inputs, cotangent),
        torch.autograd.grad(apart, inputs, cotangent),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("levels", [1, 3])
def test_torch_finds_the_gradients_of_projections_well_made(levels):
    sizes = [21, 11, 6][:levels]
    fine, coarse = (x if x is None else x.detach() for x in projections(2, sizes))
    weights = torch.rand(2, levels).softmax(-1)
    parts = projected.split_projections(fine, coarse, sizes[1:], 2)
    output, statistics = projected._forward(*parts, weights, None, None, True, 0.25)
    arguments = (torch.randn_like(output), fine, coarse, weights, None, None, output, statistics)
    torch.library.opcheck(projected._backward, (*arguments, sizes[1:], True, 0.25))


def test_a_layer_that_trains_uses_them():
    layer = ps.HKTAttention(16, 2)
    found = set()

    def note(node):
        if node is None or node in found:
            return
        found.add(node)
        for above, _ in node.next_functions:
            note(above)

    note(layer(torch.randn(1, 9, 16)).grad_fn)
    names = {type(node).__name__ for node in found}
    assert any("_Attend" in name for name in names)
    assert any("Downsample" in name for name in names)
