"""The Triton kernels behind `impl="triton"`: forward, and two for the gradients.

Scores and log-sum-exps are in base 2, for which GPUs have an instruction.
"""
# Triton compiles this file: it has no types for mypy.
# mypy: ignore-errors

import triton
import triton.language as tl

from polyscale.ops.hkt.triton_tiles import (
    add_products,
    level_bases,
    level_factors,
    load_levels,
    load_tile,
    locate,
    merged_scores,
    store_levels,
    store_tile,
    zero_levels,
)

LOG2_E = tl.constexpr(1.4426950408889634)
SIZES = ("blocks", "rows", "heads", "length")  # no new compilation for every batch and length


@triton.jit
def attend_span(
    weighted, total, peak, queries, factors, key_bases, key_strides, value_base, value_stride,
    position, low, high, length,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr, DEEPEST: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys `low .. high`; unmasked where every pair is allowed."""
    for first in range(low, high, BLOCK_N):
        keys = load_levels(
            key_bases, key_strides, first, length, BLOCK_N, D, BLOCK_D, LEVELS, DEEPEST
        )
        scores = merged_scores(queries, keys, factors, BLOCK_M, BLOCK_N, LEVELS, DEEPEST)
        if MASKED:
            column = first + tl.arange(0, BLOCK_N)
            allowed = column[None, :] < length
            if CAUSAL:
                allowed = allowed & (column[None, :] <= position[:, None])
            scores = tl.where(allowed, scores, float("-inf"))
        # The first key is allowed for every query, so from here on the peak is finite.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - new_peak)
        exponentials = tl.exp2(scores - new_peak[:, None])
        total = total * shrink + tl.sum(exponentials, 1)
        value = load_tile(value_base, value_stride, first, length, BLOCK_N, 1, DV, BLOCK_DV)
        weighted = tl.dot(
            exponentials.to(value.dtype), value, weighted * shrink[:, None], input_precision="ieee"
        )
        peak = new_peak
    return weighted, total, peak


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    queries, keys, value, weights, lengths, starts, output, logsumexp,
    query_strides, key_strides, value_strides, output_strides,
    blocks, heads, length, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr, DEEPEST: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program per sequence, head and block of queries."""
    width = length
    block, row, batch, head, length, start = locate(blocks, heads, length, lengths, starts, LEVELS)
    if CAUSAL:
        block = blocks - 1 - block  # the longest first
    first = block * BLOCK_M
    if first >= length:
        return
    query_bases = level_bases(queries, query_strides, starts, row, batch, head, LEVELS)
    key_bases = level_bases(keys, key_strides, starts, row, batch, head, LEVELS)
    value_base = value + batch * value_strides[0] + head * value_strides[1]
    value_base += start * value_strides[2]
    query_tiles = load_levels(
        query_bases, query_strides, first, length, BLOCK_M, D, BLOCK_D, LEVELS, DEEPEST
    )
    factors = level_factors(weights, head, scale * LOG2_E, LEVELS)
    position = first + tl.arange(0, BLOCK_M)

    weighted = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    if CAUSAL:
        full = (first + 1) // BLOCK_N * BLOCK_N
        end = tl.minimum(first + BLOCK_M, length)
    else:
        full = length // BLOCK_N * BLOCK_N
        end = length
    weighted, total, peak = attend_span(
        weighted, total, peak, query_tiles, factors, key_bases, key_strides,
        value_base, value_strides[2], position, 0, full, length,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, LEVELS, DEEPEST, CAUSAL, False,
    )  # fmt: skip
    weighted, total, peak = attend_span(
        weighted, total, peak, query_tiles, factors, key_bases, key_strides,
        value_base, value_strides[2], position, full, end, length,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, LEVELS, DEEPEST, CAUSAL, True,
    )  # fmt: skip

    output_base = output + batch * output_strides[0] + head * output_strides[1]
    output_base += start * output_strides[2]
    store_tile(
        output_base, output_strides[2], weighted / total[:, None], position, length, DV, BLOCK_DV
    )
    sums = logsumexp + (batch * heads + head) * width + start + position
    tl.store(sums, peak + tl.log2(total), mask=position < length)


@triton.jit
def score_gradient(scores, logsumexp, weighted, delta, allowed):
    """Attention and the gradient of the scores, from the log-sum-exps of the forward pass."""
    exponent = tl.where(allowed, scores, float("-inf")) - logsumexp
    # Never above zero but by rounding, which of huge scores may be anything.
    attention = tl.exp2(tl.where(exponent > 0.0, 0.0, exponent))
    return attention, attention * (weighted - delta)


@triton.jit(do_not_specialize=SIZES)
def query_gradient_kernel(
    queries, keys, value, weights, lengths, starts, output, output_gradient, logsumexp,
    delta, query_gradients, weight_gradient,
    query_strides, key_strides, value_strides, output_strides, output_gradient_strides,
    query_gradient_strides,
    blocks, rows, heads, length, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr, DEEPEST: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries, its part of the level weights' gradients, and delta.

    `delta[t] = sum_d output[t, d] * output_gradient[t, d]` is also used by the other kernel.
    """
    width = length
    block, row, batch, head, length, start = locate(blocks, heads, length, lengths, starts, LEVELS)
    if CAUSAL:
        block = blocks - 1 - block
    first = block * BLOCK_M
    if first >= length:
        return
    query_bases = level_bases(queries, query_strides, starts, row, batch, head, LEVELS)
    key_bases = level_bases(keys, key_strides, starts, row, batch, head, LEVELS)
    value_base = value + batch * value_strides[0] + head * value_strides[1]
    value_base += start * value_strides[2]
    output_base = output + batch * output_strides[0] + head * output_strides[1]
    output_base += start * output_strides[2]
    gradient_base = output_gradient + batch * output_gradient_strides[0]
    gradient_base += head * output_gradient_strides[1] + start * output_gradient_strides[2]
    query_tiles = load_levels(
        query_bases, query_strides, first, length, BLOCK_M, D, BLOCK_D, LEVELS, DEEPEST
    )
    factors = level_factors(weights, head, scale * LOG2_E, LEVELS)

    attended = load_tile(output_base, output_strides[2], first, length, BLOCK_M, 1, DV, BLOCK_DV)
    gradient = load_tile(
        gradient_base, output_gradient_strides[2], first, length, BLOCK_M, 1, DV, BLOCK_DV
    )
    position = first + tl.arange(0, BLOCK_M)
    offset = (batch * heads + head) * width + start + position
    delta_tile = tl.sum(attended.to(tl.float32) * gradient.to(tl.float32), 1)
    tl.store(delta + offset, delta_tile, mask=position < length)
    # Beyond the end everything is exp2(-inf) = 0, so coarse queries get no gradient from there.
    sums = tl.load(logsumexp + offset, mask=position < length, other=float("inf"))

    gradients = zero_levels(BLOCK_M, BLOCK_D, LEVELS, DEEPEST)
    end = length
    if CAUSAL:
        end = tl.minimum(first + BLOCK_M, length)
    for key_first in range(0, end, BLOCK_N):
        key_tiles = load_levels(
            key_bases, key_strides, key_first, length, BLOCK_N, D, BLOCK_D, LEVELS, DEEPEST
        )
        value_tile = load_tile(
            value_base, value_strides[2], key_first, length, BLOCK_N, 1, DV, BLOCK_DV
        )
        column = key_first + tl.arange(0, BLOCK_N)
        allowed = column[None, :] < length
        if CAUSAL:
            allowed = allowed & (column[None, :] <= position[:, None])
        scores = merged_scores(query_tiles, key_tiles, factors, BLOCK_M, BLOCK_N, LEVELS, DEEPEST)
        products = tl.dot(gradient, tl.trans(value_tile), input_precision="ieee")
        _, change = score_gradient(scores, sums[:, None], products, delta_tile[:, None], allowed)
        gradients = add_products(gradients, change, key_tiles, BLOCK_M, BLOCK_N, LEVELS, DEEPEST)

    # The sums still lack the level weight, so the weight's own gradient is exact even at zero.
    for level in tl.static_range(LEVELS):
        part = tl.sum(tl.sum(gradients[level] * query_tiles[level].to(tl.float32), 1), 0) * scale
        tl.store(weight_gradient + ((level * rows + row) * heads + head) * blocks + block, part)
    gradient_bases = level_bases(
        query_gradients, query_gradient_strides, starts, row, batch, head, LEVELS
    )
    store_levels(
        gradient_bases, query_gradient_strides, gradients,
        level_factors(weights, head, scale, LEVELS), first, length,
        BLOCK_M, D, BLOCK_D, LEVELS, DEEPEST,
    )  # fmt: skip


@triton.jit(do_not_specialize=SIZES)
def key_gradient_kernel(
    queries, keys, value, weights, lengths, starts, output_gradient, logsumexp, delta,
    key_gradients, value_gradient,
    query_strides, key_strides, value_strides, output_gradient_strides, key_gradient_strides,
    value_gradient_strides,
    blocks, heads, length, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr, DEEPEST: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys and values. Score tiles are transposed: `[BLOCK_N, BLOCK_M]`."""
    width = length
    block, row, batch, head, length, start = locate(blocks, heads, length, lengths, starts, LEVELS)
    first = block * BLOCK_N
    if first >= length:
        return
    query_bases = level_bases(queries, query_strides, starts, row, batch, head, LEVELS)
    key_bases = level_bases(keys, key_strides, starts, row, batch, head, LEVELS)
    value_base = value + batch * value_strides[0] + head * value_strides[1]
    value_base += start * value_strides[2]
    gradient_base = output_gradient + batch * output_gradient_strides[0]
    gradient_base += head * output_gradient_strides[1] + start * output_gradient_strides[2]
    key_tiles = load_levels(
        key_bases, key_strides, first, length, BLOCK_N, D, BLOCK_D, LEVELS, DEEPEST
    )
    value_tile = load_tile(value_base, value_strides[2], first, length, BLOCK_N, 1, DV, BLOCK_DV)
    factors = level_factors(weights, head, scale * LOG2_E, LEVELS)
    column = first + tl.arange(0, BLOCK_N)
    offset = (batch * heads + head) * width + start

    gradients = zero_levels(BLOCK_N, BLOCK_D, LEVELS, DEEPEST)
    value_sums = tl.zeros((BLOCK_N, BLOCK_DV), dtype=tl.float32)
    low = 0
    if CAUSAL:
        low = first // BLOCK_M * BLOCK_M
    for query_first in range(low, length, BLOCK_M):
        query_tiles = load_levels(
            query_bases, query_strides, query_first, length, BLOCK_M, D, BLOCK_D, LEVELS, DEEPEST
        )
        gradient = load_tile(
            gradient_base, output_gradient_strides[2], query_first, length, BLOCK_M, 1, DV, BLOCK_DV
        )
        position = query_first + tl.arange(0, BLOCK_M)
        inside = position < length
        sums = tl.load(logsumexp + offset + position, mask=inside, other=float("inf"))
        delta_tile = tl.load(delta + offset + position, mask=inside, other=0.0)
        allowed = column[:, None] < length
        if CAUSAL:
            allowed = allowed & (column[:, None] <= position[None, :])
        scores = merged_scores(key_tiles, query_tiles, factors, BLOCK_N, BLOCK_M, LEVELS, DEEPEST)
        products = tl.dot(value_tile, tl.trans(gradient), input_precision="ieee")
        attention, change = score_gradient(
            scores, sums[None, :], products, delta_tile[None, :], allowed
        )
        value_sums = tl.dot(
            attention.to(gradient.dtype), gradient, value_sums, input_precision="ieee"
        )
        gradients = add_products(gradients, change, query_tiles, BLOCK_N, BLOCK_M, LEVELS, DEEPEST)

    gradient_bases = level_bases(
        key_gradients, key_gradient_strides, starts, row, batch, head, LEVELS
    )
    store_levels(
        gradient_bases, key_gradient_strides, gradients,
        level_factors(weights, head, scale, LEVELS), first, length,
        BLOCK_N, D, BLOCK_D, LEVELS, DEEPEST,
    )  # fmt: skip
    value_gradient_base = value_gradient + batch * value_gradient_strides[0]
    value_gradient_base += head * value_gradient_strides[1] + start * value_gradient_strides[2]
    store_tile(
        value_gradient_base, value_gradient_strides[2], value_sums, column, length, DV, BLOCK_DV
    )
