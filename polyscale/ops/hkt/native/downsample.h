// Causal downsampling of some channels of one row at every level, and its gradients.
#pragma once
#include "vectors.h"

// Where level `level` >= 1 of a row starts in `coarse` or its gradient.
INLINE int64_t coarse_offset(const Downsample& d, int64_t row, int64_t level) {
    int64_t before = 0, all = 0;
    for (int64_t l = 1; l <= d.levels; l++) {
        if (l < level) before += at_level(d.length, l);
        all += at_level(d.length, l);
    }
    return (row * all + before) * d.channels;
}

// Level `level` of a row: the input itself or what was made of it.
INLINE const float* level_of(const Downsample& d, int64_t row, int64_t level, int64_t* pitch) {
    *pitch = level ? d.channels : d.x_row;
    return level ? d.coarse + coarse_offset(d, row, level) : d.x + row * d.x_batch;
}

static void downsample_part(const Downsample* problem, int64_t row, int64_t first, int64_t count) {
    const Downsample& d = *problem;
    for (int64_t level = 1; level <= d.levels; level++) {
        int64_t pitch;
        const float* from = level_of(d, row, level - 1, &pitch) + first;
        const float* weights = d.weights + (level - 1) * d.width * d.channels + first;
        float* to = d.coarse + coarse_offset(d, row, level) + first;
        const int64_t rows = at_level(d.length, level);
        for (int64_t i = 0; i < rows; i++) {
            float* __restrict y = to + i * d.channels;
            const float* __restrict newest = from + 2 * i * pitch;
            const int64_t taps = least(d.width, 2 * i + 1);
            if (taps >= 2) {
                const float* __restrict before = newest - pitch;
                const float *w = weights, *v = weights + d.channels;
                for (int64_t c = 0; c < count; c++) y[c] = w[c] * newest[c] + v[c] * before[c];
            } else {
                for (int64_t c = 0; c < count; c++) y[c] = weights[c] * newest[c];
            }
            for (int64_t k = 2; k < taps; k++) {
                const float* __restrict x = newest - k * pitch;
                const float* w = weights + k * d.channels;
                for (int64_t c = 0; c < count; c++) y[c] += w[c] * x[c];
            }
        }
    }
}

// grad[j] = own[j] + sum_k weight[k] above[(j + k) / 2] over the k for which that is whole.
static void add_above(const Downsample& d, const float* weights, const float* above,
                      int64_t above_pitch, int64_t above_rows, const float* own, float* grad,
                      int64_t grad_pitch, int64_t rows, int64_t count) {
    for (int64_t j = 0; j < rows; j++) {
        float* __restrict y = grad + j * grad_pitch;
        memcpy(y, own + j * d.channels, (size_t)count * sizeof(float));
        for (int64_t k = j & 1; k < d.width && (j + k) / 2 < above_rows; k += 2) {
            const float* __restrict g = above + (j + k) / 2 * above_pitch;
            const float* w = weights + k * d.channels;
            for (int64_t c = 0; c < count; c++) y[c] += w[c] * g[c];
        }
    }
}

// Sums of float32 over a few rows, then in double: the error does not grow with the length.
static void add_weights(const Downsample& d, const float* from, int64_t pitch, const float* above,
                        int64_t above_pitch, int64_t rows, int64_t count, float* sums,
                        double* grad_weights) {
    enum { ROWS = 64 };
    for (int64_t begin = 0; begin < rows; begin += ROWS)
        for (int64_t k = 0; k < d.width; k++) {
            memset(sums, 0, (size_t)count * sizeof(float));
            for (int64_t i = most(begin, (k + 1) / 2); i < least(rows, begin + ROWS); i++) {
                const float* __restrict x = from + (2 * i - k) * pitch;
                const float* __restrict g = above + i * above_pitch;
                float* __restrict sum = sums;
                for (int64_t c = 0; c < count; c++) sum[c] += g[c] * x[c];
            }
            for (int64_t c = 0; c < count; c++) grad_weights[k * d.channels + c] += sums[c];
        }
}

static void downsample_backward_part(const Downsample* problem, int64_t row, int64_t first,
                                     int64_t count, double* grad_weights, float* scratch) {
    const Downsample& d = *problem;
    float* sums = scratch;
    float* next = scratch + round_up(count, 16);
    const float* above = d.grad_coarse + coarse_offset(d, row, d.levels) + first;
    int64_t above_pitch = d.channels;
    for (int64_t level = d.levels; level >= 1; level--) {
        const int64_t above_rows = at_level(d.length, level), rows = at_level(d.length, level - 1);
        const float* weights = d.weights + (level - 1) * d.width * d.channels + first;
        int64_t pitch;
        const float* from = level_of(d, row, level - 1, &pitch) + first;
        add_weights(d, from, pitch, above, above_pitch, above_rows, count, sums,
                    grad_weights + (level - 1) * d.width * d.channels + first);
        if (level == 1) {
            const int64_t at = row * d.length * d.channels + first;
            add_above(d, weights, above, above_pitch, above_rows, d.grad_fine + at, d.grad_x + at,
                      d.channels, rows, count);
            return;
        }
        const float* own = d.grad_coarse + coarse_offset(d, row, level - 1) + first;
        add_above(d, weights, above, above_pitch, above_rows, own, next, count, rows, count);
        above = next, above_pitch = count;
        next += rows * count;
    }
}
