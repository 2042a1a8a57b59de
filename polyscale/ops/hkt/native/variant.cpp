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
#include "simd/forward.h"
#include "simd/backward.h"
#include "simd/decode.h"

int64_t scratch_floats(const Arguments* p) {
    ForwardScratch forward;
    BackwardScratch backward;
    // Counted from an address that is never used.
    float* none = (float*)64;
    return most(forward.reserve(*p, Scratch{none}) - none,
                backward.reserve(*p, Scratch{none}) - none);
}

int64_t decode_floats(const Arguments* p) {
    DecodeScratch decode;
    float* none = (float*)64;
    return decode.reserve(*p, Scratch{none}) - none;
}
}  // namespace

extern "C" const Variant POLYSCALE_VARIANT;
const Variant POLYSCALE_VARIANT = {
    QUERY_BLOCK,  scratch_floats, forward_block, backward_part,
    DECODE_CHUNK, decode_floats,  decode_chunk,
};
