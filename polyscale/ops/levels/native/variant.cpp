// The kernel for one set of instructions: compiled once for each, with its own flags and name.
// Everything but the table is private to this file, so that the linker cannot hand code for one
// processor to another.
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "arguments.h"

namespace {
#include "native/simd/vectors.h"
#include "simd/coarse.h"
#include "simd/exact.h"
#include "simd/choose.h"
#include "simd/pack.h"

int64_t scratch_floats(const Attention* a) {
    const Store& s = *a->store;
    const Head head(s, 0, 0);
    const int64_t group = a->heads / s.heads;
    const int64_t coarse = group * (most(head.wide, head.scale_rows * BLOCK) + head.scale_rows + 1);
    const int64_t exact = 2 * group * PIECE + PIECE * most(head.wide, head.value_wide);
    const int64_t factors = round_up((a->longest / STRETCH + 1) * group, LANES);
    const int64_t ranks = a->mass < 0.0 ? least(a->heavy, a->longest) + MORE_CANDIDATES + LANES
                                        : BUCKETS + a->longest;
    return most(most(coarse, exact), factors + 2 * ranks) + LANES;
}

int64_t packing_floats(const Store* s) {
    // 64 rows of floats, and one row of 16 bits of either.
    return (BLOCK + 1) * (round_up(s->width, LANES) + round_up(s->value_width, LANES));
}
}  // namespace

extern "C" const Variant POLYSCALE_VARIANT;
const Variant POLYSCALE_VARIANT = {
    scratch_floats, score_stretch, score_always, choose,     weigh_stretch,  weigh_always,
    weigh_opened,   merge,         widen_kept,   halve_row,  packing_floats, pack_block,
};
