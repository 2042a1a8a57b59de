// What hsa_forward and hsa_backward are given, and the table of one set of instructions.
#pragma once
#include "hsa/native/plan.h"
#include "native/common.h"

// The arguments of one call, forward or backward. Mirrored by library.py.
struct AttentionArguments {
    int64_t batch, heads, key_heads, rows, width, value_width;
    int64_t position_width, position_heads;  // 0: there are no position scores
    const int32_t* plan;
    const uint8_t* ignored;                // [batch][rows], or null
    const float *position_query, *position_key;  // [position_heads][nodes][position_width]
    Tensor query, key, value, output;
    Tensor grad_output, grad_query, grad_key, grad_value;  // gradients of the inputs in float32
    float* log_sums;  // [batch][heads][rows]: of each row, or for blocks of each root, roots first
    const float* grad_log_sums;                       // likewise, or null
    float *grad_position_query, *grad_position_key;  // [batch][heads][nodes][position_width]
    double scale;
    int32_t columns, causal, include_self, bfloat16, threads, variant;
};

// What the leaves of each chunk see, found once for all heads and batch entries: it depends on the tree
// alone where no row is masked.
struct Seen {
    char* data;
    int64_t size, room;
    int64_t* starts;  // of each piece, in `data`
};

// What one pass of one copy of one unit works on.
struct Work {
    const AttentionArguments* arguments;
    const Unit* unit;
    int64_t batch, head;
    float* shared;  // of this copy of the unit: what its steps hand on
    float* own;     // of this thread
    const Seen* seen;  // or null
};

enum { MOST_OPEN = 64 };

// One new token of every row of a batch against the open families of its hierarchical cache, which
// changes in place: families close, the token is added. Mirrored by library.py.
struct Decode {
    int64_t batch, heads, key_heads, width, value_width;
    int64_t levels;  // from the tokens up
    Tensor query, key, value, output;
    void *keys[MOST_OPEN], *values[MOST_OPEN];  // means [batch][key_heads][room][width]
    int64_t* counts[MOST_OPEN];                 // [batch][room] tokens under each member
    int64_t* filled[MOST_OPEN];                 // [batch] members
    int64_t room[MOST_OPEN];
    const int64_t* closes;  // [batch] levels that close before the token
    const uint8_t* rows;    // [batch] whether there is a token
    int64_t missing;        // out: the level that has no room for one more member, or -1
    double scale;
    int32_t include_self, bfloat16, threads, variant;
};

// A family that closes: its members and where their mean goes in the level above.
struct Closing {
    int64_t members, place;
};

// One set of instructions. Memory is aligned to 64 bytes.
struct Variant {
    // Floats that all steps of one copy of the unit share, and that a thread needs for itself.
    int64_t (*shared_floats)(const AttentionArguments*, const Unit*, bool backward);
    int64_t (*own_floats)(const AttentionArguments*, const TreePlan*, bool backward);
    // Adds what the leaves of a unit's chunks see; false if there is not enough memory.
    bool (*see)(const Work*, Seen*);
    // Even steps are run for every segment of a unit, odd steps once, in order.
    void (*forward)(const Work*, int step, int64_t segment);
    void (*backward)(const Work*, int step, int64_t segment);
    // One key head of one row; `closing` has an entry for each level.
    int64_t (*decode_floats)(const Decode*);
    void (*decode)(const Decode*, int64_t batch, int64_t key_head, const Closing* closing,
                   float* scratch);
};
