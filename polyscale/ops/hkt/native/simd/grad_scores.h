// The gradients of a tile's scores. Scores are recomputed tile by tile, in the order of the forward pass,
// so that they are the same numbers.
//
// With e = exp(score - largest) and i = 1 / sum of e, attention is e * i. The factor i goes into
// the gradient of the output (g = i * grad_output), so that
//     grad_value = e^T g,    grad_score = e * (g value^T - delta),    delta = g . output.
// The gradients of a row of scores sum to zero, so the gradient of its query stays the same when one
// vector is subtracted from all keys. Subtracting what the keys have in common avoids rounding errors.
// Where keys are equal, subtracting their common value is tried as well: the gradients of their scores
// may nearly cancel, and they then multiply zeros, which leaves no error. Where the key with the largest
// score (the first of them), or its block at some level, has most of the attention, the gradient of its
// score is a small difference of large numbers and is set to what makes the sum zero. That is done in
// all rows where such a block may have half of the attention: below half, the sum of the others is no
// better than the difference, and a block without that key cannot have nearly all the attention.
#pragma once
#include "exact.h"

// Which keys of a sequence occur more than once, bit for bit.
struct EqualKeys {
    int32_t *first, *times;  // [room], by hash: a key, or -1, and how many are equal to it
    int64_t room;

    void reserve(const Arguments& p, Scratch& scratch) {
        for (room = 16; room < 2 * p.length;) room *= 2;
        first = (int32_t*)scratch.take(room);
        times = (int32_t*)scratch.take(room);
    }

    // The key that occurs most often, or -1 if none occurs twice. Keys that differ in few channels may
    // be missed, as a long search is abandoned.
    int64_t most_common(Rows keys, int64_t count, int64_t width) {
        enum { LONG = 16 };
        int64_t slots = 16, found = -1, most_times = 1;
        while (slots < 2 * count) slots *= 2;
        memset(first, -1, (size_t)slots * sizeof(int32_t));
        for (int64_t n = 0; n < count; n++) {
            const float* key = keys.data + n * keys.pitch;
            int64_t at = hash(key, width) & (slots - 1);
            for (int tries = 0; tries < LONG; tries++, at = (at + 1) & (slots - 1)) {
                if (first[at] < 0) {
                    first[at] = (int32_t)n, times[at] = 1;
                    break;
                }
                const float* other = keys.data + first[at] * keys.pitch;
                if (memcmp(key, other, (size_t)width * sizeof(float))) continue;
                if (++times[at] > most_times) most_times = times[at], found = first[at];
                break;
            }
        }
        return found;
    }

   private:
    static int64_t hash(const float* key, int64_t width) {
        uint64_t mixed = 0;
        for (int64_t i = 0; i < 4; i++) {
            uint32_t bits;
            memcpy(&bits, key + i * (width - 1) / 3, 4);
            mixed = (mixed ^ bits) * 0x9E3779B97F4A7C15u;
        }
        return (int64_t)(mixed >> 33);
    }
};

// What is subtracted from keys: the median of some, and the most common key if some are equal.
enum { MEDIAN = 0, COMMON = 1, MAX_CENTRES = 2 };

struct BackwardScratch {
    Tile tile;
    ExactScores exact;
    ExactProduct exact_by_value;
    // [keys][queries]. Gradients overwrite what they are computed from, so that they stay in the cache:
    // the weights at level 0, the coarse scores above it.
    float* grad_scores[MAX_LEVELS];
    float* weights;
    float* queries[MAX_LEVELS];                     // [queries][width] with scale and level weight
    // [queries][width] without; from keys minus each of the vectors in `shared`.
    float* grad_queries[MAX_CENTRES][MAX_LEVELS];
    float *grad_output, *packed_grad, *packed_output, *values, *plain, *sums;
    float* shared[MAX_CENTRES][MAX_LEVELS];         // of the sequence's keys, [width]
    int centres[MAX_LEVELS];                        // how many of them there are
    float* balance[MAX_LEVELS];                     // per query, see weigh_common
    float* centred;                                 // keys of a tile minus what they share
    float *largest, *inverse, *missing, *delta;     // per query
    float* rest;                                    // per query, see Largest
    float sharp_attention;
    float* dominant;                                // per query: number of a key, or -1
    // Per query: sums of gradients of scores, inside the dominant key's block of a level but outside its
    // block of the level below, and outside all of them.
    float *near[MAX_LEVELS], *outside;
    double *exact_sum, *exact_delta, *exact_row;    // per query
    double exact_products[MAX_LEVELS + 1];          // of gradients and scores from a level up
    float longest_key[MAX_LEVELS];
    EqualKeys equal_keys;

    float* reserve(const Arguments& p, Scratch scratch) {
        sharp_attention = ::sharp_attention(p);
        tile.reserve(p, scratch);
        exact.reserve(p, scratch);
        exact_by_value.reserve(scratch, p.value_width, 0);
        const int64_t width = row_pitch(p.width), value_width = row_pitch(p.value_width);
        weights = scratch.take((KEY_BLOCK + SCORE_ROWS) * QUERY_BLOCK);
        for (int64_t l = 0; l < p.levels; l++) {
            grad_scores[l] = l ? tile.coarse[l] : weights;
            queries[l] = scratch.take(at_level(QUERY_BLOCK, l) * width);
            for (int c = 0; c < MAX_CENTRES; c++) {
                grad_queries[c][l] = scratch.take(at_level(QUERY_BLOCK, l) * width);
                shared[c][l] = scratch.take(width);
            }
            balance[l] = scratch.take(QUERY_BLOCK);
            near[l] = scratch.take(QUERY_BLOCK);
        }
        centred = scratch.take(KEY_BLOCK * width);
        grad_output = scratch.take(QUERY_BLOCK * value_width);
        packed_grad = scratch.take(QUERY_BLOCK * value_width);
        packed_output = scratch.take(QUERY_BLOCK * value_width);
        values = scratch.take(KEY_BLOCK * value_width);
        plain = scratch.take(QUERY_BLOCK * most(width, value_width));
        sums = scratch.take(KEY_BLOCK * most(width, value_width));
        largest = scratch.take(QUERY_BLOCK), inverse = scratch.take(QUERY_BLOCK);
        missing = scratch.take(QUERY_BLOCK), delta = scratch.take(QUERY_BLOCK);
        rest = scratch.take(QUERY_BLOCK);
        dominant = scratch.take(QUERY_BLOCK), outside = scratch.take(QUERY_BLOCK);
        exact_sum = (double*)scratch.take(2 * QUERY_BLOCK);
        exact_delta = (double*)scratch.take(2 * QUERY_BLOCK);
        exact_row = (double*)scratch.take(2 * QUERY_BLOCK);
        equal_keys.reserve(p, scratch);
        return scratch.next;
    }
};

struct KeepExponentials {
    const Level& level;
    float* weights;
    const float* largest;
    INLINE_MEMBER void skip(int64_t key, int64_t column) {
        for (int r = 0; r < SCORE_ROWS; r++)
            store(weights + (key + r) * level.pitch + column, splat(0.0f));
    }
    template <int C>
    INLINE_MEMBER void done(Vector (&acc)[SCORE_ROWS][C], int64_t key, int64_t column) {
        hide_later(level, acc, key, column);
        float* to = weights + key * level.pitch + column;
        UNROLL for (int r = 0; r < SCORE_ROWS; r++)
            UNROLL for (int c = 0; c < C; c++) store(to + r * level.pitch + c * WIDTH, acc[r][c]);
        Vector top[C];
        for (int c = 0; c < C; c++) top[c] = load(largest + column + c * WIDTH);
// Unrolled, the exponentials would run out of registers.
#pragma GCC unroll 1
        for (int r = 0; r < SCORE_ROWS; r++, to += level.pitch)
            for (int c = 0; c < C; c++)
                store(to + c * WIDTH, exponential(load(to + c * WIDTH) - top[c]));
    }
};

// Gradients, which overwrite the weights; and on request their sums of two by two, which are the
// gradients of the next level.
struct KeepGradScores {
    const Level& level;
    float* scores;
    const float* delta;
    float* pooled;
    int64_t pooled_pitch;
    INLINE_MEMBER void skip(int64_t key, int64_t column) {
        for (int r = 0; r < SCORE_ROWS; r++)
            store(scores + (key + r) * level.pitch + column, splat(0.0f));
        for (int r = 0; r < SCORE_ROWS / 2 && pooled; r++)
            store_half(pooled + (key / 2 + r) * pooled_pitch + column / 2, splat(0.0f));
    }
    template <int C>
    INLINE_MEMBER void done(Vector (&acc)[SCORE_ROWS][C], int64_t key, int64_t column) {
        UNROLL for (int c = 0; c < C; c++) {
            const Vector less = load(delta + column + c * WIDTH);
            UNROLL for (int r = 0; r < SCORE_ROWS; r++) {
                float* at = scores + (key + r) * level.pitch + column + c * WIDTH;
                acc[r][c] = load(at) * (acc[r][c] - less);
                store(at, acc[r][c]);
            }
        }
        if (!pooled) return;
        UNROLL for (int r = 0; r < SCORE_ROWS; r += 2) {
            float* to = pooled + (key + r) / 2 * pooled_pitch + column / 2;
            // Rows beyond the last key repeat it.
            const bool whole = key + r + 1 < level.key_count;
            Vector sum[C];
            UNROLL for (int c = 0; c < C; c++) sum[c] = whole ? acc[r][c] + acc[r + 1][c] : acc[r][c];
            UNROLL for (int c = 0; c + 1 < C; c += 2)
                store(to + c * (WIDTH / 2), add_pairs(sum[c], sum[c + 1]));
            if (C % 2) store_half(to + (C - 1) * (WIDTH / 2), add_pairs(sum[C - 1], sum[C - 1]));
        }
    }
};

// In sharp rows: notes which key is dominant, and corrects the weights of all others for what rounding
// took from the largest score.
static void correct_others(BackwardScratch& my, int64_t first_key) {
    const Level& fine = my.tile.level[0];
    for (int64_t m = 0; m < fine.pitch; m += WIDTH) {
        const Integers sharp = (Integers)(load(my.inverse + m) > splat(my.sharp_attention));
        const Vector missing = load(my.missing + m);
        Vector found = load(my.dominant + m);
        for (int64_t key = 0; key < fine.key_count; key++) {
            float* at = my.weights + key * fine.pitch + m;
            const Vector weight = load(at);
            const Integers here = sharp & (Integers)(weight == splat(1.0f)) &
                                  (Integers)(found < splat(0.0f));
            found = choose(here, splat((float)(first_key + key)), found);
            store(at, choose(here, weight, weight - missing * weight));
        }
        store(my.dominant + m, found);
    }
}

static void exact_weights(const Arguments& p, const Sequence& s, BackwardScratch& my) {
    const Level& fine = my.tile.level[0];
    my.exact.compute(p, s, my.tile, my.plain);
    for (int64_t key = 0; key < fine.key_count; key++) {
        float* row = my.weights + key * fine.pitch;
        my.exact.less(fine, key, fine.query_count, my.largest, my.rest, row);
        for (int64_t m = 0; m < fine.pitch; m += WIDTH) store(row + m, exponential(load(row + m)));
    }
}

// Computes the weights of a tile; returns the product of values and the gradient of the output.
static Level set_weights(const Arguments& p, const Sequence& s, BackwardScratch& my, int64_t key,
                         int64_t keys, bool exact, bool sharp) {
    my.tile.set_keys(p, s, key, keys);
    const Level& fine = my.tile.level[0];
    if (exact) {
        exact_weights(p, s, my);
    } else {
        KeepExponentials keep{fine, my.weights, my.largest};
        score_tiles(fine, p.width, keep);
        if (sharp) correct_others(my, key);
    }
    Level by_value = fine;
    by_value.keys = view_rows(p, p.value, s, 0, key, keys, p.value_width, false, my.values);
    by_value.queries = my.packed_grad;
    by_value.coarse = nullptr;
    return by_value;
}

// Where one key has nearly all the attention, the gradient of its score is a small difference. It is
// preserved by a delta that is the mean of the very numbers from which it is then subtracted.
static void set_exact_delta(const Arguments& p, const Sequence& s, BackwardScratch& my,
                            int64_t end) {
    const int64_t count = my.tile.query_count;
    my.exact_by_value.pack({my.grad_output, row_pitch(p.value_width)}, count, p.value_width);
    for (int64_t m = 0; m < count; m++) my.exact_sum[m] = 0.0, my.exact_delta[m] = 0.0;
    for (int64_t first = 0; first < end; first += KEY_BLOCK) {
        const int64_t keys = least(KEY_BLOCK, end - first);
        const Level by_value = set_weights(p, s, my, first, keys, true, false);
        my.exact_by_value.compute(by_value, p.value_width, 1.0, nullptr);
        for (int64_t key = 0; key < by_value.key_count; key++) {
            const double* from = my.exact_by_value.row(key);
            const float* weights = my.weights + key * by_value.pitch;
            for (int64_t m = by_value.first_seeing(key, count); m < count; m++) {
                my.exact_sum[m] += (double)weights[m];
                my.exact_delta[m] += (double)weights[m] * from[m];
            }
        }
    }
    for (int64_t m = 0; m < count; m++) my.exact_delta[m] /= my.exact_sum[m];
}

static void exact_grad_scores(const Arguments& p, BackwardScratch& my, const Level& by_value) {
    const int64_t count = by_value.query_count;
    my.exact_by_value.compute(by_value, p.value_width, 1.0, nullptr);
    for (int64_t key = 0; key < by_value.key_count; key++) {
        const double* from = my.exact_by_value.row(key);
        float* row = my.weights + key * by_value.pitch;
        const int64_t first = by_value.first_seeing(key, count);
        for (int64_t m = first; m < count; m++) {
            my.exact_row[m] = (double)row[m] * (from[m] - my.exact_delta[m]);
            row[m] = (float)my.exact_row[m];
        }
        for (int64_t m = 0; m < first; m++) row[m] = 0.0f;
        for (int64_t m = count; m < by_value.pitch; m++) row[m] = 0.0f;
        // Scores of a row may be large and differ little: in float, their products with gradients
        // that sum to zero would lose all digits.
        for (int64_t l = 0; l < p.levels; l++) {
            const double* scores = my.exact.level[l].row(key >> l);
            double sum = 0.0;
            for (int64_t m = first; m < count; m++) sum += my.exact_row[m] * scores[m >> l];
            my.exact_products[l] += sum;
        }
    }
}

// In sharp rows of a tile: skips the dominant key's block of a level, and notes what it contained.
static void leave_out_block(BackwardScratch& my, int64_t first_key, int64_t level) {
    const Level& fine = my.tile.level[0];
    for (int64_t m = 0; m < fine.query_count; m++) {
        const int64_t key = (int64_t)my.dominant[m];
        if (key < first_key || key >= first_key + fine.key_count) continue;
        const int64_t first = (key >> level << level) - first_key;
        const int64_t end = least(first + ((int64_t)1 << level), fine.key_count);
        float sum = 0.0f;
        for (int64_t n = first; n < end; n++) {
            float* at = my.grad_scores[0] + n * fine.pitch + m;
            sum += *at, *at = 0.0f;
        }
        my.near[level][m] = sum;
    }
}

// Per query, the attention of all other keys minus that of the most common key and its equals: negative
// where the gradients of these may cancel.
static void weigh_common(BackwardScratch& my, int64_t level, int64_t width) {
    const Level &fine = my.tile.level[0], &here = my.tile.level[level];
    for (int64_t n = 0; n < here.key_count; n++) {
        const float* row = here.keys.data + n * here.keys.pitch;
        const bool common = !memcmp(row, my.shared[COMMON][level], (size_t)width * sizeof(float));
        const float sign = common ? -1.0f : 1.0f;
        const int64_t end = least((n + 1) << level, fine.key_count);
        for (int64_t key = n << level; key < end; key++)
            for (int64_t m = 0; m < fine.query_count; m++)
                my.balance[level][m] += sign * my.weights[key * fine.pitch + m];
    }
}

// Which of a query's gradients, computed with different centres, to use.
static int best_centre(const BackwardScratch& my, int64_t level, int64_t query) {
    float sum = 0.0f;
    for (int64_t m = query << level; m < least((query + 1) << level, my.tile.query_count); m++)
        sum += my.balance[level][m] * my.inverse[m];
    return sum < 0.0f ? COMMON : MEDIAN;
}

// Adds the rest of the tile.
static void add_outside(BackwardScratch& my) {
    const Level& fine = my.tile.level[0];
    for (int64_t m = 0; m < fine.pitch; m += WIDTH) {
        Vector total = load(my.outside + m);
        for (int64_t first = 0; first < fine.key_count; first += SUM_CHUNK) {
            Vector part = splat(0.0f);
            const int64_t end = least(first + SUM_CHUNK, fine.key_count);
            for (int64_t key = first; key < end; key++)
                part += load(my.grad_scores[0] + key * fine.pitch + m);
            total += part;
        }
        store(my.outside + m, total);
    }
}
