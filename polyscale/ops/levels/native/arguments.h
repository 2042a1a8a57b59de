// What Python hands over: plain pointers, strides and sizes. Mirrors library.py.
#pragma once
#include "native/common.h"

enum {
    BLOCK = 64,        // tokens packed together
    LANES = 16,        // words read together
    VALUE_GROUP = 32,  // channels of a value that share a scale at 2 bits
    STRETCH = 512,     // tokens of the coarse level that are one task, however many threads there are
    PIECE = 64,        // opened tokens that are one task
};

// The arrays of a store, all of them contiguous; see store.py for their shapes.
struct Store {
    uint8_t* key_codes;
    uint16_t* key_scales;
    uint8_t* value_codes;
    uint16_t* value_scales;
    void *keys, *values;
    uint8_t *key_rest, *value_rest;
    uint16_t* rest_scales;
    void* sink_keys;
    int64_t* lengths;
    int64_t batch, heads, blocks, width, value_width, sinks;
    int32_t key_bits, value_bits, is_8bit, bfloat16;

    // Whether the rows of `keys`, `values` and `sink_keys` are float16, not as tokens come.
    bool halves() const { return is_8bit && !bfloat16; }
};

struct Attention {
    const Store* store;
    Tensor query, output;
    int64_t heads, queries, longest, near, heavy;
    // What was opened besides near and first tokens: [batch][store heads][queries][room], and how
    // many. Or null.
    int32_t *opened, *counts;
    int64_t room;
    double scale, mass;  // mass: negative for a fixed number of heavy tokens
    int32_t threads, variant;
};

struct Append {
    const Store* store;
    Tensor key, value;
    int64_t tokens;
    const uint8_t* real;  // [batch][tokens], or null
    int32_t threads, variant;
};

// The array of one head, and where a block of it begins.
struct Head {
    const Store* store;
    int64_t wide, value_wide;  // channels, padded to whole vectors
    uint8_t *key_codes, *value_codes, *key_rest, *value_rest;
    uint16_t *key_scales, *value_scales, *rest_scales;
    char *keys, *values, *sink_keys;
    int64_t key_bytes, value_bytes, scale_rows, packed;

    Head() {}
    Head(const Store& s, int64_t batch, int64_t head) : store(&s) {
        const int64_t n = batch * s.heads + head, size = s.bfloat16 || s.is_8bit ? 2 : 4;
        const int64_t exact = s.is_8bit ? BLOCK : BLOCK * s.blocks;
        const bool two_bits = s.value_bits == 2;
        wide = round_up(s.width, LANES), value_wide = round_up(s.value_width, LANES);
        scale_rows = two_bits ? 2 * ((s.value_width + VALUE_GROUP - 1) / VALUE_GROUP) : 1;
        key_codes = s.key_codes + n * s.blocks * wide * (BLOCK / 2);
        key_scales = s.key_scales + n * s.blocks * 2 * wide;
        value_codes = s.value_codes + n * s.blocks * value_code_bytes();
        value_scales = s.value_scales + n * s.blocks * scale_rows * BLOCK;
        key_bytes = s.width * size, value_bytes = s.value_width * size;
        keys = (char*)s.keys + n * exact * key_bytes;
        values = (char*)s.values + n * exact * value_bytes;
        key_rest = s.key_rest + n * s.blocks * BLOCK * (wide / 2);
        value_rest = s.value_rest + n * s.blocks * BLOCK * value_rest_bytes();
        rest_scales = s.rest_scales + n * s.blocks * BLOCK;
        sink_keys = (char*)s.sink_keys + n * s.sinks * key_bytes;
        packed = s.lengths[batch] / BLOCK * BLOCK;
    }
    int64_t value_code_bytes() const { return value_wide * BLOCK * store->value_bits / 8; }
    int64_t value_rest_bytes() const { return store->value_bits == 2 ? value_wide : value_wide / 2; }
};

// The queries of all heads that share a head of keys, at one place of one row.
struct Unit {
    Head from;
    int64_t group, seen;     // query heads; tokens they see
    int64_t first, newest;   // tokens before and from here on are opened whatever they are
    int64_t chosen;          // opened tokens between them
    float* query;            // [group][wide], times the scale
    float* coarse;           // [group][pitch] exp(score - stretch's largest), zero if opened
    float* stretches;        // [stretches][group][2] largest score, sum of exponentials
    float* always;           // [group][always pitch] exact scores of first and near tokens
    float* masses;           // [pitch], where a share of the mass is asked for
    float* parts;            // [parts][group][2 + value_wide] largest score, sum, sum of values
    int32_t* opened;         // [chosen]
    int64_t pitch, always_pitch;

    int64_t always_count() const { return first + seen - newest; }
    int64_t always_token(int64_t n) const { return n < first ? n : newest + n - first; }
    int64_t stretch_count() const {
        return newest > first ? (newest + STRETCH - 1) / STRETCH : 0;
    }
    int64_t always_pieces() const { return (always_count() + PIECE - 1) / PIECE; }
    int64_t part_size() const { return 2 + from.value_wide; }
    float* part(int64_t number) const { return parts + number * group * part_size(); }
};

// One set of instructions. `scratch` is aligned to 64 bytes.
struct Variant {
    int64_t (*scratch_floats)(const Attention*);
    // The exponentials and statistics of a stretch of the coarse level.
    void (*score_stretch)(const Unit*, int64_t stretch, float* scratch);
    // The exact scores of a piece of the tokens that are opened whatever they are.
    void (*score_always)(const Unit*, int64_t piece, float* scratch);
    // Fills `opened`, and takes what is opened out of the coarse level.
    void (*choose)(const Attention*, Unit*, float* scratch);
    // Parts of the result: of a stretch, of a piece that is always opened, of a piece of `opened`.
    void (*weigh_stretch)(const Unit*, int64_t stretch, float* part, float* scratch);
    void (*weigh_always)(const Unit*, int64_t piece, float* part, float* scratch);
    void (*weigh_opened)(const Unit*, int64_t piece, float* part, float* scratch);
    // [group][value_wide], at the beginning of the first part.
    void (*merge)(const Unit*, int64_t parts);
    // A row of tokens to be packed as floats, with zeros up to `wide`.
    void (*widen)(const Store*, const char* row, int64_t width, int64_t wide, float* to);
    // The nearest float16 of each number.
    void (*halve)(const float* row, int64_t width, uint16_t* to);
    int64_t (*packing_floats)(const Store*);
    // Packs 64 tokens whose keys and values are rows of floats, [64][wide].
    void (*pack)(const Head*, int64_t block, float* scratch);
};
