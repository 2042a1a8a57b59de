// The library's two functions: they pick a set of instructions, cut the work in tasks, and run them
// on the threads that torch has already.
#include <dlfcn.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "problem.h"

extern "C" const Variant hkt_portable;
#ifdef HKT_X86
extern "C" const Variant hkt_avx2;
extern "C" const Variant hkt_avx512;
#endif

namespace {

enum { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

int best_variant() {
#ifdef HKT_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PORTABLE;
}

const Variant& variant(const Problem& p) {
    // A caller may ask for a lesser one, never for one that the processor lacks.
    const int best = best_variant();
    const int chosen = p.variant < 0 || p.variant > best ? best : p.variant;
#ifdef HKT_X86
    if (chosen == AVX512) return hkt_avx512;
    if (chosen == AVX2) return hkt_avx2;
#endif
    (void)chosen;
    return hkt_portable;
}

std::vector<Sequence> sequences_of(const Problem& p) {
    std::vector<Sequence> all;
    for (int64_t b = 0; b < p.batch; b++)
        for (int64_t h = 0; h < p.heads; h++)
            for (int64_t n = 0; n < most(1, p.sequences); n++) {
                Sequence s{b, h, {0, 0, 0, 0, 0}, p.lengths ? p.lengths[b] : p.length};
                if (p.sequences) {
                    for (int64_t l = 0; l < p.levels; l++)
                        s.start[l] = p.boundaries[l * (p.sequences + 1) + n];
                    s.length = p.boundaries[n + 1] - p.boundaries[n];
                }
                all.push_back(s);
            }
    return all;
}

// A team of threads that take tasks from one counter; each has its own scratch memory.
class Team {
   public:
    Team(int64_t tasks, int threads, int64_t scratch_floats)
        : tasks_(tasks), scratch_floats_(scratch_floats), next_(0), failed_(false) {
        threads_ = (int)least(tasks, most(1, threads));
    }
    virtual ~Team() = default;
    virtual void task(int64_t number, float* scratch) = 0;

    bool run() {
        if (threads_ <= 1) {
            work();
            return !failed_;
        }
        // torch's own OpenMP threads, wherever its library came from: a second pool would compete
        // with the first, whose threads go on spinning for a while after their work.
        typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
        static const Parallel parallel = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
        if (parallel) {
            parallel(enter, this, (unsigned)threads_, 0);
        } else {
            std::vector<std::thread> others;
            for (int i = 1; i < threads_; i++) others.emplace_back(enter, this);
            work();
            for (std::thread& other : others) other.join();
        }
        return !failed_;
    }

   private:
    static void enter(void* team) { ((Team*)team)->work(); }

    void work() {
        void* scratch = nullptr;
        if (posix_memalign(&scratch, 64, (size_t)(scratch_floats_ + 64) * sizeof(float))) {
            failed_ = true;
            return;
        }
        for (int64_t n = next_++; n < tasks_; n = next_++) task(n, (float*)scratch);
        free(scratch);
    }

    int64_t tasks_, scratch_floats_;
    int threads_;
    std::atomic<int64_t> next_;
    std::atomic<bool> failed_;
};

int64_t blocks_of(const Sequence& s, int64_t block) { return (s.length + block - 1) / block; }

// Waking threads takes longer than a small problem.
int worthwhile_threads(const Problem& p, const std::vector<Sequence>& all) {
    double products = 0.0;
    for (const Sequence& s : all)
        products += (double)s.length * (double)s.length * (double)(p.width + p.value_width);
    return (int)fmin((double)p.threads, 1.0 + products / 1e6);
}

class Forward : public Team {
   public:
    Forward(const Problem& p, const Variant& v, const std::vector<Sequence>& all,
            const std::vector<int64_t>& starts)
        : Team(starts.back(), worthwhile_threads(p, all), v.scratch_floats(&p)),
          p_(p), v_(v), all_(all), starts_(starts) {}

    void task(int64_t number, float* scratch) override {
        size_t low = 0, high = all_.size();
        while (high - low > 1) {
            const size_t middle = (low + high) / 2;
            (starts_[middle] <= number ? low : high) = middle;
        }
        // The last blocks see most keys: they go first, so that no thread is left with a long one.
        v_.forward(&p_, &all_[low], starts_[low + 1] - 1 - number, scratch);
    }

   private:
    const Problem& p_;
    const Variant& v_;
    const std::vector<Sequence>& all_;
    const std::vector<int64_t>& starts_;
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

// With fewer sequences than threads, parts of a sequence's query blocks go to several threads. The
// first adds to the gradients of keys and values themselves, the others to memory of their own,
// added at the end and in order: the same threads give the same bits.
class Backward : public Team {
   public:
    Backward(const Problem& p, const Variant& v, const std::vector<Sequence>& all, int64_t parts)
        : Team((int64_t)all.size() * parts, worthwhile_threads(p, all), v.scratch_floats(&p)),
          p_(p), v_(v), all_(all), parts_(parts),
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
        Partial to = {};
        if (part) {
            to = partial(number / parts_, part);
        } else {
            clear_gradients(s);
        }
        double* grad_weights = &grad_weights_[(size_t)number * MAX_LEVELS];
        v_.backward(&p_, &s, part, parts_, &to, grad_weights, scratch);
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
        float* next = memory_.data() + offsets_[(size_t)sequence] + size(s) * (size_t)(part - 1);
        Partial to = {};
        to.value = next;
        next += s.length * p_.value_width;
        for (int64_t l = 0; l < p_.levels; l++) {
            to.key[l] = next;
            next += at_level(s.length, l) * p_.width;
        }
        return to;
    }

    // Also the rows of padding, which belong to nobody.
    void clear_gradients(const Sequence& s) {
        const int64_t rows = p_.sequences ? s.length : p_.length;
        clear(p_.grad_value, s, 0, 0, rows, p_.value_width, sizeof(float));
        for (int64_t l = 0; l < p_.levels; l++) {
            const int64_t used = at_level(s.length, l), all = at_level(rows, l);
            clear(p_.grad_key[l], s, l, 0, all, p_.width, sizeof(float));
            clear(p_.grad_query[l], s, l, used, all, p_.width, sizeof(float));
        }
    }

    const Problem& p_;
    const Variant& v_;
    const std::vector<Sequence>& all_;
    int64_t parts_;
    std::vector<double> grad_weights_;
    std::vector<size_t> offsets_;
    std::vector<float> memory_;
};

// The fewest parts per sequence that keep nearly all threads busy.
int64_t parts_for(const Problem& p, const std::vector<Sequence>& all, int64_t block) {
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

}  // namespace

// 0: done, 1: out of memory.
extern "C" int hkt_forward(const Problem* problem) {
    try {
        const Problem& p = *problem;
        const Variant& v = variant(p);
        const std::vector<Sequence> all = sequences_of(p);
        std::vector<int64_t> starts(1, 0);
        for (const Sequence& s : all) {
            starts.push_back(starts.back() + blocks_of(s, v.query_block));
            if (!p.lengths) continue;
            clear(p.output, s, 0, s.length, p.length, p.value_width, p.bfloat16 ? 2 : 4);
            const int64_t row = (s.batch * p.heads + s.head) * p.length;
            for (int64_t i = s.length; i < p.length; i++) {
                p.statistics[row + i] = 0.0f;
                p.statistics[p.batch * p.heads * p.length + row + i] = 0.0f;
            }
        }
        return Forward(p, v, all, starts).run() ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// Gradients are float32, whatever the inputs are.
extern "C" int hkt_backward(const Problem* problem) {
    try {
        const Problem& p = *problem;
        const Variant& v = variant(p);
        const std::vector<Sequence> all = sequences_of(p);
        Backward team(p, v, all, parts_for(p, all, v.query_block));
        if (!team.run()) return 1;
        team.finish();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// 0 portable, 1 AVX2, 2 AVX-512.
extern "C" int hkt_best_variant() { return best_variant(); }

extern "C" int64_t hkt_problem_size() { return (int64_t)sizeof(Problem); }
