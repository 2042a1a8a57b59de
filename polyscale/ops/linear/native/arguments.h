// What Python hands over: plain pointers, strides and sizes. Mirrors library.py.
#pragma once
#include "native/common.h"

// Rows of an input, and the gradients of its projections.
struct Projected {
    const float *x, *grad;  // [rows][width], [rows][outputs]
    int64_t rows, outputs;
};

// The gradient of a weight that projects one or two inputs; the second by its first outputs only.
struct Arguments {
    Projected projected[2];
    int64_t width;
    float *grad_weight, *grad_bias;  // [outputs of the first][width], [outputs of the first]
    int32_t threads, variant;
};

// One set of instructions. `scratch` is aligned to 64 bytes.
struct Variant {
    int64_t (*scratch_floats)(const Arguments*);
    // Of the outputs from `begin` to `end`.
    void (*weight_gradient)(const Arguments*, int64_t begin, int64_t end, float* scratch);
};
