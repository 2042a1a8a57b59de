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
#include "simd/attend.h"
#include "simd/backward.h"
#include "simd/choose.h"

// Counted from an address that is never used.
float* const NOWHERE = (float*)64;

int64_t choose_floats(const Arguments* p, int64_t longest, int64_t sinks) {
    ChooseScratch my;
    return my.reserve(*p, longest, sinks, Scratch{NOWHERE}) - NOWHERE;
}

int64_t attend_floats(const Arguments* p, int64_t heads, int64_t view) {
    AttendScratch my;
    return my.reserve(*p, heads, view, Scratch{NOWHERE}) - NOWHERE;
}

int64_t backward_floats(const Arguments* p, int64_t heads, int64_t view) {
    BackwardScratch my;
    return my.reserve(*p, heads, view, Scratch{NOWHERE}) - NOWHERE;
}
}  // namespace

extern "C" const Variant POLYSCALE_VARIANT;
const Variant POLYSCALE_VARIANT = {
    choose_units,    choose_floats, choose_units_from, attend_floats, attend_unit,
    backward_floats, backward_unit, add_gradients,     pool_blocks,   unpool_blocks,
};
