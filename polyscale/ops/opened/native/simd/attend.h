// One query block over the keys of its view, with a running softmax.
#pragma once
#include "scores.h"

struct AttendScratch {
    float *plain, *packed, *keys, *values, *scores, *output;
    float *largest, *next_largest, *sum, *correction, *bias;
    int32_t *query_positions, *positions;

    float* reserve(const Arguments& p, int64_t heads, int64_t view, Scratch scratch) {
        const int64_t columns = round_up(heads * p.unit, TILE * WIDTH);
        plain = scratch.take(columns * row_pitch(p.width));
        packed = scratch.take(columns * p.width);
        keys = scratch.take((KEY_CHUNK + SCORE_ROWS) * row_pitch(p.width));
        values = scratch.take((KEY_CHUNK + SCORE_ROWS) * row_pitch(p.value_width));
        scores = scratch.take((KEY_CHUNK + SCORE_ROWS) * TILE * WIDTH);
        output = scratch.take(columns * row_pitch(p.value_width));
        largest = scratch.take(columns), next_largest = scratch.take(columns);
        sum = scratch.take(columns), correction = scratch.take(columns);
        bias = scratch.take(KEY_CHUNK + SCORE_ROWS);
        query_positions = (int32_t*)scratch.take(columns);
        positions = (int32_t*)scratch.take(view);
        return scratch.next;
    }
};

// Positions of queries, column by column; those beyond the last repeat it.
static void set_positions(const Interval& v, int64_t heads, int64_t columns, int32_t* positions) {
    const int64_t real = (v.last - v.first) * heads;
    for (int64_t i = 0; i < columns; i++)
        positions[i] = (int32_t)(v.first + least(i, real - 1) / heads);
}

// log2 of the number of keys that each entry of the view stands for; null if all are single keys.
static const float* set_bias(const Arguments& p, const Sequence& s, const Interval& v,
                             const int32_t* positions, int64_t count, float* bias) {
    bool any = false;
    for (int64_t i = 0; i < count; i++) {
        bias[i] = 0.0f;
        if (positions[i] >= 0) continue;
        bias[i] = __builtin_log2f((float)unseen_of(p, s, v, -1 - positions[i]));
        any = true;
    }
    return any ? bias : nullptr;
}

template <int C>
static void exponentials(AttendScratch& my, int64_t keys, int64_t column) {
    Vector top[C], sum[C];
    for (int c = 0; c < C; c++) {
        const int64_t at = column + c * WIDTH;
        top[c] = load(my.next_largest + at);
        const Vector correction = power_of_two(load(my.largest + at) - top[c]);
        store(my.correction + at, correction);
        store(my.largest + at, top[c]);
        sum[c] = splat(0.0f);
    }
    for (int64_t key = 0; key < keys; key++)
        UNROLL for (int c = 0; c < C; c++) {
            float* at = my.scores + (key * TILE + c) * WIDTH;
            const Vector x = power_of_two(load(at) - top[c]);
            sum[c] += x;
            store(at, x);
        }
    for (int c = 0; c < C; c++) {
        const int64_t at = column + c * WIDTH;
        store(my.sum + at, load(my.sum + at) * load(my.correction + at) + sum[c]);
    }
}

// Keys of a chunk that the last query of a column of tiles sees: its own block's keys come last.
static int64_t seen_by(const Arguments& p, const int32_t* positions, int64_t count, int32_t last) {
    if (p.causal)
        while (count > 0 && positions[count - 1] > last) count--;
    return count;
}

struct AttendColumn {
    const Arguments& p;
    AttendScratch& my;
    Rows keys, values;
    const int32_t* positions;
    const float* bias;
    int64_t count, columns, real;

    template <int C>
    INLINE_MEMBER void run(int64_t column) {
        const int32_t* queries = my.query_positions + column;
        const int64_t seen = seen_by(p, positions, count, queries[C * WIDTH - 1]);
        if (!seen) return;
        const Later later{queries, positions, 0, p.causal && positions[seen - 1] > queries[0]};
        KeepLargest<true> keep{later, bias, my.scores, my.next_largest + column, seen};
        score_column<C>(keys, seen, my.packed, columns, p.width, column, keep);
        exponentials<C>(my, seen, column);
        const int64_t pitch = row_pitch(p.value_width), rows = least(C * WIDTH, real - column);
        product<true>(my.scores, TILE * WIDTH, rows, seen, values.data, values.pitch,
                      my.output + column * pitch, pitch, padded(p.value_width),
                      my.correction + column, nullptr);
    }
};

static void attend_unit(const Arguments* arguments, const Sequence* sequence, const Part* part,
                        const Nodes* nodes, float* memory) {
    const Arguments& p = *arguments;
    const Sequence& s = *sequence;
    AttendScratch my;
    my.reserve(p, part->heads, 0, Scratch{memory});
    const Interval v = interval_of(p, s, part->unit);
    const int64_t rows = v.last - v.first, real = rows * part->heads, columns = padded(real);
    const Rows queries = gather_queries(p, s, p.query, *part, v.first, rows, p.width,
                                        (float)(p.scale * LOG2_E), my.plain);
    transpose(queries, real, p.width, columns, my.packed);
    set_positions(v, part->heads, columns, my.query_positions);
    for (int64_t i = 0; i < columns; i++) my.largest[i] = -INFINITE, my.sum[i] = 0.0f;
    const int64_t pitch = row_pitch(p.value_width);
    memset(my.output, 0, (size_t)(real * pitch) * sizeof(float));

    const int64_t view = list_view(p, s, *part, v, my.positions);
    for (int64_t key = 0; key < view; key += KEY_CHUNK) {
        const int32_t* at = my.positions + key;
        const int64_t count = least(KEY_CHUNK, view - key);
        const Rows keys =
            gather(p, s, v, p.key, *part, *nodes, 0, p.width, at, count, my.keys);
        const Rows values = gather(p, s, v, p.value, *part, *nodes, p.width, p.value_width, at,
                                   count, my.values);
        const float* bias = p.pool ? set_bias(p, s, v, at, count, my.bias) : nullptr;
        memcpy(my.next_largest, my.largest, (size_t)columns * sizeof(float));
        each_column(columns,
                    AttendColumn{p, my, keys, values, at, bias, count, columns, real});
    }
    for (int64_t m = 0; m < rows; m++)
        for (int64_t h = 0; h < part->heads; h++) {
            const int64_t i = m * part->heads + h, head = part->first_head + h;
            const int64_t row = s.query_start + v.first + m - s.first_position();
            write_row(p, p.output, row_at(p.output, s.batch, head, row), my.output + i * pitch,
                      p.value_width, 1.0f / my.sum[i]);
            p.row_sum[(s.batch * p.heads + head) * p.queries + row] =
                my.largest[i] * LN_2 + __builtin_logf(my.sum[i]);
        }
}
