// What Python hands over: plain pointers, strides and sizes. Mirrors library.py.
#pragma once
#include "native/common.h"

// Causal filters between levels, channel by channel:
//     x_l[i] = sum_k weight_l[k] x_{l-1}[2 i - k], zeros before the start.
struct Arguments {
    int64_t batch, length, channels, levels, width;  // levels above the first; taps
    const float* x;                                  // [batch][length][channels]
    const float* weights;                            // [levels][width][channels]
    int64_t x_batch, x_row;                          // strides of x
    float* coarse;                                   // [batch][sum of coarse lengths][channels]
    const float* grad_coarse;                        // like coarse
    const float* grad_fine;  // what else depends on x adds this, [batch][length][channels]
    float* grad_x;           // [batch][length][channels]
    float* grad_weights;     // like weights
    int32_t threads, variant;
};

// One set of instructions. `scratch` is aligned to 64 bytes.
struct Variant {
    void (*forward)(const Arguments*, int64_t row, int64_t first, int64_t channels);
    // Adds to grad_weights[levels][width][channels]; `scratch` holds a row at all coarse levels.
    void (*backward)(const Arguments*, int64_t row, int64_t first, int64_t channels,
                     double* grad_weights, float* scratch);
};
