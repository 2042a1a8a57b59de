// The gradient of a weight on several threads: each has outputs of its own, of all rows. Every sum is
// taken in the same order on however many threads.
#pragma once
#include "sequences.h"

namespace {

class WeightGradients : public Team {
   public:
    WeightGradients(const WeightGradient& w, const Variant& v)
        : Team(shares(w), shares(w), v.weight_gradient_floats(&w)), w_(w), v_(v) {}

    void task(int64_t number, float* scratch) override {
        const int64_t begin = boundary(number), end = boundary(number + 1);
        if (begin < end) v_.weight_gradient(&w_, begin, end, scratch);
    }

   private:
    // As many outputs as any tile has rows.
    enum { GROUP = 12 };

    static int64_t groups(const WeightGradient& w) {
        return (w.projected[0].outputs + GROUP - 1) / GROUP;
    }

    static int shares(const WeightGradient& w) {
        const double products = (double)w.projected[0].rows * (double)w.width *
                                (double)w.projected[0].outputs;
        return (int)least(most(1, groups(w)), (int64_t)fmin((double)w.threads, 1 + products / 1e6));
    }

    // Outputs that several inputs have take longer. With no rows there is still something to write.
    int64_t work(int64_t group) const {
        int64_t rows = 1;
        for (const Projected& from : w_.projected)
            if (group * GROUP < from.outputs) rows += from.rows;
        return rows;
    }

    // Where a share begins, so that all take about as long.
    int64_t boundary(int64_t share) const {
        int64_t all = 0, done = 0, group = 0;
        for (int64_t g = 0; g < groups(w_); g++) all += work(g);
        for (; group < groups(w_) && done * shares(w_) < all * share; group++) done += work(group);
        return least(group * GROUP, w_.projected[0].outputs);
    }

    const WeightGradient& w_;
    const Variant& v_;
};

}  // namespace
