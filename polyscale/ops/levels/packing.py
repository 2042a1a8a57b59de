"""Keys and values in few bits: how 64 neighbouring tokens are rounded and laid out.

This is the specification, in float32 whatever the inputs are: every implementation makes the same
bits. Scales are float16, rounded so that the range they span covers the numbers they stand for. A
store whose exact level is 8 bits takes its tokens as float16, too, unless they come as bfloat16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # tokens that share the scales of a channel
LANES = 16  # 32-bit words that are read together
VALUE_GROUP = 32  # channels of a value that share a scale at 2 bits
LARGEST = 65504.0  # of float16


def padded(width: int) -> int:
    """Channels kept for a width: whole vectors."""
    return (width + LANES - 1) // LANES * LANES


def round_down(x: Tensor) -> Tensor:
    """The largest float16 that is no larger; what is beyond float16 saturates.

    >>> round_down(torch.tensor([0.1, -0.1])).tolist()
    [0.0999755859375, -0.10003662109375]
    """
    x = x.clamp(-LARGEST, LARGEST)
    half = x.to(torch.float16)
    bits = half.view(torch.int16)
    below = torch.where(half > 0, bits - 1, bits + 1)
    below = torch.where(half == 0, torch.tensor(-0x7FFF, dtype=torch.int16), below)
    return torch.where(half.to(torch.float32) > x, below, bits).view(torch.float16)


def round_up(x: Tensor) -> Tensor:
    """The smallest float16 that is no smaller; what is beyond float16 saturates."""
    return -round_down(-x)


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of tokens that an 8-bit store holds as they came: those not packed yet, keys of the first."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def to_kept(x: Tensor) -> Tensor:
    """The nearest numbers of `kept_dtype`; finite ones beyond float16 saturate.

    >>> to_kept(torch.tensor([0.1, 1e9, -torch.inf])).tolist()
    [0.0999755859375, 65504.0, -inf]
    """
    dtype = kept_dtype(x.dtype)
    if dtype == x.dtype:
        return x
    return torch.where(x.isfinite(), x.clamp(-LARGEST, LARGEST), x).to(torch.float32).to(dtype)


def quantize(
    x: Tensor, levels: int, dim: int, counted: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Asymmetric codes along an axis: `lo`, `step`, codes from 0 to `levels`, what they round away.

    What is rounded away is counted in 16ths of a step, -8 to 7. `counted` says which entries the
    range has to cover. Where one of those is not finite, `lo` and `step` are not a number.

    Example:
        >>> lo, step, codes, _ = quantize(torch.tensor([[0.0, 1.0, 15.0]]), 15, -1)
        >>> lo.item(), step.item(), codes.tolist()
        (0.0, 1.0, [[0.0, 1.0, 15.0]])
    """
    x = x.to(torch.float32)
    least, most = x, x
    if counted is not None:
        least = x.masked_fill(~counted, torch.inf)
        most = x.masked_fill(~counted, -torch.inf)
    least, most = least.amin(dim, keepdim=True), most.amax(dim, keepdim=True)
    if counted is not None:  # a range of nothing
        none = ~counted.any(dim, keepdim=True).expand_as(least)
        least, most = least.masked_fill(none, 0.0), most.masked_fill(none, 0.0)
    finite = torch.isfinite(least) & torch.isfinite(most)
    lo = round_down(least)
    step = round_up((most - lo.to(torch.float32)).clamp(min=0.0) / levels)
    lo, step = lo.masked_fill(~finite, torch.nan), step.masked_fill(~finite, torch.nan)
    codes, rest = _codes(x - lo.to(torch.float32), step.to(torch.float32), 0, levels)
    return lo, step, codes, rest


def quantize_symmetric(x: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes from `-levels` to `levels` of each row: scale, codes, 16ths that they round away."""
    x = x.to(torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    scale = round_up(largest / levels).masked_fill(~torch.isfinite(largest), torch.nan)
    codes, rest = _codes(x, scale.to(torch.float32), -levels, levels)
    return scale, codes, rest


def _codes(x: Tensor, step: Tensor, least: int, most: int) -> tuple[Tensor, Tensor]:
    steps = torch.where(step > 0, x / step, 0.0).nan_to_num(0.0, 1e9, -1e9)
    codes = steps.round().clamp(least, most)
    return codes, ((steps - codes) * 16).round().clamp(-8, 7)


def pack_keys(codes: Tensor) -> Tensor:
    """Codes `[..., 64, D]` to bytes `[..., D / 8, 4, 64]`.

    A 32-bit word holds 8 channels of a token, the first in its lowest bits; 16 words, those of 16
    neighbouring tokens, are read together.
    """
    *shape, _, width = codes.shape
    words = codes.view(*shape, BLOCK // LANES, LANES, width // 8, 8)
    words = words.movedim(-2, -4)  # [..., D / 8, 4, 16, 8]
    return _bytes(words, 4).flatten(-2)


def unpack_keys(packed: Tensor) -> Tensor:
    """The codes `[..., 64, D]` that `pack_keys` packed."""
    *shape, groups, tiles, _ = packed.shape
    words = _codes_of(packed.view(*shape, groups, tiles, LANES, 4), 4)
    return words.movedim(-4, -2).reshape(*shape, BLOCK, 8 * groups)


def pack_values(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., 64, D]` to bytes `[..., 2 bits, D / 16, 64]`.

    A 32-bit word holds a channel of 32 / bits tokens, the first in its lowest bits; 16 words, those
    of 16 neighbouring channels, are read together.
    """
    *shape, _, width = codes.shape
    tokens = 32 // bits
    words = codes.view(*shape, BLOCK // tokens, tokens, width // LANES, LANES)
    words = words.movedim(-3, -1)  # [..., 2 bits, D / 16, 16, tokens]
    return _bytes(words, bits).flatten(-2)


def unpack_values(packed: Tensor, bits: int) -> Tensor:
    """The codes `[..., 64, D]` that `pack_values` packed."""
    *shape, tiles, groups, _ = packed.shape
    words = _codes_of(packed.view(*shape, tiles, groups, LANES, 4), bits)
    return words.movedim(-1, -3).reshape(*shape, BLOCK, LANES * groups)


def pack_rest(rest: Tensor) -> Tensor:
    """What codes round away, `[..., D]` from -8 to 7, to bytes `[..., D / 2]`, in order."""
    return _bytes(rest + 8, 4)


def unpack_rest(packed: Tensor) -> Tensor:
    """What `pack_rest` packed."""
    return _codes_of(packed, 4) - 8


def _bytes(codes: Tensor, bits: int) -> Tensor:
    per_byte = 8 // bits
    codes = codes.to(torch.uint8).unflatten(-1, (-1, per_byte))
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    return (codes << shifts).sum(-1, dtype=torch.uint8)


def _codes_of(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2).to(torch.float32)


def pad_channels(x: Tensor) -> Tensor:
    """`[..., D]` with zeros up to whole vectors."""
    return F.pad(x, (0, padded(x.shape[-1]) - x.shape[-1]))
