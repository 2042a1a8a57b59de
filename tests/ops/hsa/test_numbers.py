"""Every float dtype, and scores too large for an exponential."""

from typing import Any

import pytest
import torch

from polyscale.ops.hsa import hsa_attention, hsa_matrix
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import KINDS, bushy_tree, kind_name, random_inputs, random_tree

every_kind = pytest.mark.parametrize("kind", KINDS, ids=kind_name)


@every_kind
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)],
    ids=str,
)
def test_every_dtype_gives_its_own_dtype_back(
    kind: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0)
    small = [part.detach().to(dtype).requires_grad_() for part in inputs.tensors()[:3]]
    wide = [part.detach().double() for part in small]
    output = hsa_attention(*small, tree, **kind)
    assert output.dtype == dtype
    # Only the rounding of the result itself is left: scores and softmax are in float32.
    torch.testing.assert_close(
        output.double(), hsa_attention(*wide, tree, **kind), atol=tolerance, rtol=0
    )
    output.sum().backward()
    for part in small:
        assert part.grad is not None
        assert part.grad.dtype == dtype
        assert torch.isfinite(part.grad).all()


def test_half_precision_scores_are_not_rounded_to_half_precision() -> None:
    tree = SignalTree.from_parents([-1, 0, 0, 1, 1])
    query = torch.full((1, 3, 1), 30.0, dtype=torch.float16)
    key = torch.tensor([[[66.6], [66.7], [66.8]]], dtype=torch.float16)  # scores near 2000
    matrix = hsa_matrix(query, key, tree, tie="columns", scale=1.0)
    expected = hsa_matrix(query.double(), key.double(), tree, tie="columns", scale=1.0)
    torch.testing.assert_close(matrix.double(), expected, atol=1e-3, rtol=0)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scores_of_ten_thousand_give_finite_results(
    kind: dict[str, Any], dtype: torch.dtype
) -> None:
    for seed in range(12):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed, lead=(1, 2), strength=100.0)
        tensors = [part.detach().to(dtype).requires_grad_() for part in inputs.tensors()]
        ignored = torch.zeros(1, tree.num_rows, dtype=torch.bool)
        ignored[0, 1::4] = True
        for mask in (None, ignored):
            output = hsa_attention(
                *tensors[:3],
                tree,
                position_scores=(tensors[3], tensors[4]),
                scale=1.0,
                key_padding_mask=mask,
                **kind,
            )
            assert torch.isfinite(output).all()
            if output.requires_grad:
                gradients = torch.autograd.grad(
                    output.sum(), tensors, allow_unused=True, materialize_grads=True
                )
                assert all(torch.isfinite(gradient).all() for gradient in gradients)


@every_kind
def test_large_scores_agree_with_the_reference_in_float64(kind: dict[str, Any]) -> None:
    for seed in range(10):
        tree = random_tree(seed)
        inputs = random_inputs(tree, seed, strength=60.0)
        arguments = (inputs.query, inputs.key, inputs.value / 60, tree)
        fast = hsa_attention(*arguments, scale=1.0, **kind)
        slow = hsa_attention(*arguments, scale=1.0, impl="reference", **kind)
        torch.testing.assert_close(fast, slow, atol=1e-9, rtol=0)


def test_float32_rows_still_sum_to_one_under_large_scores() -> None:
    tree = SignalTree.from_windows(64, (4, 4))
    query = 100 * torch.randn(2, 64, 4, generator=torch.manual_seed(0))
    for kind in (KINDS[0], KINDS[2], KINDS[4]):
        sums = hsa_matrix(query, query, tree, scale=1.0, **kind).sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-5, rtol=0)


def test_inputs_that_are_not_contiguous_are_read_as_they_are() -> None:
    tree = bushy_tree()
    inputs = random_inputs(tree, 0, lead=(2, 3))
    for kind in KINDS:
        turned = [
            part.transpose(1, 2).contiguous().transpose(1, 2) for part in inputs.tensors()[:3]
        ]
        assert not turned[0].is_contiguous()
        torch.testing.assert_close(
            hsa_attention(*turned, tree, **kind),
            hsa_attention(*inputs.tensors()[:3], tree, **kind),
        )


@every_kind
def test_equal_scores_give_the_mean_of_what_is_seen(kind: dict[str, Any]) -> None:
    for seed in range(20):
        tree = random_tree(seed)
        query = torch.zeros(1, tree.num_rows, 2, dtype=torch.float64)
        matrix = hsa_matrix(query, query, tree, **kind)[0]
        seen = torch.ones_like(matrix)
        if kind["causal"]:
            seen = seen.tril()
        if not kind["include_self"]:
            seen.fill_diagonal_(0.0)
        expected = seen / seen.sum(-1, keepdim=True).clamp(min=1)
        torch.testing.assert_close(matrix, expected, atol=1e-12, rtol=0)
