// Gradients of one sequence of one head: those of the scores, tile by tile, times queries and keys.
#pragma once
#include "grad_scores.h"

// Sums of blocks of two by two. Rows of `from` beyond the last key, and columns beyond the last query
// up to a whole vector, are zero.
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

// Columns from `first` on.
static void clear_beyond(const Level& level, int64_t first, float* scores) {
    for (int64_t key = 0; key < level.key_count && first < level.pitch; key++)
        memset(scores + key * level.pitch + first, 0, (size_t)(level.pitch - first) * sizeof(float));
}

// rows[key][:] += a[key][:] . b, directly where rows are whole vectors, otherwise through `sums`.
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

static float* grad_key_row(const Arguments& p, const Sequence& s, const Partial& to, int64_t level,
                           int64_t row) {
    if (to.key[level]) return to.key[level] + row * p.width;
    return (float*)p.grad_key[level].data + offset(p.grad_key[level], s, level, row);
}

// `scratch` has room for the keys of a tile.
static float longest_key(const Arguments& p, const Sequence& s, int64_t level, int64_t count,
                         float* scratch) {
    if (!p.bfloat16)
        return longest_row(view_rows(p, p.key[level], s, level, 0, 0, p.width, false, scratch),
                           count, p.width);
    float longest = 0.0f;
    for (int64_t first = 0; first < count; first += KEY_BLOCK) {
        const int64_t keys = least(KEY_BLOCK, count - first);
        const Rows rows =
            view_rows(p, p.key[level], s, level, first, keys, p.width, false, scratch);
        const float here = longest_row(rows, keys, p.width);
        longest = here > longest ? here : longest;
    }
    return longest;
}

constexpr float VERY_LONG = 1e38f;

// The median of three keys, channel by channel: close to what all keys share, and robust to a single
// outlier. And the key that occurs most often, if any occurs twice.
static void set_shared(const Arguments& p, const Sequence& s, BackwardScratch& my) {
    for (int64_t l = 0; l < p.levels; l++) {
        const int64_t count = at_level(s.length, l);
        my.centres[l] = 1, my.longest_key[l] = 0.0f;
        for (int64_t i = 1; i <= 3; i++)
            copy_rows(p, p.key[l], s, l, i * count / 4, 1, 1, p.width, 1.0f, nullptr,
                      my.centred + (i - 1) * row_pitch(p.width));
        const float *a = my.centred, *b = a + row_pitch(p.width), *c = b + row_pitch(p.width);
        for (int64_t d = 0; d < p.width; d++) {
            const float low = a[d] < b[d] ? a[d] : b[d], high = a[d] < b[d] ? b[d] : a[d];
            my.shared[MEDIAN][l][d] = c[d] < low ? low : c[d] < high ? c[d] : high;
        }
        my.longest_key[l] = longest_key(p, s, l, count, my.centred);
        if (p.bfloat16) continue;
        const Rows keys = view_rows(p, p.key[l], s, l, 0, 0, p.width, false, my.centred);
        // Differences of keys that long may overflow.
        if (!(my.longest_key[l] < VERY_LONG)) {
            memset(my.shared[MEDIAN][l], 0, (size_t)p.width * sizeof(float));
            continue;
        }
        const int64_t common = my.equal_keys.most_common(keys, count, p.width);
        if (common < 0) continue;
        my.centres[l] = 2;
        memcpy(my.shared[COMMON][l], keys.data + common * keys.pitch,
               (size_t)p.width * sizeof(float));
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

static void backward_queries(const Arguments& p, const Sequence& s, BackwardScratch& my,
                             int64_t first, int64_t count) {
    const int64_t all = p.batch * p.heads * p.length;
    const int64_t row = (s.batch * p.heads + s.head) * p.length + s.start[0] + first;
    const int64_t width = row_pitch(p.width);
    // Columns beyond the last query may have coarse scores; less infinity, their weights are zero.
    for (int64_t m = count; m < QUERY_BLOCK; m++) my.largest[m] = INFINITE;
    memset(my.inverse, 0, QUERY_BLOCK * sizeof(float));
    memset(my.missing, 0, QUERY_BLOCK * sizeof(float));
    memcpy(my.largest, p.statistics + row, (size_t)count * sizeof(float));
    memcpy(my.inverse, p.statistics + all + row, (size_t)count * sizeof(float));
    memcpy(my.missing, p.statistics + 2 * all + row, (size_t)count * sizeof(float));
    for (int64_t m = 0; m < QUERY_BLOCK; m++)
        my.rest[m] = m < count && is_split(my.largest[m]) ? my.missing[m] : 0.0f;
    my.tile.set_queries(p, s, first, count, my.queries);
    my.exact.packed = false;
    for (int64_t l = 0; l < p.levels; l++) {
        for (int c = 0; c < my.centres[l]; c++)
            memset(my.grad_queries[c][l], 0, (size_t)(at_level(count, l) * width) * sizeof(float));
        memset(my.balance[l], 0, QUERY_BLOCK * sizeof(float));
    }
    const Rows grad = copy_rows(p, p.grad_output, s, 0, first, count, count, p.value_width, 1.0f,
                                my.inverse, my.grad_output);
    const Rows output = copy_rows(p, p.output, s, 0, first, count, count, p.value_width, 1.0f,
                                  nullptr, my.plain);
    const int64_t columns = padded(count);
    transpose(grad, count, p.value_width, columns, my.packed_grad);
    transpose(output, count, p.value_width, columns, my.packed_output);
    // Summed in the order of the products with the values: where one key has all the attention, the
    // output is its value, both products are the same number, and the gradient of its score is zero.
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

static void add_scaled(float* to, const float* from, const float* less, float factor,
                       int64_t width) {
    for (int64_t d = 0; d < width; d++) to[d] += factor * (from[d] - (less ? less[d] : 0.0f));
}

// Delta comes from a rounded output, which makes the gradients of a row of scores inexact. As their
// exact sum is zero, the error is known: this is the factor that corrects those of all but the dominant
// key, whose sum is `others`.
static double delta_correction(const Arguments& p, const Sequence& s, BackwardScratch& my, int64_t m,
                               double others) {
    if (p.bfloat16 || my.inverse[m] < DOMINANT) return 1.0;
    const Rows value = view_rows(p, p.value, s, 0, (int64_t)my.dominant[m], 1, p.value_width, false,
                                 my.values);
    const double product =
        dot(my.grad_output + m * row_pitch(p.value_width), value.data, p.value_width);
    const double sum = product - (double)my.delta[m] + others;
    const double factor = 1.0 - (1.0 - (double)my.inverse[m]) * sum / others;
    // Not where `others` is itself a small difference.
    return factor > 1.0 - 1e-5 && factor < 1.0 + 1e-5 ? factor : 1.0;
}

// Adds what the dominant keys' blocks in sharp rows, skipped before, contribute to the gradients.
static void add_dominant(const Arguments& p, const Sequence& s, BackwardScratch& my,
                         const Partial& to) {
    for (int64_t m = 0; m < my.tile.query_count; m++) {
        const int64_t key = (int64_t)my.dominant[m];
        if (key < 0) continue;
        double others[MAX_LEVELS];  // outside the block of each level
        others[p.levels - 1] = (double)my.outside[m];
        for (int64_t l = p.levels - 1; l > 0; l--)
            others[l - 1] = others[l] + (double)my.near[l][m];
        const double factor = delta_correction(p, s, my, m, others[0]);
        for (int64_t l = 0; l < p.levels; l++) {
            const Rows keys =
                view_rows(p, p.key[l], s, l, key >> l, 1, p.width, false, my.centred);
            const int64_t row = (m >> l) * row_pitch(p.width);
            const float gradient = (float)(-factor * others[l]);
            for (int c = 0; c < my.centres[l]; c++)
                add_scaled(my.grad_queries[c][l] + row, keys.data, my.shared[c][l], gradient,
                           p.width);
            add_scaled(grad_key_row(p, s, to, l, key >> l), my.queries[l] + row, nullptr, gradient,
                       p.width);
        }
    }
}

static void backward_tile(const Arguments& p, const Sequence& s, BackwardScratch& my, int64_t key,
                          int64_t keys, bool exact, bool sharp, const Partial& to) {
    const Level by_value = set_weights(p, s, my, key, keys, exact, sharp);
    for (int64_t l = 0; l < p.levels; l++)
        if (my.centres[l] > COMMON) weigh_common(my, l, p.width);
    const Level& fine = my.tile.level[0];
    const int64_t value_pitch = to.value ? p.value_width : p.grad_value.row;
    float* grad_value = to.value ? to.value + key * p.value_width
                                 : (float*)p.grad_value.data + offset(p.grad_value, s, 0, key);
    add_product(fine, my.weights, fine.query_count, my.grad_output, p.value_width, grad_value,
                value_pitch, my.sums);
    const bool pooled = !exact && !sharp && p.levels > 1;
    if (exact) {
        exact_grad_scores(p, my, by_value);
    } else {
        KeepGradScores keep{fine, my.grad_scores[0], my.delta, nullptr, 0};
        if (pooled) keep.pooled = my.grad_scores[1], keep.pooled_pitch = my.tile.level[1].pitch;
        score_tiles(by_value, p.value_width, keep);
        if (pooled) clear_beyond(my.tile.level[1], fine.pitch / 2, my.grad_scores[1]);
    }

    for (int64_t l = 0; l < p.levels; l++) {
        const Level& here = my.tile.level[l];
        float* grad_scores = my.grad_scores[l];
        if (sharp) leave_out_block(my, key, l);
        // From the finest level on, if something was skipped there.
        for (int64_t k = sharp ? 0 : l - 1; k >= (pooled ? 1 : 0) && k < l; k++) {
            const Level &from = my.tile.level[k], &next = my.tile.level[k + 1];
            pool(my.grad_scores[k], from.pitch, next.key_count, next.pitch, my.grad_scores[k + 1],
                 next.pitch);
        }
        // One more row, so that the rows form pairs.
        memset(grad_scores + here.key_count * here.pitch, 0, (size_t)here.pitch * sizeof(float));
        const int64_t key_pitch = to.key[l] ? p.width : p.grad_key[l].row;
        add_product(here, grad_scores, here.query_count, my.queries[l], p.width,
                    grad_key_row(p, s, to, l, key >> l), key_pitch, my.sums);
        const int64_t diagonal = -here.ahead;
        const int64_t width = row_pitch(p.width);
        for (int c = 0; c < my.centres[l]; c++) {
            centre(here, my.shared[c][l], p.width, my.centred);
            product<true>(grad_scores, here.pitch, here.query_count, here.key_count, my.centred,
                          width, my.grad_queries[c][l], width, padded(p.width), nullptr,
                          p.causal ? &diagonal : nullptr);
        }
    }
    if (sharp) add_outside(my);
}

static bool is_any_above(const float* numbers, int64_t count, float bound) {
    for (int64_t m = 0; m < count; m++)
        if (numbers[m] > bound) return true;
    return false;
}

static void backward_part(const Arguments* arguments, const Sequence* sequence, int64_t part,
                          int64_t parts, const Partial* to, double* grad_weights, float* memory) {
    const Arguments& p = *arguments;
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
        const bool sharp = !exact && is_any_above(my.inverse, count, my.sharp_attention);
        if (exact) set_exact_delta(p, s, my, end);
        for (int64_t m = 0; m < QUERY_BLOCK; m++) my.outside[m] = 0.0f, my.dominant[m] = -1.0f;
        for (int64_t l = 0; l <= MAX_LEVELS; l++) my.exact_products[l] = 0.0;
        for (int64_t key = 0; key < end; key += KEY_BLOCK)
            backward_tile(p, s, my, key, least(KEY_BLOCK, end - key), exact, sharp, *to);
        if (sharp) add_dominant(p, s, my, *to);
        for (int64_t l = 0; l < p.levels; l++) {
            const float factor = (float)score_factor(p, s, l);
            const bool from_scores = exact && factor != 0.0f;
            if (from_scores)
                grad_weights[l] += (my.exact_products[l] - my.exact_products[l + 1]) /
                                   (double)p.weights[s.head * p.levels + l];
            const Rows query = view_rows(p, p.query[l], s, l, first >> l, at_level(count, l),
                                         p.width, false, my.plain);
            for (int64_t m = 0; m < at_level(count, l); m++) {
                const float* grad = my.grad_queries[best_centre(my, l, m)][l] + m * width;
                // The gradient of a level's weight: the same sum, without the weight.
                if (!from_scores)
                    grad_weights[l] += dot(grad, query.data + m * query.pitch, p.width) * p.scale;
                float* row = (float*)p.grad_query[l].data +
                             offset(p.grad_query[l], s, l, (first >> l) + m);
                for (int64_t d = 0; d < p.width; d++) row[d] = grad[d] * factor;
            }
        }
    }
}
