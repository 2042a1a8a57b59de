"""Tiles of several resolutions in the registers of a GPU: what the Triton kernels are made of.

The tile of level l covers the same positions as the fine one with `2**l` times fewer rows and
columns. Going from coarse to fine, a tile is added to the next finer one by viewing that as
`[M, 2, N, 2]`, so nothing coarse is ever written out at full size; the gradient of the scores is
summed down the same way. `DEEPEST` is how often a tile can be halved before it falls below the
smallest matrix product of a GPU: coarser levels keep that size and load their rows repeatedly.

A *row* of the batch is one sequence: a row of `[B, H, T, D]`, or one of the packed sequences.
"""
# Triton compiles this file: it has no types for mypy, and no starred tuples.
# mypy: ignore-errors
# ruff: noqa: RUF005

import triton
import triton.language as tl


@triton.jit
def level_bases(pointers, strides, starts, row, batch, head, LEVELS: tl.constexpr):
    """Per level the address of a sequence's first entry. `starts` is None unless packed."""
    bases = ()
    for level in tl.static_range(LEVELS):
        base = pointers[level] + batch * strides[level][0] + head * strides[level][1]
        if starts is not None:
            base += tl.load(starts + row * LEVELS + level) * strides[level][2]
        bases = bases + (base,)
    return bases


@triton.jit
def level_factors(weights, head, scale, LEVELS: tl.constexpr):
    """The factor of each level's products: level weight times scale."""
    factors = ()
    for level in tl.static_range(LEVELS):
        factors = factors + (tl.load(weights + head * LEVELS + level) * scale,)
    return factors


@triton.jit
def load_tile(base, stride, first, count, ROWS: tl.constexpr, REPEAT: tl.constexpr,
              WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):  # fmt: skip
    """`ROWS` rows from `first` on, each `REPEAT` times; zeros from row `count` on."""
    row = (first + tl.arange(0, ROWS) // REPEAT).to(tl.int64)
    channel = tl.arange(0, BLOCK_WIDTH)
    inside = (row[:, None] < count) & (channel[None, :] < WIDTH)
    return tl.load(base + row[:, None] * stride + channel[None, :], mask=inside, other=0.0)


@triton.jit
def load_levels(bases, strides, first, length,
                BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
                LEVELS: tl.constexpr, DEEPEST: tl.constexpr):  # fmt: skip
    """Per level the entries of the positions from `first` to `first + BLOCK`."""
    tiles = ()
    for level in tl.static_range(LEVELS):
        tile = load_tile(
            bases[level], strides[level][2], first >> level, (length + (1 << level) - 1) >> level,
            BLOCK >> (level if level < DEEPEST else DEEPEST),
            1 << (level - DEEPEST if level > DEEPEST else 0),
            WIDTH, BLOCK_WIDTH,
        )  # fmt: skip
        tiles = tiles + (tile,)
    return tiles


@triton.jit
def merged_scores(rows, columns, factors, M: tl.constexpr, N: tl.constexpr,
                  LEVELS: tl.constexpr, DEEPEST: tl.constexpr):  # fmt: skip
    """`sum_l factor_l * up_l(rows_l columns_l^T)`, `[M, N]`."""
    merged = tl.dot(rows[LEVELS - 1], tl.trans(columns[LEVELS - 1]), input_precision="ieee")
    merged = merged * factors[LEVELS - 1]
    for level in tl.static_range(LEVELS - 2, -1, -1):
        score = tl.dot(rows[level], tl.trans(columns[level]), input_precision="ieee")
        score = score * factors[level]
        if level < DEEPEST:
            score = tl.reshape(score, (M >> (level + 1), 2, N >> (level + 1), 2))
            score = score + merged[:, None, :, None]
            merged = tl.reshape(score, (M >> level, N >> level))
        else:
            merged = score + merged
    return merged


@triton.jit
def add_products(sums, gradient, columns, M: tl.constexpr, N: tl.constexpr,
                 LEVELS: tl.constexpr, DEEPEST: tl.constexpr):  # fmt: skip
    """Per level `sums_l + down_l(gradient) columns_l`; `down_l` sums the blocks of a level."""
    results = ()
    for level in tl.static_range(LEVELS):
        if level > 0 and level <= DEEPEST:
            gradient = tl.reshape(gradient, (M >> level, 2, N >> level, 2))
            gradient = tl.sum(tl.sum(gradient, 3), 1)
        product = tl.dot(
            gradient.to(columns[level].dtype), columns[level], sums[level], input_precision="ieee"
        )
        results = results + (product,)
    return results


@triton.jit
def zero_levels(BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr, LEVELS: tl.constexpr,
                DEEPEST: tl.constexpr):  # fmt: skip
    """Sums to begin with, per level."""
    sums = ()
    for level in tl.static_range(LEVELS):
        zeros = tl.zeros(
            (BLOCK >> (level if level < DEEPEST else DEEPEST), BLOCK_WIDTH), dtype=tl.float32
        )
        sums = sums + (zeros,)
    return sums


@triton.jit
def store_levels(bases, strides, sums, factors, first, length, BLOCK: tl.constexpr,
                 WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, LEVELS: tl.constexpr,
                 DEEPEST: tl.constexpr):  # fmt: skip
    """Write `factor_l * sums_l`; rows that were loaded repeatedly are added up."""
    for level in tl.static_range(LEVELS):
        tile = sums[level] * factors[level]
        if level > DEEPEST:
            tile = tl.reshape(tile, (BLOCK >> level, 1 << (level - DEEPEST), BLOCK_WIDTH))
            tile = tl.sum(tile, 1)
        row = (first >> level) + tl.arange(0, BLOCK >> level)
        count = (length + (1 << level) - 1) >> level
        store_tile(bases[level], strides[level][2], tile, row, count, WIDTH, BLOCK_WIDTH)


@triton.jit
def store_tile(base, stride, tile, row, count, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Write the rows below `count`."""
    channel = tl.arange(0, BLOCK_WIDTH)
    pointer = base + row.to(tl.int64)[:, None] * stride + channel[None, :]
    inside = (row[:, None] < count) & (channel[None, :] < WIDTH)
    tl.store(pointer, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def locate(blocks, heads, length, lengths, starts, LEVELS: tl.constexpr):
    """The part of this program: block, row, batch, head, the sequence's length and start."""
    program = tl.program_id(0)
    block = program % blocks
    row = (program // (blocks * heads)).to(tl.int64)
    head = ((program // blocks) % heads).to(tl.int64)
    batch = row
    start = row * 0
    if starts is not None:
        batch = row * 0
        start = tl.load(starts + row * LEVELS)
    if lengths is not None:
        length = tl.load(lengths + row)
    return block, row, batch, head, length, start
