"""Eigenvalues of forms and scores, and the condition that carries over from one to the other."""

import pytest
import torch

from polyscale.theory import bilinear_forms, level_scores, product_spectrum, spectrum
from polyscale.theory.kernel import gram_spectrum
from tests.theory.helpers import draw, random_layer, randomise

PSD_OPTIONS = [
    {},
    {"causal": False},
    {"downsampling": "dense"},
    {"downsampling": "mean"},
    {"filter_width": 3},
    {"values": "merged"},
    {"downsampling_width": 4},
]


def layer_with(symmetric, **options):
    """One head whose bilinear form has the given symmetric part and some antisymmetric one."""
    size = len(symmetric)
    layer = random_layer(width=size, heads=1, bias=False, **options)
    skew = draw(size, size, seed=7)
    with torch.no_grad():
        layer.q_proj[0].weight.copy_(torch.eye(size))
        layer.k_proj[0].weight.copy_((symmetric + skew - skew.T).T)
    return layer


class TestSpectrum:
    @pytest.mark.parametrize(("size", "width"), [(1, 1), (3, 8), (16, 8), (17, 8), (40, 3)])
    def test_the_product_has_the_eigenvalues_of_the_matrix_it_never_makes(self, size, width):
        left, right = draw(4, size, width), draw(4, size, width, seed=1)
        dense = torch.linalg.eigvalsh((left @ right.mT + right @ left.mT) / 2).flip(-1)
        found = product_spectrum(left, right)
        most = found.eigenvalues.shape[-1]
        assert most == min(size, 2 * width)
        padded = torch.cat((found.eigenvalues, torch.zeros(4, size - most)), -1)
        torch.testing.assert_close(padded.sort(descending=True).values, dense, atol=1e-11, rtol=0)
        same = spectrum(left @ right.mT)
        for name in ("fraction_negative", "negative_share", "smallest", "margin"):
            one, other = getattr(found, name), getattr(same, name)
            torch.testing.assert_close(one, other, atol=1e-11, rtol=0)
        assert torch.equal(found.psd, same.psd)

    def test_a_gram_matrix_has_the_squared_singular_values(self):
        factor = draw(9, 4)
        dense = torch.linalg.eigvalsh(factor @ factor.T).flip(-1)[:4]
        found = gram_spectrum(factor)
        torch.testing.assert_close(found.eigenvalues, dense)
        assert bool(found.psd)
        assert found.fraction_negative == 0
        assert found.negative_share == 0

    def test_rounding_does_not_make_a_semidefinite_matrix_indefinite(self):
        for seed in range(50):
            factor = draw(60, 3, seed=seed) * 10.0 ** (seed % 7 - 3)
            skew = 1e3 * draw(60, 60, seed=seed)
            assert bool(spectrum(factor @ factor.T + skew - skew.T).psd)
            assert bool(product_spectrum(factor, factor).psd)

    def test_a_small_negative_eigenvalue_is_seen(self):
        turned = torch.linalg.qr(draw(20, 20)).Q
        values = torch.linspace(1, 2, 20, dtype=torch.float64)
        values[-1] = -1e-9
        found = spectrum(turned @ torch.diag(values) @ turned.T)
        assert not bool(found.psd)
        assert found.fraction_negative.item() == pytest.approx(1 / 20)
        assert found.smallest.item() == pytest.approx(-1e-9, rel=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_a_semidefinite_matrix_of_any_precision_is_semidefinite(self, dtype):
        for seed in range(20):
            factor = draw(60, 8, seed=seed).to(dtype)
            gram = factor @ factor.mT
            assert not bool((torch.linalg.eigvalsh(gram.double()) >= 0).all())  # so it takes care
            found = spectrum(gram)
            assert bool(found.psd)
            assert found.fraction_negative == 0
            # float64 is told the entries are exact, and then they are not semidefinite.
            assert not bool(spectrum(gram.double()).psd)
            assert bool(product_spectrum(factor, factor).psd)

    def test_scores_of_a_psd_layer_in_float32_are_semidefinite(self):
        layer = random_layer(width=32, heads=2, kernel="psd").float()
        _, details = layer(draw(1, 40, 32).float(), return_details=True)
        for scores in details.level_scores:
            assert scores.dtype == torch.float32
            assert bool(spectrum(scores).psd.all())

    def test_a_negative_eigenvalue_above_the_rounding_of_float32_is_seen(self):
        turned = torch.linalg.qr(draw(20, 20)).Q
        values = torch.linspace(1, 2, 20, dtype=torch.float64)
        values[-1] = -1e-3
        found = spectrum((turned @ torch.diag(values) @ turned.T).float())
        assert not bool(found.psd)
        assert found.fraction_negative.item() == pytest.approx(1 / 20)

    def test_whole_numbers_are_exact(self):
        assert not bool(spectrum(torch.tensor([[10**9, 0], [0, -1]])).psd)

    def test_nothing_but_zeros_is_semidefinite(self):
        found = spectrum(torch.zeros(3, 3))
        assert bool(found.psd)
        assert found.margin == 0
        assert found.negative_share == 0

    def test_bad_input_is_named(self):
        with pytest.raises(ValueError, match=r"matrix must be square .* got \[2, 3\]"):
            spectrum(torch.zeros(2, 3))
        with pytest.raises(ValueError, match="before the mask"):
            spectrum(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
        with pytest.raises(ValueError, match="at least one row"):
            spectrum(torch.zeros(0, 0))
        with pytest.raises(ValueError, match="one shape"):
            product_spectrum(torch.zeros(2, 3), torch.zeros(3, 3))
        with pytest.raises(TypeError, match="got Linear"):
            bilinear_forms(torch.nn.Linear(2, 2))


class TestForms:
    @pytest.mark.parametrize("shared", [True, False])
    def test_every_head_and_level_has_the_eigenvalues_of_its_own_form(self, shared):
        layer = random_layer(width=24, heads=3, shared_projections=shared)
        forms = bilinear_forms(layer)
        assert len(forms) == (3 if shared else 9)
        for one in forms:
            assert one.level is None if shared else one.level in (0, 1, 2)
            number, rows = one.level or 0, slice(8 * one.head, 8 * one.head + 8)
            query, key = (p[number].weight[rows].detach() for p in (layer.q_proj, layer.k_proj))
            form = query.T @ key
            dense = torch.linalg.eigvalsh((form + form.T) / 2).flip(-1)
            shown = torch.cat((one.form.eigenvalues, torch.zeros(24 - 16))).sort(descending=True)
            torch.testing.assert_close(shown.values, dense, atol=1e-12, rtol=0)

    @pytest.mark.parametrize(("width", "heads"), [(16, 2), (24, 3), (32, 4), (64, 8)])
    def test_independent_weights_have_as_many_negative_as_positive_eigenvalues(self, width, heads):
        for seed in range(10):
            layer = randomise(random_layer(width=width, heads=heads), seed=seed)
            for one in bilinear_forms(layer):
                head_dim = width // heads
                assert int((one.form.eigenvalues > 0).sum()) == head_dim
                assert int((one.form.eigenvalues < 0).sum()) == head_dim
                assert one.form.fraction_negative == 0.5
                assert not bool(one.form.psd)

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("seed", range(5))
    def test_the_psd_kernel_always_passes(self, seed, shared):
        layer = random_layer(kernel="psd", shared_projections=shared)
        randomise(layer, 2.0, seed)
        for one in bilinear_forms(layer):
            assert bool(one.form.psd)
            assert bool(one.with_bias.psd)
            assert (one.form.eigenvalues >= 0).all()

    def test_the_psd_kernels_form_is_that_of_its_scores(self):
        layer = random_layer(width=8, heads=1, kernel="psd", bias=False)
        weight = layer.q_proj[0].weight.detach()
        a, b, c = weight.split((4, 2, 2))
        form = a.T @ a + b.T @ c - c.T @ b
        dense = torch.linalg.eigvalsh((form + form.T) / 2).flip(-1)
        torch.testing.assert_close(
            bilinear_forms(layer)[0].form.eigenvalues, dense[:4], atol=1e-12, rtol=0
        )

    def test_biases_can_break_what_the_weights_satisfy(self):
        layer = random_layer(width=8, heads=1)
        with torch.no_grad():
            layer.k_proj[0].weight.copy_(layer.q_proj[0].weight)
            layer.k_proj[0].bias.copy_(-layer.q_proj[0].bias)
        one = bilinear_forms(layer)[0]
        assert bool(one.form.psd)
        assert not bool(one.with_bias.psd)
        for scores in level_scores(layer, 0.1 * draw(20, 8)).scores:
            assert not bool(spectrum(scores).psd)


class TestTransfer:
    @pytest.mark.parametrize("options", PSD_OPTIONS, ids=str)
    @pytest.mark.parametrize("length", [1, 2, 7, 30])
    def test_a_semidefinite_form_gives_semidefinite_scores_at_every_level(self, options, length):
        factor = draw(8, 5)
        layer = layer_with(factor @ factor.T, **options)
        assert bool(bilinear_forms(layer)[0].form.psd)
        found = level_scores(layer, draw(length, 8), levels=6)
        for scores in found.scores:
            assert bool(spectrum(scores).psd)
        for levels in range(1, 7):
            merged = spectrum(found.merged(levels))
            assert bool(merged.psd)
            assert merged.margin > -1e-12

    @pytest.mark.parametrize("options", PSD_OPTIONS, ids=str)
    def test_the_converse_case_is_reported(self, options):
        layer = layer_with(
            torch.diag(torch.tensor([3.0, 2, 1, 1, 1, 1, -1, -2]).double()), **options
        )
        form = bilinear_forms(layer)[0].form
        assert not bool(form.psd)
        assert form.smallest.item() == pytest.approx(-2)
        assert form.margin.item() == pytest.approx(-2 / 3)
        assert form.fraction_negative.item() == 0.25
        found = level_scores(layer, draw(60, 8))
        for scores in [*found.scores, found.merged(3)]:
            assert not bool(spectrum(scores).psd)
            assert spectrum(scores).margin < -0.01

    def test_rotation_can_break_what_the_weights_satisfy_and_the_note_says_so(self):
        layer = layer_with(torch.eye(8, dtype=torch.float64), rotary=True)
        assert bool(bilinear_forms(layer)[0].form.psd)
        assert not bool(spectrum(level_scores(layer, draw(30, 8)).scores[0]).psd)

    @pytest.mark.parametrize("rotary", [False, True])
    def test_the_psd_kernel_has_semidefinite_scores(self, rotary):
        layer = randomise(random_layer(kernel="psd", rotary=rotary), 2.0)
        found = level_scores(layer, draw(40, 16), levels=6)
        for scores in [*found.scores, found.merged(6)]:
            assert spectrum(scores).psd.all()
