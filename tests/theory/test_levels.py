"""The scores of a layer, recomputed for analysis, are the layer's own."""

import pytest
import torch

from polyscale.layers.hkt import HKTAttention
from polyscale.theory.levels import level_scores, merge, upsample, with_levels
from tests.theory.helpers import OPTIONS, draw, option_name, random_layer

every_option = pytest.mark.parametrize("options", OPTIONS, ids=option_name)
LENGTHS = (1, 2, 3, 13, 32)


@every_option
@pytest.mark.parametrize("length", LENGTHS)
def test_levels_weights_and_attention_are_those_of_the_layer(options, length):
    layer = random_layer(**options)
    x = draw(length, 16)
    found = level_scores(layer, x)
    with torch.no_grad():
        _, details = layer(x[None], return_details=True)
    for ours, theirs in zip(found.scores, details.level_scores, strict=True):
        torch.testing.assert_close(ours, theirs[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(found.weights(3), details.level_weights.double())
    merged = found.merged(3).masked_fill(~found.allowed(), -torch.inf)
    # Fixed weights are kept in float32: their sum is 1 to that precision, ours exactly.
    precision = 1e-7 if "level_weights" in options else 1e-12
    torch.testing.assert_close(merged.softmax(-1), details.attention[0], atol=precision, rtol=0)


@every_option
def test_further_levels_leave_the_first_as_they_are(options):
    layer = random_layer(**options)
    x = draw(21, 16)
    own, further = level_scores(layer, x), level_scores(layer, x, levels=6)
    assert [score.shape[-1] for score in further.scores] == [21, 11, 6, 3, 2, 1]
    for level in range(3):
        assert torch.equal(own.scores[level], further.scores[level])
    torch.testing.assert_close(further.weights(3), own.weights(3))


@every_option
@pytest.mark.parametrize("levels", [1, 2, 3, 5])
def test_a_layer_with_other_levels_runs_and_has_the_same_first_scores(options, levels):
    if levels < 3 and options.get("level_weights") == (0.0, 0.0, 1.0):
        with pytest.raises(ValueError, match="all 0"):
            with_levels(random_layer(**options), levels)
        return
    layer = random_layer(**options)
    other = with_levels(layer, levels)
    x = draw(1, 9, 16)
    with torch.no_grad():
        _, details = other(x, return_details=True)
        _, own = layer(x, return_details=True)
    assert len(details.level_scores) == levels
    for level in range(min(levels, 3)):
        torch.testing.assert_close(details.level_scores[level], own.level_scores[level])
    torch.testing.assert_close(
        details.level_weights.sum(-1), torch.ones_like(own.level_weights[:, 0])
    )
    assert layer.levels == 3
    assert len(layer.hierarchy.downsamplers) == 2


def test_a_further_level_is_the_mean_of_two_entries_of_the_one_before():
    layer = random_layer(levels=1, bias=False)
    x = draw(6, 16)
    coarse = torch.stack((x[0] / 2, (x[1] + x[2]) / 2, (x[3] + x[4]) / 2))
    expected = level_scores(layer, coarse).scores[0]
    torch.testing.assert_close(level_scores(layer, x, levels=2).scores[1], expected)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("level", range(5))
def test_upsampling_reads_the_block_of_each_position(length, level):
    size = -(-length // 2**level)
    score = draw(2, size, size)
    index = torch.arange(length) >> level
    expected = score[:, index][:, :, index]
    assert torch.equal(upsample(score, level, length), expected)
    rows = torch.arange(0, length, 2)
    assert torch.equal(upsample(score, level, length, rows), expected[:, rows])


def test_merging_changes_none_of_its_inputs():
    scores = [draw(2, 4, 4), draw(2, 2, 2)]
    kept = [score.clone() for score in scores]
    merge(scores, torch.full((2, 2), 0.5, dtype=torch.float64))
    assert all(torch.equal(score, before) for score, before in zip(scores, kept, strict=True))


def test_bad_input_is_named():
    layer = HKTAttention(8, 2)
    with pytest.raises(TypeError, match="layer must be an HKTAttention, got Linear"):
        with_levels(torch.nn.Linear(2, 2), 2)
    with pytest.raises(ValueError, match="levels must be at least 1, got 0"):
        with_levels(layer, 0)
    with pytest.raises(ValueError, match=r"x must be one sequence \[T, C\]"):
        level_scores(layer, torch.zeros(1, 3, 8))
    alone = level_scores(random_layer(level_weights=(0.0, 0.0, 1.0)), draw(4, 16))
    with pytest.raises(ValueError, match="no weight"):
        alone.weights(2)
