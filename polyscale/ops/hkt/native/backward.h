// Gradients of one sequence of one head. Scores are computed again, tile by tile, in the same order
// as in the forward pass, so that they are the same numbers.
//
// With e = exp(score - largest) and i = 1 / sum of e, attention is e * i. The factor i goes into
// the gradient of the output (g = i * grad_output), so that
//     grad_value = e^T g,    grad_score = e * (g value^T - delta),    delta = g . output.
// The gradients of a row of scores sum to zero, so its query's gradient may take the keys less
// one and the same vector: what all keys share would only leave rounding errors.
#pragma once
#include "exact.h"

struct BackwardScratch {
    Tile tile;
    ExactScores exact;
    ExactProduct exact_by_value;
    float *weights, *grad_scores[MAX_LEVELS];       // [keys][queries]
    float* queries[MAX_LEVELS];                     // [queries][width] with scale and level weight
    float* grad_queries[MAX_LEVELS];                // [queries][width] without
    float *grad_output, *packed_grad, *packed_output, *values, *plain, *sums;
    float* shared[MAX_LEVELS];                      // by the sequence's keys, [width]
    float* centred;                                 // keys of a tile less what they share
    float *largest, *inverse, *delta;               // per query
    double *exact_sum, *exact_delta;                // per query
    float longest_key[MAX_LEVELS];

    float* reserve(const Problem& p, Scratch scratch) {
        tile.reserve(p, scratch);
        exact.reserve(p, scratch);
        exact_by_value.reserve(scratch, p.value_width, 0);
        const int64_t width = row_pitch(p.width), value_width = row_pitch(p.value_width);
        weights = scratch.take((KEY_BLOCK + SCORE_ROWS) * QUERY_BLOCK);
        for (int64_t l = 0; l < p.levels; l++) {
            const int64_t rows = at_level(KEY_BLOCK, l) + SCORE_ROWS;
            grad_scores[l] = scratch.take(rows * (Tile::pitch(l) + 2 * WIDTH));
            queries[l] = scratch.take(at_level(QUERY_BLOCK, l) * width);
            grad_queries[l] = scratch.take(at_level(QUERY_BLOCK, l) * width);
            shared[l] = scratch.take(width);
        }
        centred = scratch.take(KEY_BLOCK * width);
        grad_output = scratch.take(QUERY_BLOCK * value_width);
        packed_grad = scratch.take(QUERY_BLOCK * value_width);
        packed_output = scratch.take(QUERY_BLOCK * value_width);
        values = scratch.take(KEY_BLOCK * value_width);
        plain = scratch.take(QUERY_BLOCK * most(width, value_width));
        sums = scratch.take(KEY_BLOCK * most(width, value_width));
        largest = scratch.take(QUERY_BLOCK), inverse = scratch.take(QUERY_BLOCK);
        delta = scratch.take(QUERY_BLOCK);
        exact_sum = (double*)scratch.take(2 * QUERY_BLOCK);
        exact_delta = (double*)scratch.take(2 * QUERY_BLOCK);
        return scratch.next;
    }
};

struct KeepExponentials {
    const Level& level;
    float* weights;
    const float* largest;
    template <int C>
    INLINE_MEMBER void skip(int64_t key, int64_t column) {
        for (int r = 0; r < SCORE_ROWS; r++)
            for (int c = 0; c < C; c++)
                store(weights + (key + r) * level.pitch + column + c * WIDTH, splat(0.0f));
    }
    template <int C>
    INLINE_MEMBER void done(Vector (&acc)[SCORE_ROWS][C], int64_t key, int64_t column) {
        hide_later(level, acc, key, column);
        for (int c = 0; c < C; c++) {
            const Vector top = load(largest + column + c * WIDTH);
            for (int r = 0; r < SCORE_ROWS; r++)
                store(weights + (key + r) * level.pitch + column + c * WIDTH,
                      exponential(acc[r][c] - top));
        }
    }
};

struct KeepGradScores {
    const Level& level;
    const float *weights, *delta;
    float* grad_scores;
    template <int C>
    INLINE_MEMBER void skip(int64_t key, int64_t column) {
        for (int r = 0; r < SCORE_ROWS; r++)
            for (int c = 0; c < C; c++)
                store(grad_scores + (key + r) * level.pitch + column + c * WIDTH, splat(0.0f));
    }
    template <int C>
    INLINE_MEMBER void done(Vector (&acc)[SCORE_ROWS][C], int64_t key, int64_t column) {
        for (int c = 0; c < C; c++) {
            const Vector less = load(delta + column + c * WIDTH);
            for (int r = 0; r < SCORE_ROWS; r++) {
                const int64_t at = (key + r) * level.pitch + column + c * WIDTH;
                store(grad_scores + at, load(weights + at) * (acc[r][c] - less));
            }
        }
    }
};

// Sums over two by two. Rows of `from` beyond the last key, and columns beyond the last query up
// to a whole vector, are zero.
static void pool(const float* from, int64_t pitch, int64_t rows, int64_t columns, float* to,
                 int64_t to_pitch) {
    for (int64_t r = 0; r < rows; r++) {
        const float *upper = from + 2 * r * pitch, *lower = upper + pitch;
        for (int64_t c = 0; c < columns; c += WIDTH) {
            const Vector left = load(upper + 2 * c) + load(lower + 2 * c);
            Vector right = splat(0.0f);
            if (2 * c + WIDTH < pitch)
                right = load(upper + 2 * c + WIDTH) + load(lower + 2 * c + WIDTH);
            store(to + r * to_pitch + c, add_pairs(left, right));
        }
    }
}

// rows[key][:] += a[key][:] . b, into memory of whole vectors, or by way of `sums`.
static void add_product(const Level& level, const float* a, int64_t query_count, const float* b,
                        int64_t width, float* to, int64_t to_pitch, float* sums) {
    const int64_t pitch = row_pitch(width), columns = padded(width);
    const int64_t* diagonal = level.causal ? &level.ahead : nullptr;
    if (width == columns) {
        product<false>(a, level.pitch, level.key_count, query_count, b, pitch, to, to_pitch,
                       columns, nullptr, diagonal);
        return;
    }
    memset(sums, 0, (size_t)(level.key_count * pitch) * sizeof(float));
    product<false>(a, level.pitch, level.key_count, query_count, b, pitch, sums, pitch, columns,
                   nullptr, diagonal);
    for (int64_t r = 0; r < level.key_count; r++)
        for (int64_t d = 0; d < width; d++) to[r * to_pitch + d] += sums[r * pitch + d];
}

// The median of three keys, channel by channel: near what all keys share, and no single key can
// pull it away.
static void set_shared(const Problem& p, const Sequence& s, BackwardScratch& my) {
    for (int64_t l = 0; l < p.levels; l++) {
        const int64_t count = at_level(s.length, l);
        for (int64_t i = 1; i <= 3; i++)
            copy_rows(p, p.key[l], s, l, i * count / 4, 1, 1, p.width, 1.0f, nullptr,
                      my.centred + (i - 1) * row_pitch(p.width));
        const float *a = my.centred, *b = a + row_pitch(p.width), *c = b + row_pitch(p.width);
        for (int64_t d = 0; d < p.width; d++) {
            const float low = a[d] < b[d] ? a[d] : b[d], high = a[d] < b[d] ? b[d] : a[d];
            my.shared[l][d] = c[d] < low ? low : c[d] < high ? c[d] : high;
        }
        const Rows keys = view_rows(p, p.key[l], s, l, 0, 0, p.width, false, my.centred);
        my.longest_key[l] = p.bfloat16 ? 0.0f : longest_row(keys, count, p.width);
    }
}

static void centre(const Level& level, const float* shared, int64_t width, float* to) {
    const int64_t pitch = row_pitch(width), whole = padded(width);
    for (int64_t n = 0; n < level.key_count; n++) {
        const float* from = level.keys.data + n * level.keys.pitch;
        for (int64_t d = 0; d < width; d++) to[n * pitch + d] = from[d] - shared[d];
        for (int64_t d = width; d < whole; d++) to[n * pitch + d] = 0.0f;
    }
}

static void backward_queries(const Problem& p, const Sequence& s, BackwardScratch& my,
                             int64_t first, int64_t count) {
    const int64_t half = p.batch * p.heads * p.length;
    const int64_t row = (s.batch * p.heads + s.head) * p.length + s.start[0] + first;
    const int64_t width = row_pitch(p.width);
    // Columns beyond the last query may have coarse scores: against infinity they are nothing.
    for (int64_t m = count; m < QUERY_BLOCK; m++) my.largest[m] = INFINITE;
    memset(my.inverse, 0, QUERY_BLOCK * sizeof(float));
    memcpy(my.largest, p.statistics + row, (size_t)count * sizeof(float));
    memcpy(my.inverse, p.statistics + half + row, (size_t)count * sizeof(float));
    my.tile.set_queries(p, s, first, count, my.plain);
    my.exact.packed = false;
    for (int64_t l = 0; l < p.levels; l++) {
        const int64_t rows = at_level(count, l);
        copy_rows(p, p.query[l], s, l, first >> l, rows, rows, p.width,
                  (float)score_factor(p, s, l), nullptr, my.queries[l]);
        memset(my.grad_queries[l], 0, (size_t)(rows * width) * sizeof(float));
    }
    const Rows grad = copy_rows(p, p.grad_output, s, 0, first, count, count, p.value_width, 1.0f,
                                my.inverse, my.grad_output);
    const Rows output = copy_rows(p, p.output, s, 0, first, count, count, p.value_width, 1.0f,
                                  nullptr, my.plain);
    const int64_t columns = padded(count);
    transpose(grad, count, p.value_width, columns, my.packed_grad);
    transpose(output, count, p.value_width, columns, my.packed_output);
    // In the order of the products with the values: where one key has all the attention, the
    // output is its value, the two are the same number, and the gradient of its score is zero.
    for (int64_t m = 0; m < columns; m += WIDTH) {
        Vector sum = splat(0.0f);
        for (int64_t chunk = 0; chunk < p.value_width; chunk += SCORE_CHUNK) {
            Vector part = splat(0.0f);
            for (int64_t d = chunk; d < least(chunk + SCORE_CHUNK, p.value_width); d++)
                part = load(my.packed_output + d * columns + m) *
                           load(my.packed_grad + d * columns + m) + part;
            sum += part;
        }
        store(my.delta + m, sum);
    }
}

static void exact_weights(const Problem& p, const Sequence& s, BackwardScratch& my) {
    const Level& fine = my.tile.level[0];
    my.exact.compute(p, s, my.tile, my.plain);
    for (int64_t key = 0; key < fine.key_count; key++) {
        float* row = my.weights + key * fine.pitch;
        my.exact.less(fine, key, fine.query_count, my.largest, row);
        for (int64_t m = 0; m < fine.pitch; m += WIDTH) store(row + m, exponential(load(row + m)));
    }
}

// The weights of a tile; returns what makes the products of values and the gradient of the output.
static Level set_weights(const Problem& p, const Sequence& s, BackwardScratch& my, int64_t key,
                         int64_t keys) {
    my.tile.set_keys(p, s, key, keys);
    const Level& fine = my.tile.level[0];
    if (needs_exact(p, my.tile.score_bound)) {
        exact_weights(p, s, my);
    } else {
        KeepExponentials keep{fine, my.weights, my.largest};
        score_tiles(fine, p.width, keep);
    }
    Level by_value = fine;
    by_value.keys = view_rows(p, p.value, s, 0, key, keys, p.value_width, false, my.values);
    by_value.queries = my.packed_grad;
    by_value.coarse = nullptr;
    return by_value;
}

// Where one key has nearly all the attention, the gradient of its score is a small difference. It is
// kept by a delta that is the mean of the very numbers it is then taken from.
static void set_exact_delta(const Problem& p, const Sequence& s, BackwardScratch& my,
                            int64_t end) {
    const int64_t count = my.tile.query_count;
    my.exact_by_value.pack({my.grad_output, row_pitch(p.value_width)}, count, p.value_width);
    for (int64_t m = 0; m < count; m++) my.exact_sum[m] = 0.0, my.exact_delta[m] = 0.0;
    for (int64_t first = 0; first < end; first += KEY_BLOCK) {
        const Level by_value = set_weights(p, s, my, first, least(KEY_BLOCK, end - first));
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

static void exact_grad_scores(const Problem& p, BackwardScratch& my, const Level& by_value) {
    my.exact_by_value.compute(by_value, p.value_width, 1.0, nullptr);
    for (int64_t key = 0; key < by_value.key_count; key++) {
        const double* from = my.exact_by_value.row(key);
        const float* weights = my.weights + key * by_value.pitch;
        float* to = my.grad_scores[0] + key * by_value.pitch;
        memset(to, 0, (size_t)by_value.pitch * sizeof(float));
        for (int64_t m = by_value.first_seeing(key, by_value.query_count); m < by_value.query_count;
             m++)
            to[m] = (float)((double)weights[m] * (from[m] - my.exact_delta[m]));
    }
}

static void backward_tile(const Problem& p, const Sequence& s, BackwardScratch& my, int64_t key,
                          int64_t keys, bool exact, const Partial& to) {
    const Level by_value = set_weights(p, s, my, key, keys);
    const Level& fine = my.tile.level[0];
    if (exact) {
        exact_grad_scores(p, my, by_value);
    } else {
        KeepGradScores keep{fine, my.weights, my.delta, my.grad_scores[0]};
        score_tiles(by_value, p.value_width, keep);
    }

    const int64_t value_pitch = to.value ? p.value_width : p.grad_value.row;
    float* grad_value = to.value ? to.value + key * p.value_width
                                 : (float*)p.grad_value.data + offset(p.grad_value, s, 0, key);
    add_product(fine, my.weights, fine.query_count, my.grad_output, p.value_width, grad_value,
                value_pitch, my.sums);

    for (int64_t l = 0; l < p.levels; l++) {
        const Level& here = my.tile.level[l];
        float* grad_scores = my.grad_scores[l];
        // One more row, so that pairs are whole.
        memset(grad_scores + here.key_count * here.pitch, 0, (size_t)here.pitch * sizeof(float));
        const int64_t key_pitch = to.key[l] ? p.width : p.grad_key[l].row;
        float* grad_key = to.key[l]
                              ? to.key[l] + (key >> l) * p.width
                              : (float*)p.grad_key[l].data + offset(p.grad_key[l], s, l, key >> l);
        add_product(here, grad_scores, here.query_count, my.queries[l], p.width, grad_key,
                    key_pitch, my.sums);
        const int64_t diagonal = -here.ahead;
        const int64_t width = row_pitch(p.width);
        centre(here, my.shared[l], p.width, my.centred);
        product<true>(grad_scores, here.pitch, here.query_count, here.key_count, my.centred, width,
                      my.grad_queries[l], width, padded(p.width), nullptr,
                      p.causal ? &diagonal : nullptr);
        if (l + 1 < p.levels) {
            const Level& next = my.tile.level[l + 1];
            pool(grad_scores, here.pitch, next.key_count, next.pitch, my.grad_scores[l + 1],
                 next.pitch);
        }
    }
}

static void backward_part(const Problem* problem, const Sequence* sequence, int64_t part,
                          int64_t parts, const Partial* to, double* grad_weights, float* memory) {
    const Problem& p = *problem;
    const Sequence& s = *sequence;
    BackwardScratch my;
    my.reserve(p, Scratch{memory});
    if (s.length) set_shared(p, s, my);
    const int64_t width = row_pitch(p.width), blocks = (s.length + QUERY_BLOCK - 1) / QUERY_BLOCK;
    for (int64_t block = part; block < blocks; block += parts) {
        const int64_t first = block * QUERY_BLOCK, count = least(QUERY_BLOCK, s.length - first);
        backward_queries(p, s, my, first, count);
        const int64_t end = p.causal ? first + count : s.length;
        float score_bound = 0.0f;
        for (int64_t l = 0; l < p.levels; l++)
            score_bound += my.tile.longest_query[l] * my.longest_key[l];
        const bool exact = needs_exact(p, score_bound);
        if (exact) set_exact_delta(p, s, my, end);
        for (int64_t key = 0; key < end; key += KEY_BLOCK)
            backward_tile(p, s, my, key, least(KEY_BLOCK, end - key), exact, *to);
        for (int64_t l = 0; l < p.levels; l++) {
            const float factor = (float)score_factor(p, s, l);
            const Rows query = view_rows(p, p.query[l], s, l, first >> l, at_level(count, l),
                                         p.width, false, my.plain);
            for (int64_t m = 0; m < at_level(count, l); m++) {
                const float* grad = my.grad_queries[l] + m * width;
                // The weight of a level times its scores: the same sum, without the weight.
                grad_weights[l] += dot(grad, query.data + m * query.pitch, p.width) * p.scale;
                float* row = (float*)p.grad_query[l].data +
                             offset(p.grad_query[l], s, l, (first >> l) + m);
                for (int64_t d = 0; d < p.width; d++) row[d] = grad[d] * factor;
            }
        }
    }
}
