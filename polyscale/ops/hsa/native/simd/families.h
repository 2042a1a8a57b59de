// Lanes: children of one large family, or of several small ones, each a row of its family's matrix.

template <int N>
struct Number {
    static constexpr int value = N;
};

struct Group {
    int64_t lane0, lanes, columns;
    int64_t family, size;  // of the large family; -1 for several small ones
    int64_t parent;        // the first
    int64_t parents;       // nodes from it on, leaves among them
    int64_t equal;         // size of each of its small families; 0 if they differ
    bool inner;            // of equal families: whether no lane is a leaf (of the tree)
    // Of each lane: where its family starts and how large it is, which child it is, its parent.
    alignas(64) int32_t first[WIDTH], sizes[WIDTH], own[WIDTH], above[WIDTH];

    bool packed() const { return family < 0; }
    // Whether no later group has lanes of its families.
    bool last() const { return packed() || lane0 + lanes == family + size; }
    bool stored() const { return columns <= STORED; }
    // Vectors that are kept of it.
    int64_t kept() const { return stored() ? columns : 1; }

    void set_lane(int64_t lane, int64_t start, int64_t count, int64_t child, int64_t up) {
        first[lane] = (int32_t)start;
        sizes[lane] = (int32_t)count;
        own[lane] = (int32_t)child;
        above[lane] = (int32_t)up;
    }
    // Lanes without a node are like the first.
    void fill() {
        for (int64_t l = lanes; l < WIDTH; l++) set_lane(l, first[0], sizes[0], own[0], above[0]);
    }
};

INLINE Integers load_integers(const int32_t* from) {
    Integers x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store_integers(int32_t* to, Integers x) { memcpy(to, &x, sizeof x); }

// Families of one size, as many as go in a vector at a time.
template <class Visit>
INLINE void for_equal_groups(const View& v, int64_t level, int64_t size, Visit visit) {
    const int64_t parents = v.end(level) - v.begin(level), each = WIDTH / size;
    int32_t lane_family[WIDTH], lane_own[WIDTH];
    for (int32_t l = 0; l < WIDTH; l++) {
        const int32_t family = l < each * size ? l / (int32_t)size : 0;
        lane_family[l] = family;
        lane_own[l] = l < each * size ? l % (int32_t)size : 0;
    }
    const Integers family = load_integers(lane_family), own = load_integers(lane_own);
    const Integers first = family * (int32_t)size, lane = lane_numbers();
    Group g;
    g.family = -1;
    g.size = 0;
    g.columns = g.equal = size;
    g.inner = v.top || v.level[level + 1].uniform > 0;
    for (int64_t done = 0; done < parents; done += each) {
        g.parents = least(each, parents - done);
        g.parent = v.begin(level) + done;
        g.lanes = g.parents * size;
        g.lane0 = v.at.first[g.parent];
        const Integers real = lane < (int32_t)g.lanes;
        store_integers(g.first, (first & real) + (int32_t)g.lane0);
        store_integers(g.sizes, Integers{} + (int32_t)size);
        store_integers(g.own, own & real);
        store_integers(g.above, (family & real) + (int32_t)g.parent);
        visit(g);
    }
}

// The groups of the families whose parents are at a level, from left to right.
template <class Visit>
INLINE void for_groups(const View& v, int64_t level, Visit visit) {
    const int64_t uniform = v.level[level].uniform;
    if (uniform && uniform <= most_packed(WIDTH)) {
        for_equal_groups(v, level, uniform, visit);
        return;
    }
    Group g;
    g.lanes = g.columns = g.parent = g.equal = 0;
    g.inner = false;
    const int64_t end = v.end(level);
    const auto flush = [&](int64_t parent) {
        if (!g.lanes) return;
        g.family = -1;
        g.size = 0;
        g.parents = parent - g.parent;
        g.fill();
        visit(g);
        g.lanes = 0;
    };
    for (int64_t i = v.begin(level); i < end; i++) {
        const int64_t count = v.at.count[i], first = v.at.first[i];
        if (!count) continue;
        if (count > most_packed(WIDTH)) {
            flush(i);
            g.family = first;
            g.size = g.columns = count;
            g.parent = i;
            g.parents = 1;
            for (int64_t row = 0; row < count; row += WIDTH) {
                g.lane0 = first + row;
                g.lanes = least(WIDTH, count - row);
                for (int64_t l = 0; l < g.lanes; l++) g.set_lane(l, first, count, row + l, i);
                g.fill();
                visit(g);
            }
            g.lanes = 0;
            continue;
        }
        if (g.lanes + count > WIDTH) flush(i);
        if (!g.lanes) {
            g.lane0 = first;
            g.parent = i;
            g.columns = 0;
        }
        for (int64_t k = 0; k < count; k++) g.set_lane(g.lanes + k, first, count, k, i);
        g.lanes += count;
        g.columns = most(g.columns, count);
    }
    flush(end);
}

INLINE Integers least_of(Integers a, Integers b) { return (a & (a < b)) | (b & ~(a < b)); }

INLINE Vector gather_lanes(const float* from, const int32_t* at) {
    return gather(from, load_integers(at));
}

// The rows of a group's lanes; lanes without a node repeat the first.
INLINE void lane_rows(const Group& g, const Rows& rows, const float** to) {
    for (int64_t l = 0; l < WIDTH; l++) to[l] = rows[g.lane0 + (l < g.lanes ? l : 0)];
}

// Products of N neighbours among the rows `a` with two rows of their families in `b`: two columns.
struct TwoColumns {
    Vector first, second;
};

template <int N, int VECTORS>
INLINE TwoColumns two_columns(const float* const* a, int64_t a_pitch, const float* const* b,
                              int64_t b_pitch, int64_t width) {
    if constexpr (N > 2) {
        const TwoColumns low = two_columns<N / 2, VECTORS>(a, a_pitch, b, b_pitch, width);
        const TwoColumns high =
            two_columns<N / 2, VECTORS>(a + N / 4, a_pitch, b + N / 4, b_pitch, width);
        return {add_pairs(low.first, high.first), add_pairs(low.second, high.second)};
    } else {
        const float *a0 = a[0], *a1 = a0 + a_pitch, *b0 = b[0], *b1 = b0 + b_pitch;
        Vector left = load(a0), right = load(a1), one = load(b0), two = load(b1);
        Vector x00 = left * one, x10 = right * one, x01 = left * two, x11 = right * two;
        const auto next = [&](int64_t i) __attribute__((always_inline)) {
            left = load(a0 + i), right = load(a1 + i), one = load(b0 + i), two = load(b1 + i);
            x00 = left * one + x00;
            x10 = right * one + x10;
            x01 = left * two + x01;
            x11 = right * two + x11;
        };
        if constexpr (VECTORS > 0) {
            UNROLL for (int v = 1; v < VECTORS; v++) next(v * WIDTH);
        } else {
            for (int64_t i = WIDTH; i < width; i += WIDTH) next(i);
        }
        return {add_pairs(x00, x10), add_pairs(x01, x11)};
    }
}

// x[c][lane] = the product of the lane's row in `a` and its family's row c in `b`, for families of one
// even size, in pairs of lanes and columns: each row is loaded half as often.
static void equal_products(const Group& g, const Rows& a, const Rows& b, int64_t width, float* x) {
    const float *lanes[WIDTH / 2], *families[WIDTH / 2], *columns[WIDTH / 2];
    for (int64_t l = 0; l < WIDTH; l += 2) {
        const int64_t lane = l < g.lanes ? l : 0;  // lanes without a node are like the first
        lanes[l / 2] = a[g.lane0 + lane];
        families[l / 2] = b[g.first[lane]];
    }
    for (int64_t c = 0; c < g.equal; c += 2) {
        UNROLL for (int i = 0; i < WIDTH / 2; i++) columns[i] = families[i] + c * b.pitch;
        const TwoColumns found =
            width == 64
                ? two_columns<WIDTH, 64 / WIDTH>(lanes, a.pitch, columns, b.pitch, width)
                : two_columns<WIDTH, 0>(lanes, a.pitch, columns, b.pitch, width);
        store(x + c * WIDTH, found.first);
        store(x + (c + 1) * WIDTH, found.second);
    }
}

// x[c - low][lane] = (or +=) the product of the lane's row in `a` and its family's row c in `b`.
template <bool FRESH>
static void family_products(const Group& g, const Rows& a, const Rows& b, int64_t width,
                            int64_t low, int64_t high, float* turned, float* x) {
    if (FRESH && g.equal && g.equal % 2 == 0) return equal_products(g, a, b, width, x);
    const float* lanes[WIDTH];
    lane_rows(g, a, lanes);
    if (!g.packed()) {
        transpose(lanes, width, turned);
        multiply_rows<false, FRESH>(high - low, width, b[g.family + low], b.pitch, turned, WIDTH,
                                    x, WIDTH, WIDTH);
        return;
    }
    for (int64_t c = low; c < high; c++) {
        const float* other[WIDTH];
        for (int l = 0; l < WIDTH; l++)
            other[l] = b[g.first[l] + least(c, g.sizes[l] - 1)];
        const Vector found = lane_products(lanes, other, width);
        float* to = x + (c - low) * WIDTH;
        store(to, FRESH ? found : load(to) + found);
    }
}

// Rows 0 to R of a family's lanes: start[0..C) + sum_k factor * weights[k * step + r * lane_step] rows[k].
template <int R, int C>
INLINE void mix_equal_tile(int64_t size, const float* weights, int64_t step, int64_t lane_step,
                           Vector factor, const float* rows, int64_t pitch, const float* start,
                           float* to, int64_t to_pitch, bool stream) {
    Vector sum[R][C];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < C; i++)
            sum[r][i] = start ? load(start + i * WIDTH) : Vector{};
#pragma GCC unroll 1
    for (int64_t k = 0; k < size; k++) {
        Vector row[C];
        UNROLL for (int i = 0; i < C; i++) row[i] = load(rows + k * pitch + i * WIDTH);
        UNROLL for (int r = 0; r < R; r++) {
            const Vector weight = factor * splat(weights[k * step + r * lane_step]);
            UNROLL for (int i = 0; i < C; i++) sum[r][i] = weight * row[i] + sum[r][i];
        }
    }
    if (stream) {
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int i = 0; i < C; i++)
                store_to_memory(to + r * to_pitch + i * WIDTH, sum[r][i]);
        return;
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < C; i++) store(to + r * to_pitch + i * WIDTH, sum[r][i]);
}

template <int R, int C>
INLINE void mix_equal_lanes(int64_t low, int64_t size, const float* weights, int64_t step,
                            int64_t lane_step, Vector factor, const float* rows, int64_t pitch,
                            const float* start, float* to, int64_t to_pitch, bool stream) {
    mix_equal_tile<R, C>(size, weights + low * lane_step, step, lane_step, factor, rows, pitch,
                         start, to + low * to_pitch, to_pitch, stream);
}

// All lanes of one family: each of its rows is loaded once for several lanes.
INLINE void mix_equal(int64_t size, const float* weights, int64_t step, int64_t lane_step,
                      Vector factor, Rows rows, const float* start, int64_t width, float* to,
                      int64_t to_pitch, bool stream = false) {
    const auto columns = [&](auto tile, int64_t d) __attribute__((always_inline)) {
        constexpr int C = decltype(tile)::value;
        const float *from = rows.data + d, *first = start ? start + d : nullptr;
        int64_t l = 0;
        for (; l + 4 <= size; l += 4)
            mix_equal_lanes<4, C>(l, size, weights, step, lane_step, factor, from, rows.pitch,
                                  first, to + d, to_pitch, stream);
        for (; l + 2 <= size; l += 2)
            mix_equal_lanes<2, C>(l, size, weights, step, lane_step, factor, from, rows.pitch,
                                  first, to + d, to_pitch, stream);
        for (; l < size; l++)
            mix_equal_lanes<1, C>(l, size, weights, step, lane_step, factor, from, rows.pitch,
                                  first, to + d, to_pitch, stream);
    };
    int64_t d = 0;
    for (; d + WIDE_TILE * WIDTH <= width; d += WIDE_TILE * WIDTH) columns(Number<WIDE_TILE>{}, d);
    for (; d < width; d += WIDTH) columns(Number<1>{}, d);
}

// Rows of small families, one for each lane: the sum over its family of `rows` times x[k][lane], or
// if TURNED times x[own][lane of k].
template <bool TURNED, int C>
INLINE void mix_columns(const Group& g, const float* x, const Rows& rows, int64_t d, int64_t width,
                        float* to) {
    for (int64_t l = 0; l < g.lanes; l++) {
        const int64_t own = g.own[l], step = TURNED ? 1 : WIDTH;
        const float* weight = TURNED ? x + own * WIDTH + l - own : x + l;
        const float* row = rows[g.first[l]] + d;
        Vector sum[C];
        UNROLL for (int c = 0; c < C; c++) sum[c] = Vector{};
#pragma GCC unroll 1
        for (int64_t k = 0; k < g.sizes[l]; k++) {
            const Vector factor = splat(weight[k * step]);
            UNROLL for (int c = 0; c < C; c++)
                sum[c] = factor * load(row + k * rows.pitch + c * WIDTH) + sum[c];
        }
        UNROLL for (int c = 0; c < C; c++) store(to + l * width + d + c * WIDTH, sum[c]);
    }
}

template <bool TURNED>
static void mix_small(const Group& g, const float* x, const Rows& rows, int64_t width, float* to) {
    if (g.equal) {
        for (int64_t l = 0; l < g.lanes; l += g.equal)
            mix_equal(g.equal, x + l, TURNED ? 1 : WIDTH, TURNED ? WIDTH : 1, splat(1.0f),
                      {rows[g.first[l]], rows.pitch}, nullptr, width, to + l * width, width);
        return;
    }
    int64_t d = 0;
    for (; d + 4 * WIDTH <= width; d += 4 * WIDTH)
        mix_columns<TURNED, 4>(g, x, rows, d, width, to);
    for (; d < width; d += WIDTH) mix_columns<TURNED, 1>(g, x, rows, d, width, to);
}

// to[lane] = sum_c x[c - low][lane] rows[c], for the lanes of a group; columns of a large family
// that begin later add to what is there.
static void mix_rows(const Group& g, const float* x, const Rows& rows, int64_t width, int64_t low,
                     int64_t high, float* to) {
    if (g.packed()) return mix_small<false>(g, x, rows, width, to);
    const float* from = rows[g.family + low];
    if (low == 0)
        multiply_rows<true, true>(g.lanes, high - low, x, WIDTH, from, rows.pitch, to, width,
                                  width);
    else
        multiply_rows<true, false>(g.lanes, high - low, x, WIDTH, from, rows.pitch, to, width,
                                   width);
}

// rows[c] = sum over lanes of x[c - low][lane] from[lane], where `rows` are those of the families;
// lanes of a large family that come later add to what is there.
static void mix_turned(const Group& g, const float* x, const Rows& from, int64_t width,
                       int64_t low, int64_t high, float* rows) {
    if (g.packed()) return mix_small<true>(g, x, from, width, rows + g.lane0 * width);
    const float* lanes = from[g.lane0];
    float* to = rows + (g.family + low) * width;
    if (g.lane0 == g.family)
        multiply_rows<false, true>(high - low, g.lanes, x, WIDTH, lanes, from.pitch, to, width,
                                   width);
    else
        multiply_rows<false, false>(high - low, g.lanes, x, WIDTH, lanes, from.pitch, to, width,
                                    width);
}
