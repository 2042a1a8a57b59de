// Gradients of one query block: those of its queries, and what it adds to those of its keys and values.
#pragma once
#include "attend.h"

struct BackwardScratch {
    float *plain, *packed, *grad, *packed_grad, *keys, *values, *weights, *grad_scores;
    float *grad_queries, *log_sum, *delta, *bias, *grad_keys, *grad_values;
    int32_t *query_positions, *positions;
    int64_t* view;  // entries of it

    float* reserve(const Arguments& p, int64_t heads, int64_t room, Scratch scratch) {
        const int64_t columns = round_up(heads * p.unit, TILE * WIDTH);
        view = (int64_t*)scratch.take(2);
        plain = scratch.take(columns * row_pitch(p.width));
        packed = scratch.take(columns * p.width);
        grad = scratch.take(columns * row_pitch(p.value_width));
        packed_grad = scratch.take(columns * p.value_width);
        keys = scratch.take((KEY_CHUNK + SCORE_ROWS) * row_pitch(p.width));
        values = scratch.take((KEY_CHUNK + SCORE_ROWS) * row_pitch(p.value_width));
        weights = scratch.take((KEY_CHUNK + SCORE_ROWS) * columns);
        grad_scores = scratch.take((KEY_CHUNK + SCORE_ROWS) * columns);
        grad_queries = scratch.take(columns * row_pitch(p.width));
        log_sum = scratch.take(columns), delta = scratch.take(columns);
        bias = scratch.take(KEY_CHUNK + SCORE_ROWS);
        query_positions = (int32_t*)scratch.take(columns);
        positions = (int32_t*)scratch.take(room);
        grad_keys = scratch.take(room * row_pitch(p.width));
        grad_values = scratch.take(room * row_pitch(p.value_width));
        return scratch.next;
    }
};

// The weights of a tile of scores.
struct KeepWeights {
    static constexpr bool exact = true;
    const Later& later;
    const float *bias, *log_sum;
    float* weights;
    int64_t count, pitch;

    template <int C>
    INLINE_MEMBER void done(Vector (&acc)[SCORE_ROWS][C], int64_t key) {
        if (bias)
            for (int r = 0; r < SCORE_ROWS; r++)
                for (int c = 0; c < C; c++) acc[r][c] += splat(bias[least(key + r, count - 1)]);
        later.hide(acc, key, count);
        for (int r = 0; r < SCORE_ROWS; r++)
            for (int c = 0; c < C; c++)
                store(weights + (key + r) * pitch + c * WIDTH,
                      power_of_two(acc[r][c] - load(log_sum + c * WIDTH)));
    }
};

// The gradients of the scores from a tile of products of values and gradients.
struct KeepGradients {
    static constexpr bool exact = true;
    const float *weights, *delta;
    float* grad_scores;
    int64_t pitch;

    template <int C>
    INLINE_MEMBER void done(Vector (&acc)[SCORE_ROWS][C], int64_t key) {
        UNROLL for (int r = 0; r < SCORE_ROWS; r++)
            UNROLL for (int c = 0; c < C; c++) {
                const int64_t at = (key + r) * pitch + c * WIDTH;
                store(grad_scores + at,
                      load(weights + at) * (acc[r][c] - load(delta + c * WIDTH)));
            }
    }
};

struct BackwardColumn {
    const Arguments& p;
    BackwardScratch& my;
    Rows keys, values;
    const int32_t* positions;
    const float* bias;
    int64_t count, columns;

    template <int C>
    INLINE_MEMBER void run(int64_t column) {
        const int32_t* queries = my.query_positions + column;
        const int64_t seen = seen_by(p, positions, count, queries[C * WIDTH - 1]);
        float *weights = my.weights + column, *grad_scores = my.grad_scores + column;
        if (seen) {
            const Later later{queries, positions, 0, p.causal && positions[seen - 1] > queries[0]};
            KeepWeights keep{later, bias, my.log_sum + column, weights, seen, columns};
            score_column<C>(keys, seen, my.packed, columns, p.width, column, keep);
            KeepGradients gradients{weights, my.delta + column, grad_scores, columns};
            score_column<C>(values, seen, my.packed_grad, columns, p.value_width, column,
                            gradients);
        }
        for (int64_t key = seen; key < count; key++) {
            memset(weights + key * columns, 0, C * WIDTH * sizeof(float));
            memset(grad_scores + key * columns, 0, C * WIDTH * sizeof(float));
        }
    }
};

static void set_rows(const Arguments& p, const Sequence& s, const Part& part, const Interval& v,
                     BackwardScratch& my, int64_t real, int64_t columns) {
    const int64_t rows = v.last - v.first;
    const Rows queries = gather_queries(p, s, p.query, part, v.first, rows, p.width,
                                        (float)(p.scale * LOG2_E), my.plain);
    transpose(queries, real, p.width, columns, my.packed);
    const Rows grad = gather_queries(p, s, p.grad_output, part, v.first, rows, p.value_width, 1.0f,
                                     my.grad);
    transpose(grad, real, p.value_width, columns, my.packed_grad);
    set_positions(v, part.heads, columns, my.query_positions);
    const int64_t pitch = row_pitch(p.value_width);
    float* output = my.grad_values;  // not in use yet
    for (int64_t i = 0; i < columns; i++) my.log_sum[i] = INFINITE, my.delta[i] = 0.0f;
    for (int64_t i = 0; i < real; i++) {
        const int64_t head = part.first_head + i % part.heads;
        const int64_t row = s.query_start + v.first + i / part.heads - s.first_position();
        my.log_sum[i] =
            p.row_sum[(s.batch * p.heads + head) * p.queries + row] * (float)LOG2_E;
        read_row(p, p.output, row_at(p.output, s.batch, head, row), p.value_width, 1.0f, output);
        float sum = 0.0f;
        for (int64_t d = 0; d < p.value_width; d++) sum += output[d] * grad.data[i * pitch + d];
        my.delta[i] = sum;
    }
}

static void backward_unit(const Arguments* arguments, const Sequence* sequence, const Part* part,
                          const Nodes* nodes, float* memory) {
    const Arguments& p = *arguments;
    const Sequence& s = *sequence;
    BackwardScratch my;
    my.reserve(p, part->heads, 0, Scratch{memory});
    const Interval v = interval_of(p, s, part->unit);
    const int64_t view = list_view(p, s, *part, v, my.positions);
    my.reserve(p, part->heads, view, Scratch{memory});
    *my.view = view;
    const int64_t rows = v.last - v.first, real = rows * part->heads, columns = padded(real);
    set_rows(p, s, *part, v, my, real, columns);
    const int64_t width = row_pitch(p.width), value_width = row_pitch(p.value_width);
    memset(my.grad_queries, 0, (size_t)(real * width) * sizeof(float));
    memset(my.grad_keys, 0, (size_t)(view * width) * sizeof(float));
    memset(my.grad_values, 0, (size_t)(view * value_width) * sizeof(float));

    for (int64_t key = 0; key < view; key += KEY_CHUNK) {
        const int32_t* at = my.positions + key;
        const int64_t count = least(KEY_CHUNK, view - key);
        const Rows keys =
            gather(p, s, v, p.key, *part, *nodes, 0, p.width, at, count, my.keys);
        const Rows values = gather(p, s, v, p.value, *part, *nodes, p.width, p.value_width, at,
                                   count, my.values);
        const float* bias = p.pool ? set_bias(p, s, v, at, count, my.bias) : nullptr;
        each_column(columns, BackwardColumn{p, my, keys, values, at, bias, count, columns});
        product<false>(my.weights, columns, count, real, my.grad, value_width,
                       my.grad_values + key * value_width, value_width, padded(p.value_width),
                       nullptr, nullptr);
        product<false>(my.grad_scores, columns, count, real, my.plain, width,
                       my.grad_keys + key * width, width, padded(p.width), nullptr, nullptr);
        product<true>(my.grad_scores, columns, real, count, keys.data, keys.pitch,
                      my.grad_queries, width, padded(p.width), nullptr, nullptr);
    }
    for (int64_t i = 0; i < real; i++) {
        const int64_t head = part->first_head + i % part->heads;
        const int64_t row = s.query_start + v.first + i / part->heads - s.first_position();
        float* to = (float*)p.grad_query.data + row_at(p.grad_query, s.batch, head, row);
        for (int64_t d = 0; d < p.width; d++)
            to[d] = my.grad_queries[i * width + d] * (float)p.scale;
    }
}

static void add_row(float* to, const float* from, int64_t width, float factor) {
    for (int64_t d = 0; d < width; d++) to[d] += from[d] * factor;
}

static void add_gradients(const Arguments* arguments, const Sequence* sequence, const Part* part,
                          const Nodes* nodes, float* memory) {
    const Arguments& p = *arguments;
    const Sequence& s = *sequence;
    BackwardScratch my;
    my.reserve(p, part->heads, 0, Scratch{memory});
    const int64_t view = *my.view;
    my.reserve(p, part->heads, view, Scratch{memory});
    const Interval v = interval_of(p, s, part->unit);
    auto add = [&](int64_t at, int64_t i, float share) {
        const int64_t row = s.key_start + at;
        add_row((float*)p.grad_key.data + row_at(p.grad_key, s.batch, part->key_head, row),
                my.grad_keys + i * row_pitch(p.width), p.width, LN_2 * share);
        add_row((float*)p.grad_value.data + row_at(p.grad_value, s.batch, part->key_head, row),
                my.grad_values + i * row_pitch(p.value_width), p.value_width, share);
    };
    for (int64_t i = 0; i < view; i++) {
        const int64_t at = my.positions[i];
        if (at >= 0) {
            add(at, i, 1.0f);
            continue;
        }
        const int64_t c = -1 - at;
        if (is_whole(p, s, v, c)) {
            float* mean = nodes->grad_means + c * (p.width + p.value_width);
            add_row(mean, my.grad_keys + i * row_pitch(p.width), p.width, LN_2);
            add_row(mean + p.width, my.grad_values + i * row_pitch(p.value_width), p.value_width,
                    1.0f);
        } else {
            const float share = 1.0f / (float)unseen_of(p, s, v, c);
            each_unseen(p, s, v, c, [&](int64_t unseen) { add(unseen, i, share); });
        }
    }
}

// Mean keys and values of all key blocks, [key_blocks][width + value_width].
static void pool_blocks(const Arguments* arguments, const Sequence* sequence, int64_t key_head,
                        float* means) {
    const Arguments& p = *arguments;
    const Sequence& s = *sequence;
    const int64_t widths[] = {p.width, p.value_width};
    const Tensor tensors[] = {p.key, p.value};
    for (int64_t c = 0; c < key_blocks(p, s); c++) {
        const int64_t begin = c * p.key_block, end = least(begin + p.key_block, s.length);
        for (int k = 0; k < 2; means += widths[k++]) {
            for (int64_t d = 0; d < widths[k]; d++) means[d] = 0.0f;
            for (int64_t at = begin; at < end; at++) {
                const int64_t from = row_at(tensors[k], s.batch, key_head, s.key_start + at);
                for (int64_t d = 0; d < widths[k]; d++)
                    means[d] += p.bfloat16
                                    ? from_bfloat16(((const uint16_t*)tensors[k].data)[from + d])
                                    : ((const float*)tensors[k].data)[from + d];
            }
            for (int64_t d = 0; d < widths[k]; d++) means[d] /= (float)(end - begin);
        }
    }
}

// What the means' gradients add to those of the keys and values.
static void unpool_blocks(const Arguments* arguments, const Sequence* sequence, int64_t key_head,
                          const float* grad_means) {
    const Arguments& p = *arguments;
    const Sequence& s = *sequence;
    const int64_t widths[] = {p.width, p.value_width};
    const Tensor tensors[] = {p.grad_key, p.grad_value};
    for (int64_t c = 0; c < key_blocks(p, s); c++) {
        const int64_t begin = c * p.key_block, end = least(begin + p.key_block, s.length);
        for (int k = 0; k < 2; grad_means += widths[k++])
            for (int64_t at = begin; at < end; at++)
                add_row((float*)tensors[k].data +
                            row_at(tensors[k], s.batch, key_head, s.key_start + at),
                        grad_means, widths[k], 1.0f / (float)(end - begin));
    }
}
