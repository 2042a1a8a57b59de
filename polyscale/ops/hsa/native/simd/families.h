// Lanes: children of one large family, or of several small ones, each a row of its family's matrix.

struct Group {
    int64_t lane0, lanes, columns;
    int64_t family, size;  // of the large family; -1 for several small ones
    int64_t parent;        // the first
    int64_t parents;       // nodes from it on, leaves among them
    // Of each lane: where its family starts and how large it is, which child it is, its parent.
    alignas(64) int32_t first[WIDTH], sizes[WIDTH], own[WIDTH], above[WIDTH];

    bool packed() const { return family < 0; }
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

// The groups of the families whose parents are at a level, from left to right.
template <class Visit>
INLINE void for_groups(const View& v, int64_t level, Visit visit) {
    Group g;
    g.lanes = 0;
    const int64_t end = v.level[level + 1];
    const auto flush = [&](int64_t parent) {
        if (!g.lanes) return;
        g.family = -1;
        g.size = 0;
        g.parents = parent - g.parent;
        g.fill();
        visit(g);
        g.lanes = 0;
    };
    for (int64_t i = v.level[level]; i < end; i++) {
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

INLINE Integers load_integers(const int32_t* from) {
    Integers x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE Integers least_of(Integers a, Integers b) { return (a & (a < b)) | (b & ~(a < b)); }

INLINE Vector gather_lanes(const float* from, const int32_t* at) {
    return gather(from, load_integers(at));
}

// The rows of a group's lanes; lanes without a node repeat the first.
INLINE void lane_rows(const Group& g, const float* rows, int64_t width, const float** to) {
    for (int64_t l = 0; l < WIDTH; l++) to[l] = rows + (g.lane0 + (l < g.lanes ? l : 0)) * width;
}

// x[c - low][lane] = (or +=) the product of the lane's row in `a` and its family's row c in `b`.
template <bool FRESH>
static void family_products(const Group& g, const float* a, const float* b, int64_t width,
                            int64_t low, int64_t high, float* turned, float* x) {
    const float* lanes[WIDTH];
    lane_rows(g, a, width, lanes);
    if (!g.packed()) {
        transpose(lanes, width, turned);
        multiply_rows<false, FRESH>(high - low, width, b + (g.family + low) * width, width, turned,
                                    WIDTH, x, WIDTH, WIDTH);
        return;
    }
    for (int64_t c = low; c < high; c++) {
        const float* other[WIDTH];
        for (int l = 0; l < WIDTH; l++)
            other[l] = b + (g.first[l] + least(c, g.sizes[l] - 1)) * width;
        const Vector found = lane_products(lanes, other, width);
        float* to = x + (c - low) * WIDTH;
        store(to, FRESH ? found : load(to) + found);
    }
}

// to[lane] += sum_c x[c - low][lane] rows[c], for the lanes of a group.
static void add_mixed(const Group& g, const float* x, const float* rows, int64_t width, int64_t low,
                      int64_t high, float* to) {
    if (!g.packed()) {
        multiply_rows<true, false>(g.lanes, high - low, x, WIDTH, rows + (g.family + low) * width,
                                   width, to, width, width);
        return;
    }
    for (int64_t l = 0; l < g.lanes; l++)
        multiply_rows<true, false>(1, g.sizes[l], x + l, WIDTH, rows + g.first[l] * width, width,
                                   to + l * width, width, width);
}

// rows[c] += sum over lanes of x[c - low][lane] from[lane]: `rows` are those of the families.
static void add_turned(const Group& g, const float* x, const float* from, int64_t width,
                       int64_t low, int64_t high, float* rows) {
    if (!g.packed()) {
        multiply_rows<false, false>(high - low, g.lanes, x, WIDTH, from + g.lane0 * width, width,
                                    rows + (g.family + low) * width, width, width);
        return;
    }
    for (int64_t l = 0; l < g.lanes; l += g.sizes[l])
        multiply_rows<false, false>(g.sizes[l], g.sizes[l], x + l, WIDTH,
                                    from + g.first[l] * width, width, rows + g.first[l] * width,
                                    width, width);
}
