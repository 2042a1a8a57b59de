"""Random stores of levels, and their definition once more, in plain loops."""

import math

import torch
from torch import Tensor

from polyscale.ops.levels import LevelSettings, LevelStore

SETTINGS = [LevelSettings(bits, exact) for bits in ((4, 4), (4, 2)) for exact in ("model", "8bit")]
NAMES = [f"{s.key_bits}{s.value_bits} {s.exact}" for s in SETTINGS]


def random_tokens(
    tokens: int, *, batch: int = 2, heads: int = 2, width: int = 32, value_width: int = 32
) -> tuple[Tensor, Tensor]:
    """Keys and values, some channels of the keys with offsets as rotary embeddings leave them."""
    offset = 4 * torch.randn(width) * (torch.rand(width) < 0.2)
    key = torch.randn(batch, heads, tokens, width) + offset
    return key, torch.randn(batch, heads, tokens, value_width)


def store_of(
    key: Tensor,
    value: Tensor,
    settings: LevelSettings | None = None,
    real: Tensor | None = None,
    impl: str = "auto",
) -> LevelStore:
    """A store that holds these tokens."""
    store = LevelStore.empty(
        *key.shape[:2], key.shape[3], value.shape[3], settings=settings, dtype=key.dtype
    )
    store.append(key, value, real, impl=impl)
    return store


def same_bits(one: LevelStore, other: LevelStore) -> bool:
    """Whether both hold the same tokens in the same bits."""
    if not torch.equal(one.lengths, other.lengths) or one.longest != other.longest:
        return False
    for row, length in enumerate(one.lengths.tolist()):
        blocks = length // 64
        for name, mine in one.arrays().items():
            theirs = other.arrays()[name]
            used = blocks
            if name in ("keys", "values"):
                used = length % 64 if one.settings.is_8bit else length
            elif name in ("key_rest", "value_rest"):
                used = 64 * blocks
            elif name == "sink_keys":
                used = min(length, one.settings.sinks)
            x, y = (array[row, :, :used].contiguous() for array in (mine, theirs))
            if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                return False
    return True


def coarse_by_loops(key: Tensor, sinks: int, levels: int = 15) -> Tensor:
    """A block of keys `[64, D]` as 4 bits have it, channel by channel."""
    coarse = torch.empty_like(key)
    for channel in range(key.shape[1]):
        column = key[:, channel].tolist()
        counted = column[sinks:]
        lo = _half(min(counted), down=True)
        step = _half((max(counted) - lo) / levels, down=False)
        for token, x in enumerate(column):
            code = 0 if step == 0 else round((x - lo) / step)  # round takes ties to even
            coarse[token, channel] = lo + step * min(max(code, 0), levels)
    return coarse


def _half(x: float, down: bool) -> float:
    """The float16 next to a number, below or above it."""
    half = float(torch.tensor(x).half())
    if down:
        return half if half <= x else _step(half, -1)
    return half if half >= x else _step(half, 1)


def _step(x: float, sign: int) -> float:
    """The next float16 in a direction."""
    exponent = max(-14, math.floor(math.log2(abs(x)))) if x else -14
    return float(torch.tensor(x + sign * 2.0 ** (exponent - 10)).half())


def attention_by_loops(
    query: Tensor,
    coarse: tuple[Tensor, Tensor],
    exact: tuple[Tensor, Tensor],
    near: int,
    heavy: int,
    sinks: int,
) -> Tensor:
    """One new token of one head of keys: `query` `[G, D]`, keys and values `[T, D]`."""
    tokens, scale = len(exact[0]), 1 / math.sqrt(query.shape[1])
    newest = min(tokens // 64 * 64, tokens - near)
    opened = {t for t in range(tokens) if t < sinks or t >= newest}
    mass = [0.0] * tokens
    for q in query:
        scores = [
            float(q @ (exact if t in opened else coarse)[0][t]) * scale for t in range(tokens)
        ]
        total = sum(map(math.exp, scores))
        mass = [m + math.exp(s) / total for m, s in zip(mass, scores, strict=True)]
    rest = sorted(set(range(tokens)) - opened, key=lambda t: (-mass[t], t))
    opened |= set(rest[:heavy])
    output = torch.zeros(len(query), exact[1].shape[1], dtype=query.dtype)
    for g, q in enumerate(query):
        levels = [exact if t in opened else coarse for t in range(tokens)]
        weights = [math.exp(float(q @ level[0][t]) * scale) for t, level in enumerate(levels)]
        for t, level in enumerate(levels):
            output[g] += weights[t] / sum(weights) * level[1][t]
    return output
