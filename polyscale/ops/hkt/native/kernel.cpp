// The library's functions: they cut the work into tasks and run them on the threads that torch
// already has.
#include "threads/decode.h"
#include "threads/sequences.h"

namespace {

int64_t blocks_of(const Sequence& s, int64_t block) { return (s.length + block - 1) / block; }

// Waking threads takes longer than a small problem.
int worthwhile_threads(const Arguments& p, const std::vector<Sequence>& all) {
    double products = 0.0;
    for (const Sequence& s : all)
        products += (double)s.length * (double)s.length * (double)(p.width + p.value_width);
    return (int)fmin((double)p.threads, 1.0 + products / 1e6);
}

// Every query block reads all keys and values. Rows with a large stride (the heads of a token are
// contiguous) share few sets of the cache, so a thread works on copies of its sequence. Rows in
// bfloat16 are not copied here, as they are widened anyway.
bool are_apart(const Arguments& p) { return !p.bfloat16 && p.key[0].row != p.width; }

// Keys of every level and values of the longest sequence.
int64_t copied_floats(const Arguments& p, const std::vector<Sequence>& all) {
    if (!are_apart(p)) return 0;
    int64_t longest = 0;
    for (const Sequence& s : all) longest = most(longest, s.length);
    int64_t floats = longest * p.value_width;
    for (int64_t l = 0; l < p.levels; l++) floats += at_level(longest, l) * p.width;
    return floats;
}

float* copy_rows(Tensor* t, const Sequence& s, int64_t level, int64_t rows, int64_t width,
                 float* to) {
    const int64_t bytes = width * (int64_t)sizeof(float);
    for (int64_t i = 0; i < rows; i++) {
        const float* from = (const float*)t->data + offset(*t, s, level, i);
        if (i + ROWS_AHEAD < rows) fetch_row(from + ROWS_AHEAD * t->row, bytes);
        memcpy(to + i * width, from, (size_t)bytes);
    }
    // The start of the sequence is the same in the copy.
    *t = {to - s.start[level] * width, 0, 0, width};
    return to + rows * width;
}

// Lets the arguments point to copies of a sequence's keys and values; returns the memory after them.
float* copy_keys(Arguments* arguments, const Sequence& s, float* next) {
    for (int64_t l = 0; l < arguments->levels; l++)
        next = copy_rows(&arguments->key[l], s, l, at_level(s.length, l), arguments->width, next);
    return copy_rows(&arguments->value, s, 0, s.length, arguments->value_width, next);
}

// The fewest parts per sequence that keep nearly all threads busy.
int64_t parts_for(const Arguments& p, const std::vector<Sequence>& all, int64_t block) {
    const int64_t threads = worthwhile_threads(p, all), count = (int64_t)all.size();
    int64_t longest = 1;
    for (const Sequence& s : all) longest = most(longest, blocks_of(s, block));
    int64_t parts = 1;
    while (parts < least(threads, longest)) {
        const int64_t tasks = count * parts, rounds = (tasks + threads - 1) / threads;
        if (5 * tasks >= 4 * rounds * threads) break;
        parts++;
    }
    return parts;
}

class Forward : public Team {
   public:
    Forward(const Arguments& p, const Variant& v, const std::vector<Sequence>& all, int64_t parts)
        : Team((int64_t)all.size() * parts, worthwhile_threads(p, all),
               v.scratch_floats(&p) + copied_floats(p, all)),
          p_(p), v_(v), all_(all), parts_(parts), own_floats_(v.scratch_floats(&p)) {}

    void task(int64_t number, float* scratch) override {
        const Sequence& s = all_[(size_t)(number / parts_)];
        Arguments arguments = p_;
        if (are_apart(p_)) copy_keys(&arguments, s, scratch + own_floats_);
        const int64_t blocks = blocks_of(s, v_.query_block);
        for (int64_t block = number % parts_; block < blocks; block += parts_)
            v_.forward(&arguments, &s, block, scratch);
    }

   private:
    const Arguments& p_;
    const Variant& v_;
    const std::vector<Sequence>& all_;
    int64_t parts_, own_floats_;
};

void clear(const Tensor& t, const Sequence& s, int64_t level, int64_t from, int64_t to,
           int64_t width, size_t size) {
    for (int64_t i = from; i < to; i++)
        memset((char*)t.data + offset(t, s, level, i) * (int64_t)size, 0, (size_t)width * size);
}

void add_rows(const Tensor& t, const Sequence& s, int64_t level, int64_t rows, int64_t width,
              const float* from) {
    for (int64_t i = 0; i < rows; i++) {
        float* to = (float*)t.data + offset(t, s, level, i);
        for (int64_t d = 0; d < width; d++) to[d] += from[i * width + d];
    }
}

void put_rows(const Tensor& t, const Sequence& s, int64_t level, int64_t rows, int64_t width,
              const float* from) {
    const int64_t bytes = width * (int64_t)sizeof(float);
    for (int64_t i = 0; i < rows; i++) {
        float* to = (float*)t.data + offset(t, s, level, i);
        if (i + ROWS_AHEAD < rows) fetch_row_to_write(to + ROWS_AHEAD * t.row, bytes);
        memcpy(to, from + i * width, (size_t)bytes);
    }
}

// With fewer sequences than threads, several threads share a sequence's query blocks. The first one
// adds to the gradients of keys and values themselves, the others to separate memory that is added at
// the end and in order: results are bitwise reproducible for a number of threads.
class Backward : public Team {
   public:
    Backward(const Arguments& p, const Variant& v, const std::vector<Sequence>& all, int64_t parts)
        : Team((int64_t)all.size() * parts, worthwhile_threads(p, all),
               v.scratch_floats(&p) + 2 * copied_floats(p, all)),
          p_(p), v_(v), all_(all), parts_(parts), own_floats_(v.scratch_floats(&p)),
          grad_weights_(all.size() * (size_t)parts * MAX_LEVELS, 0.0) {
        size_t floats = 0;
        for (const Sequence& s : all) {
            offsets_.push_back(floats);
            floats += size(s) * (size_t)(parts - 1);
        }
        memory_.resize(floats);
    }

    void task(int64_t number, float* scratch) override {
        const Sequence& s = all_[(size_t)(number / parts_)];
        const int64_t part = number % parts_;
        const bool apart = are_apart(p_);
        Arguments arguments = p_;
        float* next = scratch + own_floats_;
        if (apart) next = copy_keys(&arguments, s, next);
        Partial to = {};
        if (part) {
            to = partial(number / parts_, part);
        } else if (apart) {
            memset(next, 0, size(s) * sizeof(float));
            to = targets(s, next);
        } else {
            clear_gradients(s, 0);
        }
        double* grad_weights = &grad_weights_[(size_t)number * MAX_LEVELS];
        v_.backward(&arguments, &s, part, parts_, &to, grad_weights, scratch);
        if (part == 0 && apart) {
            clear_gradients(s, s.length);
            put_rows(p_.grad_value, s, 0, s.length, p_.value_width, to.value);
            for (int64_t l = 0; l < p_.levels; l++)
                put_rows(p_.grad_key[l], s, l, at_level(s.length, l), p_.width, to.key[l]);
        }
    }

    void finish() {
        for (int64_t i = 0; i < p_.heads * p_.levels; i++) p_.grad_weights[i] = 0.0f;
        std::vector<double> sums((size_t)(p_.heads * p_.levels), 0.0);
        for (size_t n = 0; n < all_.size(); n++)
            for (int64_t part = 0; part < parts_; part++) {
                const size_t task = n * (size_t)parts_ + (size_t)part;
                const double* from = &grad_weights_[task * MAX_LEVELS];
                for (int64_t l = 0; l < p_.levels; l++)
                    sums[(size_t)(all_[n].head * p_.levels + l)] += from[l];
                if (part == 0) continue;
                const Partial mine = partial((int64_t)n, part);
                const Sequence& s = all_[n];
                add_rows(p_.grad_value, s, 0, s.length, p_.value_width, mine.value);
                for (int64_t l = 0; l < p_.levels; l++)
                    add_rows(p_.grad_key[l], s, l, at_level(s.length, l), p_.width, mine.key[l]);
            }
        for (size_t i = 0; i < sums.size(); i++) p_.grad_weights[i] = (float)sums[i];
    }

   private:
    size_t size(const Sequence& s) const {
        int64_t floats = s.length * p_.value_width;
        for (int64_t l = 0; l < p_.levels; l++) floats += at_level(s.length, l) * p_.width;
        return (size_t)floats;
    }

    Partial partial(int64_t sequence, int64_t part) {
        const Sequence& s = all_[(size_t)sequence];
        return targets(s, memory_.data() + offsets_[(size_t)sequence] +
                              size(s) * (size_t)(part - 1));
    }

    Partial targets(const Sequence& s, float* next) {
        Partial to = {};
        to.value = next;
        next += s.length * p_.value_width;
        for (int64_t l = 0; l < p_.levels; l++) {
            to.key[l] = next;
            next += at_level(s.length, l) * p_.width;
        }
        return to;
    }

    // Rows from `first` on, including those of padding.
    void clear_gradients(const Sequence& s, int64_t first) {
        const int64_t rows = p_.sequences ? s.length : p_.length;
        clear(p_.grad_value, s, 0, first, rows, p_.value_width, sizeof(float));
        for (int64_t l = 0; l < p_.levels; l++) {
            const int64_t used = at_level(s.length, l), all = at_level(rows, l);
            clear(p_.grad_key[l], s, l, at_level(first, l), all, p_.width, sizeof(float));
            clear(p_.grad_query[l], s, l, used, all, p_.width, sizeof(float));
        }
    }

    const Arguments& p_;
    const Variant& v_;
    const std::vector<Sequence>& all_;
    int64_t parts_, own_floats_;
    std::vector<double> grad_weights_;
    std::vector<size_t> offsets_;
    std::vector<float> memory_;
};

void clear_padding(const Arguments& p, const std::vector<Sequence>& all) {
    for (const Sequence& s : all) {
        clear(p.output, s, 0, s.length, p.length, p.value_width, p.bfloat16 ? 2 : 4);
        const int64_t row = (s.batch * p.heads + s.head) * p.length;
        for (int64_t n = 0; n < 3; n++)
            for (int64_t i = s.length; i < p.length; i++)
                p.statistics[n * p.batch * p.heads * p.length + row + i] = 0.0f;
    }
}

}  // namespace

// Every function returns 0 when it is done and 1 when it is out of memory.
extern "C" int hkt_forward(const Arguments* arguments) {
    return guarded([&] {
        const Arguments& p = *arguments;
        const Variant& v = variant(p.variant);
        const std::vector<Sequence> all = sequences_of(p);
        if (p.lengths) clear_padding(p, all);
        return Forward(p, v, all, parts_for(p, all, v.query_block)).run();
    });
}

// Gradients are float32, whatever the inputs are.
extern "C" int hkt_backward(const Arguments* arguments) {
    return guarded([&] {
        const Arguments& p = *arguments;
        const Variant& v = variant(p.variant);
        const std::vector<Sequence> all = sequences_of(p);
        Backward team(p, v, all, parts_for(p, all, v.query_block));
        if (!team.run()) return false;
        team.finish();
        return true;
    });
}

// A few new queries against cached keys and values of `length` tokens; a query sees the keys up to
// position[b][m].
extern "C" int hkt_decode(const Arguments* arguments) {
    return guarded([&] {
        const Arguments& p = *arguments;
        const Variant& v = variant(p.variant);
        const std::vector<Sequence> all = sequences_of(p);
        Decode team(p, v, all, (p.length + v.decode_chunk - 1) / v.decode_chunk);
        if (!team.run()) return false;
        team.finish();
        return true;
    });
}

// 0 portable, 1 AVX2, 2 AVX-512.
extern "C" int hkt_best_variant() { return best_variant(); }

extern "C" int hkt_max_levels() { return MAX_LEVELS; }

extern "C" int64_t hkt_arguments_size() { return (int64_t)sizeof(Arguments); }
