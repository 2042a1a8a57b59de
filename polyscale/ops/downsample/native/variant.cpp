// Downsampling for one set of instructions: compiled once for each, with its own flags and name.
// Everything but the table is private to this file, so that the linker cannot hand code for one
// processor to another.
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "arguments.h"

namespace {
#include "simd/downsample.h"
}  // namespace

extern "C" const Variant POLYSCALE_VARIANT;
const Variant POLYSCALE_VARIANT = {downsample_part, downsample_backward_part};
