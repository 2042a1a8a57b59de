// Which instructions to use, which sequences there are, and the threads that work on them.
#pragma once
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

const Variant& variant(int asked) {
    // A caller may ask for a lesser one, never for one that the processor lacks.
    const int best = best_variant();
    const int chosen = asked < 0 || asked > best ? best : asked;
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

}  // namespace
