// The gradient of a projection's weight and bias: grad^T x, and the sum of grad, over all rows.
#pragma once
#include "native/simd/products.h"

// A block of rows, for some outputs, and the same rows of some channels of x stay in the cache.
// Processors with AVX-512 have at least 1 MiB of it for each core.
#if defined(__AVX512F__)
enum { GRADIENT_ROWS = 192, GRADIENT_OUTPUTS = 384, PANEL = 64 };
#else
enum { GRADIENT_ROWS = 96, GRADIENT_OUTPUTS = 192, PANEL = 64 };
#endif

// The rows needed next, prefetched line by line between products: all at once they would delay the
// rows needed now.
struct Ahead {
    const float* row;
    int64_t rows, width, pitch, column;

    void fetch_line() {
        if (rows <= 0) return;
        __builtin_prefetch(row + column, 0, 2);
        column += 16;
        if (column >= width) row += pitch, rows--, column = 0;
    }
};

// Channels of a row of sums.
INLINE int64_t whole_panels(const Arguments& w) {
    return most(PANEL, round_up(w.width, PANEL));
}

struct WeightGradientScratch {
    float *grad, *x, *weight, *bias;
    int64_t outputs;  // at a time, so that the sums stay in the cache as well

    float* reserve(const Arguments& w, Scratch scratch) {
        const int64_t width = whole_panels(w);
        const int64_t fitting = GRADIENT_OUTPUTS * 256 / width / PRODUCT_ROWS * PRODUCT_ROWS;
        outputs = least(GRADIENT_OUTPUTS, most(PRODUCT_ROWS, fitting));
        grad = scratch.take(GRADIENT_ROWS * row_pitch(outputs));
        x = scratch.take(GRADIENT_ROWS * row_pitch(PANEL));
        weight = scratch.take(outputs * width);
        bias = scratch.take(outputs);
        return scratch.next;
    }
};

// A block of rows of some outputs' gradients, copied close together, and their sum.
static void take_gradient(const Projected& from, int64_t row, int64_t rows, int64_t output,
                          int64_t outputs, float* to, float* bias) {
    float sums[GRADIENT_OUTPUTS];
    for (int64_t o = 0; o < outputs; o++) sums[o] = 0.0f;
    for (int64_t i = 0; i < rows; i++) {
        const float* grad = from.grad + (row + i) * from.outputs + output;
        float* copy = to + i * row_pitch(outputs);
        for (int64_t o = 0; o < outputs; o++) copy[o] = grad[o], sums[o] += grad[o];
    }
    for (int64_t o = 0; o < outputs; o++) bias[o] += sums[o];
}

static void take_panel(const Projected& from, int64_t row, int64_t rows, int64_t first,
                       int64_t width, float* to) {
    const int64_t count = least(PANEL, width - first);
    for (int64_t i = 0; i < rows; i++) {
        const float* x = from.x + (row + i) * width + first;
        float* copy = to + i * row_pitch(PANEL);
        for (int64_t c = 0; c < count; c++) copy[c] = x[c];
        for (int64_t c = count; c < PANEL; c++) copy[c] = 0.0f;
    }
}

// A tile of WIDE_TILE vectors of columns has half of the rows.
enum { GROUP_TILE = WIDE_TILE, GROUP = WIDE_TILE > 2 ? PRODUCT_ROWS / 2 : PRODUCT_ROWS };

// Like product_tile for a whole group of outputs.
INLINE void gradient_tile(const float* grad, int64_t pitch, int64_t rows, const float* x, float* sum,
                          int64_t sum_pitch, Ahead& next_grad, Ahead& next_x) {
    enum { STEP = 8 };
    Vector acc[GROUP][GROUP_TILE];
    UNROLL for (int r = 0; r < GROUP; r++)
        UNROLL for (int c = 0; c < GROUP_TILE; c++) acc[r][c] = splat(0.0f);
    for (int64_t i = 0; i < rows; i += STEP) {
        next_grad.fetch_line();
        next_x.fetch_line();
        const float* here = grad + i * pitch;
        multiply<GROUP, GROUP_TILE, true>(acc, least(STEP, rows - i), &here, pitch,
                                          x + i * row_pitch(PANEL), row_pitch(PANEL));
    }
    UNROLL for (int r = 0; r < GROUP; r++)
        UNROLL for (int c = 0; c < GROUP_TILE; c++) {
            float* at = sum + r * sum_pitch + c * WIDTH;
            store(at, load(at) + acc[r][c]);
        }
}

// Adds a block of rows to the sums. Each block is summed from zero, so that rounding errors grow with
// the length of a block and the number of blocks, not with their product.
static void add_rows(const Arguments& w, const Projected& from, int64_t row, int64_t output,
                     int64_t outputs, WeightGradientScratch& my) {
    const int64_t rows = least(GRADIENT_ROWS, from.rows - row), width = whole_panels(w);
    const int64_t next = row + rows, next_rows = least(GRADIENT_ROWS, from.rows - next);
    const int64_t pitch = row_pitch(outputs), whole = outputs / GROUP * GROUP;
    take_gradient(from, row, rows, output, outputs, my.grad, my.bias);
    Ahead grad{from.grad + next * from.outputs + output, next_rows, outputs, from.outputs, 0};
    Ahead x{from.x + next * w.width, next_rows, w.width, w.width, 0};
    for (int64_t first = 0; first < w.width; first += PANEL) {
        take_panel(from, row, rows, first, w.width, my.x);
        float* sums = my.weight + first;
        for (int64_t o = 0; o < whole; o += GROUP)
            for (int64_t c = 0; c < PANEL; c += GROUP_TILE * WIDTH)
                gradient_tile(my.grad + o, pitch, rows, my.x + c, sums + o * width + c, width, grad,
                              x);
        if (whole < outputs)
            product_group<GROUP, true>(outputs - whole, my.grad + whole, pitch, rows, my.x,
                                       row_pitch(PANEL), sums + whole * width, width, PANEL,
                                       nullptr);
    }
}

static void weight_gradient(const Arguments* arguments, int64_t begin, int64_t end,
                            float* memory) {
    const Arguments& w = *arguments;
    WeightGradientScratch my;
    my.reserve(w, Scratch{memory});
    const int64_t width = whole_panels(w), passes = (end - begin + my.outputs - 1) / my.outputs;
    const int64_t in_a_pass = round_up((end - begin + passes - 1) / passes, GROUP);
    for (int64_t output = begin; output < end; output += in_a_pass) {
        const int64_t outputs = least(in_a_pass, end - output);
        memset(my.weight, 0, (size_t)(outputs * width) * sizeof(float));
        memset(my.bias, 0, (size_t)outputs * sizeof(float));
        for (const Projected& from : w.projected) {
            const int64_t here = least(outputs, from.outputs - output);
            for (int64_t row = 0; row < from.rows && here > 0; row += GRADIENT_ROWS)
                add_rows(w, from, row, output, here, my);
        }
        for (int64_t o = 0; o < outputs; o++)
            memcpy(w.grad_weight + (output + o) * w.width, my.weight + o * width,
                   (size_t)w.width * sizeof(float));
        memcpy(w.grad_bias + output, my.bias, (size_t)outputs * sizeof(float));
    }
}
