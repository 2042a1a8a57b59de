"""Tensors that only have a shape, and rows that attend to nothing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyscale import HSAAttention, SignalTree, hsa_attention, hsa_matrix

TREE = SignalTree.from_windows(6, (2,))


@pytest.mark.parametrize("tie", ["columns", "blocks"])
def test_where_nothing_attends_there_are_zeros_with_zero_gradients(tie: str) -> None:
    tensors = [torch.randn(2, 6, 4, requires_grad=True) for _ in range(3)]
    hidden = torch.ones(6, dtype=torch.bool)
    output = hsa_attention(*tensors, TREE, tie=tie, key_padding_mask=hidden)
    assert output.grad_fn is not None
    assert torch.count_nonzero(output) == 0
    output.sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        assert torch.count_nonzero(tensor.grad) == 0


def test_meta_tensors_give_shapes() -> None:
    query = torch.zeros(2, 6, 4, device="meta", requires_grad=True)
    value = torch.zeros(2, 6, 3, device="meta")
    output = hsa_attention(query, query, value, TREE)
    assert (output.shape, output.device.type) == ((2, 6, 3), "meta")
    assert hsa_matrix(query, query, TREE).shape == (2, 6, 6)


def test_fake_tensors_give_shapes() -> None:
    with FakeTensorMode():
        query, value = torch.zeros(2, 6, 4, requires_grad=True), torch.zeros(2, 6, 3)
        assert hsa_attention(query, query, value, TREE).shape == (2, 6, 3)


def test_a_layer_on_the_meta_device_gives_shapes() -> None:
    with torch.device("meta"):
        layer, x = HSAAttention(8, 2), torch.zeros(1, 6, 8)
    assert layer(x, TREE).shape == (1, 6, 8)
