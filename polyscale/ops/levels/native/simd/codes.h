// Vectors of 16 lanes for every set of instructions, codes and float16 scales as floats.
#pragma once

typedef float Wide __attribute__((vector_size(64)));
typedef int32_t WideIntegers __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// Heads that go over the codes together, and vectors of tokens or channels: what registers hold.
#if defined(__AVX512F__)
enum { MOST_HEADS = 4, ACROSS = 4 };
#elif defined(__AVX2__)
enum { MOST_HEADS = 4, ACROSS = 1 };
#else
enum { MOST_HEADS = 2, ACROSS = 1 };
#endif

template <class T>
INLINE T read(const void* from) {
    T x;
    memcpy(&x, from, sizeof x);
    return x;
}
template <class T>
INLINE void write(void* to, T x) {
    memcpy(to, &x, sizeof x);
}
INLINE Wide all(float x) { return x - Wide{}; }
INLINE Wide select(WideIntegers mask, Wide yes, Wide no) {
    return (Wide)((mask & (WideIntegers)yes) | (~mask & (WideIntegers)no));
}

INLINE float sum_of(Wide x) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight halves[2];
    memcpy(halves, &x, sizeof x);
    const Eight eight = halves[0] + halves[1];
    Four quarters[2];
    memcpy(quarters, &eight, sizeof eight);
    const Four four = quarters[0] + quarters[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// The sum of each of 16 vectors.
INLINE Wide sums_of(const Wide* x) {
#if defined(__AVX512F__)
    __m512 two[8], four[4], eight[2];
    UNROLL for (int i = 0; i < 8; i++) {
        const __m512 a = (__m512)x[2 * i], b = (__m512)x[2 * i + 1];
        two[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        const __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    UNROLL for (int i = 0; i < 2; i++)
        eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xDD));
    return (Wide)_mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),
                               _mm512_shuffle_f32x4(eight[0], eight[1], 0xDD));
#else
    Wide sums;
    for (int i = 0; i < LANES; i++) sums[i] = sum_of(x[i]);
    return sums;
#endif
}

// Codes as floats: those of keys count from 0, those of values at 4 bits from -8.
enum Kind { KEYS, VALUES, VALUES_2 };

template <Kind KIND>
struct Decoder {
#if defined(__AVX512F__)
    // A look at a table of 16 floats, which reads the four lowest bits and no others.
    __m512 table;
    INLINE_MEMBER Decoder() {
        float numbers[LANES];
        for (int i = 0; i < LANES; i++)
            numbers[i] = KIND == KEYS ? (float)i : KIND == VALUES ? (float)(i - 8) : (float)(i & 3);
        table = _mm512_loadu_ps(numbers);
    }
    INLINE_MEMBER Wide operator()(Words x) const {
        return (Wide)_mm512_permutexvar_ps((__m512i)x, table);
    }
#else
    INLINE_MEMBER Wide operator()(Words x) const {
        WideIntegers codes = (WideIntegers)(x & (KIND == VALUES_2 ? 3u : 15u));
        if (KIND == VALUES) codes -= 8;
        return __builtin_convertvector(codes, Wide);
    }
#endif
};

// The codes of 16 neighbouring channels, which are two words of one token: lane n is nibble n.
INLINE Words spread(uint32_t low, uint32_t high) {
    const WideIntegers lane = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
    const Words first = {~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
    const Words both = (first & low) | (~first & high);
    return (both >> (Words)(lane * 4)) & 15u;
}

INLINE Wide from_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Wide)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
    const Words x = __builtin_convertvector(read<Halves>(from), Words);
    const Wide size = (Wide)((x & 0x7FFFu) << 13) * all(5.192296858534828e33f);  // 2**112
    const Words beyond = (Words)(size >= all(65536.0f)) & 0x7F800000u;
    return (Wide)((Words)size | beyond | (x & 0x8000u) << 16);
#endif
}
INLINE float from_half(uint16_t x) {
    uint16_t lanes[LANES] = {x};
    return from_halves(lanes)[0];
}

// `larger` and `exponential` on 16 lanes.
INLINE Wide wider(Wide a, Wide b) {
    Vector x[LANES / WIDTH], y[LANES / WIDTH];
    memcpy(x, &a, sizeof a), memcpy(y, &b, sizeof b);
    UNROLL for (int i = 0; i < LANES / WIDTH; i++) x[i] = larger(x[i], y[i]);
    memcpy(&a, x, sizeof a);
    return a;
}
INLINE Wide exponentials_of(Wide a) {
    Vector x[LANES / WIDTH];
    memcpy(x, &a, sizeof a);
    UNROLL for (int i = 0; i < LANES / WIDTH; i++) x[i] = exponential(x[i]);
    memcpy(&a, x, sizeof a);
    return a;
}
INLINE float exponential_of(float x) { return exponentials_of(all(x))[0]; }

INLINE float largest_of(Wide x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

// The first `count` lanes, minus infinity in the others.
INLINE Wide first_of(Wide x, int64_t count) {
    const WideIntegers lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return select(lane < (int32_t)least(count, LANES), x, all(-INFINITE));
}

// Heads of a group in equal parts that the registers hold: part(0), part(1), ...
INLINE int64_t heads_at_once(int64_t group) {
    const int64_t parts = (group + MOST_HEADS - 1) / MOST_HEADS;
    return (group + parts - 1) / parts;
}

// call<1>, call<2>, ... for a number known when the program runs.
#define FOR_HEADS(count, call)              \
    switch (count) {                        \
        case 1: call(1); break;             \
        case 2: call(2); break;             \
        case 3: call(MOST_HEADS < 3 ? 1 : 3); break; \
        default: call(MOST_HEADS < 4 ? 1 : 4); break; \
    }
