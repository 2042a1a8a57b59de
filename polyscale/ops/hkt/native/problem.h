// What Python hands over: plain pointers, strides and sizes. Mirrors library.py.
#pragma once
#include <stdint.h>

enum { MAX_LEVELS = 5 };

// [batch, head, row, channel]; channels lie side by side, strides count elements.
struct Tensor {
    void* data;
    int64_t batch, head, row;
};

struct Problem {
    int64_t batch, heads, length, width, value_width, levels;
    int64_t sequences;          // packed in one row; 0: each row is one sequence
    const int64_t* boundaries;  // [levels][sequences + 1], if packed
    const int64_t* lengths;     // [batch] real tokens, or null
    const float* weights;       // [heads][levels]
    float* statistics;          // [2][batch][heads][length]: largest score, 1 / sum of exponentials
    float* grad_weights;        // [heads][levels]
    Tensor query[MAX_LEVELS], key[MAX_LEVELS], value, output;
    Tensor grad_query[MAX_LEVELS], grad_key[MAX_LEVELS], grad_value, grad_output;
    float scale;
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

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t a, int64_t multiple) {
    return (a + multiple - 1) / multiple * multiple;
}

// Key and value gradients of one part of the query blocks, when several threads share a sequence.
struct Partial {
    float* key[MAX_LEVELS];  // [at_level(length)][width], or null: straight into the gradient
    float* value;            // [length][value_width]
};

// One set of instructions. `scratch` is aligned to 64 bytes.
struct Variant {
    int64_t query_block;
    int64_t (*scratch_floats)(const Problem*);
    void (*forward)(const Problem*, const Sequence*, int64_t block, float* scratch);
    // Query blocks part, part + parts, ...; adds to grad_weights[levels].
    void (*backward)(const Problem*, const Sequence*, int64_t part, int64_t parts,
                     const Partial*, double* grad_weights, float* scratch);
};
