// Blocks of rows in memory, their transposes, and products of blocks.
#pragma once
#include "native/simd/vectors.h"

struct Rows {
    const float* data;
    int64_t pitch;
};

INLINE int64_t padded(int64_t width) { return round_up(width, WIDTH); }

// Distance of copied rows. A power of two would put a column of all rows in few sets of the cache.
INLINE int64_t row_pitch(int64_t width) {
    const int64_t whole = padded(width);
    return whole % 32 ? whole : whole + 16;
}

#if defined(__AVX2__)
INLINE void transpose_eight(const float* from, int64_t pitch, float* to, int64_t to_pitch) {
    __m256 row[8], pair[8], quad[8];
    for (int i = 0; i < 8; i++) row[i] = _mm256_loadu_ps(from + i * pitch);
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps(row[i], row[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps(row[i], row[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            quad[i + 2 * j] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0x44);
            quad[i + 2 * j + 1] = _mm256_shuffle_ps(pair[i + j], pair[i + j + 2], 0xEE);
        }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + i * to_pitch, _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * to_pitch,
                         _mm256_permute2f128_ps(quad[i], quad[i + 4], 0x31));
    }
}
#endif

// [rows][width] to [width][columns], zero beyond the rows.
static void transpose(Rows from, int64_t rows, int64_t width, int64_t columns, float* to) {
    int64_t done_rows = 0, done_width = 0;
#if defined(__AVX2__)
    done_rows = rows / 8 * 8, done_width = width / 8 * 8;
    for (int64_t m = 0; m < done_rows; m += 8)
        for (int64_t d = 0; d < done_width; d += 8)
            transpose_eight(from.data + m * from.pitch + d, from.pitch, to + d * columns + m,
                            columns);
#endif
    for (int64_t m = 0; m < columns; m++)
        for (int64_t d = m < done_rows ? done_width : 0; d < width; d++)
            to[d * columns + m] = m < rows ? from.data[m * from.pitch + d] : 0.0f;
}

template <int R, int C, bool TRANSPOSED>
INLINE void product_tile(const float* const* rows, int64_t pitch, int64_t count, const float* b,
                         int64_t b_pitch, float* c, int64_t c_pitch, const float* factor) {
    // Summed from zero and then added: rounding errors grow with the length of a block and the
    // number of blocks, not with their product.
    Vector acc[R][C];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < C; j++) {
            acc[r][j] = splat(0.0f);
            if (!TRANSPOSED) __builtin_prefetch(c + r * c_pitch + j * WIDTH, 1);
        }
    multiply<R, C, TRANSPOSED>(acc, count, rows, pitch, b, b_pitch);
    for (int r = 0; r < R; r++)
        for (int j = 0; j < C; j++) {
            float* at = c + r * c_pitch + j * WIDTH;
            store(at, (factor ? load(at) * splat(factor[r]) : load(at)) + acc[r][j]);
        }
}

template <int R, bool TRANSPOSED>
static void product_rows(const float* a, int64_t pitch, int64_t count, const float* b,
                         int64_t b_pitch, float* c, int64_t c_pitch, int64_t columns,
                         const float* factor) {
    const float* rows[R];
    for (int r = 0; r < R; r++) rows[r] = TRANSPOSED ? a + r : a + r * pitch;
    int64_t j = 0;
    if constexpr (WIDE_TILE > 2 && R <= PRODUCT_ROWS / 2)
        for (; j + WIDE_TILE * WIDTH <= columns; j += WIDE_TILE * WIDTH)
            product_tile<R, WIDE_TILE, TRANSPOSED>(rows, pitch, count, b + j, b_pitch, c + j,
                                                   c_pitch, factor);
    for (; j + 2 * WIDTH <= columns; j += 2 * WIDTH)
        product_tile<R, 2, TRANSPOSED>(rows, pitch, count, b + j, b_pitch, c + j, c_pitch, factor);
    if (j < columns)
        product_tile<R, 1, TRANSPOSED>(rows, pitch, count, b + j, b_pitch, c + j, c_pitch, factor);
}

// As many rows as there are, up to R.
template <int R, bool TRANSPOSED>
static void product_group(int64_t rows, const float* a, int64_t pitch, int64_t count,
                          const float* b, int64_t b_pitch, float* c, int64_t c_pitch,
                          int64_t columns, const float* factor) {
    if constexpr (R > 0) {
        if (rows == R)
            product_rows<R, TRANSPOSED>(a, pitch, count, b, b_pitch, c, c_pitch, columns, factor);
        else
            product_group<R - 1, TRANSPOSED>(rows, a, pitch, count, b, b_pitch, c, c_pitch,
                                             columns, factor);
    }
}

// c[r][:] = c[r][:] * factor[r] + sum_k a(r, k) b[k][:] for r < rows, columns a multiple of WIDTH.
// TRANSPOSED: a(r, k) = a[k * pitch + r] and k < count is at most r + diagonal if that is given;
// else a(r, k) = a[r * pitch + k] and k is at least r + diagonal.
template <bool TRANSPOSED>
static void product(const float* a, int64_t pitch, int64_t rows, int64_t count, const float* b,
                    int64_t b_pitch, float* c, int64_t c_pitch, int64_t columns,
                    const float* factor, const int64_t* diagonal) {
    const bool wide = WIDE_TILE > 2 && columns % (WIDE_TILE * WIDTH) == 0;
    const int64_t group = wide ? PRODUCT_ROWS / 2 : PRODUCT_ROWS;
    for (int64_t r = 0; r < rows; r += group) {
        const int64_t here = least(group, rows - r);
        int64_t first = 0, last = count;
        if (diagonal && TRANSPOSED) last = most(0, least(count, r + here + *diagonal));
        if (diagonal && !TRANSPOSED) first = least(count, most(0, r + *diagonal));
        product_group<PRODUCT_ROWS, TRANSPOSED>(
            here, TRANSPOSED ? a + r : a + r * pitch + first, pitch, last - first,
            b + first * b_pitch, b_pitch, c + r * c_pitch, c_pitch, columns,
            factor ? factor + r : nullptr);
    }
}
