"""Leaves read where the inputs have them, and results stored past the caches."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from polyscale.ops.hsa import hsa_attention
from polyscale.ops.hsa.native import library
from polyscale.ops.native import instructions
from polyscale.trees import SignalTree


@pytest.fixture(params=instructions.NAMES, autouse=True)
def kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernel for each set of instructions; the best one there is for those beyond it."""
    best = instructions.NAMES.index(library.best_instructions())
    instructions.wanted = instructions.NAMES[min(best, instructions.NAMES.index(request.param))]
    yield
    instructions.wanted = None


def _attend(rows: list[Tensor], tree: SignalTree, mask: Tensor | None) -> list[Tensor]:
    """The output and all gradients of blocks."""
    output = hsa_attention(*rows, tree, key_padding_mask=mask, impl="native")
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
    return [output, *torch.autograd.grad(output, rows, weights)]


def _rows(side_by_side: bool, heads: int, size: int, width: int = 64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    shape = (1, size, heads, width) if side_by_side else (1, heads, size, width)
    found = [torch.randn(shape, generator=generator) for _ in range(3)]
    return [(x.transpose(1, 2) if side_by_side else x).requires_grad_() for x in found]


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(
    "tree",
    [
        SignalTree.from_windows(64, (2, 4, 8, 16)),
        SignalTree.from_windows(509, (4, 3)),
        SignalTree.from_windows(300, (16, 5, 7)),
        SignalTree.from_windows(90, ()),
        SignalTree.batch([SignalTree.from_windows(n, (6, 2)) for n in (12, 37, 60)]),
    ],
    ids=["pairs", "several chunks", "families of 16", "one family", "forest"],
)
def test_leaves_read_in_place_give_the_same_bits_as_copies(
    tree: SignalTree, side_by_side: bool
) -> None:
    rows = _rows(side_by_side, 2, tree.num_rows)
    # With a mask, rows are copied, as those to be ignored have to become zero.
    nothing = torch.zeros(1, tree.num_rows, dtype=torch.bool)
    for found, copied in zip(_attend(rows, tree, None), _attend(rows, tree, nothing), strict=True):
        assert torch.equal(found, copied)


def test_large_results_do_not_depend_on_how_they_are_stored() -> None:
    size, heads = 2304, 8  # a tensor of 4.5 MiB, more than what stays in the caches
    tree = SignalTree.from_windows(size, (2, 4, 8, 16))
    rows = _rows(False, heads, size)
    found = _attend(rows, tree, None)
    for head in range(0, heads, 4):  # and half of the heads, less than that
        some = [x[:, head : head + 4].detach().requires_grad_() for x in rows]
        output = hsa_attention(*some, tree, impl="native")
        assert torch.equal(output, found[0][:, head : head + 4])
        weights = torch.linspace(-1, 1, found[0].numel()).view(found[0].shape)
        gradients = torch.autograd.grad(output, some, weights[:, head : head + 4])
        for gradient, whole in zip(gradients, found[1:], strict=True):
            assert torch.equal(gradient, whole[:, head : head + 4])


def test_large_results_are_the_same_on_any_number_of_threads() -> None:
    tree = SignalTree.from_windows(2304, (2, 4, 8, 16))
    rows = _rows(True, 8, 2304)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(_attend(rows, tree, None))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
