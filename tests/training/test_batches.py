import itertools

import pytest
import torch

from polyscale.training.batches import BatchPlan, mix_seed

LENGTHS = torch.randint(1, 100, (1_000,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("bucket", [False, True])
def test_an_epoch_sees_every_sample_at_most_once_and_leaves_less_than_a_step(bucket):
    plan = BatchPlan(LENGTHS, 32, seed=0, bucket_by_length=bucket)
    seen = [index for step in range(plan.steps_per_epoch) for index in plan.step(step)]
    assert len(seen) == len(set(seen)) == 1_000 - 1_000 % 32


def test_epochs_and_seeds_have_orders_of_their_own():
    plan = BatchPlan(LENGTHS, 32, seed=0)
    first, second = plan.step(0), plan.step(plan.steps_per_epoch)
    assert first != second
    assert first != BatchPlan(LENGTHS, 32, seed=1).step(0)


def test_a_step_is_the_same_whether_or_not_the_ones_before_it_were_asked_for():
    plan = BatchPlan(LENGTHS, 32, seed=3, bucket_by_length=True)
    forward = [plan.step(step) for step in range(100)]
    assert BatchPlan(LENGTHS, 32, seed=3, bucket_by_length=True).step(77) == forward[77]


def test_bucketed_steps_hold_samples_of_about_one_length():
    def spread(bucket):
        plan = BatchPlan(LENGTHS, 20, seed=0, bucket_by_length=bucket)
        return sum(float(LENGTHS[plan.step(step)].float().std()) for step in range(50)) / 50

    assert spread(True) < spread(False) / 10


def test_bucketed_steps_do_not_come_in_the_order_of_length():
    plan = BatchPlan(LENGTHS, 20, seed=0, bucket_by_length=True)
    means = [float(LENGTHS[plan.step(step)].float().mean()) for step in range(50)]
    rises = sum(b > a for a, b in itertools.pairwise(means))
    assert 10 < rises < 40


@pytest.mark.parametrize(("processes", "accumulate"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_the_processes_together_see_the_whole_step(processes, accumulate):
    plan = BatchPlan(LENGTHS, 32, seed=0, bucket_by_length=True)
    shares = [
        plan.share(5, process=process, processes=processes, accumulate=accumulate)
        for process in range(processes)
    ]
    assert {len(share) for share in shares} == {accumulate}
    assert {len(part) for share in shares for part in share} == {32 // processes // accumulate}
    seen = [index for share in shares for part in share for index in part]
    assert sorted(seen) == sorted(plan.step(5))


def test_a_step_larger_than_the_training_set_is_refused():
    with pytest.raises(ValueError, match=r"from 1 to 1000, .* got 1001"):
        BatchPlan(LENGTHS, 1_001, seed=0)


def test_mixed_seeds_do_not_collide():
    seeds = {mix_seed(a, b, c) for a in range(10) for b in range(100) for c in range(4)}
    assert len(seeds) == 4_000
    assert all(0 <= seed < 2**63 for seed in seeds)
