"""The native kernel on the projections of a layer as they come out of its products."""

import pytest
import torch

import polyscale as ps
from polyscale.ops.hkt.api import AttentionMask, attend, attend_projected
from polyscale.ops.hkt.native import projected
from polyscale.ops.hkt.native.library import LIBRARY
from polyscale.ops.layout import PackedLayout

NO_KERNEL = LIBRARY.why_not_built()
pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=f"no native kernel: {NO_KERNEL}")


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
    mask = AttentionMask(causal, lengths, packed)
    together = attend_projected(fine, coarse, sizes[1:], weights, mask)
    parts = projected.split_projections(fine, coarse, sizes[1:], 2)
    apart = attend(*parts, weights, mask)
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
