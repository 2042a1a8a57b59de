// One new token of every row: which families close, then a task for each key head of each row.
#pragma once
#include <vector>

#include "hsa/native/arguments.h"
#include "native/threads/team.h"

namespace {

class Decoding : public Team {
   public:
    Decoding(Decode& d, const Variant& v)
        : Team(d.batch * d.key_heads, (int)most(1, least(d.threads, d.batch * d.heads / 16)),
               v.decode_floats(&d)),
          d_(d), v_(v), closing_((size_t)(d.batch * d.levels), Closing{0, 0}) {}

    // Whether every level has room for what is added. Nothing has changed if not.
    bool has_room() {
        d_.missing = -1;
        for (int64_t b = 0; b < d_.batch; b++) {
            if (!d_.rows[b]) continue;
            for (int64_t l = 0; l < d_.levels; l++) {
                const int64_t filled = d_.filled[l][b];
                // A level gets one more if the one below closes, the lowest the token.
                const bool closes = l < d_.closes[b], gets = l == 0 || l - 1 < d_.closes[b];
                const int64_t needed = l == 0 ? (closes ? 1 : filled + 1) : filled + (gets ? 1 : 0);
                if (needed > d_.room[l]) d_.missing = l;
            }
            if (d_.closes[b] >= d_.levels) d_.missing = d_.levels;
        }
        return d_.missing < 0;
    }

    void close() {
        for (int64_t b = 0; b < d_.batch; b++) {
            if (!d_.rows[b]) continue;
            for (int64_t l = 0; l < d_.closes[b]; l++) {
                int64_t *filled = d_.filled[l] + b, *above = d_.filled[l + 1] + b;
                if (!*filled) continue;
                int64_t total = 0;
                for (int64_t i = 0; i < *filled; i++) total += d_.counts[l][b * d_.room[l] + i];
                closing_[(size_t)(b * d_.levels + l)] = {*filled, *above};
                d_.counts[l + 1][b * d_.room[l + 1] + *above] = total;
                (*above)++;
                *filled = 0;
            }
        }
    }

    void task(int64_t number, float* scratch) override {
        const int64_t b = number / d_.key_heads;
        v_.decode(&d_, b, number % d_.key_heads, &closing_[(size_t)(b * d_.levels)], scratch);
    }

    void add_tokens() {
        for (int64_t b = 0; b < d_.batch; b++) {
            if (!d_.rows[b]) continue;
            int64_t* filled = d_.filled[0] + b;
            d_.counts[0][b * d_.room[0] + (*filled)++] = 1;
        }
    }

   private:
    Decode& d_;
    const Variant& v_;
    std::vector<Closing> closing_;
};

}  // namespace
