// A piece of a tree (a chunk or a top) in memory, for one head of one batch entry.

enum { LARGE_BYTES = 1 << 22 };
enum { BLOCKS = 0, BLOCKS_BACKWARD = 1, COLUMNS = 2, COLUMNS_BACKWARD = 3 };
enum { VECTOR_SLOT = WIDTH == 4 ? 0 : WIDTH == 8 ? 1 : 2 };

struct Shape {
    int64_t width, value_width, places;  // padded to whole vectors; of query and key, of value, ..
    int mode;
};

INLINE Shape shape_of(const AttentionArguments& p, bool backward) {
    return {padded(p.width), padded(p.value_width), padded(p.position_width),
            2 * p.columns + (backward ? 1 : 0)};
}

// Rows of all nodes of a piece, some of them in place.
struct AllRows {
    Rows inner, leaves;
    int64_t in_place;
    const float* operator[](int64_t node) const {
        return node < in_place ? inner[node] : leaves[node];
    }
};

// What is known of each node: rows of means (a leaf's are its own) and numbers. Arrays that a mode
// does not need are null.
struct Nodes {
    float *query, *key, *value, *grad;  // means; of the gradient of the output, the sum
    float *place_query, *place_key;     // position embeddings
    float *leaves, *log_leaves;         // how many leaves the mask leaves under the node
    float* share;                       // of the leaves of its parent
    float *inside;                      // blocks: minus the energy
    float *mass, *outer;                // blocks: what is left for the inside; the output so far
    float *grad_mass, *grad_inside;
    float *to_query, *to_key, *to_value;        // gradients per leaf under the node
    float *to_place_query, *to_place_key;       // of the node itself
    // Nodes from `in_place` on are leaves whose rows stay where the inputs have them.
    int64_t in_place, width, value_width;
    Rows query_leaves, key_leaves, value_leaves, grad_leaves;

    // The rows of a node's level.
    Rows queries(int64_t node) const { return node < in_place ? Rows{query, width} : query_leaves; }
    Rows keys(int64_t node) const { return node < in_place ? Rows{key, width} : key_leaves; }
    Rows values(int64_t node) const {
        return node < in_place ? Rows{value, value_width} : value_leaves;
    }
    AllRows all_keys() const { return {{key, width}, key_leaves, in_place}; }
    AllRows all_values() const { return {{value, value_width}, value_leaves, in_place}; }
    Rows grads(int64_t node) const {
        return node < in_place ? Rows{grad, value_width} : grad_leaves;
    }

    void reserve(const Shape& s, int64_t nodes, Scratch* memory) {
        memset(this, 0, sizeof *this);
        in_place = INT64_MAX;
        width = s.width;
        value_width = s.value_width;
        const int64_t room = nodes + WIDTH;  // lanes past the end are read, never used
        const bool blocks = s.mode < COLUMNS, backward = s.mode & 1;
        key = memory->take(room * s.width);
        value = memory->take(room * s.value_width);
        if (s.places) {
            place_query = memory->take(room * s.places);
            place_key = memory->take(room * s.places);
        }
        leaves = memory->take(room);
        log_leaves = memory->take(room);
        share = memory->take(room);
        if (blocks) {
            query = memory->take(room * s.width);
            inside = memory->take(room);
            mass = memory->take(room);
            if (!backward) outer = memory->take(room * s.value_width);
        }
        if (!backward) return;
        to_key = memory->take(room * s.width);
        to_value = memory->take(room * s.value_width);
        if (blocks) {
            grad = memory->take(room * s.value_width);
            grad_mass = memory->take(room);
            grad_inside = memory->take(room);
            to_query = memory->take(room * s.width);
        }
        if (s.places) {
            to_place_query = memory->take(room * s.places);
            to_place_key = memory->take(room * s.places);
        }
    }
};

// A piece of the plan: pointers to its own nodes.
struct View {
    int64_t piece, nodes, levels, roots, leaves, parent, own, slot;
    const Level* level;
    Places at;
    const int32_t* leaf_order;
    int64_t kept_before;
    bool top;

    int64_t begin(int64_t l) const { return level[l].first; }
    int64_t end(int64_t l) const { return level[l + 1].first; }
    // Vectors of weights that the levels above keep.
    int64_t kept_above(int64_t l) const { return level[l].above.vectors[VECTOR_SLOT]; }
};

INLINE View view_of(const TreePlan& plan, int64_t piece, bool top) {
    const Piece& from = plan.pieces[piece];
    View v;
    v.piece = piece;
    v.nodes = from.nodes;
    v.levels = from.levels;
    v.roots = from.roots;
    v.leaves = from.leaves;
    v.parent = from.parent;
    v.own = from.own;
    v.slot = from.slot;
    v.level = plan.levels + from.level;
    v.at = {plan.places.node + from.place,   plan.places.parent + from.place,
            plan.places.first + from.place,  plan.places.count + from.place,
            plan.places.leaves + from.place, plan.places.begin + from.place,
            plan.places.row + from.place};
    v.leaf_order = plan.leaf_order + from.leaf;
    v.kept_before = from.before.vectors[VECTOR_SLOT];
    v.top = top;
    return v;
}

// Whether a tensor of a call is larger than a core's part of the caches.
INLINE bool is_large(const AttentionArguments& p) {
    return p.batch * p.heads * p.rows * p.value_width * 4 > LARGE_BYTES;
}

// Everything the steps of one copy of a unit see.
struct Context {
    const AttentionArguments& p;
    const TreePlan plan;
    const Unit& unit;
    const Shape s;
    const int64_t batch, head, key_head;
    const bool streams;  // results go past the caches
    const Seen* seen;
    const uint8_t* ignored;
    const float *position_query, *position_key;
    float *grad_position_query, *grad_position_key;

    Context(const Work& w, bool backward)
        : p(*w.arguments), plan(read_plan(w.arguments->plan)), unit(*w.unit),
          s(shape_of(*w.arguments, backward)), batch(w.batch), head(w.head),
          key_head(w.head / (w.arguments->heads / w.arguments->key_heads)),
          streams(is_large(*w.arguments)), seen(w.seen) {
        ignored = p.ignored ? p.ignored + batch * p.rows : nullptr;
        const int64_t nodes = plan.header->nodes, size = nodes * p.position_width;
        const int64_t at = p.position_heads > 1 ? head * size : 0;
        position_query = p.position_query + at;
        position_key = p.position_key + at;
        const int64_t to = (batch * p.heads + head) * size;
        grad_position_query = p.grad_position_query + to;
        grad_position_key = p.grad_position_key + to;
    }

    bool is_ignored(int64_t row) const { return ignored && ignored[row]; }
    int64_t segments() const { return unit.chunks < SEGMENTS ? unit.chunks : SEGMENTS; }
};

enum { FAR_AHEAD = 16 };

// From which node on a chunk's leaves can be read where the inputs have them: whole vectors of float32,
// and none to be ignored. Those of the last level, which all come after the inner nodes.
INLINE int64_t leaves_in_place(const Context& c, const View& v) {
    const bool whole = c.s.width == c.p.width && c.s.value_width == c.p.value_width;
    if (c.p.bfloat16 || c.ignored || !whole || v.levels < 2) return INT64_MAX;
    return v.level[v.levels - 1].uniform == LEAVES_IN_ORDER ? v.begin(v.levels - 1) : INT64_MAX;
}

// The rows of an input at the leaves of a chunk that are not read in place; ignored ones are zero,
// whatever they hold. Returns the rows of those that are.
static Rows read_leaves(const Context& c, const View& v, const Tensor& from, int64_t head,
                        int64_t width, int64_t in_place, float* to) {
    const int64_t pitch = padded(width), bytes = width * (c.p.bfloat16 ? 2 : 4);
    for (int64_t i = 0; i < least(v.nodes, in_place); i++) {
        if (v.at.count[i]) continue;
        const int64_t row = v.at.row[i], soon = i + FAR_AHEAD;
        // The processor's own prefetching stops at the end of a page, which is a few rows away.
        if (soon < v.nodes && v.at.row[soon] >= 0)
            fetch_row(row_of(c.p, from, c.batch, head, v.at.row[soon]), bytes);
        if (c.is_ignored(row)) {
            clear_row(to + i * pitch, pitch);
            continue;
        }
        read_row(c.p, row_of(c.p, from, c.batch, head, row), width, 1.0f, to + i * pitch);
    }
    if (in_place >= v.nodes) return {to, pitch};
    const char* first = row_of(c.p, from, c.batch, head, v.at.row[in_place]);
    return {(const float*)first - in_place * from.row, from.row};
}

// Prefetches rows of an input that stay in place, some way after a group of lanes: past the end of a
// chunk lie the rows of the next one, or of the next head.
INLINE void fetch_leaves(const Rows& rows, int64_t low, int64_t high, int64_t width) {
    for (int64_t node = low + FAR_AHEAD; node < high + FAR_AHEAD; node++)
        fetch_row(rows[node], width * 4);
}

// The rows of chunk roots, or numbers of them, at the leaves of a top.
static void take_roots(const View& v, const float* roots, int64_t width, float* to) {
    for (int64_t i = 0; i < v.nodes; i++)
        if (!v.at.count[i])
            memcpy(to + i * width, roots + v.at.row[i] * width, (size_t)width * sizeof(float));
}

// The other way: what a top found for its leaves.
static void give_roots(const View& v, const float* from, int64_t width, float* roots) {
    for (int64_t i = 0; i < v.nodes; i++)
        if (!v.at.count[i])
            memcpy(roots + v.at.row[i] * width, from + i * width, (size_t)width * sizeof(float));
}

static void count_leaves(const Context& c, const View& v, const Nodes& roots, Nodes* n) {
    for (int64_t i = v.nodes - 1; i >= 0; i--) {
        if (!c.ignored) {
            n->leaves[i] = (float)v.at.leaves[i];
        } else if (v.at.count[i]) {
            float sum = 0.0f;
            for (int64_t k = 0; k < v.at.count[i]; k++) sum += n->leaves[v.at.first[i] + k];
            n->leaves[i] = sum;
        } else if (v.top) {
            n->leaves[i] = roots.leaves[v.at.row[i]];
        } else {
            n->leaves[i] = c.is_ignored(v.at.row[i]) ? 0.0f : 1.0f;
        }
    }
    for (int64_t i = v.nodes; i < v.nodes + WIDTH; i++) n->leaves[i] = 1.0f;
    for (int64_t i = 0; i < v.roots; i++) n->share[i] = 1.0f;
    for (int64_t i = 0; i < v.nodes; i++) {
        const int64_t first = v.at.first[i], count = v.at.count[i];
        if (!count) continue;
        const float part = n->leaves[i] > 0.0f ? 1.0f / n->leaves[i] : 0.0f;
        for (int64_t k = 0; k < count; k++) n->share[first + k] = part * n->leaves[first + k];
    }
    for (int64_t i = 0; i < v.nodes; i += WIDTH) {
        const Vector count = load(n->leaves + i);
        store(n->log_leaves + i,
              choose((Integers)(count == Vector{}), splat(-INFINITE), logarithm(count)));
    }
}

// Children's rows into their parent's: means, or sums.
template <bool SUM, int C, int COUNT = 0>
INLINE void pool_columns(const float* shares, int64_t count, const float* from, int64_t pitch,
                         float* to) {
    Vector sum[C];
    UNROLL for (int c = 0; c < C; c++) sum[c] = Vector{};
    if (COUNT) count = COUNT;  // known when this is compiled
    for (int64_t k = 0; k < count; k++) {
        const Vector share = splat(SUM ? 1.0f : shares[k]);
        const float* row = from + k * pitch;
        UNROLL for (int c = 0; c < C; c++) sum[c] = share * load(row + c * WIDTH) + sum[c];
    }
    UNROLL for (int c = 0; c < C; c++) store(to + c * WIDTH, sum[c]);
}

// The rows of `parents` nodes from `parent` on from those of their children.
template <bool SUM, bool AHEAD = false>
static void pool_parents(const View& v, const Nodes& n, int64_t parent, int64_t parents, Rows from,
                         int64_t width, float* rows) {
    for (int64_t i = parent; i < parent + parents; i++) {
        const int64_t first = v.at.first[i], count = v.at.count[i];
        if (!count) continue;
        const float* child = from[first];
        if (AHEAD) fetch_leaves(from, first, first + count, width);
        int64_t d = 0;
        if (count == 2)
            for (; d + 4 * WIDTH <= width; d += 4 * WIDTH)
                pool_columns<SUM, 4, 2>(n.share + first, count, child + d, from.pitch,
                                        rows + i * width + d);
        for (; d + 4 * WIDTH <= width; d += 4 * WIDTH)
            pool_columns<SUM, 4>(n.share + first, count, child + d, from.pitch,
                                 rows + i * width + d);
        for (; d < width; d += WIDTH)
            pool_columns<SUM, 1>(n.share + first, count, child + d, from.pitch,
                                 rows + i * width + d);
    }
}

// All inner nodes' rows from the leaves'.
template <bool SUM>
static void pool(const View& v, const Nodes& n, const Rows& leaves, int64_t width, float* rows) {
    for (int64_t l = v.levels - 2; l >= 0; l--) {
        const int64_t parent = v.begin(l), parents = v.end(l) - v.begin(l);
        if (v.begin(l + 1) < n.in_place)
            pool_parents<SUM>(v, n, parent, parents, {rows, width}, width, rows);
        else
            pool_parents<SUM, true>(v, n, parent, parents, leaves, width, rows);
    }
}

// The position embeddings of a piece's nodes.
static void read_places(const Context& c, const View& v, Nodes* n) {
    if (!c.s.places) return;
    const int64_t width = c.p.position_width;
    for (int64_t i = 0; i < v.nodes; i++) {
        const int64_t from = v.at.node[i] * width, to = i * c.s.places;
        clear_row(n->place_query + to, c.s.places);
        clear_row(n->place_key + to, c.s.places);
        memcpy(n->place_query + to, c.position_query + from, (size_t)width * sizeof(float));
        memcpy(n->place_key + to, c.position_key + from, (size_t)width * sizeof(float));
    }
}

// What a chunk's roots hand to the top.
static void keep_roots(const View& v, const float* from, int64_t width, float* roots) {
    memcpy(roots + v.slot * width, from, (size_t)(v.roots * width) * sizeof(float));
}
