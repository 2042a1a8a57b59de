// Scores of a tile in double precision, where queries and keys are so long that sums in float would
// round away what the softmax sees. They leave here less the largest one, as small numbers.
#pragma once
#include "blocks.h"

// Floats of this size lie 2**-15 apart. The bound is a generous one, and the scores of keys that
// share a query's attention are smaller still: below it, outputs err by less than 2e-6.
enum { LARGE_SCORE = 256 };

enum { DOUBLES = WIDTH / 2, EXACT_ROWS = 4, EXACT_TILE = 4 };
typedef double Doubles __attribute__((vector_size(DOUBLES * 8)));
typedef float HalfVector __attribute__((vector_size(DOUBLES * 4)));

INLINE Doubles load_doubles(const double* from) {
    Doubles x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE Doubles widen(const float* from) {
    HalfVector x;
    memcpy(&x, from, sizeof x);
    return __builtin_convertvector(x, Doubles);
}

// Of bfloat16 inputs the answer is rounded far more than that.
INLINE bool needs_exact(const Problem& p, float score_bound) {
    return !p.bfloat16 && score_bound > LARGE_SCORE;
}

struct ExactScores {
    double* queries[MAX_LEVELS];  // [width][pitch], as they were given
    double* scores[MAX_LEVELS];   // [keys][pitch], of this level and all coarser ones
    bool packed;

    // Whole vectors of every kind of tile fit in.
    static int64_t pitch(int64_t level) {
        return round_up(at_level(QUERY_BLOCK, level), EXACT_TILE * DOUBLES);
    }

    void reserve(const Problem& p, Scratch& scratch) {
        for (int64_t l = 0; l < p.levels; l++) {
            queries[l] = (double*)scratch.take(2 * p.width * pitch(l));
            scores[l] =
                (double*)scratch.take(2 * (at_level(KEY_BLOCK, l) + EXACT_ROWS) * pitch(l));
        }
        packed = false;
    }

    // The scores of the tile's keys. `plain` is scratch for the queries of one level.
    void compute(const Problem& p, const Sequence& s, const Tile& tile, float* plain) {
        if (!packed) pack(p, s, tile, plain);
        packed = true;
        for (int64_t l = p.levels - 1; l >= 0; l--) {
            const Level& level = tile.level[l];
            const int64_t columns = round_up(level.query_count, EXACT_TILE * DOUBLES);
            for (int64_t key = 0; key < level.key_count; key += EXACT_ROWS)
                for (int64_t column = 0; column < columns; column += EXACT_TILE * DOUBLES)
                    tile_scores(p, level, l, score_factor(p, s, l), key, column);
        }
    }

    // Scores of a key, for the queries that see it.
    const double* row(int64_t key) const { return scores[0] + key * pitch(0); }

    // Scores of a key less each query's largest; minus infinity where the key is not seen.
    void less(const Level& fine, int64_t key, int64_t count, const float* largest,
              float* to) const {
        const double* from = row(key);
        const int64_t first = fine.first_seeing(key, count);
        for (int64_t m = 0; m < first; m++) to[m] = -INFINITE;
        for (int64_t m = first; m < count; m++) to[m] = (float)(from[m] - (double)largest[m]);
        for (int64_t m = count; m < fine.pitch; m++) to[m] = -INFINITE;
    }

   private:
    void pack(const Problem& p, const Sequence& s, const Tile& tile, float* plain) {
        for (int64_t l = 0; l < p.levels; l++) {
            const int64_t rows = at_level(tile.query_count, l);
            const Rows q = copy_rows(p, p.query[l], s, l, tile.first_query >> l, rows, rows,
                                     p.width, 1.0f, nullptr, plain);
            for (int64_t d = 0; d < p.width; d++)
                for (int64_t m = 0; m < pitch(l); m++)
                    queries[l][d * pitch(l) + m] =
                        m < rows ? (double)q.data[m * q.pitch + d] : 0.0;
        }
    }

    INLINE_MEMBER void tile_scores(const Problem& p, const Level& level, int64_t l, double factor,
                                   int64_t key, int64_t column) {
        if (level.causal && column + EXACT_TILE * DOUBLES <= key + level.ahead) return;
        Doubles acc[EXACT_ROWS][EXACT_TILE];
        const float* rows[EXACT_ROWS];
        for (int r = 0; r < EXACT_ROWS; r++) {
            rows[r] = level.keys.data + least(key + r, level.key_count - 1) * level.keys.pitch;
            for (int c = 0; c < EXACT_TILE; c++) acc[r][c] = Doubles{};
        }
        for (int64_t d = 0; d < p.width; d++) {
            const double* q = queries[l] + d * pitch(l) + column;
            for (int r = 0; r < EXACT_ROWS; r++)
                for (int c = 0; c < EXACT_TILE; c++)
                    acc[r][c] += load_doubles(q + c * DOUBLES) * (double)rows[r][d];
        }
        for (int r = 0; r < EXACT_ROWS; r++)
            for (int c = 0; c < EXACT_TILE; c++) {
                Doubles score = acc[r][c] * factor;
                if (l + 1 < p.levels) {
                    const int64_t row = least(key + r, level.key_count - 1) >> 1;
                    const double* coarse =
                        scores[l + 1] + row * pitch(l + 1) + (column + c * DOUBLES) / 2;
                    for (int i = 0; i < DOUBLES; i++) score[i] += coarse[i / 2];
                }
                memcpy(scores[l] + (key + r) * pitch(l) + column + c * DOUBLES, &score,
                       sizeof score);
            }
    }
};
