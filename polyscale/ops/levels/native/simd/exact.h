// The exact level: rows of opened tokens, their scores and their values.
#pragma once
#include "codes.h"

INLINE Wide from_bfloat16s(const void* from) {
    return (Wide)(__builtin_convertvector(read<Halves>(from), Words) << 16);
}

// A row as a store holds it, as floats with zeros up to `wide`; where it stands, if it is like that
// already.
static const float* widen_row(const Store& s, const char* row, int64_t width, int64_t wide,
                              float* to) {
    const bool bfloat16 = s.bfloat16, halves = s.halves();
    if (!bfloat16 && !halves && width == wide) return (const float*)row;
    int64_t c = 0;
    for (; c + LANES <= width; c += LANES)
        write(to + c, bfloat16 ? from_bfloat16s(row + 2 * c)
                      : halves ? from_halves((const uint16_t*)row + c)
                               : read<Wide>(row + 4 * c));
    for (; c < wide; c++)
        to[c] = c >= width ? 0.0f
                : bfloat16 ? from_bfloat16(((const uint16_t*)row)[c])
                : halves   ? from_half(((const uint16_t*)row)[c])
                           : ((const float*)row)[c];
    return to;
}

// 16 channels of what the codes round away.
INLINE Wide rest_of(const uint8_t* row, int64_t c) {
    const Words x = spread(read<uint32_t>(row + c / 2), read<uint32_t>(row + c / 2 + 4));
    return __builtin_convertvector((WideIntegers)x - 8, Wide) * all(0.0625f);
}

static const float* exact_key(const Head& h, int64_t token, float* to) {
    const Store& s = *h.store;
    const char* plain = nullptr;
    if (!s.is_8bit) plain = h.keys + token * h.key_bytes;
    else if (token >= h.packed) plain = h.keys + (token - h.packed) * h.key_bytes;
    else if (token < s.sinks) plain = h.sink_keys + token * h.key_bytes;
    if (plain) return widen_row(s, plain, s.width, h.wide, to);
    const uint16_t* lo = h.key_scales + token / BLOCK * 2 * h.wide;
    const uint8_t* words = h.key_codes + token / BLOCK * h.wide * (BLOCK / 2) + token % BLOCK * 4;
    const uint8_t* rest = h.key_rest + token * (h.wide / 2);
    for (int64_t c = 0; c < h.wide; c += LANES) {
        const Words codes = spread(read<uint32_t>(words + c / 8 * (4 * BLOCK)),
                                   read<uint32_t>(words + (c / 8 + 1) * (4 * BLOCK)));
        const Wide code = __builtin_convertvector((WideIntegers)codes, Wide);
        write(to + c, from_halves(lo + c) + from_halves(lo + h.wide + c) * (code + rest_of(rest, c)));
    }
    return to;
}

static const float* exact_value(const Head& h, int64_t token, float* to) {
    const Store& s = *h.store;
    const char* plain = nullptr;
    if (!s.is_8bit) plain = h.values + token * h.value_bytes;
    else if (token >= h.packed) plain = h.values + (token - h.packed) * h.value_bytes;
    if (plain) return widen_row(s, plain, s.value_width, h.value_wide, to);
    const uint8_t* rest = h.value_rest + token * h.value_rest_bytes();
    if (s.value_bits == 2) {
        const float scale = from_half(h.rest_scales[token]);
        for (int64_t c = 0; c < h.value_wide; c++) to[c] = scale * (float)((const int8_t*)rest)[c];
        return to;
    }
    const Wide scale = all(from_half(h.value_scales[token]));
    const uint8_t* words = h.value_codes + token / BLOCK * h.value_code_bytes() +
                           token % BLOCK / 8 * (h.value_wide * 4);
    for (int64_t c = 0; c < h.value_wide; c += LANES) {
        const Words codes = (read<Words>(words + c * 4) >> (uint32_t)(token % 8 * 4)) & 15u;
        const Wide code = __builtin_convertvector((WideIntegers)codes - 8, Wide);
        write(to + c, scale * (code + rest_of(rest, c)));
    }
    return to;
}

INLINE void fetch_token(const Head& h, int64_t token, bool key) {
    const Store& s = *h.store;
    if (!s.is_8bit) {
        fetch_row(key ? h.keys + token * h.key_bytes : h.values + token * h.value_bytes,
                  key ? h.key_bytes : h.value_bytes);
        return;
    }
    if (token >= h.packed) return;
    if (key) {
        const uint8_t* words = h.key_codes + token / BLOCK * h.wide * (BLOCK / 2);
        for (int64_t c = 0; c < h.wide; c += 8)
            __builtin_prefetch(words + c / 8 * (4 * BLOCK) + token % BLOCK * 4, 0);
        fetch_row(h.key_rest + token * (h.wide / 2), h.wide / 2);
        return;
    }
    fetch_row(h.value_rest + token * h.value_rest_bytes(), h.value_rest_bytes());
    if (s.value_bits == 4)
        fetch_row(h.value_codes + token / BLOCK * h.value_code_bytes() +
                      token % BLOCK / 8 * (h.value_wide * 4),
                  h.value_wide * 4);
}

// Products of a key with H queries, channels not yet summed: `sums` [H][LANES].
template <int H>
INLINE void score_row(const float* key, const float* query, int64_t wide, Wide* sums) {
    Wide acc[H];
    UNROLL for (int h = 0; h < H; h++) acc[h] = all(0.0f);
    for (int64_t c = 0; c < wide; c += LANES) {
        const Wide k = read<Wide>(key + c);
        UNROLL for (int h = 0; h < H; h++) acc[h] += k * read<Wide>(query + h * wide + c);
    }
    UNROLL for (int h = 0; h < H; h++) sums[h * LANES] = acc[h];
}

// Exact scores of up to PIECE tokens, `scores` [group][pitch]; rows of it are whole vectors.
static void score_tokens(const Unit& u, const int64_t* tokens, int64_t count, float* scores,
                         int64_t pitch, float* row) {
    const int64_t at_once = heads_at_once(u.group), wide = u.from.wide;
    Wide sums[MOST_HEADS * LANES];
    for (int64_t n = 0; n < count; n++) fetch_token(u.from, tokens[n], true);
    for (int64_t g = 0; g < u.group; g += at_once) {
        const int64_t heads = least(at_once, u.group - g);
        for (int64_t first = 0; first < count; first += LANES) {
            for (int64_t n = 0; n < LANES; n++) {
                const float* key = exact_key(u.from, tokens[least(first + n, count - 1)], row);
#define SCORE(H) score_row<H>(key, u.query + g * wide, wide, sums + n)
                FOR_HEADS(heads, SCORE)
#undef SCORE
            }
            for (int64_t h = 0; h < heads; h++)
                write(scores + (g + h) * pitch + first, sums_of(sums + h * LANES));
        }
    }
}

template <int H>
INLINE void weigh_rows(const float* const* rows, int64_t count, const float* weights,
                       int64_t vectors, float* sums, int64_t part) {
    for (int64_t c = 0; c < vectors; c += ACROSS) {
        Wide acc[H][ACROSS];
        UNROLL for (int h = 0; h < H; h++)
            UNROLL for (int i = 0; i < ACROSS; i++) acc[h][i] = all(0.0f);
        for (int64_t n = 0; n < count; n++)
            UNROLL for (int i = 0; i < ACROSS; i++) {
                // Where fewer vectors are left, the last one is taken again.
                const Wide x = read<Wide>(rows[n] + least(c + i, vectors - 1) * LANES);
                UNROLL for (int h = 0; h < H; h++)
                    acc[h][i] += all(weights[h * PIECE + n]) * x;
            }
        UNROLL for (int h = 0; h < H; h++)
            UNROLL for (int i = 0; i < ACROSS; i++)
                write(sums + h * part + least(c + i, vectors - 1) * LANES, acc[h][i]);
    }
}

// A part of the result: tokens whose scores [group][pitch] are known.
static void weigh_tokens(const Unit& u, const int64_t* tokens, int64_t count, const float* scores,
                         int64_t pitch, float* part, float* weights, float* memory) {
    const int64_t vectors = u.from.value_wide / LANES, size = u.part_size();
    const int64_t at_once = heads_at_once(u.group);
    const float* rows[PIECE];
    for (int64_t n = 0; n < count; n++)
        rows[n] = exact_value(u.from, tokens[n], memory + n * u.from.value_wide);
    for (int64_t g = 0; g < u.group; g++) {
        const float* mine = scores + g * pitch;
        Wide top = all(-INFINITE), sum = all(0.0f);
        for (int64_t n = 0; n < count; n += LANES)
            top = wider(first_of(read<Wide>(mine + n), count - n), top);
        float largest = largest_of(top);
        if (!(largest > -INFINITE)) largest = 0.0f;
        for (int64_t n = 0; n < count; n += LANES) {
            const Wide score = first_of(read<Wide>(mine + n), count - n);
            const Wide x = exponentials_of(score - all(largest));
            sum += x;
            write(weights + g * PIECE + n, x);
        }
        part[g * size] = largest;
        part[g * size + 1] = sum_of(sum);
    }
    for (int64_t g = 0; g < u.group; g += at_once) {
#define WEIGH(H) \
    weigh_rows<H>(rows, count, weights + g * PIECE, vectors, part + g * size + 2, size)
        FOR_HEADS(least(at_once, u.group - g), WEIGH)
#undef WEIGH
    }
}

static int64_t always_tokens(const Unit& u, int64_t piece, int64_t* tokens) {
    const int64_t begin = piece * PIECE, count = least(PIECE, u.always_count() - begin);
    for (int64_t n = 0; n < count; n++) tokens[n] = u.always_token(begin + n);
    return count;
}

static void score_always(const Unit* unit, int64_t piece, float* scratch) {
    int64_t tokens[PIECE];
    const int64_t count = always_tokens(*unit, piece, tokens);
    for (int64_t n = 0; n < count; n++) fetch_token(unit->from, tokens[n], false);
    score_tokens(*unit, tokens, count, unit->always + piece * PIECE, unit->always_pitch, scratch);
}

static void weigh_always(const Unit* unit, int64_t piece, float* part, float* scratch) {
    int64_t tokens[PIECE];
    const int64_t count = always_tokens(*unit, piece, tokens);
    weigh_tokens(*unit, tokens, count, unit->always + piece * PIECE, unit->always_pitch, part,
                 scratch, scratch + unit->group * PIECE);
}

static void weigh_opened(const Unit* unit, int64_t piece, float* part, float* scratch) {
    int64_t tokens[PIECE];
    const int64_t begin = piece * PIECE, count = least(PIECE, unit->chosen - begin);
    for (int64_t n = 0; n < count; n++) tokens[n] = unit->opened[begin + n];
    float *weights = scratch, *scores = weights + unit->group * PIECE;
    float* rows = scores + unit->group * PIECE;
    for (int64_t n = 0; n < count; n++) fetch_token(unit->from, tokens[n], false);
    score_tokens(*unit, tokens, count, scores, PIECE, rows);
    weigh_tokens(*unit, tokens, count, scores, PIECE, part, weights, rows);
}
