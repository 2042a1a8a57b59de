// tie="columns": each leaf keeps its own query, only keys and values are pooled. A leaf sees, for
// each of its ancestors and for itself, the siblings. Lanes are leaves, from left to right; columns
// are the nodes they see.

// A family that many lanes are under. Where they are few, each lane has columns of its own, which
// it shares with other families of other lanes: narrow ones.
struct Sight {
    int32_t first, count, low, high, column;  // children; lanes; where its columns begin
    bool top;
    int32_t own[WIDTH];    // which child a lane is under
    int32_t alone[WIDTH];  // -1 if that child is the lane's leaf
};

struct ColumnsScratch {
    Sight* sights;
    float *query, *turned_query, *grad, *turned_grad, *output, *place, *turned_place;
    float *weights, *worth, *others;  // [columns][lane]
    int32_t *at, *above;              // narrow columns: which node each lane sees, and from which
    float* bias;
    const float **keys, **values;     // rows of the nodes seen in each wide column

    void reserve(const Shape& s, const Header& h, Scratch* memory) {
        const int64_t columns = 2 * h.chunk_nodes + h.top_nodes + WIDTH;
        const int64_t sights = h.chunk_nodes + h.top_nodes + WIDTH;
        this->sights = (Sight*)memory->take(sights * (int64_t)sizeof(Sight) / 4);
        query = memory->take(s.width * WIDTH);
        turned_query = memory->take(s.width * WIDTH);
        output = memory->take(most(s.width, s.value_width) * WIDTH);
        place = memory->take(s.places * WIDTH);
        turned_place = memory->take(s.places * WIDTH);
        weights = memory->take(columns * WIDTH);
        others = memory->take(columns * WIDTH);
        at = (int32_t*)memory->take(h.chunk_nodes * WIDTH + WIDTH);
        above = (int32_t*)memory->take(h.chunk_nodes * WIDTH + WIDTH);
        bias = memory->take(h.chunk_nodes * WIDTH + WIDTH);
        keys = (const float**)memory->take(2 * columns);
        values = (const float**)memory->take(2 * columns);
        if (!(s.mode & 1)) return;
        grad = memory->take(s.value_width * WIDTH);
        turned_grad = memory->take(s.value_width * WIDTH);
        worth = memory->take(columns * WIDTH);
    }
};

struct ColumnsShared {
    Nodes roots, top;
    Nodes parts[SEGMENTS];  // gradients of the top's nodes that each segment finds

    void reserve(const Shape& s, const TreePlan& plan, const Unit& unit, Scratch* memory) {
        if (unit.top < 0) return;
        const int64_t nodes = plan.pieces[unit.top].nodes;
        roots.reserve(s, unit.slots, memory);
        top.reserve(s, nodes, memory);
        if (!(s.mode & 1)) return;
        for (int64_t i = 0; i < least(unit.chunks, SEGMENTS); i++) {
            memset(&parts[i], 0, sizeof(Nodes));
            parts[i].to_key = memory->take(nodes * s.width);
            parts[i].to_value = memory->take(nodes * s.value_width);
            if (!s.places) continue;
            parts[i].to_place_query = memory->take(nodes * s.places);
            parts[i].to_place_key = memory->take(nodes * s.places);
        }
    }
};

// The leaves first to first + lanes of a chunk, and what they see.
struct Leaves {
    int64_t first, lanes, sights, narrow, columns;
    int64_t node[WIDTH], row[WIDTH];
};

struct Columns {
    const Context& c;
    const View& v;         // the chunk
    const View* above;     // the top, or null
    const Nodes &n, &top;
    ColumnsScratch& my;
    mutable const char* seen;  // of the next lanes, if it is known already

    const Nodes& nodes(const Sight& s) const { return s.top ? top : n; }

    Leaves leaves_from(int64_t first) const {
        Leaves found;
        if (seen) {
            seen = take(seen, &found);
            point(found);
            return found;
        }
        find(first, &found);
        point(found);
        return found;
    }

    // What `put` wrote. Returns where the next lanes' begins.
    const char* take(const char* from, Leaves* g) const {
        const char* start = from;
        memcpy(g, from, sizeof *g);
        const int64_t narrow = g->narrow * WIDTH * 4;
        my.sights = (Sight*)(from += sizeof *g);
        my.at = (int32_t*)(from += g->sights * (int64_t)sizeof(Sight));
        my.above = (int32_t*)(from += narrow);
        my.bias = (float*)(from += narrow);
        return start + round_up(bytes_of(*g), 64);
    }

    static int64_t bytes_of(const Leaves& g) {
        return sizeof g + g.sights * (int64_t)sizeof(Sight) + 3 * g.narrow * WIDTH * 4;
    }

    void put(const Leaves& g, char* to) const {
        const size_t sights = (size_t)g.sights * sizeof(Sight),
                     narrow = (size_t)(g.narrow * WIDTH * 4);
        memcpy(to, &g, sizeof g);
        memcpy(to += sizeof g, my.sights, sights);
        memcpy(to += sights, my.at, narrow);
        memcpy(to += narrow, my.above, narrow);
        memcpy(to += narrow, my.bias, narrow);
    }

    void find(int64_t first, Leaves* g) const {
        Leaves& found = *g;
        found.first = first;
        found.lanes = least(WIDTH, v.leaves - first);
        for (int64_t l = 0; l < WIDTH; l++) {
            found.node[l] = v.leaf_order[first + (l < found.lanes ? l : 0)];
            found.row[l] = v.at.row[found.node[l]];
        }
        look(&found);
    }

    // All families above the lanes, each once: an ancestor that begins before a lane is known.
    void look(Leaves* g) const {
        int32_t used[WIDTH] = {};
        g->sights = g->narrow = 0;
        for (int64_t l = 0; l < g->lanes; l++) {
            int64_t child = g->node[l];
            int64_t parent = v.at.parent[child];
            for (; parent >= 0 && (l == 0 || v.at.begin[parent] >= g->first + l);
                 child = parent, parent = v.at.parent[parent]) {
                const int64_t end = v.at.begin[parent] + v.at.leaves[parent] - g->first;
                const int64_t high = least(g->lanes, end);
                if (high - l < most(2, WIDTH / 2))
                    see_narrow(g, l, high, child, parent, used);
                else
                    see_wide(g, l, high, child, parent);
            }
            // A tree of one leaf sees itself.
            if (v.parent < 0 && v.at.parent[g->node[l]] < 0) {
                widen(g, 1);
                if (c.p.include_self) my.bias[l] = n.log_leaves[g->node[l]];
            }
        }
        g->columns = g->narrow;
        if (above) see_top(g);
        for (int64_t i = 0; i < g->sights; i++) {
            Sight& s = my.sights[i];
            s.column = (int32_t)g->columns;
            g->columns += s.count;
        }
    }

    // The rows of what the lanes see in wide columns.
    void point(const Leaves& g) const {
        for (int64_t i = 0; i < g.sights; i++) {
            const Sight& s = my.sights[i];
            const Nodes& from = nodes(s);
            const Rows keys = from.keys(s.first), values = from.values(s.first);
            for (int64_t k = 0; k < s.count; k++) {
                my.keys[s.column + k] = keys[s.first + k];
                my.values[s.column + k] = values[s.first + k];
            }
        }
    }

    // More narrow columns, in which no lane sees anything as yet.
    void widen(Leaves* g, int64_t columns) const {
        for (; g->narrow < columns; g->narrow++) {
            const int64_t to = g->narrow * WIDTH;
            for (int64_t l = 0; l < WIDTH; l++)
                my.at[to + l] = my.above[to + l] = (int32_t)g->node[l];
            store(my.bias + to, splat(-INFINITE));
        }
    }

    void see_narrow(Leaves* g, int64_t low, int64_t high, int64_t child, int64_t parent,
                    int32_t* used) const {
        const int64_t first = v.at.first[parent], count = v.at.count[parent];
        int32_t column = 0;
        for (int64_t l = low; l < high; l++) column = (int32_t)most(column, used[l]);
        widen(g, column + count);
        for (int64_t l = low, own = child - first; l < high; l++) {
            while (own + 1 < count && v.at.begin[first + own + 1] <= g->first + l) own++;
            const bool self = !v.at.count[first + own] && c.p.include_self;
            const int64_t seen = c.p.causal ? own + 1 : count;
            for (int64_t k = 0; k < seen; k++) {
                if (k == own && !self) continue;
                const int64_t to = (column + k) * WIDTH + l;
                my.at[to] = (int32_t)(first + k);
                my.above[to] = (int32_t)(first + own);
                my.bias[to] = n.log_leaves[first + k];
            }
            used[l] = column + (int32_t)count;
        }
    }

    Sight* start(Leaves* g, int64_t first, int64_t count, int64_t low, int64_t high,
                 bool of_top) const {
        Sight* s = my.sights + g->sights++;
        s->first = (int32_t)first;
        s->count = (int32_t)count;
        s->low = (int32_t)low;
        s->high = (int32_t)high;
        s->top = of_top;
        memset(s->own, 0, sizeof s->own);
        memset(s->alone, 0, sizeof s->alone);
        return s;
    }

    // How many children of a family the lanes up to `high` see at most, if causal: not the one that the
    // last of them is under, unless that is its leaf and it sees itself.
    int64_t seen_up_to(const Sight& s, int64_t high) const {
        const bool self = c.p.include_self && s.alone[high - 1];
        return least(s.count, s.own[high - 1] + (self ? 1 : 0));
    }

    // Leaves out what no lane sees.
    void finish(Sight* s) const {
        if (c.p.causal) s->count = (int32_t)seen_up_to(*s, s->high);
    }

    void see_wide(Leaves* g, int64_t low, int64_t high, int64_t child, int64_t parent) const {
        const int64_t first = v.at.first[parent], count = v.at.count[parent];
        Sight* s = start(g, first, count, low, high, false);
        for (int64_t l = low, own = child - first; l < high; l++) {
            while (own + 1 < count && v.at.begin[first + own + 1] <= g->first + l) own++;
            s->own[l] = (int32_t)own;
            s->alone[l] = v.at.count[first + own] ? 0 : -1;
        }
        finish(s);
    }

    void see_top(Leaves* g) const {
        int64_t parent = v.parent;
        Sight* s = start(g, above->at.first[parent], above->at.count[parent], 0, g->lanes, true);
        for (int64_t l = 0, root = 0; l < g->lanes; l++) {
            while (root + 1 < v.roots && v.at.begin[root + 1] <= g->first + l) root++;
            s->own[l] = (int32_t)(v.own + root);
            s->alone[l] = v.at.count[root] ? 0 : -1;
        }
        finish(s);
        for (int64_t child = parent; above->at.parent[child] >= 0; child = parent) {
            parent = above->at.parent[child];
            const int64_t first = above->at.first[parent];
            s = start(g, first, above->at.count[parent], 0, g->lanes, true);
            for (int64_t l = 0; l < g->lanes; l++) s->own[l] = (int32_t)(child - first);
            finish(s);
        }
    }

    // x[c][lane] = the product of the lane's row and the row of the node it sees in column c.
    void narrow_products(const Leaves& g, const float* rows, const AllRows& seen, int64_t width,
                         float* x) const {
        const float* lanes[WIDTH];
        for (int64_t l = 0; l < WIDTH; l++) lanes[l] = rows + l * width;
        for (int64_t k = 0; k < g.narrow; k++) {
            const float* other[WIDTH];
            for (int64_t l = 0; l < WIDTH; l++) other[l] = seen[my.at[k * WIDTH + l]];
            store(x + k * WIDTH, lane_products(lanes, other, width));
        }
    }

    // x[c][lane] = the product of the lane's row and the row seen in the wide column c.
    void wide_products(const Leaves& g, const float* const* rows, const float* turned,
                       int64_t width, float* x) const {
        int64_t k = g.narrow;
        for (; k + 8 <= g.columns; k += 8) wide_tile<8>(rows + k, turned, width, x + k * WIDTH);
        for (; k + 2 <= g.columns; k += 2) wide_tile<2>(rows + k, turned, width, x + k * WIDTH);
        for (; k < g.columns; k++) wide_tile<1>(rows + k, turned, width, x + k * WIDTH);
    }

    template <int R>
    static INLINE_MEMBER void wide_tile(const float* const* rows, const float* turned,
                                        int64_t width, float* x) {
        Vector sum[R][1];
        UNROLL for (int r = 0; r < R; r++) sum[r][0] = Vector{};
        multiply<R, 1, false>(sum, width, rows, 0, turned, WIDTH);
        UNROLL for (int r = 0; r < R; r++) store(x + r * WIDTH, sum[r][0]);
    }

    // Position terms of narrow columns; a leaf has none with itself.
    void add_narrow_places(const Leaves& g) const {
        for (int64_t k = 0; k < g.narrow; k++) {
            const float *one[WIDTH], *other[WIDTH];
            alignas(64) int32_t counts[WIDTH];
            for (int64_t l = 0; l < WIDTH; l++) {
                const int64_t i = k * WIDTH + l;
                one[l] = n.place_query + my.above[i] * c.s.places;
                other[l] = n.place_key + my.at[i] * c.s.places;
                counts[l] = my.above[i] == my.at[i] ? 0 : -1;
            }
            const Vector term = lane_products(one, other, c.s.places);
            float* to = my.weights + k * WIDTH;
            store(to, load(to) + (Vector)(load_integers(counts) & bits(term)));
        }
    }

    // The embeddings of the ancestors that the lanes are under.
    void lane_places(const Sight& s) const {
        const float* rows[WIDTH];
        for (int64_t l = 0; l < WIDTH; l++) {
            const int64_t own = s.own[l >= s.low && l < s.high ? l : s.low];
            rows[l] = nodes(s).place_query + (s.first + own) * c.s.places;
        }
        transpose(rows, c.s.places, my.turned_place);
    }

    // Which lanes a family has, as a mask.
    static Integers lanes_of(const Sight& s) {
        const Integers lane = lane_numbers();
        return (lane >= s.low) & (lane < s.high);
    }

    void wide_logits(const Sight& s) const {
        const Nodes& at = nodes(s);
        float* x = my.weights + s.column * WIDTH;
        if (c.s.places) {
            lane_places(s);
            multiply_rows<false, true>(s.count, c.s.places, at.place_key + s.first * c.s.places,
                                       c.s.places, my.turned_place, WIDTH, my.others, WIDTH, WIDTH);
        }
        const Integers own = load_integers(s.own), lanes = lanes_of(s);
        const Integers self = c.p.include_self ? load_integers(s.alone) : Integers{};
        for (int64_t k = 0; k < s.count; k++) {
            const Integers column = Integers{} + (int32_t)k, is_own = column == own;
            Vector score = load(x + k * WIDTH) + splat(at.log_leaves[s.first + k]);
            if (c.s.places)
                score = score + (Vector)(~is_own & bits(load(my.others + k * WIDTH)));
            Integers seen = lanes & (~is_own | self);
            if (c.p.causal) seen &= column <= own;
            store(x + k * WIDTH, choose(seen, score, splat(-INFINITE)));
        }
    }

    // The rows of the next lanes, which are needed soon.
    void fetch_next(const Leaves& g, const Tensor& from, int64_t width) const {
        const int64_t end = least(g.first + 2 * WIDTH, v.leaves);
        for (int64_t leaf = g.first + WIDTH; leaf < end; leaf++)
            fetch_row(row_of(c.p, from, c.batch, c.head, v.at.row[v.leaf_order[leaf]]),
                      width * (c.p.bfloat16 ? 2 : 4));
    }

    // Weights of all that the lanes see, and the logarithm of their sums.
    Vector attend(const Leaves& g) const {
        fetch_next(g, c.p.query, c.p.width);
        for (int64_t l = 0; l < WIDTH; l++) {
            float* to = my.query + l * c.s.width;
            if (l >= g.lanes || c.is_ignored(g.row[l])) {
                clear_row(to, c.s.width);
                continue;
            }
            read_row(c.p, row_of(c.p, c.p.query, c.batch, c.head, g.row[l]), c.p.width,
                     (float)c.p.scale, to);
        }
        turn(my.query, c.s.width, my.turned_query);
        if (g.narrow) {
            narrow_products(g, my.query, n.all_keys(), c.s.width, my.weights);
            for (int64_t k = 0; k < g.narrow; k++) {
                float* to = my.weights + k * WIDTH;
                store(to, load(to) + load(my.bias + k * WIDTH));
            }
            if (c.s.places) add_narrow_places(g);
        }
        wide_products(g, my.keys, my.turned_query, c.s.width, my.weights);
        for (int64_t i = 0; i < g.sights; i++) wide_logits(my.sights[i]);
        return normalise(my.weights, g.columns);
    }

    void turn(const float* rows, int64_t width, float* to) const {
        const float* lanes[WIDTH];
        for (int64_t l = 0; l < WIDTH; l++) lanes[l] = rows + l * width;
        transpose(lanes, width, to);
    }

    // Lanes lane to lane + R: the sum over columns of x[column][lane] times the row seen there.
    template <int R, int C>
    INLINE_MEMBER void mix_tile(const Leaves& g, int64_t lane, const float* x, const AllRows& narrow,
                                const float* const* wide, int64_t d, int64_t width,
                                float* to) const {
        Vector sum[R][C];
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int i = 0; i < C; i++) sum[r][i] = Vector{};
        }
#pragma GCC unroll 1
        for (int64_t k = 0; k < g.narrow; k++) {
            const float* weight = x + k * WIDTH + lane;
            const int32_t* at = my.at + k * WIDTH + lane;
            UNROLL for (int r = 0; r < R; r++) {
                const float* row = narrow[at[r]] + d;
                UNROLL for (int i = 0; i < C; i++)
                    sum[r][i] = splat(weight[r]) * load(row + i * WIDTH) + sum[r][i];
            }
        }
        // Weights of families that none of these lanes is under are zero, and so are those of what comes
        // later: neither is looked at.
        for (int64_t f = 0; f < g.sights; f++) {
            const Sight& s = my.sights[f];
            if (s.high <= lane || s.low >= lane + R) continue;
            const int64_t seen = c.p.causal ? seen_up_to(s, least(s.high, lane + R)) : s.count;
#pragma GCC unroll 1
            for (int64_t k = s.column; k < s.column + seen; k++) {
                const float *row = wide[k] + d, *weight = x + k * WIDTH + lane;
                Vector right[C];
                UNROLL for (int i = 0; i < C; i++) right[i] = load(row + i * WIDTH);
                UNROLL for (int r = 0; r < R; r++) {
                    UNROLL for (int i = 0; i < C; i++)
                        sum[r][i] = splat(weight[r]) * right[i] + sum[r][i];
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) {
            UNROLL for (int i = 0; i < C; i++)
                store(to + (lane + r) * width + d + i * WIDTH, sum[r][i]);
        }
    }

    // Rows of all lanes: the sum over columns of x[column][lane] times the row of the node seen.
    void mix(const Leaves& g, const float* x, const AllRows& narrow, const float* const* wide,
             int64_t width, float* to) const {
        int64_t d = 0;
        for (; d + WIDE_TILE * WIDTH <= width; d += WIDE_TILE * WIDTH)
            for (int64_t l = 0; l < g.lanes; l += 4)
                mix_tile<4, WIDE_TILE>(g, l, x, narrow, wide, d, width, to);
        for (; d < width; d += WIDTH)
            for (int64_t l = 0; l < g.lanes; l += 4)
                mix_tile<4, 1>(g, l, x, narrow, wide, d, width, to);
    }
};
