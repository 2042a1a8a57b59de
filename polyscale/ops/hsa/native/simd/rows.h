// Rows in memory: read, written, transposed, multiplied.

// Rows at equal distances, of a piece's nodes.
struct Rows {
    const float* data;
    int64_t pitch;
    const float* operator[](int64_t node) const { return data + node * pitch; }
};

INLINE int64_t padded(int64_t width) { return round_up(width, WIDTH); }

INLINE const char* row_of(const AttentionArguments& p, const Tensor& t, int64_t batch, int64_t head,
                          int64_t row) {
    return (const char*)t.data + (batch * t.batch + head * t.head + row * t.row) *
                                     (p.bfloat16 ? 2 : 4);
}

// A row of an input as floats times a factor, zero up to a multiple of the vector's width.
INLINE void read_row(const AttentionArguments& p, const char* from, int64_t width, float factor, float* to) {
    int64_t i = 0;
    if (p.bfloat16) {
        for (; i + WIDTH <= width; i += WIDTH) {
            uint16_t half[WIDTH];
            uint32_t wide[WIDTH];
            memcpy(half, from + 2 * i, sizeof half);
            for (int l = 0; l < WIDTH; l++) wide[l] = (uint32_t)half[l] << 16;
            memcpy(to + i, wide, sizeof wide);
            store(to + i, splat(factor) * load(to + i));
        }
        for (; i < width; i++) {
            uint16_t half;
            memcpy(&half, from + 2 * i, 2);
            to[i] = factor * from_bfloat16(half);
        }
    } else {
        for (; i + WIDTH <= width; i += WIDTH)
            store(to + i, splat(factor) * load((const float*)from + i));
        for (; i < width; i++) to[i] = factor * ((const float*)from)[i];
    }
    for (; i < padded(width); i++) to[i] = 0.0f;
}

INLINE void write_row(const AttentionArguments& p, const float* from, int64_t width, char* to) {
    int64_t i = 0;
    if (p.bfloat16) {
        for (; i < width; i++) ((uint16_t*)to)[i] = to_bfloat16(from[i]);
        return;
    }
    for (; i + WIDTH <= width; i += WIDTH) store((float*)to + i, load(from + i));
    for (; i < width; i++) ((float*)to)[i] = from[i];
}

// A row of a gradient, which is float32 whatever the inputs are.
INLINE float* gradient_row(const Tensor& t, int64_t batch, int64_t head, int64_t row) {
    return (float*)t.data + batch * t.batch + head * t.head + row * t.row;
}

// Past the caches, to whole vectors' addresses, for results that are too large to stay in them.
INLINE void store_to_memory(float* to, Vector x) {
#if defined(__AVX512F__)
    _mm512_stream_ps(to, (__m512)x);
#elif defined(__AVX2__)
    _mm256_stream_ps(to, (__m256)x);
#else
    store(to, x);
#endif
}

// Before another thread reads what was stored so.
INLINE void wait_for_memory() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

INLINE void put_floats(const float* from, float factor, int64_t width, float* to) {
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) store(to + i, splat(factor) * load(from + i));
    for (; i < width; i++) to[i] = factor * from[i];
}

INLINE void clear_row(float* to, int64_t width) {
    for (int64_t i = 0; i < width; i += WIDTH) store(to + i, Vector{});
}

// to += factor * from; both padded.
INLINE void add_row(float* to, float factor, const float* from, int64_t width) {
    for (int64_t i = 0; i < width; i += WIDTH)
        store(to + i, splat(factor) * load(from + i) + load(to + i));
}

#if defined(__AVX512F__)
INLINE void transpose_block(const float* const* rows, float* to) {
    __m512 a[16], b[16];
    UNROLL for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(rows[i]);
    UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4) {
        UNROLL for (int j = 0; j < 2; j++) {
            const __m512d x = _mm512_castps_pd(b[i + j]), y = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
        }
    }
    // a[4 i + j] holds the columns j, j + 4, j + 8, j + 12 of rows 4 i to 4 i + 3.
    UNROLL for (int j = 0; j < 4; j++) {
        const __m512 low = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88);
        const __m512 high = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88);
        const __m512 low2 = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xDD);
        const __m512 high2 = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xDD);
        _mm512_storeu_ps(to + j * WIDTH, _mm512_shuffle_f32x4(low, high, 0x88));
        _mm512_storeu_ps(to + (8 + j) * WIDTH, _mm512_shuffle_f32x4(low, high, 0xDD));
        _mm512_storeu_ps(to + (4 + j) * WIDTH, _mm512_shuffle_f32x4(low2, high2, 0x88));
        _mm512_storeu_ps(to + (12 + j) * WIDTH, _mm512_shuffle_f32x4(low2, high2, 0xDD));
    }
}
#elif defined(__AVX2__)
INLINE void transpose_block(const float* const* rows, float* to) {
    __m256 a[8], b[8];
    UNROLL for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows[i]);
    UNROLL for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL for (int i = 0; i < 8; i += 4) {
        UNROLL for (int j = 0; j < 2; j++) {
            const __m256d x = _mm256_castps_pd(b[i + j]), y = _mm256_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
            a[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
        }
    }
    UNROLL for (int j = 0; j < 4; j++) {
        _mm256_storeu_ps(to + j * WIDTH, _mm256_permute2f128_ps(a[j], a[4 + j], 0x20));
        _mm256_storeu_ps(to + (4 + j) * WIDTH, _mm256_permute2f128_ps(a[j], a[4 + j], 0x31));
    }
}
#else
INLINE void transpose_block(const float* const* rows, float* to) {
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < WIDTH; j++) to[j * WIDTH + i] = rows[i][j];
}
#endif

// a . b of two padded rows.
INLINE float row_product(const float* a, const float* b, int64_t width) {
    Vector sum = Vector{};
    for (int64_t i = 0; i < width; i += WIDTH) sum = load(a + i) * load(b + i) + sum;
    float total = 0.0f;
    for (int l = 0; l < WIDTH; l++) total += sum[l];
    return total;
}

// One row per lane: to[d][lane] = rows[lane][d].
INLINE void transpose(const float* const* rows, int64_t width, float* to) {
    for (int64_t d = 0; d < width; d += WIDTH) {
        const float* from[WIDTH];
        for (int l = 0; l < WIDTH; l++) from[l] = rows[l] + d;
        transpose_block(from, to + d * WIDTH);
    }
}

// a . b of N pairs of rows, in order; N = WIDTH in the end.
template <int N, int VECTORS>
INLINE Vector products_of(const float* const* a, const float* const* b, int64_t width) {
    if constexpr (N > 1) {
        return add_pairs(products_of<N / 2, VECTORS>(a, b, width),
                         products_of<N / 2, VECTORS>(a + N / 2, b + N / 2, width));
    } else {
        Vector sum = load(a[0]) * load(b[0]);
        if constexpr (VECTORS > 0) {
            UNROLL for (int v = 1; v < VECTORS; v++)
                sum = load(a[0] + v * WIDTH) * load(b[0] + v * WIDTH) + sum;
        } else {
            for (int64_t i = WIDTH; i < width; i += WIDTH)
                sum = load(a[0] + i) * load(b[0] + i) + sum;
        }
        return sum;
    }
}

INLINE Vector lane_products(const float* const* a, const float* const* b, int64_t width) {
    // Heads of 64 channels are by far the most common.
    if (width == 64) return products_of<WIDTH, 64 / WIDTH>(a, b, width);
    return products_of<WIDTH, 0>(a, b, width);
}

// to[r][0..C) (+)= sum_k a(r, k) b[k][0..C), where a(r, k) is a[r * pitch + k], or if TRANSPOSED
// a[k * pitch + r].
template <int R, int C, bool TRANSPOSED, bool FRESH>
INLINE void matrix_tile(int64_t count, const float* a, int64_t pitch, const float* b,
                        int64_t b_pitch, float* to, int64_t to_pitch) {
    Vector acc[R][C];
    const float* rows[R];
    UNROLL for (int r = 0; r < R; r++) {
        rows[r] = TRANSPOSED ? a + r : a + r * pitch;
        UNROLL for (int c = 0; c < C; c++)
            acc[r][c] = FRESH ? Vector{} : load(to + r * to_pitch + c * WIDTH);
    }
    multiply<R, C, TRANSPOSED>(acc, count, rows, pitch, b, b_pitch);
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < C; c++) store(to + r * to_pitch + c * WIDTH, acc[r][c]);
}

template <int R, int C, bool TRANSPOSED, bool FRESH>
INLINE void matrix_columns(int64_t rows, int64_t count, const float* a, int64_t pitch,
                           const float* b, int64_t b_pitch, float* to, int64_t to_pitch) {
    int64_t r = 0;
    const int64_t step = TRANSPOSED ? 1 : pitch;
    for (; r + R <= rows; r += R)
        matrix_tile<R, C, TRANSPOSED, FRESH>(count, a + r * step, pitch, b, b_pitch,
                                             to + r * to_pitch, to_pitch);
    for (; r < rows; r++)
        matrix_tile<1, C, TRANSPOSED, FRESH>(count, a + r * step, pitch, b, b_pitch,
                                             to + r * to_pitch, to_pitch);
}

// A product of matrices, `width` a multiple of WIDTH; added to what is there unless FRESH.
template <bool TRANSPOSED, bool FRESH>
static void multiply_rows(int64_t rows, int64_t count, const float* a, int64_t pitch,
                          const float* b, int64_t b_pitch, float* to, int64_t to_pitch,
                          int64_t width) {
    int64_t d = 0;
    for (; d + WIDE_TILE * WIDTH <= width; d += WIDE_TILE * WIDTH)
        matrix_columns<4, WIDE_TILE, TRANSPOSED, FRESH>(rows, count, a, pitch, b + d, b_pitch,
                                                        to + d, to_pitch);
    for (; d < width; d += WIDTH)
        matrix_columns<8, 1, TRANSPOSED, FRESH>(rows, count, a, pitch, b + d, b_pitch, to + d,
                                                to_pitch);
}

INLINE Vector smaller(Vector a, Vector b) { return choose((Integers)(a < b), a, b); }

// log(x) for x >= 1, within 1e-7 of it.
INLINE Vector logarithm(Vector x) {
    const Integers half = {};
    // The mantissa between sqrt(1/2) and sqrt(2).
    const Integers shifted = bits(x) - (half + 0x3F3504F3);
    const Integers exponent = shifted >> 23;
    const Vector m = (Vector)((shifted & 0x007FFFFF) + 0x3F3504F3);
    const Vector s = (m - splat(1.0f)) / (m + splat(1.0f)), z = s * s;
    Vector y = splat(0.2222222222f);
    y = y * z + splat(0.2857142857f);
    y = y * z + splat(0.4f);
    y = y * z + splat(0.6666666667f);
    const Vector e = __builtin_convertvector(exponent, Vector);
    return e * splat(0.693147182f) + (s * (y * z) + (s + s));
}

// Scores become weights; returns the logarithm of their sum, minus infinity where there are none.
static Vector normalise(float* x, int64_t columns) {
    Vector top = splat(-INFINITE);
    for (int64_t c = 0; c < columns; c++) top = larger(top, load(x + c * WIDTH));
    top = choose((Integers)(top == splat(-INFINITE)), Vector{}, top);
    Vector total = Vector{};
    for (int64_t c = 0; c < columns; c++) {
        const Vector e = exponential(load(x + c * WIDTH) - top);
        total = total + e;
        store(x + c * WIDTH, e);
    }
    const Integers empty = (Integers)(total == Vector{});
    const Vector share = choose(empty, Vector{}, splat(1.0f) / total);
    for (int64_t c = 0; c < columns; c++) store(x + c * WIDTH, load(x + c * WIDTH) * share);
    return choose(empty, splat(-INFINITE), logarithm(total) + top);
}

#if defined(__AVX512F__)
INLINE Vector gather(const float* from, Integers at) {
    return (Vector)_mm512_i32gather_ps((__m512i)at, from, 4);
}
#else
INLINE Vector gather(const float* from, Integers at) {
    Vector x;
    for (int l = 0; l < WIDTH; l++) x[l] = from[at[l]];
    return x;
}
#endif
