// The kernel for one set of instructions: compiled once for each, with its own flags and name.
// Everything but the table is private to this file, so that the linker cannot hand code for one
// processor to another.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "hsa/native/arguments.h"

namespace {
#include "native/simd/vectors.h"

#include "simd/rows.h"
#include "simd/piece.h"
#include "simd/families.h"
#include "simd/blocks.h"
#include "simd/blocks_backward.h"
#include "simd/columns.h"
#include "simd/columns_forward.h"
#include "simd/columns_backward.h"
#include "simd/decode.h"

// Counted from an address that is never used.
float* const NONE = (float*)64;

int64_t shared_floats(const AttentionArguments* p, const Unit* unit, bool backward) {
    Scratch memory = {NONE};
    const TreePlan plan = read_plan(p->plan);
    const Shape s = shape_of(*p, backward);
    if (p->columns) {
        ColumnsShared shared;
        shared.reserve(s, plan, *unit, &memory);
    } else {
        BlocksShared shared;
        shared.reserve(s, plan, *unit, &memory);
    }
    return memory.next - NONE;
}

int64_t own_floats(const AttentionArguments* p, const TreePlan* plan, bool backward) {
    Scratch memory = {NONE};
    const Shape s = shape_of(*p, backward);
    if (p->columns) {
        ColumnsScratch my;
        my.reserve(s, *plan->header, &memory);
    } else {
        BlocksScratch my;
        my.reserve(s, &memory);
    }
    Nodes n;
    n.reserve(s, plan->header->chunk_nodes, &memory);
    return memory.next - NONE;
}

void forward(const Work* w, int step, int64_t segment) {
    (w->arguments->columns ? columns_forward : blocks_forward)(w, step, segment);
}

void backward(const Work* w, int step, int64_t segment) {
    (w->arguments->columns ? columns_backward : blocks_backward)(w, step, segment);
}
}  // namespace

extern "C" const Variant POLYSCALE_VARIANT;
const Variant POLYSCALE_VARIANT = {shared_floats, own_floats,    see_unit, forward,
                                   backward,      decode_floats, decode};
