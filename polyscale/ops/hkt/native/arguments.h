// What Python hands over: plain pointers, strides and sizes. Mirrors library.py.
#pragma once
#include "native/common.h"

// Set where Python compiles this file, so that the number stands in one place.
enum { MAX_LEVELS = HKT_MAX_LEVELS };

struct Arguments {
    int64_t batch, heads, length, width, value_width, levels;
    int64_t sequences;          // packed in one row; 0: each row is one sequence
    const int64_t* boundaries;  // [levels][sequences + 1], if packed
    const int64_t* lengths;     // [batch] real tokens, or null
    const float* weights;       // [heads][levels]
    int64_t queries;            // decoding: new queries per head
    const int64_t* positions;   // decoding: [batch][queries] of each query; -1: padding
    // [3][batch][heads][length]: largest score, 1 / sum of exponentials, and by how much the largest
    // score exceeds its float, known where one key has nearly all the attention or the score is huge.
    float* statistics;
    float* grad_weights;        // [heads][levels]
    Tensor query[MAX_LEVELS], key[MAX_LEVELS], value, output;
    Tensor grad_query[MAX_LEVELS], grad_key[MAX_LEVELS], grad_value, grad_output;
    // Decoding one query: scores of levels 1 and up, each with those of all coarser levels, from the
    // token before, [batch, head, 2, room]: scores, and where a chunk starts a bound of them. Or null.
    Tensor coarse_scores[MAX_LEVELS];
    int64_t first_reused;  // scores of this level and coarser ones are still valid
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

// Key and value gradients of one part of the query blocks, when several threads share a sequence.
struct Partial {
    float* key[MAX_LEVELS];  // [at_level(length)][width], or null: straight into the gradient
    float* value;            // [length][value_width]
};

// One set of instructions. `scratch` is aligned to 64 bytes.
struct Variant {
    int64_t query_block;
    int64_t (*scratch_floats)(const Arguments*);
    void (*forward)(const Arguments*, const Sequence*, int64_t block, float* scratch);
    // Query blocks part, part + parts, ...; adds to grad_weights[levels].
    void (*backward)(const Arguments*, const Sequence*, int64_t part, int64_t parts,
                     const Partial*, double* grad_weights, float* scratch);
    int64_t decode_chunk;
    int64_t (*decode_floats)(const Arguments*);
    // [queries][3 + value_width]: largest score as two floats, sum of exponentials, their sum of values.
    void (*decode)(const Arguments*, const Sequence*, int64_t chunk, float* result, float* scratch);
};
