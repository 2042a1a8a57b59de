// Blocks of rows in scratch memory and the merged scores of one tile.
#pragma once
#include "native/simd/products.h"

// Divisible by 2**(MAX_LEVELS - 1), so that a block of queries or keys is whole at every level, and
// QUERY_BLOCK by the columns of a score tile. Where the cache has room, also at the coarse levels, and
// KEY_BLOCK by PRODUCT_ROWS, as partial tiles are slow. Processors with AVX-512 have at least 1 MiB of
// cache for each core.
enum { TILE = 3 };
#if defined(__AVX512F__)
enum { QUERY_BLOCK = 192, KEY_BLOCK = 240 };
#else
enum { QUERY_BLOCK = 96, KEY_BLOCK = 128 };
#endif
static_assert(QUERY_BLOCK % (1 << (MAX_LEVELS - 1)) == 0, "blocks of queries are whole");
static_assert(KEY_BLOCK % (1 << (MAX_LEVELS - 1)) == 0, "blocks of keys are whole");

// Channels of a score that are summed at a time, before the sums are added. In a single sum, rounding
// errors would grow with the width of a head.
enum { SCORE_CHUNK = 16 };

// Keys whose weights, and weighted values, are summed at a time where one key may have nearly all the
// attention: added to it one by one, the others would be rounded away.
enum { SUM_CHUNK = 16 };

// A key with more than DOMINANT of the attention leaves less than a 16th to all others together, so
// that none of them has a score as large, with rounding errors as large.
constexpr float DOMINANT = 16.0f / 17.0f;

// Above this attention of a key, a block of the coarsest level may have half of the attention.
INLINE float sharp_attention(const Arguments& p) {
    return 0.5f / (float)((int64_t)1 << (p.levels - 1));
}

// The factor of a level's dot products.
INLINE double score_factor(const Arguments& p, const Sequence& s, int64_t level) {
    return p.scale * (double)p.weights[s.head * p.levels + level];
}

// Rows as floats, times a factor per row if there is one; rows up to `filled` and channels up to a
// whole vector are zero.
static Rows copy_rows(const Arguments& p, const Tensor& t, const Sequence& s, int64_t level,
                      int64_t first, int64_t count, int64_t filled, int64_t width, float factor,
                      const float* row_factor, float* scratch) {
    const int64_t pitch = row_pitch(width), whole = padded(width), bytes = p.bfloat16 ? 2 : 4;
    for (int64_t i = 0; i < count; i++) {
        const int64_t from = offset(t, s, level, first + i);
        if (i + ROWS_AHEAD < count)
            fetch_row((const char*)t.data + (from + ROWS_AHEAD * t.row) * bytes, width * bytes);
        const float f = row_factor ? factor * row_factor[i] : factor;
        float* to = scratch + i * pitch;
        if (p.bfloat16) {
            const uint16_t* x = (const uint16_t*)t.data + from;
            for (int64_t d = 0; d < width; d++) to[d] = from_bfloat16(x[d]) * f;
        } else {
            const float* x = (const float*)t.data + from;
            for (int64_t d = 0; d < width; d++) to[d] = x[d] * f;
        }
        for (int64_t d = width; d < whole; d++) to[d] = 0.0f;
    }
    memset(scratch + count * pitch, 0, (size_t)((filled - count) * pitch) * sizeof(float));
    return {scratch, pitch};
}

// Rows in place, if they can be read as whole vectors of floats there, otherwise copied. Rows with a
// large stride would evict each other from the cache when they are read repeatedly.
static Rows view_rows(const Arguments& p, const Tensor& t, const Sequence& s, int64_t level,
                      int64_t first, int64_t count, int64_t width, bool whole, float* scratch) {
    if (!p.bfloat16 && (!whole || (width % WIDTH == 0 && t.row == width)))
        return {(const float*)t.data + offset(t, s, level, first), t.row};
    return copy_rows(p, t, s, level, first, count, count, width, 1.0f, nullptr, scratch);
}

static void write_row(const Arguments& p, const Tensor& t, int64_t to, const float* x, int64_t width,
                      float factor) {
    if (p.bfloat16) {
        uint16_t* y = (uint16_t*)t.data + to;
        for (int64_t d = 0; d < width; d++) y[d] = to_bfloat16(x[d] * factor);
    } else {
        float* y = (float*)t.data + to;
        for (int64_t d = 0; d < width; d++) y[d] = x[d] * factor;
    }
}

// The scores of one level, with a row per key and a column per query, plus those of the next coarser
// level, each of which covers two by two. They pass through `finish` while they are in registers, which
// is also told of vectors that are skipped because all their queries precede all their keys.
struct Level {
    Rows keys;
    int64_t key_count;           // rows; those beyond it in the last group repeat the last
    const float* queries;        // [width][pitch], with scale and level weight
    int64_t pitch, query_count;  // of queries and of the scores
    const float* coarse;         // [key_count / 2][coarse_pitch], or null
    int64_t coarse_pitch;
    bool causal;
    int64_t ahead;  // number of the first key minus that of the first query, at this level

    bool is_hidden(int64_t key, int64_t query) const { return causal && query < key + ahead; }

    // The first of `count` queries that sees a key.
    int64_t first_seeing(int64_t key, int64_t count) const {
        return causal ? least(count, most(0, key + ahead)) : 0;
    }
};

template <int C>
INLINE void add_coarse(const Level& level, Vector (&acc)[SCORE_ROWS][C], int64_t key,
                       int64_t column) {
    if (!level.coarse) return;
    // Added last: a sum that starts at a large number rounds every product to its size. Two keys share
    // a coarse one, also where rows beyond the last key repeat it.
    UNROLL for (int r = 0; r < SCORE_ROWS; r += 2) {
        const int64_t row = least(key + r, level.key_count - 1) >> 1;
        const float* from = level.coarse + row * level.coarse_pitch + column / 2;
        UNROLL for (int c = 0; c < C; c++) {
            const Vector shared = load_doubled(from + c * (WIDTH / 2));
            acc[r][c] += shared;
            acc[r + 1][c] += shared;
        }
    }
}

template <int C, class Finish>
INLINE void score_tile(const Level& level, int64_t width, int64_t key, int64_t column,
                       Finish& finish) {
    const float* rows[SCORE_ROWS];
    for (int r = 0; r < SCORE_ROWS; r++)
        rows[r] = level.keys.data + least(key + r, level.key_count - 1) * level.keys.pitch;
    Vector sums[SCORE_ROWS][C];  // in memory: the registers are full
    for (int64_t d = 0;; d += SCORE_CHUNK) {
        Vector acc[SCORE_ROWS][C];
        UNROLL for (int r = 0; r < SCORE_ROWS; r++)
            UNROLL for (int c = 0; c < C; c++) acc[r][c] = splat(0.0f);
        multiply<SCORE_ROWS, C, false>(acc, least(SCORE_CHUNK, width - d), rows, 0,
                                       level.queries + d * level.pitch + column, level.pitch);
        if (d > 0)
            UNROLL for (int r = 0; r < SCORE_ROWS; r++)
                UNROLL for (int c = 0; c < C; c++) acc[r][c] += sums[r][c];
        if (d + SCORE_CHUNK >= width) {
            add_coarse<C>(level, acc, key, column);
            finish.template done<C>(acc, key, column);
            return;
        }
        UNROLL for (int r = 0; r < SCORE_ROWS; r++) {
            rows[r] += SCORE_CHUNK;
            UNROLL for (int c = 0; c < C; c++) sums[r][c] = acc[r][c];
        }
    }
}

// Some columns for all keys, then the next columns, so that the queries stay in the nearest cache.
template <class Finish>
static void score_tiles(const Level& level, int64_t width, Finish& finish) {
    const int64_t columns = padded(level.query_count);
    for (int64_t first = 0; first < columns; first += TILE * WIDTH) {
        const int64_t end = least(columns, first + TILE * WIDTH);
        for (int64_t key = 0; key < level.key_count; key += SCORE_ROWS) {
            int64_t column = first;
            for (; column < end && level.is_hidden(key, column + WIDTH - 1); column += WIDTH)
                finish.skip(key, column);
            if (end - column == TILE * WIDTH) score_tile<TILE>(level, width, key, column, finish);
            if (end - column == 2 * WIDTH) score_tile<2>(level, width, key, column, finish);
            if (end - column == WIDTH) score_tile<1>(level, width, key, column, finish);
        }
    }
}

// Minus infinity where the key is later than the query.
template <int C>
INLINE void hide_later(const Level& level, Vector (&acc)[SCORE_ROWS][C], int64_t key,
                       int64_t column) {
    if (!level.causal || column >= key + SCORE_ROWS - 1 + level.ahead) return;
    const Integers lane = lane_numbers();
    for (int r = 0; r < SCORE_ROWS; r++)
        for (int c = 0; c < C; c++) {
            // Rows beyond the last key repeat it, so they are visible to the same queries.
            const int32_t row = (int32_t)least(key + r, level.key_count - 1);
            const int32_t first = row + (int32_t)level.ahead - (int32_t)(column + c * WIDTH);
            acc[r][c] = choose((Integers)(lane >= first), acc[r][c], splat(-INFINITE));
        }
}

struct Keep {
    float* scores;
    int64_t pitch;
    INLINE_MEMBER void skip(int64_t, int64_t) {}
    template <int C>
    INLINE_MEMBER void done(Vector (&acc)[SCORE_ROWS][C], int64_t key, int64_t column) {
        UNROLL for (int r = 0; r < SCORE_ROWS; r++)
            UNROLL for (int c = 0; c < C; c++)
                store(scores + (key + r) * pitch + column + c * WIDTH, acc[r][c]);
    }
};

// At least the norm of the longest row: lane by lane the largest sum of squares of any row.
static float longest_row(Rows rows, int64_t count, int64_t width) {
    Vector largest = splat(0.0f);
    float largest_rest = 0.0f;
    const int64_t whole = width / WIDTH * WIDTH;
    for (int64_t n = 0; n < count; n++) {
        const float* row = rows.data + n * rows.pitch;
        Vector squares = splat(0.0f);
        for (int64_t d = 0; d < whole; d += WIDTH) squares += load(row + d) * load(row + d);
        largest = larger(squares, largest);
        float rest = 0.0f;
        for (int64_t d = whole; d < width; d++) rest += row[d] * row[d];
        largest_rest = rest > largest_rest ? rest : largest_rest;
    }
    float sum = largest_rest;
    for (int i = 0; i < WIDTH; i++) sum += largest[i];
    return __builtin_sqrtf(sum);
}

// What a tile of queries and keys needs at every level.
struct Tile {
    int64_t first_query, query_count;
    float longest_query[MAX_LEVELS];  // with scale and level weight
    Level level[MAX_LEVELS];
    float* packed[MAX_LEVELS];       // queries of each level, transposed
    float* coarse[MAX_LEVELS];       // scores of levels 1 and up
    float* key_scratch[MAX_LEVELS];  // for keys that cannot be read in place

    static int64_t pitch(int64_t level) { return padded(at_level(QUERY_BLOCK, level)); }

    void reserve(const Arguments& p, Scratch& scratch) {
        for (int64_t l = 0; l < p.levels; l++) {
            packed[l] = scratch.take(p.width * pitch(l));
            // Row groups at the end may reach beyond the keys.
            const int64_t rows = at_level(KEY_BLOCK, l) + SCORE_ROWS;
            coarse[l] = l ? scratch.take(rows * pitch(l)) : nullptr;
            key_scratch[l] = scratch.take(at_level(KEY_BLOCK, l) * row_pitch(p.width));
        }
    }

    // `plain`, per level: where to put the queries before they are transposed.
    void set_queries(const Arguments& p, const Sequence& s, int64_t first, int64_t count,
                     float* const* plain) {
        first_query = first, query_count = count;
        for (int64_t l = 0; l < p.levels; l++) {
            const int64_t rows = at_level(count, l);
            const Rows q = copy_rows(p, p.query[l], s, l, first >> l, rows, rows, p.width,
                                     (float)score_factor(p, s, l), nullptr, plain[l]);
            transpose(q, rows, p.width, padded(rows), packed[l]);
            longest_query[l] = longest_row(q, rows, p.width);
        }
    }

    // Scores the coarse levels, each with all coarser ones; level 0 is left to the caller.
    void set_keys(const Arguments& p, const Sequence& s, int64_t first, int64_t count) {
        for (int64_t l = p.levels - 1; l >= 0; l--) {
            Level& here = level[l];
            here.key_count = at_level(count, l);
            here.keys = view_rows(p, p.key[l], s, l, first >> l, here.key_count, p.width, false,
                                  key_scratch[l]);
            here.query_count = at_level(query_count, l);
            here.queries = packed[l];
            here.pitch = padded(here.query_count);
            here.coarse = l + 1 < p.levels ? coarse[l + 1] : nullptr;
            here.coarse_pitch = l + 1 < p.levels ? level[l + 1].pitch : 0;
            here.causal = p.causal;
            here.ahead = (first >> l) - (first_query >> l);
            if (l > 0) {
                Keep keep{coarse[l], here.pitch};
                score_tiles(here, p.width, keep);
            }
        }
    }

    // An upper bound of the tile's scores and of their partial sums.
    float score_bound(const Arguments& p) const {
        float bound = 0.0f;
        for (int64_t l = 0; l < p.levels; l++)
            bound += longest_query[l] * longest_row(level[l].keys, level[l].key_count, p.width);
        return bound;
    }
};
