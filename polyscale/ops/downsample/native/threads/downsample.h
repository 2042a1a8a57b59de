// Downsampling on several threads.
#pragma once
#include <math.h>

#include "../arguments.h"
#include "native/threads/instructions.h"
#include "native/threads/team.h"

DECLARE_VARIANTS(downsample)

namespace {

// A task is a row of the batch or, with fewer rows than threads, some channels of a row.
class Downsampling : public Team {
   public:
    Downsampling(const Arguments& d, const Variant& v, bool backward)
        : Team(d.batch * parts(d), worthwhile(d), backward ? floats(d) : 0),
          d_(d), v_(v), backward_(backward), size_(d.levels * d.width * d.channels),
          grad_weights_(backward ? (size_t)(d.batch * size_) : 0, 0.0) {}

    void task(int64_t number, float* scratch) override {
        const int64_t row = number / parts(d_), each = channels(d_);
        const int64_t first = number % parts(d_) * each;
        const int64_t count = least(each, d_.channels - first);
        if (count <= 0) return;
        if (backward_)
            v_.backward(&d_, row, first, count, &grad_weights_[(size_t)(row * size_)], scratch);
        else
            v_.forward(&d_, row, first, count);
    }

    void finish() {
        for (int64_t i = 0; i < size_; i++) {
            double sum = 0.0;
            for (int64_t row = 0; row < d_.batch; row++)
                sum += grad_weights_[(size_t)(row * size_ + i)];
            d_.grad_weights[i] = (float)sum;
        }
    }

   private:
    static int64_t parts(const Arguments& d) {
        return least(most(1, (d.threads + d.batch - 1) / most(1, d.batch)), (d.channels + 15) / 16);
    }
    static int64_t channels(const Arguments& d) {
        return round_up((d.channels + parts(d) - 1) / parts(d), 16);
    }
    static int64_t floats(const Arguments& d) {
        int64_t rows = d.width;
        for (int64_t l = 1; l <= d.levels; l++) rows += at_level(d.length, l);
        return rows * channels(d);
    }
    static int worthwhile(const Arguments& d) {
        return (int)fmin((double)d.threads,
                         1.0 + (double)(d.batch * d.length) * (double)d.channels / 3e4);
    }

    const Arguments& d_;
    const Variant& v_;
    bool backward_;
    int64_t size_;
    std::vector<double> grad_weights_;
};

}  // namespace
