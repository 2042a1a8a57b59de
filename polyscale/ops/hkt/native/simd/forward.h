// One block of queries against all keys that it sees, with a running softmax.
#pragma once
#include "exact.h"

struct ForwardScratch {
    Tile tile;
    ExactScores exact;
    float *scores, *values, *output, *plain;
    float *largest, *next_largest, *sum, *block_sum, *correction;  // per query
    float *rest, *next_rest;  // per query: what is left of the largest score, see Largest
    bool split;               // whether that may be anything
    float* dominant;  // per query: number of the key with the largest score if it is sharp, or -1

    float* reserve(const Arguments& p, Scratch scratch) {
        tile.reserve(p, scratch);
        exact.reserve(p, scratch);
        scores = scratch.take((KEY_BLOCK + SCORE_ROWS) * QUERY_BLOCK);
        values = scratch.take(KEY_BLOCK * row_pitch(p.value_width));
        output = scratch.take(QUERY_BLOCK * row_pitch(p.value_width));
        plain = scratch.take(QUERY_BLOCK * row_pitch(p.width));
        largest = scratch.take(QUERY_BLOCK), next_largest = scratch.take(QUERY_BLOCK);
        sum = scratch.take(QUERY_BLOCK), block_sum = scratch.take(QUERY_BLOCK);
        correction = scratch.take(QUERY_BLOCK), dominant = scratch.take(QUERY_BLOCK);
        rest = scratch.take(QUERY_BLOCK), next_rest = scratch.take(QUERY_BLOCK);
        return scratch.next;
    }
};

// Keeps the scores and, per query, the largest of them.
struct KeepLargest {
    const Level& level;
    float *scores, *largest;
    INLINE_MEMBER void skip(int64_t key, int64_t column) {
        for (int r = 0; r < SCORE_ROWS; r++)
            store(scores + (key + r) * level.pitch + column, splat(-INFINITE));
    }
    template <int C>
    INLINE_MEMBER void done(Vector (&acc)[SCORE_ROWS][C], int64_t key, int64_t column) {
        hide_later(level, acc, key, column);
        for (int c = 0; c < C; c++) {
            Vector top = load(largest + column + c * WIDTH);
            for (int r = 0; r < SCORE_ROWS; r++) {
                top = larger(top, acc[r][c]);
                store(scores + (key + r) * level.pitch + column + c * WIDTH, acc[r][c]);
            }
            store(largest + column + c * WIDTH, top);
        }
    }
};

// Computes the scores again, exact and minus the largest so far, which may have changed slightly.
static void make_exact(const Arguments& p, const Sequence& s, ForwardScratch& my, int64_t count) {
    my.exact.compute(p, s, my.tile, my.plain);
    const Level& fine = my.tile.level[0];
    double top[QUERY_BLOCK];
    for (int64_t m = 0; m < count; m++) top[m] = (double)my.largest[m] + (double)my.rest[m];
    for (int64_t key = 0; key < fine.key_count; key++) {
        const double* from = my.exact.row(key);
        for (int64_t m = fine.first_seeing(key, count); m < count; m++)
            top[m] = from[m] > top[m] ? from[m] : top[m];
    }
    for (int64_t m = 0; m < count; m++) {
        const Largest next(top[m]);
        my.next_largest[m] = next.score, my.next_rest[m] = next.rest;
        my.split |= is_split(next.score);
    }
    for (int64_t key = 0; key < fine.key_count; key++)
        my.exact.less(fine, key, count, my.next_largest, my.next_rest,
                      my.scores + key * fine.pitch);
}

// `is_less`: the largest score has been subtracted already.
template <int C>
static void exponentials(const ForwardScratch& my, int64_t pitch, int64_t keys, int64_t column,
                         bool is_less) {
    Vector top[C], sum[C];
    for (int c = 0; c < C; c++) {
        const int64_t at = column + c * WIDTH;
        const Vector before = load(my.largest + at);
        const Vector now = load(my.next_largest + at);
        // The rests count where the scores are as large as each other, and their difference is exact.
        const Vector rest = load(my.next_rest + at);
        const Vector less = (before - now) + (load(my.rest + at) - rest);
        const Vector correction =
            exponential(choose((Integers)(less > splat(0.0f)), splat(0.0f), less));
        top[c] = is_less ? splat(0.0f) : now;
        sum[c] = splat(0.0f);
        store(my.correction + at, correction);
        store(my.largest + at, now);
        store(my.rest + at, rest);
    }
    for (int64_t first = 0; first < keys; first += SUM_CHUNK) {
        Vector part[C];
        for (int c = 0; c < C; c++) part[c] = splat(0.0f);
        for (int64_t key = first; key < least(first + SUM_CHUNK, keys); key++)
            for (int c = 0; c < C; c++) {
                float* at = my.scores + key * pitch + column + c * WIDTH;
                const Vector x = exponential(load(at) - top[c]);
                part[c] += x;
                store(at, x);
            }
        for (int c = 0; c < C; c++) sum[c] += part[c];
    }
    for (int c = 0; c < C; c++) {
        const int64_t at = column + c * WIDTH;
        store(my.block_sum + at, sum[c]);
        store(my.sum + at, load(my.sum + at) * load(my.correction + at) + sum[c]);
    }
}

// Whether few keys of the block have most of some query's attention.
static bool is_sharp(const float* block_sum, int64_t count) {
    for (int64_t m = 0; m < count; m++)
        if (block_sum[m] >= 1.0f && block_sum[m] < 4.0f) return true;
    return false;
}

// Notes which keys of a block have most of a query's attention. Not in exact tiles, where the
// exponentials already contain what rounding takes from the largest score.
static void note_dominant(const ForwardScratch& my, int64_t pitch, int64_t first_key, int64_t keys,
                          int64_t column, int64_t columns, bool exact) {
    for (int64_t m = column; m < column + columns; m += WIDTH) {
        const Vector sum = load(my.block_sum + m);
        Vector found = load(my.dominant + m);
        if (exact) {
            found = choose((Integers)(sum > splat(0.5f)), splat(-1.0f), found);
        } else {
            for (int64_t key = 0; key < keys; key++)
                found = choose((Integers)(load(my.scores + key * pitch + m) == splat(1.0f)),
                               splat((float)(first_key + key)), found);
        }
        store(my.dominant + m, found);
    }
}

// Adds the block's values to the output.
static void add_values(const ForwardScratch& my, Rows values, int64_t count, int64_t keys,
                       int64_t columns, int64_t output_pitch) {
    const Level& fine = my.tile.level[0];
    const int64_t chunk = is_sharp(my.block_sum, count) ? SUM_CHUNK : KEY_BLOCK;
    for (int64_t key = 0; key < keys; key += chunk) {
        const int64_t diagonal = -fine.ahead - key;
        product<true>(my.scores + key * fine.pitch, fine.pitch, count, least(chunk, keys - key),
                      values.data + key * values.pitch, values.pitch, my.output, output_pitch,
                      columns, key ? nullptr : my.correction, fine.causal ? &diagonal : nullptr);
    }
}

// The largest score is rounded to a float, which changes all other weights of its row by the same
// factor. Where one key has nearly all the attention, its score is computed again in double precision;
// sum and output are corrected, and the difference is returned.
static float correct_dominant(const Arguments& p, const Sequence& s, ForwardScratch& my, int64_t m) {
    if (p.bfloat16 || my.dominant[m] < 0.0f || !(my.sum[m] * DOMINANT < 1.0f)) return 0.0f;
    const int64_t key = (int64_t)my.dominant[m];
    double score = 0.0;
    for (int64_t l = 0; l < p.levels; l++) {
        const int64_t query = (my.tile.first_query + m) >> l;
        score += score_factor(p, s, l) *
                 dot((const float*)p.query[l].data + offset(p.query[l], s, l, query),
                     (const float*)p.key[l].data + offset(p.key[l], s, l, key >> l), p.width);
    }
    const float missing = (float)(score - (double)my.largest[m]);
    const float* value = (const float*)p.value.data + offset(p.value, s, 0, key);
    float* output = my.output + m * row_pitch(p.value_width);
    for (int64_t d = 0; d < p.value_width; d++) output[d] -= missing * (output[d] - value[d]);
    my.sum[m] -= missing * (my.sum[m] - 1.0f);
    return missing;
}

static void forward_block(const Arguments* arguments, const Sequence* sequence, int64_t block,
                          float* memory) {
    const Arguments& p = *arguments;
    const Sequence& s = *sequence;
    ForwardScratch my;
    my.reserve(p, Scratch{memory});
    const int64_t first = block * QUERY_BLOCK, count = least(QUERY_BLOCK, s.length - first);
    const int64_t value_pitch = row_pitch(p.value_width);
    Tile& tile = my.tile;
    float* plain[MAX_LEVELS];
    for (float*& each : plain) each = my.plain;  // one level after the other
    tile.set_queries(p, s, first, count, plain);
    for (int64_t m = 0; m < QUERY_BLOCK; m++)
        my.largest[m] = -INFINITE, my.sum[m] = 0.0f, my.dominant[m] = -1.0f;
    my.split = false;
    memset(my.rest, 0, QUERY_BLOCK * sizeof(float));
    memset(my.output, 0, (size_t)(QUERY_BLOCK * value_pitch) * sizeof(float));

    const int64_t end = p.causal ? first + count : s.length;
    for (int64_t key = 0; key < end; key += KEY_BLOCK) {
        const int64_t keys = least(KEY_BLOCK, end - key);
        tile.set_keys(p, s, key, keys);
        const Level& fine = tile.level[0];
        memcpy(my.next_largest, my.largest, QUERY_BLOCK * sizeof(float));
        memcpy(my.next_rest, my.rest, QUERY_BLOCK * sizeof(float));
        KeepLargest keep{fine, my.scores, my.next_largest};
        score_tiles(fine, p.width, keep);
        const bool exact = needs_exact(p, tile.score_bound(p));
        if (exact) make_exact(p, s, my, count);
        // What is larger than a score that is split, which is far below zero then, is not.
        for (int64_t m = 0; m < count && my.split && !exact; m++)
            my.next_rest[m] = my.next_largest[m] == my.largest[m] ? my.rest[m] : 0.0f;

        for (int64_t column = 0; column < fine.pitch; column += TILE * WIDTH) {
            const int64_t columns = least(TILE * WIDTH, fine.pitch - column);
            // Below the diagonal, counted in whole tiles like the scores.
            int64_t seen = p.causal ? least(keys, column + columns - fine.ahead) : keys;
            seen = most(seen, 0);
            if (columns == TILE * WIDTH) exponentials<TILE>(my, fine.pitch, seen, column, exact);
            if (columns == 2 * WIDTH) exponentials<2>(my, fine.pitch, seen, column, exact);
            if (columns == WIDTH) exponentials<1>(my, fine.pitch, seen, column, exact);
            if (exact || is_sharp(my.block_sum + column, columns))
                note_dominant(my, fine.pitch, key, seen, column, columns, exact);
        }
        const Rows values = view_rows(p, p.value, s, 0, key, keys, p.value_width, true, my.values);
        add_values(my, values, count, keys, padded(p.value_width), value_pitch);
    }
    const int64_t rows = p.batch * p.heads * p.length;
    const int64_t row = (s.batch * p.heads + s.head) * p.length + s.start[0] + first;
    for (int64_t m = 0; m < count; m++) {
        p.statistics[2 * rows + row + m] =
            is_split(my.largest[m]) ? my.rest[m] : correct_dominant(p, s, my, m);
        const float inverse = 1.0f / my.sum[m];
        write_row(p, p.output, offset(p.output, s, 0, first + m), my.output + m * value_pitch,
                  p.value_width, inverse);
        p.statistics[row + m] = my.largest[m];
        p.statistics[rows + row + m] = inverse;
    }
}
