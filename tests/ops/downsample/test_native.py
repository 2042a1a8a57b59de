"""Downsampling by the native kernel: values, gradients, gradients of gradients."""

import pytest
import torch

from polyscale.layers.hierarchy import Hierarchy
from polyscale.ops.downsample.api import DOWNSAMPLE, FilterTaps
from polyscale.ops.downsample.native import op
from polyscale.ops.downsample.native.library import LIBRARY
from polyscale.ops.layout import PackedLayout, level_length
from tests.ops.hkt.cases import error

NO_KERNEL = LIBRARY.why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")

VALUES, GRADIENTS = 2e-6, 2e-5
every_variant = pytest.mark.parametrize("instructions", [None, "portable", "avx2"])


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
    made, coarse, sizes = ours.whole(x)
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
    torch.library.opcheck(op._downsample, (x, weights))
    _, coarse = op.downsample_native(x, weights)
    gradients = torch.randn_like(x), torch.randn_like(coarse)
    torch.library.opcheck(op._backward, (*gradients, x, weights, coarse))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_downsampled_by_torch(dtype):
    hierarchy = Hierarchy(4, 3).to(dtype)
    _, coarse, _ = hierarchy.whole(torch.randn(1, 9, 4, dtype=dtype))
    assert coarse.dtype == dtype
    assert "ownsample" not in type(coarse.grad_fn).__name__


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("packed", "it takes no packed sequences"),
        ("dense", "got a matrix per tap"),
        ("widths", r"filters of one width, got \[2, 3\]"),
        ("dtype", "it takes float32, got torch.float64"),
        ("weight", "it takes float32, got torch.bfloat16"),
        ("device", "it runs on the CPU, got a tensor on meta"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused_by_name(change, reason):
    x, packed = torch.randn(1, 9, 4), None
    filters = [FilterTaps(2, torch.rand(2, 4)), FilterTaps(2, None)]
    if change == "packed":
        packed = PackedLayout.from_cu_seqlens(torch.tensor([0, 4, 9]), 3)
    if change == "dense":
        filters[0] = FilterTaps(2, torch.rand(2, 4, 4))
    if change == "widths":
        filters[1] = FilterTaps(3, None)
    if change == "dtype":
        x = x.double()
    if change == "weight":
        filters[0] = FilterTaps(2, torch.rand(2, 4).bfloat16())
    if change == "device":
        x = x.to("meta")
    with pytest.raises(ValueError, match=f"impl='native' cannot run downsample: .*{reason}"):
        DOWNSAMPLE.choose("native", x, filters, packed)
    assert DOWNSAMPLE.choose("auto", x, filters, packed).name == "reference"
