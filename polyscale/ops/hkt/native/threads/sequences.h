// The instructions HKT's kernel has, and the sequences of a arguments.
#pragma once
#include <math.h>

#include "native/threads/instructions.h"
#include "native/threads/team.h"
#include "../arguments.h"

DECLARE_VARIANTS(hkt)

namespace {

std::vector<Sequence> sequences_of(const Arguments& p) {
    std::vector<Sequence> all;
    for (int64_t b = 0; b < p.batch; b++)
        for (int64_t h = 0; h < p.heads; h++)
            for (int64_t n = 0; n < most(1, p.sequences); n++) {
                Sequence s{b, h, {}, p.lengths ? p.lengths[b] : p.length};
                if (p.sequences) {
                    for (int64_t l = 0; l < p.levels; l++)
                        s.start[l] = p.boundaries[l * (p.sequences + 1) + n];
                    s.length = p.boundaries[n + 1] - p.boundaries[n];
                }
                all.push_back(s);
            }
    return all;
}

}  // namespace
