import pytest
import torch

from polyscale.layers.hsa_pooling import global_mean, pool_into_parents, tree_mean
from polyscale.trees import SignalTree


def test_pooling_takes_means_and_leaves_rows_outside_alone():
    tree = SignalTree.from_parents([-1, 0, 0, 1, 1, 1], rows=[-1, -1, 0, 4, 1, 3], num_rows=6)
    x = torch.randn(6, 5, dtype=torch.float64)
    x[[2, 5]] = torch.nan
    pooled, smaller = pool_into_parents(x, tree)
    assert torch.allclose(pooled[0], (x[4] + x[1] + x[3]) / 3, atol=1e-15)
    assert torch.equal(pooled[1], x[0])
    assert smaller.num_rows == 2
    forest = SignalTree.batch([tree, SignalTree.from_windows(2)])
    y = torch.cat([x, torch.randn(2, 5, dtype=torch.float64)])
    expected = torch.stack([(x[0] + x[1] + x[3] + x[4]) / 4, y[6:].mean(0)])
    assert torch.allclose(global_mean(y, forest), expected, atol=1e-15)


def by_recursion(nested, x):
    if isinstance(nested, list):
        return torch.stack([by_recursion(child, x) for child in nested]).mean(0)
    return x[nested]


def test_the_mean_of_means_is_that_of_every_tree_by_itself():
    shapes = [[[0, 1, 2], 3, [[4], [5, 6]]], [[0, 1], 2], [0]]
    sizes = [7, 3, 1]
    x = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    forest = SignalTree.batch([SignalTree.from_nested(shape) for shape in shapes])
    expected = torch.stack(
        [by_recursion(shape, part) for shape, part in zip(shapes, x.split(sizes), strict=True)]
    )
    found = tree_mean(x, forest)
    assert torch.allclose(found, expected, atol=1e-15)
    cotangent = torch.randn_like(found)
    (one,), (other,) = (torch.autograd.grad(y, x, cotangent) for y in (found, expected))
    assert torch.allclose(one, other, atol=1e-15)


def test_rows_outside_a_tree_have_no_part_in_the_mean_of_means():
    tree = SignalTree.from_parents([-1, 0, 0, 1, 1, 1], rows=[-1, -1, 0, 4, 1, 3], num_rows=6)
    x = torch.randn(6, 5, dtype=torch.float64)
    x[[2, 5]] = torch.nan
    expected = (x[0] + (x[4] + x[1] + x[3]) / 3) / 2
    assert torch.allclose(tree_mean(x, tree)[0], expected, atol=1e-15)


def test_pooling_refuses_what_does_not_fit_by_name():
    tree = SignalTree.from_windows(4)
    for pool in (pool_into_parents, global_mean, tree_mean):
        with pytest.raises(ValueError, match=r"x must have shape .* N = 4 rows, got \[3, 5\]"):
            pool(torch.randn(3, 5), tree)
        with pytest.raises(ValueError, match=r"x must have shape .* got \[1, 4, 5\]"):
            pool(torch.randn(1, 4, 5), tree)
        with pytest.raises(TypeError, match=r"x must be a floating tensor .* got torch"):
            pool(torch.ones(4, 5, dtype=torch.int64), tree)
        with pytest.raises(TypeError, match="tree must be a SignalTree, got list"):
            pool(torch.randn(4, 5), [[0, 1], [2, 3]])


def test_half_precision_pools_in_single():
    tree = SignalTree.from_windows(4096)
    x = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)
    assert global_mean(x, tree).item() == 1
    assert pool_into_parents(x, tree)[0].dtype == torch.bfloat16
