// What Python hands over: plain pointers, strides and sizes. Mirrors library.py.
#pragma once
#include "native/common.h"

enum { MAX_LEVELS = 5 };

struct Problem {
    int64_t batch, heads, length, width, value_width, levels;
    int64_t sequences;          // packed in one row; 0: each row is one sequence
    const int64_t* boundaries;  // [levels][sequences + 1], if packed
    const int64_t* lengths;     // [batch] real tokens, or null
    const float* weights;       // [heads][levels]
    int64_t queries;            // decoding: new queries per head
    const int64_t* positions;   // decoding: [batch][queries], where each stands; -1: nowhere
    // [3][batch][heads][length]: largest score, 1 / sum of exponentials, and by how much the largest
    // score is more than its float, known where one key has nearly all the attention or the score is
    // huge.
    float* statistics;
    float* grad_weights;        // [heads][levels]
    Tensor query[MAX_LEVELS], key[MAX_LEVELS], value, output;
    Tensor grad_query[MAX_LEVELS], grad_key[MAX_LEVELS], grad_value, grad_output;
    // Decoding one query: scores of levels 1 and up, each with all coarser ones, kept from token to
    // token, [batch, head, 2, room]: scores, and a bound of them where a chunk starts. Or null.
    Tensor kept[MAX_LEVELS];
    int64_t known_from;  // levels from here on have the queries of the token before
    double scale;
    int32_t causal, bfloat16, threads, variant;
};

// One sequence of one head: where it starts at every level, and its number of tokens.
struct Sequence {
    int64_t batch, head, start[MAX_LEVELS], length;
};

// Where a row of a sequence starts, in elements.
static inline int64_t offset(const Tensor& t, const Sequence& s, int64_t level, int64_t row) {
    return s.batch * t.batch + s.head * t.head + (s.start[level] + row) * t.row;
}

static inline int64_t at_level(int64_t count, int64_t level) {
    return (count + ((int64_t)1 << level) - 1) >> level;
}

// Key and value gradients of one part of the query blocks, when several threads share a sequence.
struct Partial {
    float* key[MAX_LEVELS];  // [at_level(length)][width], or null: straight into the gradient
    float* value;            // [length][value_width]
};

// Causal filters between levels, channel by channel:
//     x_l[i] = sum_k weight_l[k] x_{l-1}[2 i - k], zeros before the start.
struct Downsample {
    int64_t batch, length, channels, levels, width;  // levels beyond the first; taps
    const float *x, *weights;                        // [batch][length][channels], [levels][width][channels]
    int64_t x_batch, x_row;                          // strides of x
    float* coarse;                                   // [batch][sum of coarse lengths][channels]
    const float* grad_coarse;
    const float* grad_fine;        // what x has of other gradients, [batch][length][channels]
    float *grad_x, *grad_weights;  // [batch][length][channels], like weights
    int32_t threads, variant;
};

// Rows of an input and the gradients of what a projection made of them.
struct Projected {
    const float *x, *grad;  // [rows][width], [rows][outputs]
    int64_t rows, outputs;
};

// The gradient of a weight from one or two inputs. The second may have the first outputs only.
struct WeightGradient {
    Projected projected[2];
    int64_t width;
    float *grad_weight, *grad_bias;  // [outputs of the first][width], [outputs of the first]
    int32_t threads, variant;
};

// One set of instructions. `scratch` is aligned to 64 bytes.
struct Variant {
    int64_t query_block;
    int64_t (*scratch_floats)(const Problem*);
    void (*forward)(const Problem*, const Sequence*, int64_t block, float* scratch);
    // Query blocks part, part + parts, ...; adds to grad_weights[levels].
    void (*backward)(const Problem*, const Sequence*, int64_t part, int64_t parts,
                     const Partial*, double* grad_weights, float* scratch);
    int64_t decode_chunk;
    int64_t (*decode_floats)(const Problem*);
    // [queries][3 + value_width]: largest score as two floats, sum of exponentials, their sum of values.
    void (*decode)(const Problem*, const Sequence*, int64_t chunk, float* result, float* scratch);
    void (*downsample)(const Downsample*, int64_t row, int64_t first, int64_t channels);
    // Adds to grad_weights[levels][width][channels]; `scratch` holds a row at all coarse levels.
    void (*downsample_backward)(const Downsample*, int64_t row, int64_t first, int64_t channels,
                                double* grad_weights, float* scratch);
    int64_t (*weight_gradient_floats)(const WeightGradient*);
    // Of the outputs from `begin` to `end`.
    void (*weight_gradient)(const WeightGradient*, int64_t begin, int64_t end, float* scratch);
};
