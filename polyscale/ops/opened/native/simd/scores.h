// Tiles of scores, keys down, queries across, in units of log 2.
#pragma once
#include "view.h"

// Channels of a score that are summed one after the other; the sums are then added. In one go
// rounding errors would grow with the width of a head.
enum { SCORE_CHUNK = 16 };

constexpr double LOG2_E = 1.4426950408889634;
constexpr float LN_2 = 0.6931471805599453f;

// Scores of SCORE_ROWS keys and C vectors of queries, which `finish` gets in registers. Summed in
// chunks unless `finish` is content with less.
template <int C, class Finish>
INLINE void score_tile(Rows keys, int64_t key, int64_t last, const float* queries, int64_t pitch,
                       int64_t width, int64_t column, Finish& finish) {
    const float* rows[SCORE_ROWS];
    for (int r = 0; r < SCORE_ROWS; r++)
        rows[r] = keys.data + least(key + r, last) * keys.pitch;
    const int64_t chunk = Finish::exact ? SCORE_CHUNK : width;
    Vector sums[SCORE_ROWS][C];  // in memory: the registers are full
    for (int64_t d = 0;; d += chunk) {
        Vector acc[SCORE_ROWS][C];
        UNROLL for (int r = 0; r < SCORE_ROWS; r++)
            UNROLL for (int c = 0; c < C; c++) acc[r][c] = splat(0.0f);
        multiply<SCORE_ROWS, C, false>(acc, least(chunk, width - d), rows, 0,
                                       queries + d * pitch + column, pitch);
        if (d > 0)
            UNROLL for (int r = 0; r < SCORE_ROWS; r++)
                UNROLL for (int c = 0; c < C; c++) acc[r][c] += sums[r][c];
        if (d + chunk >= width) {
            finish.template done<C>(acc, key);
            return;
        }
        UNROLL for (int r = 0; r < SCORE_ROWS; r++) {
            rows[r] += chunk;
            UNROLL for (int c = 0; c < C; c++) sums[r][c] = acc[r][c];
        }
    }
}

// All keys up to `count` for up to TILE vectors of queries from `column` on. Rows beyond the last key
// repeat it.
template <int C, class Finish>
static void score_column(Rows keys, int64_t count, const float* queries, int64_t pitch,
                         int64_t width, int64_t column, Finish& finish) {
    for (int64_t key = 0; key < count; key += SCORE_ROWS)
        score_tile<C>(keys, key, count - 1, queries, pitch, width, column, finish);
}

// What is later than a query is minus infinity: `positions` of the queries of a column of tiles,
// `first` that of the first key if they are consecutive, else of each.
struct Later {
    const int32_t* queries;
    const int32_t* keys;  // or null
    int32_t first;
    bool may_be;  // whether any key of the chunk is later than any query

    template <int C>
    INLINE_MEMBER void hide(Vector (&acc)[SCORE_ROWS][C], int64_t key, int64_t count) const {
        if (!may_be) return;
        for (int c = 0; c < C; c++) {
            Integers query;
            memcpy(&query, queries + c * WIDTH, sizeof query);
            for (int r = 0; r < SCORE_ROWS; r++) {
                const int64_t row = least(key + r, count - 1);
                const int32_t at = keys ? keys[row] : first + (int32_t)row;
                acc[r][c] = choose((Integers)(query >= at), acc[r][c], splat(-INFINITE));
            }
        }
    }
};

// Keeps scores, TILE vectors to a row, and the largest of each query.
template <bool EXACT>
struct KeepLargest {
    static constexpr bool exact = EXACT;
    const Later& later;
    const float* bias;  // of each key, or null
    float *scores, *largest;
    int64_t count;

    template <int C>
    INLINE_MEMBER void done(Vector (&acc)[SCORE_ROWS][C], int64_t key) {
        if (bias)
            for (int r = 0; r < SCORE_ROWS; r++)
                for (int c = 0; c < C; c++) acc[r][c] += splat(bias[least(key + r, count - 1)]);
        later.hide(acc, key, count);
        UNROLL for (int c = 0; c < C; c++) {
            Vector top = load(largest + c * WIDTH);
            UNROLL for (int r = 0; r < SCORE_ROWS; r++) {
                top = larger(top, acc[r][c]);
                store(scores + ((key + r) * TILE + c) * WIDTH, acc[r][c]);
            }
            store(largest + c * WIDTH, top);
        }
    }
};

// Calls column<C>(first column) for groups of up to TILE vectors.
template <class Column>
INLINE void each_column(int64_t columns, Column column) {
    for (int64_t first = 0; first < columns; first += TILE * WIDTH) {
        const int64_t here = least(columns - first, TILE * WIDTH);
        if (here > 2 * WIDTH)
            column.template run<TILE>(first);
        else if (here > WIDTH)
            column.template run<2>(first);
        else
            column.template run<1>(first);
    }
}
