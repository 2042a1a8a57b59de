// Scores of a tile in double precision, for queries and keys so long that sums in float would lose
// differences that matter to the softmax. They are returned minus the largest one, as small numbers.
#pragma once
#include "blocks.h"

// Floats of this size are 2**-16 apart. The bound is generous, as most scores are far smaller: below
// it, the error is less than 2e-6 of the largest output and 2e-5 of the largest gradient.
enum { LARGE_SCORE = 128 };
// Of bfloat16 inputs the answer is rounded far more than that, until floats lie 2**-7 apart.
enum { LARGE_BFLOAT16_SCORE = 1 << 16 };

// Above this size the largest score is kept as two floats: one alone would be off by so much that
// exponentials overflow or vanish.
enum { SPLIT_SCORE = 1 << 20 };

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

INLINE double dot(const float* a, const float* b, int64_t width) {
    Doubles sums = Doubles{};
    const int64_t whole = width / DOUBLES * DOUBLES;
    for (int64_t d = 0; d < whole; d += DOUBLES) sums += widen(a + d) * widen(b + d);
    double sum = 0.0;
    for (int i = 0; i < DOUBLES; i++) sum += sums[i];
    for (int64_t d = whole; d < width; d++) sum += (double)a[d] * (double)b[d];
    return sum;
}

// Also where the bound overflows, to infinity or, times a weight of zero, to NaN. With bfloat16 inputs,
// results are rounded far more.
INLINE bool needs_exact(const Arguments& p, float score_bound) {
    return !(score_bound <= (p.bfloat16 ? LARGE_BFLOAT16_SCORE : LARGE_SCORE));
}

INLINE bool is_split(float largest) { return __builtin_fabsf(largest) > SPLIT_SCORE; }

// The largest score as a float, and what that leaves of it: never more than the score together, so
// that the exponential of what is left is not zero for all keys.
struct Largest {
    float score, rest;

    explicit Largest(double top) : score((float)top), rest(0.0f) {
        if (!is_split(score) || __builtin_isinf(top)) return;
        if (__builtin_isinf(score)) score = score > 0.0f ? __FLT_MAX__ : -__FLT_MAX__;
        rest = (float)(top - (double)score);
        if ((double)score + (double)rest > top) rest = __builtin_nextafterf(rest, -INFINITE);
    }
};

// A score less the largest, which is rounded: that may be a little above zero, of scores beyond 1e14
// by more than an exponential can take.
INLINE float less_largest(double score, float largest, float rest) {
    const double less = score - ((double)largest + (double)rest);
    return less > 1.0 ? 1.0f : (float)less;
}

// Products of a tile's rows (keys or values) with its columns (queries or gradients of the output).
struct ExactProduct {
    double *columns, *results;  // [width][pitch], [rows][pitch]
    int64_t pitch;              // whole vectors of every kind of tile fit in

    void reserve(Scratch& scratch, int64_t width, int64_t level) {
        pitch = round_up(at_level(QUERY_BLOCK, level), EXACT_TILE * DOUBLES);
        columns = (double*)scratch.take(2 * width * pitch);
        results = (double*)scratch.take(2 * (at_level(KEY_BLOCK, level) + EXACT_ROWS) * pitch);
    }

    void pack(Rows from, int64_t count, int64_t width) {
        for (int64_t d = 0; d < width; d++)
            for (int64_t m = 0; m < pitch; m++)
                columns[d * pitch + m] = m < count ? (double)from.data[m * from.pitch + d] : 0.0;
    }

    // Times a factor, plus the coarse products, each of which covers two by two.
    void compute(const Level& level, int64_t width, double factor, const ExactProduct* coarse) {
        for (int64_t row = 0; row < level.key_count; row += EXACT_ROWS)
            for (int64_t column = 0; column < level.query_count; column += EXACT_TILE * DOUBLES)
                compute_tile(level, width, factor, coarse, row, column);
    }

    const double* row(int64_t number) const { return results + number * pitch; }

   private:
    INLINE_MEMBER void compute_tile(const Level& level, int64_t width, double factor,
                                    const ExactProduct* coarse, int64_t row, int64_t column) {
        if (level.causal && column + EXACT_TILE * DOUBLES <= row + level.ahead) return;
        Doubles acc[EXACT_ROWS][EXACT_TILE];
        const float* rows[EXACT_ROWS];
        for (int r = 0; r < EXACT_ROWS; r++) {
            rows[r] = level.keys.data + least(row + r, level.key_count - 1) * level.keys.pitch;
            for (int c = 0; c < EXACT_TILE; c++) acc[r][c] = Doubles{};
        }
        for (int64_t d = 0; d < width; d++) {
            const double* from = columns + d * pitch + column;
            for (int r = 0; r < EXACT_ROWS; r++)
                for (int c = 0; c < EXACT_TILE; c++)
                    acc[r][c] += load_doubles(from + c * DOUBLES) * (double)rows[r][d];
        }
        for (int r = 0; r < EXACT_ROWS; r++)
            for (int c = 0; c < EXACT_TILE; c++) {
                Doubles result = acc[r][c] * factor;
                if (coarse) {
                    const double* from = coarse->row(least(row + r, level.key_count - 1) >> 1) +
                                         (column + c * DOUBLES) / 2;
                    for (int i = 0; i < DOUBLES; i++) result[i] += from[i / 2];
                }
                memcpy(results + (row + r) * pitch + column + c * DOUBLES, &result,
                       sizeof result);
            }
    }
};

struct ExactScores {
    ExactProduct level[MAX_LEVELS];  // each with all coarser ones
    bool packed;

    void reserve(const Arguments& p, Scratch& scratch) {
        for (int64_t l = 0; l < p.levels; l++) level[l].reserve(scratch, p.width, l);
        packed = false;
    }

    // The scores of the tile's keys. `plain` is scratch for the queries of one level.
    void compute(const Arguments& p, const Sequence& s, const Tile& tile, float* plain) {
        for (int64_t l = 0; l < p.levels && !packed; l++) {
            const int64_t rows = at_level(tile.query_count, l);
            level[l].pack(copy_rows(p, p.query[l], s, l, tile.first_query >> l, rows, rows,
                                    p.width, 1.0f, nullptr, plain),
                          rows, p.width);
        }
        packed = true;
        for (int64_t l = p.levels - 1; l >= 0; l--)
            level[l].compute(tile.level[l], p.width, score_factor(p, s, l),
                             l + 1 < p.levels ? &level[l + 1] : nullptr);
    }

    // Scores of a key, for the queries that see it.
    const double* row(int64_t key) const { return level[0].row(key); }

    // Scores of a key minus each query's largest; minus infinity where the query does not see the key.
    void less(const Level& fine, int64_t key, int64_t count, const float* largest,
              const float* rest, float* to) const {
        const double* from = row(key);
        const int64_t first = fine.first_seeing(key, count);
        for (int64_t m = 0; m < first; m++) to[m] = -INFINITE;
        for (int64_t m = first; m < count; m++) to[m] = less_largest(from[m], largest[m], rest[m]);
        for (int64_t m = count; m < fine.pitch; m++) to[m] = -INFINITE;
    }
};
