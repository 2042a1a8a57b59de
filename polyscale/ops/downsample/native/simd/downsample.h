// Causal downsampling of some channels of one row at every level, and its gradients.
#pragma once
#include "native/simd/vectors.h"

// Where level `level` >= 1 of a row starts in `coarse` or its gradient.
INLINE int64_t coarse_offset(const Arguments& d, int64_t row, int64_t level) {
    int64_t before = 0, all = 0;
    for (int64_t l = 1; l <= d.levels; l++) {
        if (l < level) before += at_level(d.length, l);
        all += at_level(d.length, l);
    }
    return (row * all + before) * d.channels;
}

// Level `level` of a row: the input itself, or a coarse level.
INLINE const float* level_of(const Arguments& d, int64_t row, int64_t level, int64_t* pitch) {
    *pitch = level ? d.channels : d.x_row;
    return level ? d.coarse + coarse_offset(d, row, level) : d.x + row * d.x_batch;
}

static void downsample_part(const Arguments* arguments, int64_t row, int64_t first, int64_t count) {
    const Arguments& d = *arguments;
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

// One level back, in one pass over its memory: of row i of the level above, `above`,
//     grad[2 i - k] = own[2 i - k] + weight[k] above[i],  grad_weight[k] += above[i] . from[2 i - k].
// Rows 2 i - 1 and 2 i begin with row i: taps reach back only. Weights are summed in float32 over a
// few rows, then in double: the error does not grow with the length.
struct LevelBackward {
    const Arguments& d;
    const float *weights, *from, *above, *own;
    float* grad;
    int64_t pitch, above_pitch, grad_pitch, rows, above_rows, count;
    float* sums;  // [width][count rounded up]
    double* grad_weights;

    void run() {
        enum { ROWS = 64 };
        for (int64_t begin = 0; begin < above_rows; begin += ROWS) {
            memset(sums, 0, (size_t)(d.width * sum_pitch()) * sizeof(float));
            for (int64_t i = begin; i < least(above_rows, begin + ROWS); i++) {
                if (d.width == 2 && i > 0)
                    two_taps(i);
                else
                    all_taps(i);
            }
            for (int64_t k = 0; k < d.width; k++)
                for (int64_t c = 0; c < count; c++)
                    grad_weights[k * d.channels + c] += sums[k * sum_pitch() + c];
        }
        if (rows == 2 * above_rows) begin_row(rows - 1);
    }

   private:
    int64_t sum_pitch() const { return round_up(count, 16); }

    void begin_row(int64_t j) {
        memcpy(grad + j * grad_pitch, own + j * d.channels, (size_t)count * sizeof(float));
    }

    void two_taps(int64_t i) {
        const float *g = above + i * above_pitch, *w = weights, *v = weights + d.channels;
        const float *x = from + 2 * i * pitch, *z = x - pitch;
        const float *a = own + 2 * i * d.channels, *b = a - d.channels;
        float *y = grad + 2 * i * grad_pitch, *before = y - grad_pitch;
        float *sum = sums, *sum_before = sums + sum_pitch();
        int64_t c = 0;
        for (; c + WIDTH <= count; c += WIDTH) {
            const Vector gradient = load(g + c);
            store(y + c, load(a + c) + load(w + c) * gradient);
            store(before + c, load(b + c) + load(v + c) * gradient);
            store(sum + c, load(sum + c) + gradient * load(x + c));
            store(sum_before + c, load(sum_before + c) + gradient * load(z + c));
        }
        for (; c < count; c++) {
            y[c] = a[c] + w[c] * g[c];
            before[c] = b[c] + v[c] * g[c];
            sum[c] += g[c] * x[c];
            sum_before[c] += g[c] * z[c];
        }
    }

    void all_taps(int64_t i) {
        const float* g = above + i * above_pitch;
        for (int64_t j = most(0, 2 * i - 1); j <= 2 * i; j++) begin_row(j);
        for (int64_t k = 0; k < least(d.width, 2 * i + 1); k++) {
            const float *x = from + (2 * i - k) * pitch, *w = weights + k * d.channels;
            float* __restrict y = grad + (2 * i - k) * grad_pitch;
            float* __restrict sum = sums + k * sum_pitch();
            for (int64_t c = 0; c < count; c++) {
                y[c] += w[c] * g[c];
                sum[c] += g[c] * x[c];
            }
        }
    }
};

static void downsample_backward_part(const Arguments* arguments, int64_t row, int64_t first,
                                     int64_t count, double* grad_weights, float* scratch) {
    const Arguments& d = *arguments;
    float* next = scratch + d.width * round_up(count, 16);
    const float* above = d.grad_coarse + coarse_offset(d, row, d.levels) + first;
    int64_t above_pitch = d.channels;
    for (int64_t level = d.levels; level >= 1; level--) {
        const int64_t rows = at_level(d.length, level - 1), below = (level - 1) * d.width * d.channels;
        const int64_t fine = row * d.length * d.channels + first;
        const bool last = level == 1;
        int64_t pitch;
        const float* from = level_of(d, row, level - 1, &pitch) + first;
        const float* own = last ? d.grad_fine + fine
                                : d.grad_coarse + coarse_offset(d, row, level - 1) + first;
        float* grad = last ? d.grad_x + fine : next;
        const int64_t grad_pitch = last ? d.channels : count;
        LevelBackward{d, d.weights + below + first, from, above, own, grad, pitch, above_pitch,
                      grad_pitch, rows, at_level(d.length, level), count, scratch,
                      grad_weights + below + first}.run();
        above = grad, above_pitch = grad_pitch;
        next += rows * count;
    }
}
