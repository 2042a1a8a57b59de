// The gradient of a weight on several threads: each has outputs of its own, of all rows. Sums are
// taken in the same order however many threads there are.
#pragma once
#include <math.h>

#include "../arguments.h"
#include "native/threads/instructions.h"
#include "native/threads/team.h"

DECLARE_VARIANTS(linear)

namespace {

class WeightGradients : public Team {
   public:
    WeightGradients(const Arguments& w, const Variant& v)
        : Team(shares(w), shares(w), v.scratch_floats(&w)), w_(w), v_(v) {}

    void task(int64_t number, float* scratch) override {
        const int64_t begin = boundary(number), end = boundary(number + 1);
        if (begin < end) v_.weight_gradient(&w_, begin, end, scratch);
    }

   private:
    // As many outputs as any tile has rows.
    enum { GROUP = 12 };

    static int64_t groups(const Arguments& w) {
        return (w.projected[0].outputs + GROUP - 1) / GROUP;
    }

    static int shares(const Arguments& w) {
        const double products = (double)w.projected[0].rows * (double)w.width *
                                (double)w.projected[0].outputs;
        return (int)least(most(1, groups(w)), (int64_t)fmin((double)w.threads, 1 + products / 1e6));
    }

    // Outputs of both inputs take longer. Without rows there are still zeros to write.
    int64_t work(int64_t group) const {
        int64_t rows = 1;
        for (const Projected& from : w_.projected)
            if (group * GROUP < from.outputs) rows += from.rows;
        return rows;
    }

    // Where a share begins. All shares take about the same time.
    int64_t boundary(int64_t share) const {
        int64_t all = 0, done = 0, group = 0;
        for (int64_t g = 0; g < groups(w_); g++) all += work(g);
        for (; group < groups(w_) && done * shares(w_) < all * share; group++) done += work(group);
        return least(group * GROUP, w_.projected[0].outputs);
    }

    const Arguments& w_;
    const Variant& v_;
};

}  // namespace
