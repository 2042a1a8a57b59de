// A few new queries of one head against one chunk of its cached keys and values. The caller merges
// the chunks.
#pragma once
#include "exact.h"

// Divisible by 2**(MAX_LEVELS - 1) and by WIDTH at every level.
enum { DECODE_CHUNK = 512 };
static_assert((DECODE_CHUNK >> (MAX_LEVELS - 1)) % WIDTH == 0, "chunks are whole at every level");

struct DecodeScratch {
    float *scores[MAX_LEVELS], *query, *keys, *values, *output;
    double *exact, *exact_coarse;

    float* reserve(const Arguments& p, Scratch scratch) {
        for (int64_t l = 0; l < p.levels; l++)
            scores[l] = scratch.take(at_level(DECODE_CHUNK, l) + WIDTH);
        query = scratch.take(padded(p.width));
        keys = scratch.take(DECODE_CHUNK * row_pitch(p.width));
        values = scratch.take(DECODE_CHUNK * row_pitch(p.value_width));
        output = scratch.take(padded(p.value_width));
        exact = (double*)scratch.take(2 * DECODE_CHUNK);
        exact_coarse = (double*)scratch.take(2 * DECODE_CHUNK);
        return scratch.next;
    }
};

// scores[n] = query . row n: a vector of rows at a time, each with its own sums, which are added
// pairwise at the end. Rows beyond the last repeat it. Returns an upper bound of the norm of the longest
// row, that of a vector of rows together, computed while they are in registers.
static float score_rows(Rows rows, int64_t count, const float* query, int64_t width,
                        float* scores) {
    Vector largest = splat(0.0f);
    for (int64_t n = 0; n < count; n += WIDTH) {
        Vector squares = splat(0.0f);
        const float* row[WIDTH];
        Vector sum[WIDTH];
        for (int r = 0; r < WIDTH; r++) {
            row[r] = rows.data + least(n + r, count - 1) * rows.pitch;
            sum[r] = splat(0.0f);
        }
        for (int64_t d = 0; d < width; d += WIDTH) {
            const Vector q = load(query + d);
#pragma GCC unroll 16
            for (int r = 0; r < WIDTH; r++) {
                const Vector key = load(row[r] + d);
                sum[r] += q * key;
                squares += key * key;
            }
        }
        largest = larger(squares, largest);
#pragma GCC unroll 4
        for (int left = WIDTH; left > 1; left /= 2)
#pragma GCC unroll 16
            for (int r = 0; r < left / 2; r++) sum[r] = add_pairs(sum[2 * r], sum[2 * r + 1]);
        store(scores + n, sum[0]);
    }
    float sum = 0.0f;
    for (int i = 0; i < WIDTH; i++) sum += largest[i];
    return __builtin_sqrtf(sum);
}

// output[:] = sum_n weights[n] row n, for C vectors of channels, in chunks: see SUM_CHUNK.
template <int C>
INLINE void weigh_columns(const float* values, int64_t pitch, int64_t count, const float* weights,
                          float* output) {
    Vector sum[C];
    for (int c = 0; c < C; c++) sum[c] = splat(0.0f);
    for (int64_t first = 0; first < count; first += SUM_CHUNK) {
        Vector part[C];
        for (int c = 0; c < C; c++) part[c] = splat(0.0f);
        for (int64_t n = first; n < least(first + SUM_CHUNK, count); n++) {
            const Vector weight = splat(weights[n]);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) part[c] += weight * load(values + n * pitch + c * WIDTH);
        }
        for (int c = 0; c < C; c++) sum[c] += part[c];
    }
    for (int c = 0; c < C; c++) store(output + c * WIDTH, sum[c]);
}

static void weigh_rows(Rows rows, int64_t count, const float* weights, int64_t width,
                       float* output) {
    int64_t d = 0;
    for (; d + 8 * WIDTH <= width; d += 8 * WIDTH)
        weigh_columns<8>(rows.data + d, rows.pitch, count, weights, output + d);
    for (; d + 4 * WIDTH <= width; d += 4 * WIDTH)
        weigh_columns<4>(rows.data + d, rows.pitch, count, weights, output + d);
    for (; d < width; d += WIDTH)
        weigh_columns<1>(rows.data + d, rows.pitch, count, weights, output + d);
}

// Computes the scores of one query again, in double precision and minus the largest, which is returned.
static Largest exact_scores(const Arguments& p, const Sequence& s, DecodeScratch& my, int64_t query,
                            int64_t first, int64_t count) {
    for (int64_t l = p.levels - 1; l >= 0; l--) {
        const int64_t rows = at_level(count, l);
        copy_rows(p, p.query[l], s, l, query, 1, 1, p.width, 1.0f, nullptr, my.query);
        const Rows keys = view_rows(p, p.key[l], s, l, first >> l, rows, p.width, true, my.keys);
        double* coarse = my.exact;
        my.exact = my.exact_coarse, my.exact_coarse = coarse;
        for (int64_t n = 0; n < rows; n++) {
            const double sum = dot(my.query, keys.data + n * keys.pitch, p.width);
            my.exact[n] = sum * score_factor(p, s, l) + (l + 1 < p.levels ? coarse[n / 2] : 0.0);
        }
    }
    double top = my.exact[0];
    for (int64_t n = 1; n < count; n++) top = my.exact[n] > top ? my.exact[n] : top;
    const Largest largest(top);
    for (int64_t n = 0; n < count; n++)
        my.scores[0][n] = less_largest(my.exact[n], largest.score, largest.rest);
    return largest;
}

// Turns scores into exp(score - top) and returns their sum.
static float exponentials_of(float* scores, int64_t count, float top) {
    const int64_t whole = padded(count);
    for (int64_t n = count; n < whole; n++) scores[n] = -INFINITE;
    Vector sums = splat(0.0f);
    for (int64_t first = 0; first < whole; first += SUM_CHUNK * WIDTH) {
        Vector part = splat(0.0f);
        for (int64_t n = first; n < least(first + SUM_CHUNK * WIDTH, whole); n += WIDTH) {
            const Vector x = exponential(load(scores + n) - splat(top));
            part += x;
            store(scores + n, x);
        }
        sums += part;
    }
    float sum = 0.0f;
    for (int i = 0; i < WIDTH; i++) sum += sums[i];
    return sum;
}

// A chunk's scores of a coarse level, with room for a vector behind them.
static float* coarse_row(const Arguments& p, const Sequence& s, int64_t level, int64_t first) {
    const Tensor& t = p.coarse_scores[level];
    return (float*)t.data + s.batch * t.batch + s.head * t.head + (first >> level);
}

// `result` [queries][3 + value_width]: largest score and its rest, see Largest, sum of exponentials,
// their sum of values.
static void decode_chunk(const Arguments* arguments, const Sequence* sequence, int64_t chunk,
                         float* result, float* memory) {
    const Arguments& p = *arguments;
    const Sequence& s = *sequence;
    DecodeScratch my;
    my.reserve(p, Scratch{memory});
    const int64_t first = chunk * DECODE_CHUNK, size = p.value_width + 3;
    const int64_t* position = p.positions + s.batch * p.queries;
    int64_t seen = 0;
    for (int64_t m = 0; m < p.queries; m++) seen = most(seen, position[m] + 1 - first);
    seen = least(seen, least(DECODE_CHUNK, p.length - first));
    Rows values = {};
    if (seen > 0)
        values = view_rows(p, p.value, s, 0, first, seen, p.value_width, true, my.values);
    for (int64_t m = 0; m < p.queries; m++) {
        float* mine = result + m * size;
        const int64_t count = least(seen, position[m] + 1 - first);
        if (count <= 0) {
            mine[0] = -INFINITE;
            for (int64_t i = 1; i < size; i++) mine[i] = 0.0f;
            continue;
        }
        float score_bound = 0.0f;
        const float* coarse = nullptr;
        if (p.first_reused < p.levels) {
            coarse = coarse_row(p, s, p.first_reused, first);
            score_bound = coarse[p.coarse_scores[p.first_reused].row];
        }
        for (int64_t l = p.first_reused - 1; l >= 0; l--) {
            const int64_t rows = at_level(count, l);
            copy_rows(p, p.query[l], s, l, m, 1, 1, p.width,
                      (float)score_factor(p, s, l), nullptr, my.query);
            const Rows keys =
                view_rows(p, p.key[l], s, l, first >> l, rows, p.width, true, my.keys);
            score_bound += longest_row({my.query, 0}, 1, p.width) *
                           score_rows(keys, rows, my.query, padded(p.width), my.scores[l]);
            float* fine = my.scores[l];
            for (int64_t n = 0; n < rows && coarse; n += WIDTH)
                store(fine + n, load(fine + n) + load_doubled(coarse + n / 2));
            coarse = fine;
            if (l == 0 || !p.coarse_scores[l].data) continue;
            float* saved = coarse_row(p, s, l, first);
            memcpy(saved, fine, (size_t)rows * sizeof(float));
            saved[p.coarse_scores[l].row] = score_bound;
        }
        mine[0] = -INFINITE;
        for (int64_t n = 0; n < count; n++)
            mine[0] = my.scores[0][n] > mine[0] ? my.scores[0][n] : mine[0];
        const bool exact = needs_exact(p, score_bound);
        mine[1] = 0.0f;
        if (exact) {
            const Largest largest = exact_scores(p, s, my, m, first, count);
            mine[0] = largest.score, mine[1] = largest.rest;
        }
        mine[2] = exponentials_of(my.scores[0], count, exact ? 0.0f : mine[0]);
        weigh_rows(values, count, my.scores[0], padded(p.value_width), my.output);
        memcpy(mine + 3, my.output, (size_t)p.value_width * sizeof(float));
    }
}
