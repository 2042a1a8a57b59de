// One block of queries against all keys that it sees, with a running softmax.
#pragma once
#include "blocks.h"

struct ForwardScratch {
    Tile tile;
    float *scores, *values, *output, *plain;
    float *largest, *block_largest, *sum, *correction;  // per query

    float* reserve(const Problem& p, Scratch scratch) {
        tile.reserve(p, scratch);
        scores = scratch.take((KEY_BLOCK + SCORE_ROWS) * QUERY_BLOCK);
        values = scratch.take(KEY_BLOCK * row_pitch(p.value_width));
        output = scratch.take(QUERY_BLOCK * row_pitch(p.value_width));
        plain = scratch.take(QUERY_BLOCK * row_pitch(p.width));
        largest = scratch.take(QUERY_BLOCK), block_largest = scratch.take(QUERY_BLOCK);
        sum = scratch.take(QUERY_BLOCK), correction = scratch.take(QUERY_BLOCK);
        return scratch.next;
    }
};

// Keeps the scores and, per query, the largest of them.
struct KeepLargest {
    const Level& level;
    float *scores, *largest;
    template <int C>
    INLINE_MEMBER void skip(int64_t, int64_t) {}
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

template <int C>
static void exponentials(const ForwardScratch& my, int64_t pitch, int64_t keys, int64_t column) {
    Vector top[C], sum[C];
    for (int c = 0; c < C; c++) {
        const int64_t at = column + c * WIDTH;
        const Vector before = load(my.largest + at);
        top[c] = larger(before, load(my.block_largest + at));
        const Vector correction = exponential(before - top[c]);
        sum[c] = splat(0.0f);
        store(my.correction + at, correction);
        store(my.largest + at, top[c]);
    }
    for (int64_t key = 0; key < keys; key++)
        for (int c = 0; c < C; c++) {
            float* at = my.scores + key * pitch + column + c * WIDTH;
            const Vector x = exponential(load(at) - top[c]);
            sum[c] += x;
            store(at, x);
        }
    for (int c = 0; c < C; c++) {
        const int64_t at = column + c * WIDTH;
        store(my.sum + at, load(my.sum + at) * load(my.correction + at) + sum[c]);
    }
}

static void forward_block(const Problem* problem, const Sequence* sequence, int64_t block,
                          float* memory) {
    const Problem& p = *problem;
    const Sequence& s = *sequence;
    ForwardScratch my;
    my.reserve(p, Scratch{memory});
    const int64_t first = block * QUERY_BLOCK, count = least(QUERY_BLOCK, s.length - first);
    const int64_t value_pitch = row_pitch(p.value_width);
    Tile& tile = my.tile;
    tile.set_queries(p, s, first, count, my.plain);
    for (int64_t m = 0; m < QUERY_BLOCK; m++) my.largest[m] = -INFINITE, my.sum[m] = 0.0f;
    memset(my.output, 0, (size_t)(QUERY_BLOCK * value_pitch) * sizeof(float));

    const int64_t end = p.causal ? first + count : s.length;
    for (int64_t key = 0; key < end; key += KEY_BLOCK) {
        const int64_t keys = least(KEY_BLOCK, end - key);
        tile.set_keys(p, s, key, keys);
        const Level& fine = tile.level[0];
        for (int64_t m = 0; m < QUERY_BLOCK; m++) my.block_largest[m] = -INFINITE;
        KeepLargest keep{fine, my.scores, my.block_largest};
        score_tiles(fine, p.width, keep);

        for (int64_t column = 0; column < fine.pitch; column += TILE * WIDTH) {
            const int64_t columns = least(TILE * WIDTH, fine.pitch - column);
            // Below the diagonal, counted in whole tiles as the scores are.
            int64_t seen = p.causal ? least(keys, column + columns - fine.ahead) : keys;
            seen = most(seen, 0);
            if (columns == TILE * WIDTH) exponentials<TILE>(my, fine.pitch, seen, column);
            if (columns == 2 * WIDTH) exponentials<2>(my, fine.pitch, seen, column);
            if (columns == WIDTH) exponentials<1>(my, fine.pitch, seen, column);
        }
        const Rows values = view_rows(p, p.value, s, 0, key, keys, p.value_width, true, my.values);
        const int64_t diagonal = -fine.ahead;
        product<true>(my.scores, fine.pitch, count, keys, values.data, values.pitch, my.output,
                      value_pitch, padded(p.value_width), my.correction,
                      p.causal ? &diagonal : nullptr);
    }
    const int64_t half = p.batch * p.heads * p.length;
    const int64_t row = (s.batch * p.heads + s.head) * p.length + s.start[0] + first;
    for (int64_t m = 0; m < count; m++) {
        const float inverse = 1.0f / my.sum[m];
        write_row(p, p.output, offset(p.output, s, 0, first + m), my.output + m * value_pitch,
                  p.value_width, inverse);
        p.statistics[row + m] = my.largest[m];
        p.statistics[half + row + m] = inverse;
    }
}
