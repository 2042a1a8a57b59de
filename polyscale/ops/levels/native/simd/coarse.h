// The coarse level: scores from packed keys, and sums of packed values.
#pragma once
#include "codes.h"

// The processor's own prefetching ends with every page.
enum { BLOCKS_AHEAD = 2 };

// Scores of 64 packed keys for H heads, to rows `pitch` apart. `query` [H][wide] has the steps of the
// block in it, `base` what all of them have in common.
template <int H>
INLINE void score_block(const uint8_t* codes, int64_t wide, const float* query, const float* base,
                        float* scores, int64_t pitch) {
    const Decoder<KEYS> decode;
    for (int64_t tile = 0; tile < BLOCK / LANES; tile += ACROSS) {
        Wide acc[H][ACROSS];
        UNROLL for (int h = 0; h < H; h++)
            UNROLL for (int t = 0; t < ACROSS; t++) acc[h][t] = all(base[h]);
        for (int64_t c = 0; c < wide; c += 8) {
            Words x[ACROSS];
            UNROLL for (int t = 0; t < ACROSS; t++) {
                const uint8_t* from = codes + ((c / 8) * (BLOCK / LANES) + tile + t) * 64;
                x[t] = read<Words>(from);
                __builtin_prefetch(from + BLOCKS_AHEAD * wide * (BLOCK / 2), 0);
            }
            UNROLL for (int j = 0; j < 8; j++) {
                Wide code[ACROSS];
                UNROLL for (int t = 0; t < ACROSS; t++) code[t] = decode(x[t] >> (4 * j));
                UNROLL for (int h = 0; h < H; h++) {
                    const Wide q = all(query[h * wide + c + j]);
                    UNROLL for (int t = 0; t < ACROSS; t++) acc[h][t] += q * code[t];
                }
            }
        }
        UNROLL for (int h = 0; h < H; h++)
            UNROLL for (int t = 0; t < ACROSS; t++)
                write(scores + h * pitch + (tile + t) * LANES, acc[h][t]);
    }
}

// Queries times the steps of a block, and their product with its lowest numbers.
static void enter_block(const Unit& u, int64_t block, float* query, float* base) {
    const int64_t wide = u.from.wide;
    const uint16_t* lo = u.from.key_scales + block * 2 * wide;
    for (int64_t g = 0; g < u.group; g++) {
        Wide sum = all(0.0f);
        for (int64_t c = 0; c < wide; c += LANES) {
            const Wide q = read<Wide>(u.query + g * wide + c);
            sum += q * from_halves(lo + c);
            write(query + g * wide + c, q * from_halves(lo + wide + c));
        }
        base[g] = sum_of(sum);
    }
}

static void score_stretch(const Unit* unit, int64_t stretch, float* scratch) {
    const Unit& u = *unit;
    const int64_t wide = u.from.wide, begin = most(stretch * STRETCH, u.first);
    const int64_t end = least((stretch + 1) * STRETCH, u.newest);
    float *query = scratch, *base = scratch + u.group * wide;
    float* statistics = u.stretches + stretch * u.group * 2;
    if (begin >= end) {  // first tokens alone
        for (int64_t g = 0; g < u.group; g++)
            statistics[2 * g] = -INFINITE, statistics[2 * g + 1] = 0.0f;
        return;
    }
    const int64_t at_once = heads_at_once(u.group);
    const int64_t from = begin / BLOCK * BLOCK, to = round_up(end, BLOCK);
    for (int64_t token = from; token < to; token += BLOCK) {
        const uint8_t* codes = u.from.key_codes + token * (wide / 2);
        enter_block(u, token / BLOCK, query, base);
        for (int64_t g = 0; g < u.group; g += at_once) {
            float* scores = u.coarse + g * u.pitch + token;
#define SCORE(H) score_block<H>(codes, wide, query + g * wide, base + g, scores, u.pitch)
            FOR_HEADS(least(at_once, u.group - g), SCORE)
#undef SCORE
        }
    }
    for (int64_t g = 0; g < u.group; g++) {
        float* scores = u.coarse + g * u.pitch;
        for (int64_t t = from; t < begin; t++) scores[t] = -INFINITE;
        for (int64_t t = end; t < to; t++) scores[t] = -INFINITE;
        Wide top = all(-INFINITE), sum = all(0.0f);
        for (int64_t t = from; t < to; t += LANES) top = wider(read<Wide>(scores + t), top);
        float largest = largest_of(top);
        if (!(largest > -INFINITE)) largest = 0.0f;  // nothing, or nothing that is a number
        for (int64_t t = from; t < to; t += LANES) {
            const Wide x = exponentials_of(read<Wide>(scores + t) - all(largest));
            sum += x;
            write(scores + t, x);
        }
        statistics[2 * g] = largest;
        statistics[2 * g + 1] = sum_of(sum);
    }
}

// Adds 64 packed values times the weights of H heads to `sums`, rows `part` apart. `weights`
// [rows of scales][group][64] have the scales in them, `base` [rows][group] is added to every channel.
template <int H, int C, Kind KIND>
INLINE void weigh_codes(const uint8_t* codes, int64_t vectors, int64_t first, int64_t group,
                        const float* weights, const float* base, float* sums, int64_t part) {
    enum { BITS = KIND == VALUES ? 4 : 2, TOKENS = 32 / BITS, ROWS = KIND == VALUES ? 1 : (C + 1) / 2 };
    const Decoder<KIND> decode;
    const int64_t row = KIND == VALUES ? 0 : first / 2;
    Wide acc[H][C];
    UNROLL for (int h = 0; h < H; h++)
        UNROLL for (int c = 0; c < C; c++) {
            acc[h][c] = read<Wide>(sums + h * part + (first + c) * LANES);
            if (KIND == VALUES_2) acc[h][c] += all(base[(row + c / 2) * group + h]);
        }
    for (int64_t tile = 0; tile < BLOCK / TOKENS; tile++) {
        Words x[C];
        UNROLL for (int c = 0; c < C; c++) {
            const uint8_t* from = codes + (tile * vectors + first + c) * 64;
            x[c] = read<Words>(from);
            __builtin_prefetch(from + BLOCKS_AHEAD * vectors * (BLOCK * LANES * BITS / 8), 0);
        }
        UNROLL for (int j = 0; j < TOKENS; j++) {
            Wide code[C];
            UNROLL for (int c = 0; c < C; c++) code[c] = decode(x[c] >> (BITS * j));
            UNROLL for (int h = 0; h < H; h++)
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const float* from = weights + ((row + r) * group + h) * BLOCK;
                    const Wide weight = all(from[tile * TOKENS + j]);
                    UNROLL for (int c = 2 * r; c < (ROWS == 1 ? C : 2 * r + 2); c++)
                        acc[h][c] += weight * code[c];
                }
        }
    }
    UNROLL for (int h = 0; h < H; h++)
        UNROLL for (int c = 0; c < C; c++) write(sums + h * part + (first + c) * LANES, acc[h][c]);
}

template <Kind KIND>
static void weigh_block(const Unit& u, int64_t block, const float* weights, const float* base,
                        float* sums) {
    const int64_t vectors = u.from.value_wide / LANES, at_once = heads_at_once(u.group);
    const uint8_t* codes = u.from.value_codes + block * u.from.value_code_bytes();
    const int64_t part = u.part_size();
    for (int64_t g = 0; g < u.group; g += at_once) {
        const int64_t heads = least(at_once, u.group - g);
        float* mine = sums + g * part;
        int64_t c = 0;
#define WEIGH_MANY(H) \
    weigh_codes<H, ACROSS, KIND>(codes, vectors, c, u.group, weights + g * BLOCK, base + g, mine, part)
#define WEIGH_ONE(H) \
    weigh_codes<H, 1, KIND>(codes, vectors, c, u.group, weights + g * BLOCK, base + g, mine, part)
        for (; c + ACROSS <= vectors; c += ACROSS) FOR_HEADS(heads, WEIGH_MANY)
        for (; c < vectors; c++) FOR_HEADS(heads, WEIGH_ONE)
#undef WEIGH_MANY
#undef WEIGH_ONE
    }
}

static void weigh_stretch(const Unit* unit, int64_t stretch, float* part, float* scratch) {
    const Unit& u = *unit;
    const int64_t begin = most(stretch * STRETCH, u.first);
    const int64_t end = least((stretch + 1) * STRETCH, u.newest);
    const int64_t rows = u.from.scale_rows, size = u.part_size();
    float *weights = scratch, *base = weights + rows * u.group * BLOCK;
    memset(part, 0, (size_t)(u.group * size) * sizeof(float));
    for (int64_t g = 0; g < u.group; g++)
        part[g * size] = u.stretches[(stretch * u.group + g) * 2];
    if (begin >= end) return;
    for (int64_t token = begin / BLOCK * BLOCK; token < end; token += BLOCK) {
        const uint16_t* scales = u.from.value_scales + token * rows;
        for (int64_t g = 0; g < u.group; g++) {
            const float* x = u.coarse + g * u.pitch + token;
            Wide total = all(0.0f);
            for (int64_t t = 0; t < BLOCK; t += LANES) total += read<Wide>(x + t);
            part[g * size + 1] += sum_of(total);
            for (int64_t r = 0; r < rows / 2 + rows % 2; r++) {
                const uint16_t* lo = scales + 2 * r * BLOCK;
                Wide sum = all(0.0f);
                for (int64_t t = 0; t < BLOCK; t += LANES) {
                    const Wide e = read<Wide>(x + t);
                    if (rows > 1) sum += e * from_halves(lo + t);
                    const Wide scale = from_halves(rows > 1 ? lo + BLOCK + t : lo + t);
                    write(weights + (r * u.group + g) * BLOCK + t, e * scale);
                }
                base[r * u.group + g] = sum_of(sum);
            }
        }
        if (rows > 1)
            weigh_block<VALUES_2>(u, token / BLOCK, weights, base, part + 2);
        else
            weigh_block<VALUES>(u, token / BLOCK, weights, base, part + 2);
    }
}
