// Which instructions to use: the inner part of a kernel is compiled once for each set.
#pragma once

namespace {

enum { PORTABLE = 0, AVX2 = 1, AVX512 = 2 };

int best_variant() {
#ifdef POLYSCALE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return AVX2;
#endif
    return PORTABLE;
}

// A caller may ask for a lesser variant, never for one that the processor lacks.
int chosen_variant(int asked) {
    const int best = best_variant();
    return asked < 0 || asked > best ? best : asked;
}

}  // namespace

// variant(asked): one of the tables NAME_portable, NAME_avx2 and NAME_avx512 of type `Variant`.
#ifdef POLYSCALE_X86
#define DECLARE_VARIANTS(name)                              \
    extern "C" const Variant name##_portable;               \
    extern "C" const Variant name##_avx2;                   \
    extern "C" const Variant name##_avx512;                 \
    static inline const Variant& variant(int asked) {       \
        const int chosen = chosen_variant(asked);           \
        if (chosen == AVX512) return name##_avx512;         \
        return chosen == AVX2 ? name##_avx2 : name##_portable; \
    }
#else
#define DECLARE_VARIANTS(name)                \
    extern "C" const Variant name##_portable; \
    static inline const Variant& variant(int) { return name##_portable; }
#endif
