"""Buckets of families: no padding beyond 2x, computed once, dropped with the tree."""

import gc
import random
import weakref

import torch

from polyscale.ops.hsa import families, hsa_attention
from polyscale.ops.hsa.families import group, plans_of
from polyscale.trees import SignalTree
from tests.ops.hsa.helpers import bushy_tree, random_tree


def waste(sizes: torch.Tensor, spans: torch.Tensor, chosen: torch.Tensor) -> float:
    size, span = sizes[chosen], spans[chosen]
    return float(len(chosen) * size.max() * span.max() / (size * span).sum())


def test_padding_at_most_doubles_the_work() -> None:
    rng = random.Random(0)
    for _ in range(50):
        sizes = torch.tensor([rng.choice([1, 2, 3, rng.randint(1, 40)]) for _ in range(300)])
        spans = sizes * torch.tensor([rng.randint(1, 30) for _ in range(300)])
        for second in (sizes, spans):
            buckets = group(sizes, second)
            assert sorted(torch.cat(buckets).tolist()) == list(range(300))
            for chosen in buckets:
                assert waste(sizes, second, chosen) <= 2.0


def test_large_buckets_waste_at_most_a_quarter() -> None:
    sizes = torch.randint(1, 60, (20_000,), generator=torch.manual_seed(0))
    buckets = group(sizes, sizes)
    total = sum(len(chosen) * int(sizes[chosen].max()) ** 2 for chosen in buckets)
    assert total <= 1.3 * int((sizes**2).sum())
    assert len(buckets) < 30


def test_equal_families_share_one_bucket_without_padding() -> None:
    tree = SignalTree.from_windows(64, (2, 4, 8))
    plan = plans_of(tree).plan(tree, 3, False)
    assert [len(level.buckets) for level in plan.levels] == [1] * len(plan.levels)
    assert all(level.buckets[0].uniform for level in plan.levels)
    # Rows are only ever viewed: nothing is gathered.
    assert plan.rows.identity
    assert all(slots is None or slots.identity for slots in plan.slots)


def test_real_trees_are_within_the_bound_at_every_depth() -> None:
    for seed in range(60):
        tree = random_tree(seed, max_leaves=60, max_family=40)
        for columns in (False, True):
            for level in plans_of(tree).plan(tree, 1, columns).levels:
                for bucket in level.buckets:
                    span = bucket.span if columns else bucket.size
                    padded = bucket.families * bucket.size * span
                    second = bucket.real_leaves if columns else bucket.real
                    assert padded <= 2 * int((bucket.real.sum(1) * second.sum(1)).sum())


def test_a_plan_is_made_once_per_tree_and_dropped_with_it() -> None:
    tree = SignalTree.from_windows(8, (2, 2))
    query = torch.randn(1, 2, 8, 4)
    hsa_attention(query, query, query, tree, impl="torch")
    plans = plans_of(tree)
    before = plans.plan(tree, 2, False)
    hsa_attention(query, query, query, tree, impl="torch")
    assert plans_of(tree) is plans
    assert plans.plan(tree, 2, False) is before
    gone, key = weakref.ref(tree), id(tree)
    del tree
    gc.collect()
    assert gone() is None
    assert key not in families._kept


def test_only_so_many_batch_sizes_are_remembered() -> None:
    tree = SignalTree.from_windows(8, (2, 2))
    for batch in range(1, 3 * families.KEPT_PLANS):
        query = torch.randn(batch, 1, 8, 4)
        hsa_attention(query, query, query, tree, impl="torch")
    assert len(plans_of(tree).plans) == families.KEPT_PLANS


def test_a_plan_made_under_inference_mode_serves_training() -> None:
    tree = SignalTree.from_parents(bushy_tree().parent.tolist())
    query = torch.randn(1, 2, tree.num_rows, 4)
    with torch.inference_mode():
        for tie in ("blocks", "columns"):
            hsa_attention(query, query, query, tree, tie=tie, impl="torch")
    query.requires_grad_()
    places = torch.randn(tree.num_nodes, 2, requires_grad=True)
    for tie in ("blocks", "columns"):
        output = hsa_attention(
            query, query, query, tree, tie=tie, position_scores=places, impl="torch"
        )
        output.sum().backward()
    assert query.grad is not None
    assert torch.isfinite(query.grad).all()
