// What every native kernel shares, in its inner part and in the threads around it.
#pragma once
#include <stdint.h>
#include <string.h>

// [batch, head, row, channel]; channels are contiguous, strides count elements.
struct Tensor {
    void* data;
    int64_t batch, head, row;
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t round_up(int64_t a, int64_t multiple) {
    return (a + multiple - 1) / multiple * multiple;
}

// How many blocks of 2**level positions cover `count` positions.
static inline int64_t at_level(int64_t count, int64_t level) {
    return (count + ((int64_t)1 << level) - 1) >> level;
}

// Rows that lie far apart are on pages of their own, so what is needed soon is prefetched.
enum { ROWS_AHEAD = 12 };
static inline void fetch_row(const void* row, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char*)row + b, 0);
}
static inline void fetch_row_to_write(void* row, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((char*)row + b, 1);
}

static inline uint16_t to_bfloat16(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    if (x != x) return (uint16_t)((wide >> 16) | 0x40);
    return (uint16_t)((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
}

static inline float from_bfloat16(uint16_t x) {
    const uint32_t wide = (uint32_t)x << 16;
    float y;
    memcpy(&y, &wide, 4);
    return y;
}

// Memory that a thread hands out piece by piece, each aligned to 64 bytes.
struct Scratch {
    float* next;
    float* take(int64_t floats) {
        float* taken = next;
        next += round_up(floats, 16);
        return taken;
    }
};
