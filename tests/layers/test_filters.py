import itertools

import pytest
import torch
import torch.nn.functional as F

from polyscale.layers.filters import CausalFilter
from polyscale.layers.hierarchy import Hierarchy
from polyscale.layers.positions import rotate
from polyscale.ops.layout import PackedLayout, level_length


def random_filter(**options):
    made = CausalFilter(3, **options).double()
    if made.weight is not None:
        torch.nn.init.normal_(made.weight)
    return made


@pytest.mark.parametrize("mode", ["depthwise", "dense", "mean"])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_a_filter_is_its_definition(length, width, stride, mode):
    made = random_filter(width=width, stride=stride, mode=mode)
    x = torch.randn(2, length, 3, dtype=torch.float64)
    expected = torch.zeros(2, -(-length // stride), 3, dtype=torch.float64)
    for i in range(expected.shape[1]):
        for tap in range(width):
            if stride * i - tap < 0:
                continue
            entry = x[:, stride * i - tap]
            if mode == "depthwise":
                expected[:, i] += made.weight[tap] * entry
            elif mode == "dense":
                expected[:, i] += entry @ made.weight[tap]
            else:
                expected[:, i] += entry / width
    assert torch.allclose(made(x), expected, atol=1e-12)


def test_a_depthwise_filter_is_a_strided_conv1d():
    made = random_filter(width=3, stride=2)
    x = torch.randn(2, 11, 3, dtype=torch.float64)
    kernel = made.weight.flip(0).T[:, None]
    expected = F.conv1d(F.pad(x.transpose(1, 2), (2, 0)), kernel, stride=2, groups=3)
    assert torch.allclose(made(x), expected.transpose(1, 2), atol=1e-12)


@pytest.mark.parametrize("mode", ["depthwise", "dense", "mean"])
def test_downsampling_starts_as_the_mean(mode):
    x = torch.randn(1, 8, 3)
    pairs = (x[:, 2::2] + x[:, 1:-1:2]) / 2
    assert torch.allclose(CausalFilter(3, mode=mode)(x)[:, 1:], pairs, atol=1e-6)


@pytest.mark.parametrize("mode", ["depthwise", "dense"])
def test_the_filter_of_level_0_starts_as_the_identity(mode):
    x = torch.randn(1, 8, 3)
    made = CausalFilter(3, width=4, stride=1, mode=mode, start="identity")
    assert torch.allclose(made(x), x, atol=1e-6)


def test_a_level_sees_nothing_after_the_start_of_its_block():
    hierarchy = Hierarchy(2, levels=4, downsampling_width=3, filter_width=2)
    x = torch.randn(1, 20, 2, requires_grad=True)
    for level, made in enumerate(hierarchy(x)):
        for i in range(made.shape[1]):
            (gradient,) = torch.autograd.grad(made[:, i].sum(), x, retain_graph=True)
            assert torch.count_nonzero(gradient[:, i * 2**level + 1 :]) == 0
            assert torch.count_nonzero(gradient[:, i * 2**level]) > 0


def test_packed_sequences_are_filtered_apart():
    hierarchy = Hierarchy(2, levels=4, downsampling_width=3, filter_width=3)
    for parameter in hierarchy.parameters():
        torch.nn.init.normal_(parameter)
    lengths = [5, 1, 9]
    x = torch.randn(1, sum(lengths), 2)
    bounds = torch.tensor([0, 5, 6, 15])
    together = hierarchy(x, PackedLayout.from_cu_seqlens(bounds, 4))
    apart = [hierarchy(x[:, start:end]) for start, end in itertools.pairwise(bounds)]
    for level in range(4):
        assert torch.allclose(together[level], torch.cat([made[level] for made in apart], 1))


def test_level_lengths_round_up():
    assert [level_length(9, level) for level in range(5)] == [9, 5, 3, 2, 1]


def test_rotation_keeps_lengths_and_makes_products_depend_on_the_difference_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(i, j):
        return float((rotate(q, torch.tensor([i])) * rotate(k, torch.tensor([j]))).sum())

    assert abs(product(5, 3) - product(105, 103)) < 1e-12
    assert abs(product(5, 3) - product(5, 4)) > 1e-3
    assert torch.allclose(rotate(q, torch.tensor([7])).norm(), q.norm())
    assert torch.equal(rotate(q, torch.tensor([0])), q)


@pytest.mark.parametrize("options", [{"mode": "wavelet"}, {"width": 0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=r"downsampling must be|width"):
        CausalFilter(3, **options)
