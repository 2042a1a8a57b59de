// A vector of floats and the few operations on it, for the instructions it is compiled for.
#pragma once
#define INFINITE __builtin_inff()
#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
// For loops over the registers of a tile: one that is left a loop keeps them all in memory.
#define UNROLL _Pragma("GCC unroll 16")

// Rows of a tile: as many as the registers hold. TILE columns of them divide into PRODUCT_ROWS, which
// go with two vectors of columns, or half of them with WIDE_TILE vectors: fewer rows to load from.
#if defined(__AVX512F__)
enum { WIDTH = 16, SCORE_ROWS = 8, PRODUCT_ROWS = 12, WIDE_TILE = 4 };
#elif defined(__AVX2__)
enum { WIDTH = 8, SCORE_ROWS = 4, PRODUCT_ROWS = 6, WIDE_TILE = 2 };
#else
enum { WIDTH = 4, SCORE_ROWS = 4, PRODUCT_ROWS = 6, WIDE_TILE = 2 };
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));

INLINE Vector load(const float* from) {
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float* to, Vector x) { memcpy(to, &x, sizeof x); }

// The first half of the lanes.
INLINE void store_half(float* to, Vector x) { memcpy(to, &x, sizeof x / 2); }

INLINE Integers bits(Vector x) { return (Integers)x; }

INLINE Vector choose(Integers mask, Vector yes, Vector no) {
    return (Vector)((mask & bits(yes)) | (~mask & bits(no)));
}

#if defined(__AVX512F__)
INLINE Vector splat(float x) { return (Vector)_mm512_set1_ps(x); }
// The second argument if either is not a number.
INLINE Vector larger(Vector a, Vector b) { return (Vector)_mm512_max_ps((__m512)a, (__m512)b); }
// x0 x0 x1 x1 ...
INLINE Vector load_doubled(const float* from) {
    const __m512i index = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return (Vector)_mm512_permutexvar_ps(index, _mm512_castps256_ps512(_mm256_loadu_ps(from)));
}
// a0 + a1, a2 + a3, ..., b0 + b1, ...
INLINE Vector add_pairs(Vector a, Vector b) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return (Vector)_mm512_add_ps(_mm512_permutex2var_ps((__m512)a, even, (__m512)b),
                                 _mm512_permutex2var_ps((__m512)a, odd, (__m512)b));
}
#elif defined(__AVX2__)
INLINE Vector splat(float x) { return (Vector)_mm256_set1_ps(x); }
INLINE Vector larger(Vector a, Vector b) { return (Vector)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Vector load_doubled(const float* from) {
    const __m256i index = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return (Vector)_mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), index);
}
INLINE Vector add_pairs(Vector a, Vector b) {
    const __m256 pairs = _mm256_hadd_ps((__m256)a, (__m256)b);  // a01 a23 b01 b23 a45 a67 b45 b67
    return (Vector)_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(pairs), 0xD8));
}
#else
INLINE Vector splat(float x) { return x - Vector{}; }
INLINE Vector larger(Vector a, Vector b) { return choose((Integers)(a > b), a, b); }
INLINE Vector load_doubled(const float* from) {
    Vector x;
    for (int i = 0; i < WIDTH; i++) x[i] = from[i / 2];
    return x;
}
INLINE Vector add_pairs(Vector a, Vector b) {
    Vector x;
    for (int i = 0; i < WIDTH / 2; i++) {
        x[i] = a[2 * i] + a[2 * i + 1];
        x[i + WIDTH / 2] = b[2 * i] + b[2 * i + 1];
    }
    return x;
}
#endif

INLINE Integers lane_numbers() {
    Integers x;
    for (int i = 0; i < WIDTH; i++) x[i] = i;
    return x;
}

// exp(x) for x <= 0, within 2e-7; exactly 0 below -88, so that no denormal number slows a product.
INLINE Vector exponential(Vector x) {
    const Vector log2_e = splat(1.44269504f), shift = splat(12582912.0f);  // 1.5 * 2**23
    x = larger(splat(-88.03f), x);
    const Vector shifted = x * log2_e + shift;  // the whole part stands in the low bits
    // What the float log2_e leaves out counts where x is far below zero.
    const Vector f = x * splat(1.92596299e-8f) + (x * log2_e - (shifted - shift));
    Vector y = splat(0.001326472731307149f);
    y = y * f + splat(0.009671512991189957f);
    y = y * f + splat(0.05550733581185341f);
    y = y * f + splat(0.24022242426872253f);
    y = y * f + splat(0.6931470036506653f);
    y = y * f + splat(1.0f);
    return y * (Vector)((bits(shifted) << 23) + 0x3F800000);
}

// 2**x for x <= 0, within 2e-7; exactly 0 below -126.5.
INLINE Vector power_of_two(Vector x) {
    const Vector shift = splat(12582912.0f);  // 1.5 * 2**23: the whole part stands in the low bits
    x = larger(splat(-127.0f), x);
    const Vector shifted = x + shift;
    const Vector f = x - (shifted - shift);
    Vector y = splat(0.001326472731307149f);
    y = y * f + splat(0.009671512991189957f);
    y = y * f + splat(0.05550733581185341f);
    y = y * f + splat(0.24022242426872253f);
    y = y * f + splat(0.6931470036506653f);
    y = y * f + splat(1.0f);
    return y * (Vector)((bits(shifted) << 23) + 0x3F800000);
}

// The sum of the lanes.
INLINE float total(Vector x) {
    float lanes[WIDTH];
    store(lanes, x);
    UNROLL for (int half = WIDTH / 2; half > 0; half /= 2)
        UNROLL for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// acc[r][c] += sum_k a(r, k) * b[k][c], where a(r, k) is rows[r][k], or if TRANSPOSED
// rows[0][k * pitch + r].
template <int R, int C, bool TRANSPOSED>
INLINE void multiply(Vector (&acc)[R][C], int64_t count, const float* const* rows, int64_t pitch,
                     const float* b, int64_t b_pitch) {
    const float* a[R];
    for (int r = 0; r < R; r++) a[r] = TRANSPOSED ? rows[0] + r : rows[r];
    const float* column = rows[0];
// Unrolled further, the addresses no longer fit in registers.
#pragma GCC unroll 1
    for (int64_t k = 0; k < count; k++) {
        Vector right[C];
        UNROLL for (int c = 0; c < C; c++) right[c] = load(b + c * WIDTH);
        UNROLL for (int r = 0; r < R; r++) {
            const Vector left = splat(TRANSPOSED ? column[r] : a[r][k]);
            UNROLL for (int c = 0; c < C; c++) acc[r][c] = left * right[c] + acc[r][c];
        }
        b += b_pitch;
        if (TRANSPOSED) column += pitch;
    }
}
