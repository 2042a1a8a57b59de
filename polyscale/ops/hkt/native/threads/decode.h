// Decoding on several threads.
#pragma once
#include "sequences.h"

namespace {

// A task is a chunk of cached keys of one head. The results are merged at the end, in order.
class Decode : public Team {
   public:
    Decode(const Arguments& p, const Variant& v, const std::vector<Sequence>& all, int64_t chunks)
        : Team((int64_t)all.size() * chunks, worthwhile(p), v.decode_floats(&p)),
          p_(p), v_(v), all_(all), chunks_(chunks),
          results_(all.size() * (size_t)(chunks * size_of(p))) {}

    void task(int64_t number, float* scratch) override {
        v_.decode(&p_, &all_[(size_t)(number / chunks_)], number % chunks_, result(number),
                  scratch);
    }

    void finish() {
        std::vector<float> sum((size_t)p_.value_width);
        for (size_t n = 0; n < all_.size(); n++)
            for (int64_t m = 0; m < p_.queries; m++) {
                merge((int64_t)n, m, sum.data());
                const int64_t to = offset(p_.output, all_[n], 0, m);
                for (int64_t d = 0; d < p_.value_width; d++) {
                    if (p_.bfloat16)
                        ((uint16_t*)p_.output.data)[to + d] = to_bfloat16(sum[(size_t)d]);
                    else
                        ((float*)p_.output.data)[to + d] = sum[(size_t)d];
                }
            }
    }

   private:
    static int64_t size_of(const Arguments& p) { return p.queries * (p.value_width + 3); }

    static int worthwhile(const Arguments& p) {
        const double products = (double)(p.batch * p.heads * p.queries * p.length) *
                                (double)(2 * p.width + p.value_width);
        return (int)fmin((double)p.threads, 1.0 + products / 1e5);
    }

    float* result(int64_t number) { return results_.data() + number * size_of(p_); }

    void merge(int64_t sequence, int64_t query, float* sum) {
        double top = -INFINITY;
        float total = 0.0f;
        for (int64_t d = 0; d < p_.value_width; d++) sum[d] = 0.0f;
        for (int64_t chunk = 0; chunk < chunks_; chunk++) {
            const float* mine = result(sequence * chunks_ + chunk) + query * (p_.value_width + 3);
            // NaN is passed on.
            if (mine[0] == -INFINITY && mine[2] == 0.0f) continue;
            const double here = (double)mine[0] + (double)mine[1];
            const double largest = top > here ? top : here;
            const float before = expf((float)(top - largest)), now = expf((float)(here - largest));
            total = total * before + mine[2] * now;
            for (int64_t d = 0; d < p_.value_width; d++)
                sum[d] = sum[d] * before + mine[3 + d] * now;
            top = largest;
        }
        if (total != 0.0f)
            for (int64_t d = 0; d < p_.value_width; d++) sum[d] /= total;
    }

    const Arguments& p_;
    const Variant& v_;
    const std::vector<Sequence>& all_;
    int64_t chunks_;
    std::vector<float> results_;
};

}  // namespace
