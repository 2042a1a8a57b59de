"""Several new tokens at once over a hierarchical cache, against one after the other."""

import pytest
import torch
from torch import Tensor

from polyscale.ops.hsa import OpenFamily, hsa_attention, hsa_extend, hsa_step
from polyscale.trees.growth import closes_by_windows, tower, window_tree

SCALE = 0.4


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def random_closes(rows: int, count: int, seed: int, first: bool = True) -> Tensor:
    """Levels that close at random, the higher the rarer."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(rows, count, generator=generator)
    closes = sum((chance < limit).long() for limit in (0.3, 0.12, 0.05))
    closes[:, 0] *= not first  # there is nothing to close yet
    return closes


def one_by_one(
    parts: list[Tensor], families: list[OpenFamily], closes: Tensor, lengths: Tensor, **options
) -> tuple[Tensor, list[OpenFamily]]:
    outputs = []
    for t in range(closes.shape[1]):
        now = [part[:, :, t : t + 1] for part in parts]
        output, families = hsa_step(
            *now, families, closes[:, t], t < lengths, scale=SCALE, **options
        )
        outputs.append(output)
    return torch.cat(outputs, 2), families


def assert_same_state(found: list[OpenFamily], known: list[OpenFamily], atol: float) -> None:
    for height in range(max(len(found), len(known))):
        if height >= min(len(found), len(known)):
            longer = found if len(found) > len(known) else known
            assert not longer[height].filled.any()
            continue
        one, other = found[height], known[height]
        assert one.filled.tolist() == other.filled.tolist()
        for row, filled in enumerate(one.filled.tolist()):
            assert torch.equal(one.counts[row, :, :filled], other.counts[row, :, :filled])
            for a, b in ((one.keys, other.keys), (one.values, other.values)):
                torch.testing.assert_close(
                    a[row, :, :filled], b[row, :, :filled], atol=atol, rtol=0
                )


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_chunks_are_what_their_tokens_are_one_by_one(seed: int, include_self: bool) -> None:
    rows, heads, key_heads = 3, 4, 2
    families: list[OpenFamily] = []
    stepwise: list[OpenFamily] = []
    for number, count in enumerate((7, 2, 40, 1, 23)):
        closes = random_closes(rows, count, 10 * seed + number, first=number == 0)
        lengths = torch.tensor([count, max(0, count - 2), count // 2])
        query = draw(rows, heads, count, 8)
        key, value = draw(rows, key_heads, count, 8), draw(rows, key_heads, count, 5)
        parts = [query, key, value]
        expected, stepwise = one_by_one(
            parts, stepwise, closes, lengths, include_self=include_self, impl="torch"
        )
        output, families = hsa_extend(
            *parts, families, closes, lengths, scale=SCALE, include_self=include_self
        )
        for row, length in enumerate(lengths.tolist()):
            torch.testing.assert_close(
                output[row, :, :length], expected[row, :, :length], atol=1e-12, rtol=0
            )
        assert_same_state(families, stepwise, 1e-12)


@pytest.mark.parametrize("windows", [(2,), (4, 3), (16,)])
@pytest.mark.parametrize("impl", ["reference", "torch", "native"])
def test_chunks_of_windows_are_rows_of_attention_over_the_whole(
    windows: tuple[int, ...], impl: str
) -> None:
    length = 90
    tree = window_tree(length, windows, torch.device("cpu"))
    closes = closes_by_windows(torch.arange(length), tower(windows, length)).expand(2, -1)
    dtype = torch.float32 if impl == "native" else torch.float64
    parts = [draw(2, 2, length, width, dtype=dtype) for width in (8, 8, 6)]
    expected = hsa_attention(*parts, tree, tie="columns", causal=True, scale=SCALE)
    families: list[OpenFamily] = []
    start = 0
    for count in (11, 1, 38, 40):
        at = slice(start, start + count)
        output, families = hsa_extend(
            *[part[:, :, at] for part in parts],
            families,
            closes[:, at],
            torch.tensor([count, count]),
            scale=SCALE,
            impl=impl,
        )
        tolerance = 2e-6 if impl == "native" else 1e-12
        torch.testing.assert_close(output, expected[:, :, at], atol=tolerance, rtol=0)
        start += count


def test_gradients_reach_the_cache_and_the_new_tokens() -> None:
    closes = random_closes(1, 20, 3)
    parts = [draw(1, 2, 20, width).requires_grad_() for width in (4, 4, 3)]
    lengths = torch.tensor([9]), torch.tensor([11])

    def in_two(run) -> Tensor:
        first, families = run(
            [part[:, :, :9] for part in parts], [], closes[:, :9], lengths[0], impl="torch"
        )
        second, _ = run(
            [part[:, :, 9:] for part in parts], families, closes[:, 9:], lengths[1], impl="torch"
        )
        return torch.cat([first, second], 2)

    def extend(tensors, families, closes, lengths, **options):
        return hsa_extend(*tensors, families, closes, lengths, scale=SCALE, **options)

    weight = draw(1, 2, 20, 3)
    found = torch.autograd.grad((in_two(extend) * weight).sum(), parts)
    expected = torch.autograd.grad((in_two(one_by_one) * weight).sum(), parts)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)


def test_bfloat16_is_summed_in_float32() -> None:
    parts = [draw(1, 2, 60, 8, dtype=torch.float32).bfloat16() for _ in range(3)]
    closes, length = random_closes(1, 60, 1), torch.tensor([60])
    output, _ = hsa_extend(*parts, [], closes, length, scale=SCALE)
    wide = [part.double() for part in parts]
    expected, _ = hsa_extend(*wide, [], closes, length, scale=SCALE)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.double(), expected, atol=1e-2, rtol=1e-2)


def test_an_implementation_asked_for_by_name_runs_or_says_why_not() -> None:
    x = draw(1, 1, 3, 4)
    with pytest.raises(ValueError, match="it takes float32 and bfloat16"):
        hsa_extend(
            x, x, x, [], torch.zeros(1, 3).long(), torch.tensor([3]), scale=1.0, impl="native"
        )
