"""The error decomposition against sums written out, row by row."""

import math

import pytest
import torch

from polyscale.theory import decay_ratio, error_decomposition, level_scores, tail_bound
from polyscale.theory.error import analyse_levels, level_contributions
from tests.theory.helpers import OPTIONS, draw, option_name, random_layer

LENGTHS = (1, 2, 3, 7, 13, 32)
STRIDES = (1, 2, 4, 5, 64)


def by_hand(flat, scores, stride):
    """Everything of one row of Python numbers, from the definitions."""
    keys = [j for j, score in enumerate(flat) if score > -math.inf]
    if not keys:
        return [0.0] * 7

    def softmax(row):
        top = max(row[j] for j in keys)
        weights = {j: math.exp(row[j] - top) for j in keys}
        total = math.fsum(weights.values())
        return {j: weight / total for j, weight in weights.items()}

    p, a = softmax(flat), softmax(scores)
    delta = {j: flat[j] - scores[j] for j in keys}
    mean = math.fsum(p[j] * delta[j] for j in keys)

    def moment(power):
        return math.fsum(p[j] * (delta[j] - mean) ** power for j in keys)

    blocks = {}
    for j in keys:
        blocks.setdefault(j // stride, []).append(j)
    within = between = 0.0
    for members in blocks.values():
        mass = math.fsum(p[j] for j in members)
        if mass == 0:
            continue
        center = math.fsum(p[j] * delta[j] for j in members) / mass
        within += math.fsum(p[j] * (delta[j] - center) ** 2 for j in members)
        between += mass * (center - mean) ** 2
    kl = math.fsum(p[j] * (math.log(p[j]) - math.log(a[j])) for j in keys)
    third, fourth = -moment(3) / 6, (moment(4) - 3 * moment(2) ** 2) / 24
    variation = 0.5 * math.fsum(abs(p[j] - a[j]) for j in keys)
    return [kl, within / 2, between / 2, kl - moment(2) / 2, third, fourth, variation]


def assert_is_by_hand(flat, scores, stride):
    parts = error_decomposition(flat, scores, stride)
    found = torch.stack(
        [
            parts.kl,
            parts.resolution,
            parts.drift,
            parts.non_gaussian,
            parts.third_cumulant_term,
            parts.fourth_cumulant_term,
            parts.total_variation,
        ],
        -1,
    )
    rows = zip(flat.tolist(), scores.tolist(), strict=True)
    expected = torch.tensor([by_hand(*row, stride) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    total = parts.resolution + parts.drift + parts.non_gaussian
    torch.testing.assert_close(total, expected[:, 0], atol=1e-10, rtol=0)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_three_parts_add_up_to_the_divergence(length, stride, causal):
    flat, scores = 2 * draw(length, length), 2 * draw(length, length, seed=1)
    if causal:
        later = torch.ones(length, length).triu(1).bool()
        flat, scores = (part.masked_fill(later, -torch.inf) for part in (flat, scores))
    assert_is_by_hand(flat, scores, stride)


def test_any_mask_and_rows_that_see_nothing():
    hidden = torch.rand(40, 17, generator=torch.Generator().manual_seed(0)) < 0.6
    hidden[5] = True
    flat, scores = draw(40, 17), draw(40, 17, seed=1)
    flat, scores = (part.masked_fill(hidden, -torch.inf) for part in (flat, scores))
    assert_is_by_hand(flat, scores, 4)
    parts = error_decomposition(flat, scores, 4)
    assert not parts.seen[5]
    assert parts.seen.sum() == 39


def test_weights_that_underflow_lose_nothing_of_the_divergence():
    # exp(-800) is 0 in float64, but its key has all the weight under the other scores.
    flat = torch.tensor([[0.0, -800.0, 0.5]], dtype=torch.float64)
    scores = torch.tensor([[0.0, 30.0, 0.5]], dtype=torch.float64)
    parts = error_decomposition(flat, scores, 2)
    direct = (flat.softmax(-1) * (flat.log_softmax(-1) - scores.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(parts.kl, direct, atol=1e-10, rtol=0)
    total = parts.resolution + parts.drift + parts.non_gaussian
    torch.testing.assert_close(total, direct, atol=1e-10, rtol=0)


def test_single_keys_have_no_resolution_and_one_block_no_drift():
    flat, scores = draw(9, 9), draw(9, 9, seed=1)
    assert error_decomposition(flat, scores, 1).resolution.abs().max() < 1e-15
    assert error_decomposition(flat, scores, 16).drift.abs().max() < 1e-15


def test_equal_scores_and_shifted_rows_are_at_no_distance():
    flat = draw(6, 8)
    for scores in (flat, flat + draw(6, 1, seed=2)):
        parts = error_decomposition(flat, scores, 2)
        assert max(getattr(parts, n).abs().max() for n in ("kl", "resolution", "drift")) < 1e-14


def test_the_cumulant_terms_lead_the_non_gaussian_part():
    flat, direction = draw(20, 12), draw(20, 12, seed=1)
    left = []
    for size in (0.2, 0.1, 0.05):
        parts = error_decomposition(flat, flat + size * direction, 4)
        rest = parts.non_gaussian - parts.third_cumulant_term - parts.fourth_cumulant_term
        left.append(rest.abs().max().item())
    # What is left is of fifth order: half the step leaves about a 32nd.
    assert left[0] / left[1] > 20
    assert left[1] / left[2] > 20


@pytest.mark.parametrize("options", OPTIONS, ids=option_name)
@pytest.mark.parametrize("length", [1, 2, 3, 13])
def test_the_decomposition_of_a_layer_is_the_divergence_of_its_attention(options, length):
    layer = random_layer(**options)
    x = draw(length, 16)
    found = level_scores(layer, x, levels=6)
    hidden = ~found.allowed()
    p = found.scores[0].masked_fill(hidden, -torch.inf).softmax(-1)
    with torch.no_grad():
        _, details = layer(x[None], return_details=True)
    for levels in range(1, 7):
        if not found.can_merge(levels):
            continue
        analysis = analyse_levels(found, levels)
        a = found.merged(levels).masked_fill(hidden, -torch.inf).softmax(-1)
        if levels == 3:
            # Fixed weights are kept in float32: their sum is 1 to that precision, ours exactly.
            precision = 1e-7 if "level_weights" in options else 1e-12
            torch.testing.assert_close(a, details.attention[0], atol=precision, rtol=0)
        direct = torch.where(hidden, 0.0, p * (p / a.clamp(min=1e-300)).log()).sum(-1)
        for stride in (1, 2 ** (levels - 1), 8):
            parts = analysis.parts(stride)
            total = parts.resolution + parts.drift + parts.non_gaussian
            torch.testing.assert_close(total, direct, atol=1e-10, rtol=0)
    if found.can_merge(1):
        assert analyse_levels(found, 1).kl.abs().max() < 1e-14


@pytest.mark.parametrize("causal", [False, True])
def test_the_levels_share_the_gaussian_part(causal):
    found = level_scores(random_layer(causal=causal), draw(19, 16))
    shares = level_contributions(found, 3)  # [H, L, Q]
    parts = analyse_levels(found, 3).parts(4)
    torch.testing.assert_close(shares.sum(1), parts.resolution + parts.drift, atol=1e-12, rtol=0)
    assert shares[:, 0].abs().max() == 0


def test_chosen_rows_are_rows_of_the_whole():
    found = level_scores(random_layer(), draw(23, 16))
    rows = torch.tensor([0, 3, 11, 22])
    whole, some = analyse_levels(found, 3), analyse_levels(found, 3, rows)
    torch.testing.assert_close(some.kl, whole.kl[:, rows])
    assert torch.equal(
        level_contributions(found, 3, rows), level_contributions(found, 3)[..., rows]
    )


class TestTail:
    @pytest.mark.parametrize("length", [1, 5, 40])
    def test_dropping_levels_changes_no_score_by_more_than_the_bound(self, length):
        found = level_scores(random_layer(levels=5), draw(length, 16))
        weights = found.weights(5)
        tail = tail_bound(found.scores, weights, found.allowed())
        assert (tail.measured <= tail.bound + 1e-12).all()
        whole = found.merged(5)
        for level in range(1, 5):
            kept = sum(
                weights[:, m, None, None]
                * found.scores[m][:, torch.arange(length) >> m][:, :, torch.arange(length) >> m]
                for m in range(level)
            )
            change = (whole - kept).masked_fill(~found.allowed(), 0.0).abs().amax((-2, -1))
            torch.testing.assert_close(tail.measured[:, level], change, atol=1e-12, rtol=0)
        torch.testing.assert_close(tail.bound[:, -1], tail.measured[:, -1])

    def test_the_bound_is_the_sum_of_the_terms(self):
        found = level_scores(random_layer(causal=False), draw(16, 16))
        tail = tail_bound(found.scores, found.weights(3))
        terms = torch.stack([score.abs().amax((-2, -1)) for score in found.scores], -1)
        torch.testing.assert_close(tail.terms, terms * found.weights(3))
        torch.testing.assert_close(tail.bound[:, 0], tail.terms.sum(-1))

    def test_a_geometric_series_has_its_ratio(self):
        terms = torch.tensor([[3 * 0.4**level for level in range(6)], [2.0**k for k in range(6)]])
        assert decay_ratio(terms) == pytest.approx([0.4, 2.0], rel=1e-5)

    def test_what_cannot_be_fitted_has_no_ratio(self):
        assert decay_ratio(torch.tensor([[1.0]])) == [None]
        assert decay_ratio(torch.tensor([[1.0, 0.0]])) == [None]


class TestBadInput:
    def test_it_is_named(self):
        good = torch.zeros(2, 3)
        with pytest.raises(ValueError, match=r"one shape .* \[2, 3\] and \[2, 4\]"):
            error_decomposition(good, torch.zeros(2, 4), 1)
        with pytest.raises(TypeError, match=r"flat must be a floating tensor, got torch.int64"):
            error_decomposition(good.long(), good, 1)
        with pytest.raises(ValueError, match="stride must be at least 1, got 0"):
            error_decomposition(good, good, 0)
        with pytest.raises(ValueError, match="one mask for both"):
            error_decomposition(good, good.masked_fill(good == 0, -torch.inf), 1)
        with pytest.raises(ValueError, match="scores must be finite or minus infinity"):
            error_decomposition(good, good + torch.nan, 1)
        with pytest.raises(ValueError, match="levels must be from 1 to 3, got 4"):
            analyse_levels(level_scores(random_layer(), draw(4, 16)), 4)
        with pytest.raises(ValueError, match="one column for each of the 1 levels"):
            tail_bound([torch.zeros(1, 2, 2)], torch.zeros(1, 2))

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"scores": []}, ValueError, "one column for each of the 0 levels"),
            ({"scores": [torch.zeros(2, 5, 5)]}, ValueError, r"the 1 levels, got \[2, 2\]"),
            ({"weights": torch.ones(2)}, ValueError, r"weights must have shape \[H, L\]"),
            ({"weights": torch.ones(1, 2)}, ValueError, r"scores\[0\] must .* \[1, 5, 5\], for"),
            ({"weights": torch.ones(2, 2).long()}, TypeError, "weights must be a floating tensor"),
            ({"weights": torch.tensor([[1, math.nan]] * 2)}, ValueError, "weights must be finite"),
            ({"level0": torch.zeros(2, 5, 4)}, ValueError, r"scores\[0\] must have shape"),
            ({"level0": torch.zeros(5)}, ValueError, r"scores\[0\] must have shape"),
            ({"level0": torch.zeros(2, 0, 0)}, ValueError, r"T >= 1, got \[2, 0, 0\]"),
            ({"level0": torch.zeros(())}, ValueError, r"T >= 1, got \[\]"),
            ({"level0": "abc"}, TypeError, r"scores\[0\] must be a floating tensor, got str"),
            ({"level1": torch.zeros(2, 2, 2)}, ValueError, r"= \[2, 3, 3\], .* got \[2, 2, 2\]"),
            ({"level1": torch.zeros(1, 3, 3)}, ValueError, r"scores\[1\] .* got \[1, 3, 3\]"),
            ({"level1": torch.full((2, 3, 3), math.nan)}, ValueError, r"scores\[1\] must be fin"),
            ({"level1": torch.full((2, 3, 3), -math.inf)}, ValueError, "before the mask"),
            ({"allowed": torch.ones(5, 5)}, ValueError, r"got torch.float32 \[5, 5\]"),
            ({"allowed": torch.ones(3, 3).bool()}, ValueError, r"bool \[T, T\] = \[5, 5\]"),
            ({"allowed": True}, ValueError, "got bool"),
        ],
    )
    def test_scores_of_a_tail_that_do_not_fit_are_named(self, change, error, words):
        scores = [change.pop("level0", torch.zeros(2, 5, 5)), torch.zeros(2, 3, 3)]
        scores[1] = change.pop("level1", scores[1])
        arguments = {"scores": scores, "weights": torch.full((2, 2), 0.5), **change}
        with pytest.raises(error, match=words):
            tail_bound(**arguments)

    def test_terms_without_a_ratio_are_named(self):
        with pytest.raises(ValueError, match=r"terms must be numbers \[H, L\], got \[3\]"):
            decay_ratio(torch.ones(3))
        with pytest.raises(ValueError, match="got nan"):
            decay_ratio(torch.tensor([[1.0, math.nan]]))
