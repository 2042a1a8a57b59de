// Which keys a query block sees, and rows of tensors as blocks of floats.
#pragma once
#include "native/simd/products.h"

// Keys that are worked on at once: their scores of one tile stay in the nearest cache.
enum { KEY_CHUNK = 128, TILE = 3 };

// What a query block sees whatever is heavy: the keys from `low` to `high`, and the sinks.
struct Interval {
    int64_t first, last;  // its own positions that are queries, from first to before last
    int64_t low, high;
    int64_t own;    // its first position, whether a query or not
    int64_t limit;  // keys that any of its rows may see

    bool has(int64_t position) const { return position >= low && position < high; }
};

static Interval interval_of(const Arguments& p, const Sequence& s, int64_t unit) {
    const int64_t own = unit * p.unit, end = least(own + p.unit, s.length);
    Interval v;
    v.own = own;
    v.first = most(own, s.first_position()), v.last = end;
    v.low = most(0, own - p.near);
    v.high = p.causal ? end : least(s.length, own + p.unit + p.near);
    v.limit = p.causal ? end : s.length;
    return v;
}

// Keys of block c that are seen anyway, of those that any row may see.
static int64_t seen_anyway(const Arguments& p, const Sequence& s, const Interval& v, int64_t c) {
    const int64_t begin = c * p.key_block, end = least(begin + p.key_block, v.limit);
    int64_t seen = most(0, least(end, v.high) - most(begin, v.low));
    for (int32_t i = s.sink_start[c]; i < s.sink_start[c + 1]; i++)
        seen += !v.has(s.sinks[i]) && s.sinks[i] < end;
    return seen;
}

// The positions of all keys that a query block sees. Those of its own come last and in order. Of the
// nodes that stand for what is not seen, block c is -1 - c.
static int64_t list_view(const Arguments& p, const Sequence& s, const Part& part, const Interval& v,
                         int32_t* positions) {
    const uint8_t* bits = choice(p, s, part.key_head, part.unit);
    const int64_t blocks = (v.limit + p.key_block - 1) / p.key_block;
    int64_t count = 0;
    for (int32_t i = s.sink_start[0]; i < s.sink_start[blocks]; i++) {
        const int32_t at = s.sinks[i];
        if (at < v.limit && !v.has(at) && !is_set(bits, at / p.key_block)) positions[count++] = at;
    }
    for (int64_t c = 0; c < blocks; c++) {
        if ((c & 7) == 0 && !bits[c >> 3] && !p.pool) {
            c += 7;
            continue;
        }
        const int64_t begin = c * p.key_block, end = least(begin + p.key_block, v.limit);
        if (is_set(bits, c)) {
            for (int64_t at = begin; at < end; at++)
                if (!v.has(at)) positions[count++] = (int32_t)at;
        } else if (p.pool && (!p.causal || begin + p.key_block <= v.own)) {
            if (seen_anyway(p, s, v, c) < end - begin) positions[count++] = (int32_t)(-1 - c);
        }
    }
    for (int64_t at = v.low; at < v.high; at++) positions[count++] = (int32_t)at;
    return count;
}

static int64_t row_at(const Tensor& t, int64_t batch, int64_t head, int64_t row) {
    return batch * t.batch + head * t.head + row * t.row;
}

typedef uint32_t __attribute__((may_alias)) Word;

static void read_row(const Arguments& p, const Tensor& t, int64_t from, int64_t width, float factor,
                     float* to) {
    if (p.bfloat16) {
        const uint16_t* x = (const uint16_t*)t.data + from;
        Word* bits = (Word*)to;  // in two loops, which compilers turn into vectors
        for (int64_t d = 0; d < width; d++) bits[d] = (uint32_t)x[d] << 16;
        for (int64_t d = 0; d < width; d++) to[d] *= factor;
    } else {
        const float* x = (const float*)t.data + from;
        for (int64_t d = 0; d < width; d++) to[d] = x[d] * factor;
    }
}

static void write_row(const Arguments& p, const Tensor& t, int64_t at, const float* x, int64_t width,
                      float factor) {
    if (p.bfloat16) {
        uint16_t* to = (uint16_t*)t.data + at;
        for (int64_t d = 0; d < width; d++) to[d] = to_bfloat16(x[d] * factor);
    } else {
        float* to = (float*)t.data + at;
        for (int64_t d = 0; d < width; d++) to[d] = x[d] * factor;
    }
}

// The unseen keys of a block that is a node: calls use(position), returns how many there are.
template <class Use>
INLINE int64_t each_unseen(const Arguments& p, const Sequence& s, const Interval& v, int64_t c,
                           Use use) {
    const int64_t begin = c * p.key_block, end = least(begin + p.key_block, s.length);
    int32_t sink = s.sink_start[c];
    int64_t count = 0;
    for (int64_t at = begin; at < end; at++) {
        const bool is_sink = sink < s.sink_start[c + 1] && s.sinks[sink] == at;
        sink += is_sink;
        if (is_sink || v.has(at)) continue;
        use(at);
        count++;
    }
    return count;
}

static int64_t unseen_of(const Arguments& p, const Sequence& s, const Interval& v, int64_t c) {
    return each_unseen(p, s, v, c, [](int64_t) {});
}

// Whether a node stands for its whole block.
static bool is_whole(const Arguments& p, const Sequence& s, const Interval& v, int64_t c) {
    return seen_anyway(p, s, v, c) == 0;
}

// The mean of a tensor's rows that a node stands for.
static void read_node(const Arguments& p, const Sequence& s, const Interval& v, const Tensor& t,
                      int64_t key_head, int64_t c, int64_t width, const float* mean, float* to) {
    if (is_whole(p, s, v, c)) {
        memcpy(to, mean, (size_t)width * sizeof(float));
        return;
    }
    for (int64_t d = 0; d < width; d++) to[d] = 0.0f;
    const int64_t count = each_unseen(p, s, v, c, [&](int64_t at) {
        const int64_t from = row_at(t, s.batch, key_head, s.key_start + at);
        for (int64_t d = 0; d < width; d++)
            to[d] += p.bfloat16 ? from_bfloat16(((const uint16_t*)t.data)[from + d])
                                : ((const float*)t.data)[from + d];
    });
    for (int64_t d = 0; d < width; d++) to[d] /= (float)count;
}

// Rows of keys or values one after the other; channels up to a whole vector, and rows up to a
// multiple of SCORE_ROWS, are zero. `mean_at`: where the tensor's channels stand in a node's mean.
static Rows gather(const Arguments& p, const Sequence& s, const Interval& v, const Tensor& t,
                   const Part& part, const Nodes& nodes, int64_t mean_at, int64_t width,
                   const int32_t* positions, int64_t count, float* scratch) {
    const int64_t pitch = row_pitch(width), whole = padded(width), bytes = p.bfloat16 ? 2 : 4;
    const int64_t base = row_at(t, s.batch, part.key_head, s.key_start);
    for (int64_t i = 0; i < count; i++) {
        if (i + ROWS_AHEAD < count && positions[i + ROWS_AHEAD] >= 0)
            fetch_row((const char*)t.data + (base + positions[i + ROWS_AHEAD] * t.row) * bytes,
                      width * bytes);
        float* to = scratch + i * pitch;
        if (positions[i] >= 0) {
            read_row(p, t, base + positions[i] * t.row, width, 1.0f, to);
        } else {
            const int64_t c = -1 - positions[i];
            const float* mean = nodes.means + c * (p.width + p.value_width) + mean_at;
            read_node(p, s, v, t, part.key_head, c, width, mean, to);
        }
        for (int64_t d = width; d < whole; d++) to[d] = 0.0f;
    }
    const int64_t filled = round_up(count, SCORE_ROWS);
    memset(scratch + count * pitch, 0, (size_t)((filled - count) * pitch) * sizeof(float));
    return {scratch, pitch};
}

// Rows of queries, one position's heads side by side: row m * heads + h.
static Rows gather_queries(const Arguments& p, const Sequence& s, const Tensor& t, const Part& part,
                           int64_t first, int64_t count, int64_t width, float factor,
                           float* scratch) {
    const int64_t pitch = row_pitch(width), whole = padded(width);
    for (int64_t m = 0; m < count; m++)
        for (int64_t h = 0; h < part.heads; h++) {
            const int64_t row = s.query_start + first + m - s.first_position();
            float* to = scratch + (m * part.heads + h) * pitch;
            read_row(p, t, row_at(t, s.batch, part.first_head + h, row), width, factor, to);
            for (int64_t d = width; d < whole; d++) to[d] = 0.0f;
        }
    return {scratch, pitch};
}
