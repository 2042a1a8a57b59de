// Threads that share the tasks of a problem.
#pragma once
#include <dlfcn.h>
#include <stdlib.h>

#include <atomic>
#include <new>
#include <thread>
#include <vector>

#include "native/common.h"

namespace {

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
        // torch's own OpenMP threads, whichever library it loaded: a second pool would compete with
        // the first, whose threads keep spinning for a while after their work.
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

// 0: done, 1: out of memory. What an exported function returns.
template <class Work>
int guarded(Work work) {
    try {
        return work() ? 0 : 1;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace
