// What the kernel is asked for. Mirrored by library.py.
#pragma once
#include "native/common.h"

struct Arguments {
    int64_t batch, heads, key_heads, queries, keys, width, value_width;
    // Positions that share a view; heavy counts blocks, -1: as many as keep the share `mass`.
    int64_t unit, key_block, near, heavy, sample;
    int64_t choosing;  // units whose sampled rows choose for one: its own, and in strict mode earlier
    int64_t sequences;          // packed in one row, or 0
    const int64_t* boundaries;  // of them, [sequences + 1]
    const int64_t *lengths, *query_lengths;  // real tokens, which come first, [batch]; or null
    // Query blocks and sampled rows that there is room for; bytes of a query block's choice.
    int64_t query_blocks, rows, block_bytes;
    const uint8_t* sinks;  // [batch][keys]
    uint8_t* opened;       // [batch][key_heads][query_blocks][block_bytes], one bit per key block
    float *kept, *log_sum;  // of sampled rows, [batch][heads][rows]
    float* row_sum;         // log of each row's own sum, [batch][heads][queries]
    Tensor query, key, value, output;
    Tensor grad_query, grad_key, grad_value, grad_output;
    double mass, scale;
    int32_t causal, strict, pool, bfloat16, threads, variant;
};

// One sequence: where its keys, queries, query blocks and sampled rows start, and what it has.
// The queries are its last positions.
struct Sequence {
    int64_t batch, key_start, length, query_start, queries, first_unit, first_block, first_row;
    const int32_t* sinks;       // positions, in order
    const int32_t* sink_start;  // of each key block, and the number of sinks

    int64_t first_position() const { return length - queries; }
};

static inline int64_t key_blocks(const Arguments& p, const Sequence& s) {
    return (s.length + p.key_block - 1) / p.key_block;
}

static inline int64_t units(const Arguments& p, const Sequence& s) {
    return s.queries ? (s.length + p.unit - 1) / p.unit - s.first_unit : 0;
}

static inline uint8_t* choice(const Arguments& p, const Sequence& s, int64_t key_head,
                              int64_t unit) {
    const int64_t block = s.first_block + unit - s.first_unit;
    return p.opened +
           ((s.batch * p.key_heads + key_head) * p.query_blocks + block) * p.block_bytes;
}

static inline bool is_set(const uint8_t* bits, int64_t at) { return bits[at >> 3] >> (at & 7) & 1; }

// The mean key and value of what one query block does not see of a key block.
struct Nodes {
    const float* means;  // of whole key blocks, [key_blocks][width + value_width]
    float* grad_means;
};

// One query block and heads that share keys.
struct Part {
    int64_t key_head, first_head, heads, unit;
};

// One set of instructions. `scratch` is aligned to 64 bytes.
struct Variant {
    // Sampled rows that are scored together.
    int64_t (*choose_units)(const Arguments*);
    int64_t (*choose_floats)(const Arguments*, int64_t longest, int64_t sinks);
    void (*choose)(const Arguments*, const Sequence*, int64_t key_head, int64_t first_unit,
                   int64_t count, float* scratch);
    // For views of so many keys.
    int64_t (*attend_floats)(const Arguments*, int64_t heads, int64_t view);
    void (*attend)(const Arguments*, const Sequence*, const Part*, const Nodes*, float* scratch);
    int64_t (*backward_floats)(const Arguments*, int64_t heads, int64_t view);
    // Writes the gradient of the queries and leaves those of keys and values in `scratch`,
    void (*backward)(const Arguments*, const Sequence*, const Part*, const Nodes*, float* scratch);
    // from where they are added to those of other query blocks.
    void (*add_gradients)(const Arguments*, const Sequence*, const Part*, const Nodes*,
                          float* scratch);
    void (*pool)(const Arguments*, const Sequence*, int64_t key_head, float* means);
    void (*unpool)(const Arguments*, const Sequence*, int64_t key_head, const float* grad_means);
};
