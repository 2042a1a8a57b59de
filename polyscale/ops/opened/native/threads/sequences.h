// The instructions this kernel has, the sequences of a arguments, and how its work is cut.
#pragma once
#include "native/threads/instructions.h"
#include "native/threads/team.h"
#include "../arguments.h"

DECLARE_VARIANTS(opened)

namespace {

// Columns of a query block that are worked on together: the heads of a group, in parts if need be.
enum { MOST_COLUMNS = 256 };

// All sequences, and the positions of their sinks.
struct Sequences {
    std::vector<Sequence> all;
    std::vector<std::vector<int32_t>> sinks, starts;
    int64_t longest = 0, most_sinks = 0;

    explicit Sequences(const Arguments& p) {
        int64_t block = 0, row = 0;
        for (int64_t b = 0; b < p.batch; b++)
            for (int64_t n = 0; n < most(1, p.sequences); n++) {
                Sequence s{};
                s.batch = b;
                if (p.sequences) {
                    s.key_start = s.query_start = p.boundaries[n];
                    s.length = s.queries = p.boundaries[n + 1] - p.boundaries[n];
                    s.first_block = block, s.first_row = row;
                } else {
                    s.length = p.lengths ? p.lengths[b] : p.keys;
                    s.queries = p.query_lengths ? p.query_lengths[b] : p.queries;
                }
                s.first_unit = s.first_position() / p.unit;
                block += units(p, s);
                row += sampled(p, s);
                find_sinks(p, s);
                all.push_back(s);
            }
        for (size_t i = 0; i < all.size(); i++)
            all[i].sinks = sinks[i].data(), all[i].sink_start = starts[i].data();
    }

   private:
    static int64_t sampled(const Arguments& p, const Sequence& s) {
        const int64_t first = s.first_position(), rest = p.strict ? first : s.length;
        if (!s.queries) return 0;
        const int64_t up = p.strict ? p.sample - 1 : 0;
        return (s.length + up) / p.sample - (first + up) / p.sample + (rest % p.sample != 0);
    }

    void find_sinks(const Arguments& p, const Sequence& s) {
        std::vector<int32_t> found, start;
        const uint8_t* is_sink = p.sinks + s.batch * p.keys + s.key_start;
        for (int64_t at = 0; at < s.length; at++) {
            if (at % p.key_block == 0) start.push_back((int32_t)found.size());
            if (is_sink[at]) found.push_back((int32_t)at);
        }
        start.push_back((int32_t)found.size());
        longest = most(longest, s.length), most_sinks = most(most_sinks, (int64_t)found.size());
        sinks.push_back(found), starts.push_back(start);
    }
};

// A query block and the heads that are worked on together.
struct Task {
    const Sequence* sequence;
    Part part;
    int64_t turn;     // among those that share key and value gradients
    int64_t counter;  // of those
};

// Query blocks in order, all key heads of a query block one after the other.
std::vector<Task> tasks_of(const Arguments& p, const Sequences& sequences) {
    const int64_t group = p.heads / p.key_heads;
    const int64_t together = most(1, least(group, MOST_COLUMNS / p.unit));
    const int64_t parts = (group + together - 1) / together;
    std::vector<Task> tasks;
    for (size_t n = 0; n < sequences.all.size(); n++) {
        const Sequence& s = sequences.all[n];
        for (int64_t unit = 0; unit < units(p, s); unit++)
            for (int64_t i = 0; i < parts; i++)
                for (int64_t head = 0; head < p.key_heads; head++) {
                    const int64_t first = i * together, heads = least(together, group - first);
                    tasks.push_back({&s, {head, head * group + first, heads, s.first_unit + unit},
                                     unit * parts + i, (int64_t)n * p.key_heads + head});
                }
    }
    return tasks;
}

// Waking threads takes longer than a small problem.
int worthwhile_threads(const Arguments& p, double products) {
    const double most_threads = 1.0 + products * (double)(p.width + p.value_width) / 1e6;
    return most_threads < (double)p.threads ? (int)most_threads : p.threads;
}

// Entries of the largest view.
int64_t largest_view(const Arguments& p, const Sequences& sequences) {
    int64_t blocks = 0;
    const uint8_t* bits = p.opened;
    for (int64_t i = 0; i < p.batch * p.key_heads * p.query_blocks; i++, bits += p.block_bytes) {
        int64_t count = 0;
        for (int64_t k = 0; k < p.block_bytes; k++) count += __builtin_popcount(bits[k]);
        blocks = most(blocks, count);
    }
    int64_t view = blocks * p.key_block + sequences.most_sinks + p.unit + 2 * p.near;
    if (p.pool) view += (sequences.longest + p.key_block - 1) / p.key_block;
    const int64_t all = sequences.longest + p.key_block;  // nodes stand for keys that are unseen
    return least(view, all);
}

}  // namespace
