"""What the paper states of HKT, shown on the running code (section 2 of the specification)."""

import math

import pytest
import torch
import torch.nn.functional as F

import polyscale as ps
from polyscale.cost.hkt import attention_cost, score_flop_ratio
from polyscale.layers.hkt_levels import project
from polyscale.ops.hkt.api import AttentionMask, hkt_matrix, level_scores
from tests.ops.hkt.cases import close, random_case

NEVER = -1e9  # as a score: its exponential is exactly zero


def levels_of(layer, x):
    """Inputs, queries and keys of every level."""
    inputs = layer.hierarchy(x)
    levels = []
    for level, entries in enumerate(inputs):
        projected = project(entries, layer.projections().of(level, values=True))
        position = torch.arange(entries.shape[1]) << level
        levels.append(layer.heads.split(projected, [entries.shape[1]], [position]))
    queries, keys = ([getattr(made, name)[0] for made in levels] for name in ("queries", "keys"))
    return inputs, queries, keys


def merged_scores(queries, keys, weights, length):
    merged = torch.zeros((), dtype=torch.float64)
    for level, score in enumerate(level_scores(queries, keys, queries[0].shape[-1] ** -0.5)):
        index = torch.arange(length) >> level
        merged = merged + weights[:, level, None, None] * score[:, :, index][..., index]
    return merged


def smallest_eigenvalue(scores):
    """Of the symmetric part, relative to the largest in size."""
    values = torch.linalg.eigvalsh((scores + scores.mT).detach() / 2)
    return (values[..., 0] / values.abs().amax(-1)).min().item()


def randomise(layer, std=0.5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return layer.double()


class TestCost:
    def test_three_levels_cost_1_3125_times_the_score_products_counted_while_they_run(self):
        assert score_flop_ratio(3, 1024) == 1.3125

    @pytest.mark.parametrize("levels", range(1, 11))
    def test_any_number_of_levels_costs_less_than_four_thirds(self, levels):
        ratio = score_flop_ratio(levels, 1024)
        assert ratio == sum(4.0**-level for level in range(levels))
        assert ratio < 4 / 3

    def test_the_whole_operation_adds_only_the_coarse_scores_to_standard_attention(self):
        from torch.utils.flop_counter import FlopCounterMode

        counts = []
        for levels in (1, 3):
            case = random_case(64, levels, head_dim=8, value_dim=8)
            with FlopCounterMode(display=False) as counter:
                ps.hkt_attention(*case, impl="reference")
            counts.append(counter.get_total_flops())
        heads = 2 * 2
        fine = attention_cost(1, 64, head_dim=8, heads=heads).levels[0].flops
        assert counts[0] == 2 * fine  # scores and values
        assert counts[1] - counts[0] == 0.3125 * fine


class TestConvolutionIsASpecialCase:
    def layer(self, levels, mode, width):
        layer = ps.HKTAttention(
            6,
            2,
            levels,
            downsampling=mode,
            filter_width=width,
            relative_positions=2,
            bias=False,
        )
        randomise(layer)
        with torch.no_grad():
            for table in layer.relative_bias:
                table.copy_(torch.tensor([NEVER, 0.0, NEVER]))
            layer.v_proj.weight.copy_(torch.eye(6))
            layer.out_proj.weight.copy_(torch.eye(6))
        return layer

    @pytest.mark.parametrize("levels", [1, 3])
    @pytest.mark.parametrize("width", [1, 2, 5])
    def test_any_signed_depthwise_causal_convolution(self, levels, width):
        layer = self.layer(levels, "depthwise", width)
        x = torch.randn(2, 19, 6, dtype=torch.float64)
        taps = layer.hierarchy.input_filter.weight  # [width, C]; tap 0 is the newest
        kernel = taps.flip(0).T[:, None]  # [C, 1, width]
        expected = F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), kernel, groups=6)
        assert (taps < 0).any()
        assert close(layer(x), expected.transpose(1, 2), 1e-12)

    @pytest.mark.parametrize("levels", [1, 3])
    @pytest.mark.parametrize("width", [1, 2, 5])
    def test_any_signed_dense_causal_convolution(self, levels, width):
        layer = self.layer(levels, "dense", width)
        x = torch.randn(2, 19, 6, dtype=torch.float64)
        kernel = layer.hierarchy.input_filter.weight.flip(0).permute(2, 1, 0)  # [out, in, width]
        expected = F.conv1d(F.pad(x.transpose(1, 2), (width - 1, 0)), kernel)
        assert close(layer(x), expected.transpose(1, 2), 1e-12)

    def test_any_positive_normalised_kernel_by_the_relative_term_alone(self):
        kernel = torch.rand(4, dtype=torch.float64) + 0.1
        kernel = kernel / kernel.sum()
        zero = torch.zeros(1, 1, 15, 2, dtype=torch.float64)
        value = torch.randn(1, 1, 15, 3, dtype=torch.float64)
        # Distances -4..4: those of later tokens are masked, 4 and beyond get nothing.
        table = torch.tensor([[NEVER] * 4 + kernel.log().tolist() + [NEVER]], dtype=torch.float64)
        weights = torch.ones(1, dtype=torch.float64)
        output = ps.hkt_attention([zero], [zero], value, weights, relative_bias=[table])

        def convolve(x):  # [T, C]
            padded = F.pad(x.T[:, None], (3, 0))
            return F.conv1d(padded, kernel.flip(0)[None, None])[:, 0].T

        # Before the kernel fits, softmax normalises the part that does.
        mass = convolve(torch.ones(15, 1, dtype=torch.float64))
        assert close(mass[3:], torch.ones(12, 1, dtype=torch.float64), 1e-12)
        assert close(output[0, 0], convolve(value[0, 0]) / mass, 1e-12)


class TestStrictlyLarger:
    def test_scores_of_a_rank_standard_attention_cannot_reach_and_dependent_on_the_input(self):
        length, head_dim = 64, 4
        layer = randomise(ps.HKTAttention(head_dim, 1, 3, causal=False))
        ranks, matrices = {}, []
        for seed in (0, 1):
            generator = torch.Generator().manual_seed(seed)
            x = torch.randn(1, length, head_dim, dtype=torch.float64, generator=generator)
            _, queries, keys = levels_of(layer, x)
            for levels in (1, 3):
                weights = layer.level_weights[:, :levels]
                matrix = hkt_matrix(
                    queries[:levels],
                    keys[:levels],
                    weights,
                    AttentionMask(causal=False),
                    scale=head_dim**-0.5,
                )[0, 0]
                # Attention determines its scores up to a constant per row: one more rank.
                ranks[levels, seed] = int(torch.linalg.matrix_rank(matrix.log(), rtol=1e-9))
            matrices.append(matrix)
        for seed in (0, 1):
            assert ranks[1, seed] <= head_dim + 1
            assert ranks[3, seed] > head_dim + 1
        # A convolution is one Toeplitz matrix for all inputs: this is neither.
        assert not close(matrices[0], matrices[1], 1e-3)
        assert not close(matrices[0][1:, 1:], matrices[0][:-1, :-1], 1e-3)


class TestKernel:
    def layer_with(self, symmetric):
        """One head whose bilinear form has the given symmetric part and some antisymmetric one."""
        layer = randomise(ps.HKTAttention(8, 1, 3, bias=False))
        skew = torch.randn(8, 8, dtype=torch.float64)
        with torch.no_grad():
            layer.q_proj[0].weight.copy_(torch.eye(8))
            layer.k_proj[0].weight.copy_((symmetric + skew - skew.T).T)
        return layer

    def test_a_positive_semidefinite_form_gives_positive_semidefinite_scores_at_every_level(self):
        factor = torch.randn(8, 5, dtype=torch.float64)
        layer = self.layer_with(factor @ factor.T)
        x = torch.randn(2, 30, 8, dtype=torch.float64)
        _, queries, keys = levels_of(layer, x)
        for scores in level_scores(queries, keys, 1.0):
            assert smallest_eigenvalue(scores) > -1e-12
        merged = merged_scores(queries, keys, layer.level_weights, 30)
        assert smallest_eigenvalue(merged) > -1e-12

    def test_without_the_condition_the_scores_are_not_positive_semidefinite(self):
        indefinite = torch.diag(torch.tensor([3.0, 2, 1, 1, 1, 1, -1, -2], dtype=torch.float64))
        layer = self.layer_with(indefinite)
        x = torch.randn(2, 30, 8, dtype=torch.float64)
        _, queries, keys = levels_of(layer, x)
        for scores in level_scores(queries, keys, 1.0):
            assert smallest_eigenvalue(scores) < -0.01
        assert smallest_eigenvalue(merged_scores(queries, keys, layer.level_weights, 30)) < -0.01

    @pytest.mark.parametrize("rotary", [False, True])
    @pytest.mark.parametrize("seed", range(5))
    def test_the_psd_kernel_satisfies_the_condition_whatever_its_weights(self, seed, rotary):
        layer = randomise(ps.HKTAttention(16, 2, 4, kernel="psd", rotary=rotary), 2.0, seed)
        x = torch.randn(2, 30, 16, dtype=torch.float64)
        _, queries, keys = levels_of(layer, x)
        for scores in level_scores(queries, keys, 1.0):
            assert smallest_eigenvalue(scores) > -1e-12
        merged = merged_scores(queries, keys, layer.level_weights, 30)
        assert smallest_eigenvalue(merged) > -1e-12
        # It is not merely symmetric: direction is there, too.
        assert not close(merged, merged.transpose(-2, -1), 1e-3)


class TestSymmetry:
    def test_there_is_one_way_to_split_a_matrix(self):
        size = 5
        basis = []
        for i in range(size):
            for j in range(i, size):
                symmetric = torch.zeros(size, size)
                symmetric[i, j] = symmetric[j, i] = 1.0
                basis.append(symmetric)
                if i != j:
                    antisymmetric = torch.zeros(size, size)
                    antisymmetric[i, j], antisymmetric[j, i] = 1.0, -1.0
                    basis.append(antisymmetric)
        # Symmetric and antisymmetric matrices together: independent, and enough for all.
        assert len(basis) == size**2
        assert torch.linalg.matrix_rank(torch.stack(basis).flatten(1)) == size**2

    def test_the_split_of_the_scores_commutes_with_downsampling(self):
        layer = randomise(ps.HKTAttention(8, 2, 3, bias=False))
        x = torch.randn(1, 29, 8, dtype=torch.float64)
        inputs, queries, keys = levels_of(layer, x)
        for head in range(2):
            rows = slice(4 * head, 4 * head + 4)
            form = layer.q_proj[0].weight[rows].T @ layer.k_proj[0].weight[rows]  # M of the head
            reciprocal, directional = (form + form.T) / 2, (form - form.T) / 2
            for level, scores in enumerate(level_scores(queries, keys, 1.0)):
                score, x_level = scores[0, head], inputs[level][0]
                symmetric, antisymmetric = (score + score.T) / 2, (score - score.T) / 2
                # Splitting the scores of a level is splitting the form, whatever the level.
                assert close(symmetric, x_level @ reciprocal @ x_level.T, 1e-12)
                assert close(antisymmetric, x_level @ directional @ x_level.T, 1e-12)
                # And repeating blocks commutes with it, so the merged scores split level by level.
                index = torch.arange(29) >> level
                upsampled = score[index][:, index]
                assert close((upsampled + upsampled.T) / 2, symmetric[index][:, index], 1e-12)
                assert close((upsampled - upsampled.T) / 2, antisymmetric[index][:, index], 1e-12)
                # The parts are orthogonal, so no part of one can be moved to the other.
                assert math.isclose(
                    score.square().sum().item(),
                    (symmetric.square().sum() + antisymmetric.square().sum()).item(),
                    rel_tol=1e-12,
                )
