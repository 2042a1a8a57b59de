// Which key blocks are heavy: sampled rows against all keys they see, summed block by block.
#pragma once
#include "scores.h"

// Sampled rows of neighbouring query blocks are scored together, a row's heads side by side.
struct Sampled {
    int64_t heads;    // that share the key head
    int64_t columns;  // of all rows, whole vectors
    int32_t* rows;    // position of each, in order
    int64_t count;
};

struct ChooseScratch {
    float *plain, *packed, *keys, *scores, *block_sums, *partial_sums, *chunk_largest, *factors;
    float *largest, *sum, *kept, *mass, *added, *wanted, *row;
    int32_t *rows, *positions, *partial;
    uint8_t* state;  // of each key block: seen in full, in part
    uint64_t* order;

    float* reserve(const Arguments& p, int64_t longest, int64_t sinks, Scratch scratch);
};

// Keys to a chunk: whole key blocks.
INLINE int64_t choose_chunk(const Arguments& p) {
    return p.key_block * most(1, KEY_CHUNK / p.key_block);
}

// Enough query blocks for a full tile, and in strict mode so many that what the first ones share
// with the units before is little.
static int64_t choose_units(const Arguments* p) {
    const int64_t columns = most(1, p->unit / p->sample) * (p->heads / p->key_heads);
    return (TILE * WIDTH + columns - 1) / columns + (p->strict ? 3 * (p->choosing - 1) : 0);
}

INLINE int64_t most_columns(const Arguments& p) {
    const int64_t units = choose_units(&p) + p.choosing - 1;
    const int64_t rows = units * most(1, p.unit / p.sample) + 1;
    return padded(rows * (p.heads / p.key_heads));
}

inline float* ChooseScratch::reserve(const Arguments& p, int64_t longest, int64_t sinks,
                                     Scratch scratch) {
    const int64_t columns = most_columns(p), blocks = (longest + p.key_block - 1) / p.key_block;
    const int64_t chunk = choose_chunk(p), chunks = (longest + chunk - 1) / chunk;
    plain = scratch.take(columns * row_pitch(p.width));
    packed = scratch.take(columns * p.width);
    keys = scratch.take((chunk + SCORE_ROWS) * row_pitch(p.width));
    scores = scratch.take((chunk + SCORE_ROWS) * TILE * WIDTH);
    block_sums = scratch.take(blocks * columns);
    // At most the blocks at either end of an interval and those of the sinks are seen in part.
    partial_sums = scratch.take(least(blocks, sinks + 2) * columns);
    chunk_largest = scratch.take(chunks * columns);
    factors = scratch.take(columns);
    largest = scratch.take(columns), sum = scratch.take(columns), kept = scratch.take(columns);
    wanted = scratch.take(columns), row = scratch.take(padded(p.width));
    mass = scratch.take(blocks), added = scratch.take(blocks);
    rows = (int32_t*)scratch.take(columns), positions = (int32_t*)scratch.take(columns);
    partial = (int32_t*)scratch.take(blocks);
    state = (uint8_t*)scratch.take(blocks);
    order = (uint64_t*)scratch.take(2 * blocks);
    return scratch.next;
}

// Positions of the sampled rows from `begin` to before `end`.
static int64_t list_sampled(const Arguments& p, const Sequence& s, int64_t begin, int64_t end,
                            int32_t* rows) {
    int64_t count = 0;
    begin = most(begin, s.first_position()), end = least(end, s.length);
    if (p.strict) {
        for (int64_t at = begin; at < end; at++)
            if (at % p.sample == 0 || at == s.first_position()) rows[count++] = (int32_t)at;
    } else {
        for (int64_t at = begin; at < end; at++)
            if ((at + 1) % p.sample == 0 || at == s.length - 1) rows[count++] = (int32_t)at;
    }
    return count;
}

// Sums of exponentials, less the largest score so far, over each key block of a chunk.
template <int C>
static void sum_blocks(const Arguments& p, ChooseScratch& my, int64_t keys, int64_t columns,
                       int64_t column, float* to) {
    Vector top[C], all[C];
    for (int c = 0; c < C; c++) {
        top[c] = load(my.largest + column + c * WIDTH);
        all[c] = splat(0.0f);
    }
    for (int64_t first = 0; first < keys; first += p.key_block) {
        Vector sum[C];
        for (int c = 0; c < C; c++) sum[c] = splat(0.0f);
        for (int64_t key = first; key < least(first + p.key_block, keys); key++)
            UNROLL for (int c = 0; c < C; c++)
                sum[c] += power_of_two(load(my.scores + (key * TILE + c) * WIDTH) - top[c]);
        for (int c = 0; c < C; c++) {
            store(to + first / p.key_block * columns + column + c * WIDTH, sum[c]);
            all[c] += sum[c];
        }
    }
    for (int c = 0; c < C; c++) store(my.sum + column + c * WIDTH, all[c]);
}

struct ChooseColumn {
    const Arguments& p;
    ChooseScratch& my;
    Rows keys;
    int64_t first, count, columns;

    template <int C>
    INLINE_MEMBER void run(int64_t column) {
        const int32_t* queries = my.positions + column;
        int64_t seen = count;
        if (p.causal) seen = most(0, least(count, queries[C * WIDTH - 1] + 1 - first));
        float* to = my.block_sums + first / p.key_block * columns;
        if (seen) {
            const Later later{queries, nullptr, (int32_t)first,
                              p.causal && first + seen - 1 > queries[0]};
            KeepLargest<false> keep{later, nullptr, my.scores, my.largest + column, seen};
            score_column<C>(keys, seen, my.packed, columns, p.width, column, keep);
        } else {
            for (int c = 0; c < C; c++) store(my.sum + column + c * WIDTH, splat(0.0f));
        }
        sum_blocks<C>(p, my, seen, columns, column, to);
        for (int64_t key = round_up(seen, p.key_block); key < count; key += p.key_block)
            for (int c = 0; c < C; c++)
                store(to + key / p.key_block * columns + column + c * WIDTH, splat(0.0f));
    }
};

// Probabilities of the sampled rows, summed over each key block: [blocks][columns]. `largest` and
// `sum` become those of the whole row.
static void block_probabilities(const Arguments& p, const Sequence& s, ChooseScratch& my,
                                const Part& part, int64_t columns, int64_t limit) {
    const int64_t chunk = choose_chunk(p), blocks = (limit + p.key_block - 1) / p.key_block;
    for (int64_t i = 0; i < columns; i++) my.largest[i] = -INFINITE, my.kept[i] = 0.0f;
    float* largest = my.chunk_largest;
    for (int64_t first = 0; first < limit; first += chunk, largest += columns) {
        const int64_t count = least(chunk, limit - first);
        Rows keys{(const float*)p.key.data +
                      row_at(p.key, s.batch, part.key_head, s.key_start + first),
                  p.key.row};
        if (p.bfloat16) {
            keys = {my.keys, row_pitch(p.width)};
            for (int64_t i = 0; i < count; i++)
                read_row(p, p.key, row_at(p.key, s.batch, part.key_head, s.key_start + first + i),
                         p.width, 1.0f, my.keys + i * keys.pitch);
        }
        // What was summed so far counts for less if the largest score has grown.
        memcpy(my.factors, my.largest, (size_t)columns * sizeof(float));
        each_column(columns, ChooseColumn{p, my, keys, first, count, columns});
        for (int64_t i = 0; i < columns; i += WIDTH) {
            const Vector top = load(my.largest + i);
            const Vector before = load(my.kept + i) * power_of_two(load(my.factors + i) - top);
            store(my.kept + i, before + load(my.sum + i));
        }
        memcpy(largest, my.largest, (size_t)columns * sizeof(float));
    }
    memcpy(my.sum, my.kept, (size_t)columns * sizeof(float));
    largest = my.chunk_largest;
    for (int64_t first = 0; first < blocks; first += chunk / p.key_block, largest += columns) {
        for (int64_t i = 0; i < columns; i += WIDTH)
            store(my.factors + i, power_of_two(load(largest + i) - load(my.largest + i)) /
                                      load(my.sum + i));
        for (int64_t c = first; c < least(blocks, first + chunk / p.key_block); c++)
            for (int64_t i = 0; i < columns; i += WIDTH) {
                float* at = my.block_sums + c * columns + i;
                store(at, load(at) * load(my.factors + i));
            }
    }
}

// The heaviest entries of `order`, each a mass in the high and a block in the low half, until they
// weigh `needed`: as `added` says, or if that is null one each. Sets the bits of their blocks.
static void take_heaviest(uint64_t* order, int64_t count, float needed, const float* added,
                          uint8_t* bits) {
    auto weight = [&](uint64_t entry) { return added ? added[(uint32_t)entry] : 1.0f; };
    auto take = [&](uint64_t entry) {
        const uint32_t block = (uint32_t)entry;
        bits[block >> 3] |= (uint8_t)(1 << (block & 7));
    };
    while (count > 0 && needed > 0.0f) {
        const uint64_t a = order[0], b = order[count / 2], c = order[count - 1];
        const uint64_t high = a > b ? a : b, low = a > b ? b : a;
        const uint64_t middle = c > high ? high : c < low ? low : c;
        int64_t above = 0, at = 0;
        float heavier = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            const uint64_t entry = order[i];
            if (entry == middle) at = i;
            if (entry <= middle) continue;
            if (above == at) at = i;  // the middle one moves there
            order[i] = order[above];
            order[above++] = entry;
            heavier += weight(entry);
        }
        if (heavier >= needed) {
            count = above;
            continue;
        }
        for (int64_t i = 0; i < above; i++) take(order[i]);
        take(middle);
        needed -= heavier + weight(middle);
        order[at] = order[above];
        order += above + 1;
        count -= above + 1;
    }
}

// The sum over the wanted columns of one row of `from`.
INLINE float wanted_sum(const float* from, const float* wanted, int64_t begin, int64_t end) {
    Vector sum = splat(0.0f);
    for (int64_t i = begin; i < end; i += WIDTH) sum = load(from + i) * load(wanted + i) + sum;
    return total(sum);
}

// Probabilities of the keys of block c that are seen anyway, summed, for all columns.
static void sum_seen(const Arguments& p, const Sequence& s, ChooseScratch& my, const Part& part,
                     const Interval& v, int64_t c, int64_t columns, float* to) {
    memset(to, 0, (size_t)columns * sizeof(float));
    const int64_t begin = c * p.key_block, end = least(begin + p.key_block, v.limit);
    int32_t sink = s.sink_start[c];
    for (int64_t at = begin; at < end; at++) {
        const bool is_sink = sink < s.sink_start[c + 1] && s.sinks[sink] == at;
        sink += is_sink;
        if (!is_sink && !v.has(at)) continue;
        read_row(p, p.key, row_at(p.key, s.batch, part.key_head, s.key_start + at), p.width, 1.0f,
                 my.row);
        for (int64_t i = 0; i < columns; i += WIDTH) {
            Vector score = splat(0.0f);
            for (int64_t d = 0; d < p.width; d++)
                score = load(my.packed + d * columns + i) * splat(my.row[d]) + score;
            Integers query;
            memcpy(&query, my.positions + i, sizeof query);
            if (p.causal) score = choose((Integers)(query >= (int32_t)at), score, splat(-INFINITE));
            const Vector x = power_of_two(score - load(my.largest + i)) / load(my.sum + i);
            store(to + i, load(to + i) + x);
        }
    }
}

enum { UNSEEN = 0, SEEN = 1, PARTLY = 2 };

// Marks the blocks that are seen anyway, and returns how many are seen in part.
static int64_t mark_seen(const Arguments& p, const Sequence& s, ChooseScratch& my, const Interval& v,
                         int64_t blocks) {
    int64_t partial = 0;
    for (int64_t c = 0; c < blocks; c++) {
        const int64_t size = least((c + 1) * p.key_block, v.limit) - c * p.key_block;
        const int64_t seen = seen_anyway(p, s, v, c);
        my.state[c] = (uint8_t)(seen >= size ? SEEN : seen ? PARTLY : UNSEEN);
        if (my.state[c] == PARTLY) my.partial[partial++] = (int32_t)c;
    }
    return partial;
}

// Chooses for one query block by the columns from `begin` to before `end`.
static void choose_one(const Arguments& p, const Sequence& s, ChooseScratch& my, const Part& part,
                       const Interval& v, int64_t columns, int64_t begin, int64_t end) {
    const int64_t blocks = (v.limit + p.key_block - 1) / p.key_block;
    uint8_t* bits = choice(p, s, part.key_head, part.unit);
    memset(bits, 0, (size_t)p.block_bytes);
    for (int64_t i = 0; i < columns; i++) my.wanted[i] = i >= begin && i < end ? 1.0f : 0.0f;
    const int64_t from = begin / WIDTH * WIDTH, to = round_up(end, WIDTH);
    const int64_t partial = mark_seen(p, s, my, v, blocks);
    float needed = (float)p.heavy;
    const float* added = nullptr;
    if (p.heavy < 0) needed = (float)p.mass * (float)(end - begin), added = my.added;
    for (int64_t i = 0; i < partial; i++) {
        float* sums = my.partial_sums + i * columns;
        sum_seen(p, s, my, part, v, my.partial[i], columns, sums);
        if (added) needed -= wanted_sum(sums, my.wanted, from, to);
    }
    int64_t count = 0, next = 0;
    for (int64_t c = 0; c < blocks; c++) {
        if (my.state[c] == SEEN && !added) continue;
        const float mass = wanted_sum(my.block_sums + c * columns, my.wanted, from, to);
        if (my.state[c] == SEEN) {
            needed -= mass;
            continue;
        }
        my.added[c] = mass;
        if (my.state[c] == PARTLY)
            my.added[c] -= wanted_sum(my.partial_sums + next++ * columns, my.wanted, from, to);
        if (!(mass > 0.0f)) continue;
        uint32_t high;
        memcpy(&high, &mass, 4);
        my.order[count++] = (uint64_t)high << 32 | (uint64_t)c;
    }
    take_heaviest(my.order, count, needed, added, bits);
}

// What the columns from `begin` to before `end` keep of the view that was chosen last.
static void write_kept(const Arguments& p, const Sequence& s, ChooseScratch& my, const Part& part,
                       const Interval& v, int64_t columns, int64_t begin, int64_t end,
                       int64_t first_row) {
    const int64_t blocks = (v.limit + p.key_block - 1) / p.key_block;
    const uint8_t* bits = choice(p, s, part.key_head, part.unit);
    const int64_t from = begin / WIDTH * WIDTH, to = round_up(end, WIDTH);
    memset(my.kept, 0, (size_t)columns * sizeof(float));
    int64_t next = 0;
    for (int64_t c = 0; c < blocks; c++) {
        const float* sums = my.block_sums + c * columns;
        if (my.state[c] == PARTLY) {
            if (!is_set(bits, c)) sums = my.partial_sums + next * columns;
            next++;
        } else if (my.state[c] != SEEN && !is_set(bits, c)) {
            continue;
        }
        for (int64_t i = from; i < to; i += WIDTH)
            store(my.kept + i, load(my.kept + i) + load(sums + i));
    }
    for (int64_t i = begin; i < end; i++) {
        const int64_t head = part.first_head + (i - begin) % part.heads;
        const int64_t at = (s.batch * p.heads + head) * p.rows + first_row + (i - begin) / part.heads;
        p.kept[at] = my.kept[i] < 1.0f ? my.kept[i] : 1.0f;
        p.log_sum[at] = my.largest[i] * LN_2 + __builtin_logf(my.sum[i]);
    }
}

// Sampled rows before a position.
static int64_t sampled_before(const Arguments& p, const Sequence& s, int64_t position) {
    const int64_t first = s.first_position(), end = most(first, least(position, s.length));
    if (p.strict) {
        const int64_t whole = (end + p.sample - 1) / p.sample - (first + p.sample - 1) / p.sample;
        return whole + (first % p.sample != 0 && end > first);
    }
    return end / p.sample - first / p.sample + (end == s.length && s.length % p.sample != 0);
}

static void choose_units_from(const Arguments* arguments, const Sequence* sequence, int64_t key_head,
                              int64_t first_unit, int64_t count, float* memory) {
    const Arguments& p = *arguments;
    const Sequence& s = *sequence;
    ChooseScratch my;
    my.reserve(p, s.length, s.sink_start[key_blocks(p, s)], Scratch{memory});
    Part part{key_head, key_head * (p.heads / p.key_heads), p.heads / p.key_heads, first_unit};
    // In strict mode the rows of earlier units choose, too.
    const int64_t begin = most(s.first_unit, first_unit - (p.choosing - 1)) * p.unit;
    const int64_t rows = list_sampled(p, s, begin, (first_unit + count) * p.unit, my.rows);
    const int64_t real = rows * part.heads, columns = padded(real);
    for (int64_t i = 0; i < rows; i++)
        gather_queries(p, s, p.query, part, my.rows[i], 1, p.width, (float)(p.scale * LOG2_E),
                       my.plain + i * part.heads * row_pitch(p.width));
    transpose({my.plain, row_pitch(p.width)}, real, p.width, columns, my.packed);
    for (int64_t i = 0; i < columns; i++)
        my.positions[i] = my.rows[least(i, real - 1) / part.heads];
    const int64_t limit = p.causal ? my.rows[rows - 1] + 1 : s.length;
    block_probabilities(p, s, my, part, columns, limit);

    int64_t low = 0, high = 0;  // rows of one unit
    for (; part.unit < first_unit + count; part.unit++) {
        Interval v = interval_of(p, s, part.unit);
        v.limit = least(v.limit, limit);
        const int64_t oldest = (part.unit - (p.choosing - 1)) * p.unit;
        int64_t own = high;
        while (low < rows && my.rows[low] < oldest) low++;
        while (own < rows && my.rows[own] < v.own) own++;
        high = own;
        while (high < rows && my.rows[high] < v.own + p.unit) high++;
        choose_one(p, s, my, part, v, columns, low * part.heads, high * part.heads);
        write_kept(p, s, my, part, v, columns, own * part.heads, high * part.heads,
                   s.first_row + sampled_before(p, s, my.rows[own]));
    }
}
