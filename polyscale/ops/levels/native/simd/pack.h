// Packing 64 tokens: the same bits as packing.py makes.
#pragma once
#include "codes.h"

static uint16_t to_half(float x) {
    uint32_t b;
    memcpy(&b, &x, 4);
    const uint16_t sign = (uint16_t)(b >> 16 & 0x8000);
    b &= 0x7FFFFFFF;
    if (b < 0x38800000) {  // below the normal numbers: in steps of 2**-24, as floats at 0.5 are
        float y;
        memcpy(&y, &b, 4);
        y += 0.5f;
        uint32_t z;
        memcpy(&z, &y, 4);
        return (uint16_t)(sign | (z - 0x3F000000));
    }
    b += 0xC8000FFF + (b >> 13 & 1);
    return (uint16_t)(sign | b >> 13);
}

// `to_half` on 16 lanes; finite numbers saturate.
INLINE Halves to_halves(Wide x) {
    const Words bits = (Words)x, size = bits & 0x7FFFFFFFu;
    const Words small = (Words)((Wide)size + all(0.5f)) - 0x3F000000u;
    const Words normal = (size + 0xC8000FFFu + (size >> 13 & 1u)) >> 13;
    Words half = (Words)select((WideIntegers)(size < 0x38800000u), (Wide)small, (Wide)normal);
    half = (Words)select((WideIntegers)(size > 0x477FE000u), (Wide)(Words{} + 0x7BFFu), (Wide)half);
    half = (Words)select((WideIntegers)(size >= 0x7F800000u), (Wide)(Words{} + 0x7C00u), (Wide)half);
    half = (Words)select((WideIntegers)(size > 0x7F800000u), (Wide)(Words{} + 0x7E00u), (Wide)half);
    return __builtin_convertvector(half | (bits >> 16 & 0x8000u), Halves);
}

static void halve_row(const float* row, int64_t width, uint16_t* to) {
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES) write(to + c, to_halves(read<Wide>(row + c)));
    if (c == width) return;
    float rest[LANES] = {};
    uint16_t halves[LANES];
    memcpy(rest, row + c, (size_t)(width - c) * sizeof(float));
    write(halves, to_halves(read<Wide>(rest)));
    memcpy(to + c, halves, (size_t)(width - c) * sizeof(uint16_t));
}

static void widen_kept(const Store* s, const char* row, int64_t width, int64_t wide, float* to) {
    const float* found = widen_row(*s, row, width, wide, to);
    if (found != to) memcpy(to, found, (size_t)wide * sizeof(float));
}

static uint16_t round_down(float x) {
    x = x < -65504.0f ? -65504.0f : x > 65504.0f ? 65504.0f : x;
    const uint16_t half = to_half(x);
    if (!(from_half(half) > x)) return half;
    if ((half & 0x7FFF) == 0) return 0x8001;
    return (uint16_t)(half & 0x8000 ? half + 1 : half - 1);
}
static uint16_t round_up_half(float x) { return (uint16_t)(round_down(-x) ^ 0x8000); }

enum { NO_NUMBER = 0x7E00 };

// The nearest whole number, ties to the even one; for numbers far below 2**22.
INLINE Wide nearest(Wide x) {
    const Wide shift = all(12582912.0f);
    return (x + shift) - shift;
}
INLINE Wide between(Wide x, float low, float high) {
    x = select(x < all(low), all(low), x);
    return select(x > all(high), all(high), x);
}

// Codes from `low` to `high`, and what they round away in 16ths of a step.
INLINE WideIntegers codes_of(Wide x, Wide step, float low, float high, WideIntegers* rest) {
    Wide steps = select(step > all(0.0f), x / step, all(0.0f));
    steps = between(select(steps == steps, steps, all(0.0f)), -1024.0f, 1024.0f);
    const Wide code = between(nearest(steps), low, high);
    *rest = __builtin_convertvector(between(nearest((steps - code) * all(16.0f)), -8.0f, 7.0f),
                                    WideIntegers);
    return __builtin_convertvector(code, WideIntegers);
}

INLINE WideIntegers not_finite(Wide x) { return (x - x) != all(0.0f); }

struct Range {
    Wide least, most;
    WideIntegers wrong;
    INLINE_MEMBER Range() : least(all(INFINITE)), most(all(-INFINITE)), wrong(WideIntegers{}) {}
    INLINE_MEMBER void add(Wide x) {
        least = select(x < least, x, least);
        most = select(x > most, x, most);
        wrong |= not_finite(x);
    }
};

// The scales that span a range.
static void scales_of(float least, float most, bool wrong, int levels, uint16_t* lo,
                      uint16_t* step) {
    if (wrong) {
        *lo = *step = NO_NUMBER;
        return;
    }
    *lo = round_down(least + 0.0f);  // zero has one sign
    const float range = most - from_half(*lo);
    *step = round_up_half((range > 0.0f ? range : 0.0f) / (float)levels);
}

// Two words of a row of codes: channels c to c + 15.
INLINE void gather(WideIntegers codes, uint32_t* low, uint32_t* high) {
    uint32_t words[2] = {0, 0};
    for (int i = 0; i < LANES; i++) words[i / 8] |= (uint32_t)codes[i] << (i % 8 * 4);
    *low = words[0], *high = words[1];
}

static void pack_keys(const Head& h, int64_t block, const float* rows) {
    const Store& s = *h.store;
    const int levels = (1 << s.key_bits) - 1;
    const int64_t counted = most(0, least(BLOCK, s.sinks - block * BLOCK));
    uint16_t* lo = h.key_scales + block * 2 * h.wide;
    uint8_t* words = h.key_codes + block * h.wide * (BLOCK / 2);
    for (int64_t c = 0; c < h.wide; c += LANES) {
        Range range;
        for (int64_t t = counted; t < BLOCK; t++) range.add(read<Wide>(rows + t * h.wide + c));
        for (int i = 0; i < LANES; i++) {
            if (counted < BLOCK)
                scales_of(range.least[i], range.most[i], range.wrong[i] != 0, levels, lo + c + i,
                          lo + h.wide + c + i);
            else
                lo[c + i] = lo[h.wide + c + i] = 0;
        }
        const Wide from = from_halves(lo + c), step = from_halves(lo + h.wide + c);
        for (int64_t t = 0; t < BLOCK; t++) {
            WideIntegers rest;
            const WideIntegers codes = codes_of(read<Wide>(rows + t * h.wide + c) - from, step,
                                                0.0f, (float)levels, &rest);
            uint32_t low, high;
            gather(codes, &low, &high);
            write(words + (c / 8 * BLOCK + t) * 4, low);
            write(words + ((c / 8 + 1) * BLOCK + t) * 4, high);
            if (!s.is_8bit) continue;
            gather(rest + 8, &low, &high);
            uint8_t* to = h.key_rest + (block * BLOCK + t) * (h.wide / 2) + c / 2;
            write(to, low), write(to + 4, high);
        }
    }
}

// A symmetric scale of one row; the padding behind it is zeros.
static uint16_t symmetric_scale(const float* row, int64_t wide, int levels) {
    Range range;
    for (int64_t c = 0; c < wide; c += LANES) range.add(read<Wide>(row + c));
    float largest = 0.0f;
    bool wrong = false;
    for (int i = 0; i < LANES; i++) {
        const float low = -range.least[i], high = range.most[i];
        largest = low > largest ? low : largest;
        largest = high > largest ? high : largest;
        wrong |= range.wrong[i] != 0;
    }
    return wrong ? (uint16_t)NO_NUMBER : round_up_half(largest / (float)levels);
}

static void pack_values_4(const Head& h, int64_t block, const float* rows) {
    const int64_t wide = h.value_wide;
    uint16_t* scales = h.value_scales + block * BLOCK;
    uint8_t* words = h.value_codes + block * h.value_code_bytes();
    for (int64_t t = 0; t < BLOCK; t++) {
        const float* row = rows + t * wide;
        scales[t] = symmetric_scale(row, wide, 7);
        const Wide scale = all(from_half(scales[t]));
        uint8_t* to = words + t / 8 * wide * 4;
        for (int64_t c = 0; c < wide; c += LANES) {
            WideIntegers rest;
            const Words codes = (Words)(codes_of(read<Wide>(row + c), scale, -7.0f, 7.0f, &rest) + 8);
            const Words before = t % 8 ? read<Words>(to + c * 4) : Words{};
            write(to + c * 4, before | codes << (uint32_t)(t % 8 * 4));
            if (!h.store->is_8bit) continue;
            uint32_t low, high;
            gather(rest + 8, &low, &high);
            uint8_t* beside = h.value_rest + (block * BLOCK + t) * h.value_rest_bytes() + c / 2;
            write(beside, low), write(beside + 4, high);
        }
    }
}

static void pack_values_2(const Head& h, int64_t block, const float* rows) {
    const Store& s = *h.store;
    const int64_t wide = h.value_wide;
    uint16_t* scales = h.value_scales + block * h.scale_rows * BLOCK;
    uint8_t* words = h.value_codes + block * h.value_code_bytes();
    for (int64_t t = 0; t < BLOCK; t++) {
        const float* row = rows + t * wide;
        for (int64_t r = 0; r < h.scale_rows / 2; r++) {
            const int64_t end = least(s.value_width, (r + 1) * VALUE_GROUP);
            float low = INFINITE, high = -INFINITE;
            bool wrong = false;
            for (int64_t c = r * VALUE_GROUP; c < end; c++) {
                low = row[c] < low ? row[c] : low;
                high = row[c] > high ? row[c] : high;
                wrong |= row[c] - row[c] != 0.0f;
            }
            scales_of(low, high, wrong, 3, scales + 2 * r * BLOCK + t,
                      scales + (2 * r + 1) * BLOCK + t);
        }
        uint8_t* to = words + t / 16 * wide * 4;
        for (int64_t c = 0; c < wide; c += LANES) {
            const uint16_t* lo = scales + c / VALUE_GROUP * 2 * BLOCK + t;
            WideIntegers rest;
            WideIntegers codes = codes_of(read<Wide>(row + c) - all(from_half(lo[0])),
                                          all(from_half(lo[BLOCK])), 0.0f, 3.0f, &rest);
            for (int i = 0; i < LANES; i++)
                if (c + i >= s.value_width) codes[i] = 0;
            const Words before = t % 16 ? read<Words>(to + c * 4) : Words{};
            write(to + c * 4, before | (Words)codes << (uint32_t)(t % 16 * 2));
        }
        if (!s.is_8bit) continue;
        const uint16_t scale = h.rest_scales[block * BLOCK + t] = symmetric_scale(row, wide, 127);
        int8_t* bytes = (int8_t*)h.value_rest + (block * BLOCK + t) * wide;
        for (int64_t c = 0; c < wide; c += LANES) {
            WideIntegers rest;
            const WideIntegers codes =
                codes_of(read<Wide>(row + c), all(from_half(scale)), -127.0f, 127.0f, &rest);
            for (int i = 0; i < LANES; i++) bytes[c + i] = (int8_t)codes[i];
        }
    }
}

static void pack_block(const Head* head, int64_t block, float* rows) {
    pack_keys(*head, block, rows);
    const float* values = rows + BLOCK * head->wide;
    if (head->store->value_bits == 4) pack_values_4(*head, block, values);
    else pack_values_2(*head, block, values);
}
