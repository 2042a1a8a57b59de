import pytest
import torch

from polyscale.layers.hsa import HSAAttention
from polyscale.layers.hsa_cache import HSACache
from polyscale.trees import SignalTree
from polyscale.trees.growth import (
    closes_by_tokens,
    closes_by_windows,
    token_trees,
    tower,
    window_tree,
)


def make_layer(**options):
    return HSAAttention(16, 2, tie="columns", causal=True, **options).double()


def largest(x):
    return x.detach().abs().max().item()


@pytest.mark.parametrize("windows", [(2,), (4,), (2, 5), (3, 2, 4)])
@pytest.mark.parametrize("prompt", [1, 2, 7, 16, 17, 33])
@pytest.mark.parametrize("options", [{}, {"rotary": True}, {"include_self": False}])
def test_decoding_equals_the_parallel_form_while_families_open_and_close(windows, prompt, options):
    layer = make_layer(**options)
    length, rows = 75, torch.arange(3)
    x = torch.randn(3, length, 16, dtype=torch.float64)
    device = torch.device("cpu")
    expected = layer(x, window_tree(length, windows, device))
    closes = closes_by_windows(torch.arange(length), tower(windows, length)).expand(3, -1)
    # Rows of different lengths, so that they open and close at different times.
    lengths = torch.tensor([prompt, max(1, prompt - 3), max(1, prompt // 2)])
    cache = HSACache()
    output = layer(
        x[:, :prompt],
        window_tree(prompt, windows, device),
        cache=cache,
        closes=closes[:, :prompt],
        lengths=lengths,
    )
    for row in range(3):
        assert largest((output - expected[:, :prompt])[row, : lengths[row]]) < 1e-11
    for step in range(length - prompt):
        now = lengths + step
        with torch.no_grad():
            output = layer(x[rows, now][:, None], cache=cache, closes=closes[rows, now][:, None])
        assert largest(output[:, 0] - expected[rows, now]) < 1e-11


def test_several_tokens_at_once_continue_a_cache_too():
    layer = make_layer()
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    device = torch.device("cpu")
    expected = layer(x, window_tree(30, (3,), device))
    closes = closes_by_windows(torch.arange(30), tower((3,), 30)).expand(2, -1)
    cache, outputs, start = HSACache(), [], 0
    for count in (4, 9, 1, 16):
        piece = slice(start, start + count)
        outputs.append(
            layer(
                x[:, piece],
                window_tree(count, (3,), device) if start == 0 else None,
                cache=cache,
                closes=closes[:, piece],
            )
        )
        start += count
    assert largest(torch.cat(outputs, 1) - expected) < 1e-11
    assert cache.lengths.tolist() == [30, 30]


def test_the_cache_stays_within_b_times_log_n_up_to_100_000_tokens():
    window, length = 16, 100_000
    position = torch.arange(length)
    closes = closes_by_windows(position, tower((window,), length))
    levels = len(tower((window,), length))
    cache = HSACache()
    key = torch.ones(1, 1, 1, 2)
    row = torch.ones(1, dtype=torch.bool)
    rooms = 0
    with torch.no_grad():
        for t in range(length):
            cache.step(closes[t : t + 1], key * t, key, row)
            cache.add(key * t, key, row)
            if t % 997 == 0 or t == length - 1:
                rooms = max(rooms, sum(family.keys.shape[2] for family in cache.families))
                assert cache.size <= window * levels
                # Nothing is lost: the members stand for every token.
                total = sum(
                    int((family.counts * family.present()).sum()) for family in cache.families
                )
                assert total == t + 1
    assert levels == 5
    # Room is made half as much again at a time.
    assert rooms <= 1.5 * (window + 1) * levels


def test_the_state_of_a_prompt_is_that_of_its_tokens_one_by_one():
    closes = closes_by_windows(torch.arange(77), tower((4, 3), 77))[None]
    key, value = torch.randn(1, 2, 77, 4), torch.randn(1, 2, 77, 3)
    at_once, stepwise = HSACache(), HSACache()
    at_once.start(key, value, closes, torch.tensor([77]))
    row = torch.ones(1, dtype=torch.bool)
    for t in range(77):
        now = slice(t, t + 1)
        stepwise.step(closes[:, t], key[:, :, now], value[:, :, now], row)
        stepwise.add(key[:, :, now], value[:, :, now], row)
    assert len(at_once.families) == len(stepwise.families)
    for one, other in zip(at_once.families, stepwise.families, strict=True):
        count = int(one.filled)
        assert count == int(other.filled)
        assert torch.equal(one.counts[:, :, :count], other.counts[:, :, :count])
        assert torch.allclose(one.keys[:, :, :count], other.keys[:, :, :count], atol=1e-6)
        assert torch.allclose(one.values[:, :, :count], other.values[:, :, :count], atol=1e-6)


def test_boundaries_in_the_text_make_the_tree_one_would_draw():
    # a b . c . \n d e      (1 ends a sentence, 2 a paragraph)
    ids = torch.tensor([[5, 6, 1, 7, 1, 2, 8, 9]])
    previous = torch.cat((torch.tensor([[-1]]), ids[:, :-1]), 1)
    closes = closes_by_tokens(previous, [[1], [2]])
    assert closes.tolist() == [[0, 0, 0, 1, 0, 1, 2, 0]]
    tree = token_trees(closes, torch.tensor([8]), 2)
    drawn = SignalTree.from_nested([[[0, 1, 2], [3, 4], [5]], [[6, 7]]])
    assert tree == drawn


@pytest.mark.parametrize(
    ("layer", "arguments", "message"),
    [
        (HSAAttention(16, 2), {}, "causal=True"),
        (HSAAttention(16, 2, tie="columns", causal=True, alpha=1.5), {}, "alpha=1"),
        (HSAAttention(16, 2, tie="columns", causal=True, position_width=4), {}, "node positions"),
        (HSAAttention(16, 2, tie="columns", causal=True), {"closes": None}, "closes"),
        (HSAAttention(16, 2, tie="columns", causal=True), {"tree": None}, "tree must be given"),
    ],
)
def test_a_cache_is_refused_where_it_would_be_wrong(layer, arguments, message):
    given = {
        "tree": SignalTree.from_windows(4, (2,)),
        "cache": HSACache(),
        "closes": torch.zeros(1, 4, dtype=torch.int64),
        **arguments,
    }
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(1, 4, 16), **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_steps_are_those_of_torch(dtype: torch.dtype) -> None:
    layers = [
        HSAAttention(24, 2, tie="columns", causal=True, impl=impl).to(dtype)
        for impl in ("native", "torch")
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(3, 60, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    position = torch.arange(60)
    closes = sum(((position % size == 0) & (position > 0)).long() for size in (3, 12, 36))
    closes = closes.expand(3, -1)
    caches = [HSACache(), HSACache()]
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    with torch.no_grad():
        first = torch.randn(3, 2, 5, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
        for cache in caches:
            cache.start(first, 2 * first, closes[:, :5], torch.tensor([5, 4, 1]))
        for begin in range(5, 60, 5):
            now = slice(begin, begin + 5)
            # The last row writes fewer tokens at a time than the others.
            lengths = torch.tensor([5, 5, 3])
            outputs = [
                layer(x[:, now], cache=cache, closes=closes[:, now], lengths=lengths)
                for layer, cache in zip(layers, caches, strict=True)
            ]
            real = torch.arange(5) < lengths[:, None]
            torch.testing.assert_close(
                outputs[0][real], outputs[1][real], atol=tolerance, rtol=tolerance
            )
    assert caches[0].size == caches[1].size
    assert torch.equal(caches[0].lengths, caches[1].lengths)
