"""The split in reciprocal and directional scores, and how it goes with downsampling."""

import pytest
import torch

from polyscale.layers.hierarchy import Hierarchy
from polyscale.theory import downsampling_matrix, energy_shares, level_scores, split
from polyscale.theory.levels import upsample
from tests.theory.helpers import draw, random_layer, randomise

LENGTHS = (1, 2, 3, 5, 16, 29)


def assert_same(one, other):
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


class TestSplit:
    def test_the_parts_are_what_they_are_called_and_add_up(self):
        scores = draw(3, 9, 9)
        symmetric, antisymmetric = split(scores)
        assert torch.equal(symmetric, symmetric.mT)
        assert torch.equal(antisymmetric, -antisymmetric.mT)
        assert_same(symmetric + antisymmetric, scores)

    def test_no_other_split_adds_up(self):
        scores = draw(6, 6)
        symmetric, antisymmetric = split(scores)
        # Any symmetric and antisymmetric matrices that add up to S are these two.
        other = draw(6, 6, seed=3)
        other_symmetric = symmetric + other + other.T
        assert not torch.allclose(scores - other_symmetric, -(scores - other_symmetric).T)
        assert_same(split(symmetric)[0], symmetric)
        assert_same(split(antisymmetric)[1], antisymmetric)
        assert split(symmetric)[1].abs().max() == 0
        assert split(antisymmetric)[0].abs().max() == 0

    def test_energies_add_up_and_shares_to_one(self):
        scores = draw(4, 7, 7)
        reciprocal, directional, energy = energy_shares(scores)
        assert_same(energy, scores.square().sum((-2, -1)))
        assert_same(reciprocal + directional, torch.ones(4, dtype=torch.float64))
        symmetric, _ = split(scores)
        assert_same(energy_shares(symmetric)[0], torch.ones(4, dtype=torch.float64))

    def test_no_energy_has_no_share(self):
        assert [part.item() for part in energy_shares(torch.zeros(2, 2))] == [0, 0, 0]

    def test_a_single_token_is_reciprocal(self):
        reciprocal, directional, _ = energy_shares(torch.tensor([[3.0]]))
        assert (reciprocal.item(), directional.item()) == (1, 0)

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match=r"square .* got \[2, 3\]"):
            split(torch.zeros(2, 3))
        with pytest.raises(ValueError, match="before the mask"):
            energy_shares(torch.full((2, 2), -torch.inf))


class TestDownsampling:
    @pytest.mark.parametrize("options", [(), ("depthwise", 3), ("mean", 2), ("depthwise", 2, 4)])
    @pytest.mark.parametrize("length", LENGTHS)
    def test_the_matrix_of_each_channel_makes_the_levels_input(self, options, length):
        hierarchy = randomise(Hierarchy(3, 4, *options)).double()
        x = draw(length, 3)
        for level, expected in enumerate(hierarchy(x[None])):
            matrices = downsampling_matrix(hierarchy, length, level)  # [C, T_l, T]
            made = torch.stack([matrices[c].double() @ x[:, c] for c in range(3)], -1)
            assert_same(made, expected[0].detach())

    @pytest.mark.parametrize("length", LENGTHS)
    @pytest.mark.parametrize("equal_taps", [False, True])
    def test_with_one_filter_for_all_channels_scores_and_their_parts_are_congruent(
        self, length, equal_taps
    ):
        layer = random_layer(levels=4, bias=False, downsampling="mean")
        if equal_taps:
            layer = random_layer(levels=4, bias=False, filter_width=2)
            with torch.no_grad():
                for one in (layer.hierarchy.input_filter, *layer.hierarchy.downsamplers):
                    one.weight.copy_(one.weight[:, :1].expand_as(one.weight))
        x = draw(length, 16)
        plain = random_layer(levels=1, bias=False)
        plain.q_proj.load_state_dict(layer.q_proj.state_dict())
        plain.k_proj.load_state_dict(layer.k_proj.state_dict())
        flat = level_scores(plain, x).scores[0]  # of the input, not filtered
        parts = split(flat)
        found = level_scores(layer, x)
        for level, scores in enumerate(found.scores):
            matrix = downsampling_matrix(layer.hierarchy, length, level)[0].double()
            assert_same(scores, matrix @ flat @ matrix.T)
            for own, fine in zip(split(scores), parts, strict=True):
                assert_same(own, matrix @ fine @ matrix.T)

    @pytest.mark.parametrize("downsampling", ["depthwise", "dense"])
    @pytest.mark.parametrize("length", LENGTHS)
    def test_with_any_filters_splitting_the_form_splits_every_level(self, downsampling, length):
        layer = random_layer(levels=4, bias=False, downsampling=downsampling)
        x = draw(length, 16)
        found = level_scores(layer, x)
        inputs = [entry[0].detach() for entry in layer.hierarchy(x[None])]
        for head in range(2):
            rows = slice(8 * head, 8 * head + 8)
            query, key = (p[0].weight[rows].detach() for p in (layer.q_proj, layer.k_proj))
            reciprocal, directional = split(query.T @ key / 8**0.5)
            for level, scores in enumerate(found.scores):
                symmetric, antisymmetric = split(scores[head])
                assert_same(symmetric, inputs[level] @ reciprocal @ inputs[level].T)
                assert_same(antisymmetric, inputs[level] @ directional @ inputs[level].T)

    def test_with_a_filter_per_channel_scores_are_a_sum_of_congruences(self):
        layer = random_layer(levels=3, width=4, heads=1, bias=False)
        x = draw(11, 4)
        form = layer.q_proj[0].weight.T.detach() @ layer.k_proj[0].weight.detach() / 2
        for level, scores in enumerate(level_scores(layer, x).scores):
            matrices = downsampling_matrix(layer.hierarchy, 11, level)
            total = torch.zeros_like(scores[0])
            for c in range(4):
                for d in range(4):
                    fine = form[c, d] * x[:, c, None] * x[:, d]
                    total = total + matrices[c] @ fine @ matrices[d].T
            assert_same(scores[0], total)

    @pytest.mark.parametrize("length", LENGTHS)
    def test_the_merged_scores_split_level_by_level(self, length):
        found = level_scores(random_layer(), draw(length, 16))
        weights = found.weights(3)
        symmetric, antisymmetric = split(found.merged(3))
        parts = [split(scores) for scores in found.scores]
        for whole, at in ((symmetric, 0), (antisymmetric, 1)):
            total = sum(
                weights[:, level, None, None] * upsample(parts[level][at], level, length)
                for level in range(3)
            )
            assert_same(whole, total)

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match="got dense ones"):
            downsampling_matrix(Hierarchy(2, 2, "dense"), 4, 1)
        with pytest.raises(ValueError, match="level must be from 0 to 1, got 2"):
            downsampling_matrix(Hierarchy(2, 2), 4, 2)
        with pytest.raises(ValueError, match="length must be at least 1"):
            downsampling_matrix(Hierarchy(2, 2), 0, 1)
