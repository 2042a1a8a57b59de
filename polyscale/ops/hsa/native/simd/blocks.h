// tie="blocks": one weight for each ordered pair of siblings. Up: means, weights, energies. Down:
// what the leaves under a node take from outside of it.

enum { TILE = 256 };  // columns of a family too large for its weights to be kept

// What a thread needs besides the nodes of a piece.
struct BlocksScratch {
    float *turned, *rows, *weights, *others;

    void reserve(const Shape& s, Scratch* memory) {
        const int64_t widest = most(s.width, most(s.value_width, s.places));
        turned = memory->take(widest * WIDTH);
        rows = memory->take(widest * WIDTH);
        weights = memory->take(STORED * WIDTH);
        others = memory->take(STORED * WIDTH);
    }
};

// What the steps of one copy of a unit hand on.
struct BlocksShared {
    Nodes roots, top;
    float *kept, *kept_top;  // weights; with a backward pass two of each

    void reserve(const Shape& s, const TreePlan& plan, const Unit& unit, Scratch* memory) {
        const int64_t times = s.mode & 1 ? 2 : 1;
        kept = memory->take(times * unit.kept.vectors[VECTOR_SLOT] * WIDTH);
        if (unit.top < 0) return;
        const Piece& piece = plan.pieces[unit.top];
        kept_top = memory->take(times * piece.kept.vectors[VECTOR_SLOT] * WIDTH);
        roots.reserve(s, unit.slots, memory);
        top.reserve(s, piece.nodes, memory);
    }
};

// The logits of a group's lanes on the columns low to high of their families.
static void family_logits(const Context& c, const View& v, const Nodes& n, const Group& g,
                          int64_t low, int64_t high, const BlocksScratch& my, float* x) {
    const Integers first = load_integers(g.first), sizes = load_integers(g.sizes),
                   own = load_integers(g.own);
    family_products<true>(g, n.queries(g.lane0), n.keys(g.lane0), c.s.width, low, high, my.turned,
                          x);
    const Vector scale = splat((float)c.p.scale);
    // What a lane's own column holds: the product for a leaf that sees itself, else its inside.
    const Integers leaf =
        v.top ? Integers{} : (Integers)(load_integers(v.at.count + g.lane0) == Integers{});
    const Integers keeps = c.p.include_self ? leaf : Integers{};
    const Vector inside = choose(leaf, splat(-INFINITE), load(n.inside + g.lane0));
    const bool places = c.s.places != 0, ones = g.lane0 >= n.in_place;  // leaves, none ignored
    float* position = my.others;
    for (int64_t tile = low; tile < high; tile += STORED) {
        const int64_t end = least(high, tile + STORED);
        if (places)
            family_products<true>(g, {n.place_query, c.s.places}, {n.place_key, c.s.places},
                                  c.s.places, tile, end, my.turned, position);
        for (int64_t column = tile; column < end; column++) {
            const Integers at = Integers{} + (int32_t)column;
            const Integers is_own = at == own;
            float* to = x + (column - low) * WIDTH;
            const Vector count = ones ? Vector{}
                                 : g.packed()
                                     ? gather(n.log_leaves, first + least_of(at, sizes - 1))
                                     : splat(n.log_leaves[g.family + column]);
            Vector score = scale * load(to) + count;
            if (places)
                score = score + (Vector)(~is_own & bits(load(position + (column - tile) * WIDTH)));
            score = choose(is_own & ~keeps, inside, score);
            store(to, choose(at < sizes, score, splat(-INFINITE)));
        }
    }
}

// Weights of a group from its logits, and the logarithms of their sums. A family that is too large
// keeps only these.
static Vector family_weights(const Context& c, const View& v, const Nodes& n, const Group& g,
                             const BlocksScratch& my, float* kept) {
    if (g.stored()) {
        family_logits(c, v, n, g, 0, g.columns, my, kept);
        return normalise(kept, g.columns);
    }
    Vector top = splat(-INFINITE), total = Vector{};
    for (int64_t low = 0; low < g.columns; low += TILE) {
        const int64_t high = least(low + TILE, g.columns);
        family_logits(c, v, n, g, low, high, my, my.weights);
        Vector highest = top;
        for (int64_t k = 0; k < high - low; k++)
            highest = larger(highest, load(my.weights + k * WIDTH));
        highest = choose((Integers)(highest == splat(-INFINITE)), Vector{}, highest);
        total = total * exponential(top - highest);
        for (int64_t k = 0; k < high - low; k++)
            total = total + exponential(load(my.weights + k * WIDTH) - highest);
        top = highest;
    }
    const Integers empty = (Integers)(total == Vector{});
    const Vector sum = choose(empty, splat(-INFINITE), logarithm(total) + top);
    store(kept, sum);
    return sum;
}

// The weights of the columns low to high: those kept, or made again.
static float* weights_again(const Context& c, const View& v, const Nodes& n, const Group& g,
                            int64_t low, int64_t high, const BlocksScratch& my, float* kept) {
    if (g.stored()) return kept;
    family_logits(c, v, n, g, low, high, my, my.weights);
    const Vector sum = load(kept);
    const Integers empty = (Integers)(sum == splat(-INFINITE));
    const Vector top = choose(empty, Vector{}, sum);
    for (int64_t k = 0; k < high - low; k++) {
        float* to = my.weights + k * WIDTH;
        store(to, exponential(smaller(load(to) - top, Vector{})));
    }
    return my.weights;
}

INLINE int64_t tile_of(const Group& g) { return g.stored() ? g.columns : TILE; }

// Adds the leaf-weighted mean of a group's log-sums to the parents' insides.
INLINE void add_insides(const Group& g, Vector sums, Nodes* n) {
    alignas(64) float sum[WIDTH];
    // A child without leaves may see nothing: 0 times minus infinity has to be 0 here.
    const Vector share = load(n->share + g.lane0);
    store(sum, choose((Integers)(share > Vector{}), share * sums, Vector{}));
    for (int64_t l = 0; l < g.lanes; l++) n->inside[g.above[l]] += sum[l];
}

INLINE void start_insides(const View& v, int64_t level, Nodes* n) {
    for (int64_t i = v.begin(level); i < v.end(level); i++)
        if (v.at.count[i]) n->inside[i] = n->leaves[i] > 0.0f ? 0.0f : -INFINITE;
}

// Means of a group's parents while the rows of its lanes are in the cache. What the next groups read
// is prefetched row by row: in one burst it would fill the processor's buffers for misses.
template <bool AHEAD>
INLINE void pool_lanes(const Context& c, const View& v, const Nodes& n, const Group& g) {
    const int64_t parent = g.parent, parents = g.parents, at = g.lane0;
    pool_parents<false, AHEAD>(v, n, parent, parents, n.queries(at), c.s.width, n.query);
    pool_parents<false, AHEAD>(v, n, parent, parents, n.keys(at), c.s.width, n.key);
    pool_parents<false, AHEAD>(v, n, parent, parents, n.values(at), c.s.value_width, n.value);
    if (n.grad)
        pool_parents<true, AHEAD>(v, n, parent, parents, n.grads(at), c.s.value_width, n.grad);
}

INLINE void pool_group(const Context& c, const View& v, const Nodes& n, const Group& g) {
    if (!g.last()) return;
    if (g.lane0 < n.in_place)
        pool_lanes<false>(c, v, n, g);
    else
        pool_lanes<true>(c, v, n, g);
}

static void blocks_up(const Context& c, const View& v, Nodes* n, const BlocksScratch& my,
                      float* kept) {
    for (int64_t l = v.levels - 2; l >= 0; l--) {
        start_insides(v, l, n);
        float* to = kept + v.kept_above(l) * WIDTH;
        for_groups(v, l, [&](const Group& g) {
            add_insides(g, family_weights(c, v, *n, g, my, to), n);
            pool_group(c, v, *n, g);
            to += g.kept() * WIDTH;
        });
    }
}

// A lane's own weight, and zero in its place if its node has an inside.
INLINE float take_own(const View& v, const Group& g, int64_t lane, int64_t low, int64_t high,
                      float* weights) {
    const int64_t own = g.own[lane];
    if (own < low || own >= high) return 0.0f;
    float* at = weights + (own - low) * WIDTH + lane;
    const float weight = *at;
    if (v.top || v.at.count[g.lane0 + lane]) *at = 0.0f;
    return weight;
}

// Where the output of a leaf may be written at once: floats, whole vectors of them.
INLINE float* output_row(const Context& c, int64_t row) {
    if (c.p.bfloat16 || c.s.value_width != c.p.value_width || c.is_ignored(row)) return nullptr;
    return (float*)row_of(c.p, c.p.output, c.batch, c.head, row);
}

static void write_output(const Context& c, int64_t row, const float* from) {
    char* to = (char*)row_of(c.p, c.p.output, c.batch, c.head, row);
    if (c.is_ignored(row))
        memset(to, 0, (size_t)c.p.value_width * (c.p.bfloat16 ? 2 : 4));
    else
        write_row(c.p, from, c.p.value_width, to);
}

// A lane's row and mass once what its family gives it is known: written for a leaf.
INLINE void finish_lane(const Context& c, const View& v, Nodes* n, const Group& g, int64_t lane,
                        float own, const float* row) {
    const int64_t node = g.lane0 + lane;
    if (!v.top && !v.at.count[node])
        write_output(c, v.at.row[node], row);
    else
        n->mass[node] = own;
}

template <int C>
INLINE void small_columns(const Group& g, int64_t lane, const float* weights, Vector mass,
                          const Rows& values, int64_t d, const float* outer, float* to) {
    const float* row = values[g.first[lane]] + d;
    Vector sum[C];
    UNROLL for (int i = 0; i < C; i++) sum[i] = load(outer + i * WIDTH);
#pragma GCC unroll 1
    for (int64_t k = 0; k < g.sizes[lane]; k++) {
        const Vector weight = mass * splat(weights[k * WIDTH + lane]);
        UNROLL for (int i = 0; i < C; i++)
            sum[i] = weight * load(row + k * values.pitch + i * WIDTH) + sum[i];
    }
    UNROLL for (int i = 0; i < C; i++) store(to + i * WIDTH, sum[i]);
}

static void small_down(const Context& c, const View& v, Nodes* n, const Group& g, float* weights,
                       const BlocksScratch& my) {
    const int64_t width = c.s.value_width;
    const Rows values = n->values(g.lane0);
    for (int64_t lane = 0; lane < g.lanes; lane++) {
        const int64_t node = g.lane0 + lane, above = g.above[lane];
        const float mass = n->mass[above];
        const float own = mass * take_own(v, g, lane, 0, g.columns, weights);
        const bool leaf = !v.top && !v.at.count[node];
        const float* outer = n->outer + above * width;
        if (leaf && node + ROWS_AHEAD < v.nodes && v.at.row[node + ROWS_AHEAD] >= 0)
            fetch_row_to_write((void*)row_of(c.p, c.p.output, c.batch, c.head,
                                             v.at.row[node + ROWS_AHEAD]),
                               c.p.value_width * (c.p.bfloat16 ? 2 : 4));
        float* at_once = leaf ? output_row(c, v.at.row[node]) : nullptr;
        float* to = at_once ? at_once : leaf ? my.rows : n->outer + node * width;
        int64_t d = 0;
        for (; d + 4 * WIDTH <= width; d += 4 * WIDTH)
            small_columns<4>(g, lane, weights, splat(mass), values, d, outer + d, to + d);
        for (; d < width; d += WIDTH)
            small_columns<1>(g, lane, weights, splat(mass), values, d, outer + d, to + d);
        if (!at_once) finish_lane(c, v, n, g, lane, own, to);
    }
}

// The same for families of one size whose lanes are all inner nodes, or all leaves in place.
static void equal_down(const Context& c, const View& v, Nodes* n, const Group& g, float* weights) {
    const int64_t width = c.s.value_width, size = g.equal;
    const Rows values = n->values(g.lane0);
    float* to = n->outer + g.lane0 * width;
    int64_t to_pitch = width;
    bool stream = false;
    if (!g.inner) {
        to = (float*)row_of(c.p, c.p.output, c.batch, c.head, v.at.row[g.lane0]);
        to_pitch = c.p.output.row;
        stream = c.streams && (uintptr_t)to % 64 == 0 && to_pitch % WIDTH == 0;
        const int64_t ahead = stream ? 0 : least(g.lanes, v.nodes - g.lane0 - g.lanes);
        for (int64_t l = 0; l < ahead; l++)
            fetch_row_to_write(to + (g.lanes + l) * to_pitch, width * 4);
    }
    for (int64_t l = 0; l < g.lanes; l += size) {
        const int64_t above = g.above[l];
        const float mass = n->mass[above];
        if (g.inner)
            for (int64_t i = 0; i < size; i++)
                n->mass[g.lane0 + l + i] = mass * take_own(v, g, l + i, 0, size, weights);
        mix_equal(size, weights + l, WIDTH, 1, splat(mass), {values[g.lane0 + l], values.pitch},
                  n->outer + above * width, width, to + l * to_pitch, to_pitch, stream);
    }
}

static void large_down(const Context& c, const View& v, Nodes* n, const Group& g, float* kept,
                       const BlocksScratch& my) {
    const int64_t width = c.s.value_width;
    float own[WIDTH] = {};
    for (int64_t low = 0; low < g.columns; low += tile_of(g)) {
        const int64_t high = least(low + tile_of(g), g.columns);
        float* weights = weights_again(c, v, *n, g, low, high, my, kept);
        for (int64_t lane = 0; lane < g.lanes; lane++)
            own[lane] += take_own(v, g, lane, low, high, weights);
        mix_rows(g, weights, n->values(g.lane0), width, low, high, my.rows);
    }
    for (int64_t lane = 0; lane < g.lanes; lane++) {
        const int64_t node = g.lane0 + lane, above = g.above[lane];
        const float mass = n->mass[above];
        const float *outer = n->outer + above * width, *mixed = my.rows + lane * width;
        const bool leaf = !v.top && !v.at.count[node];
        float* to = leaf ? my.rows + lane * width : n->outer + node * width;
        for (int64_t d = 0; d < width; d += WIDTH)
            store(to + d, splat(mass) * load(mixed + d) + load(outer + d));
        finish_lane(c, v, n, g, lane, mass * own[lane], to);
    }
}

static void blocks_down(const Context& c, const View& v, Nodes* n, const BlocksScratch& my,
                        float* kept) {
    const int64_t width = c.s.value_width;
    for (int64_t l = 0; l + 1 < v.levels; l++) {
        for_groups(v, l, [&](const Group& g) {
            if (g.equal && (g.inner || g.lane0 >= n->in_place))
                equal_down(c, v, n, g, kept);
            else if (g.packed())
                small_down(c, v, n, g, kept, my);
            else
                large_down(c, v, n, g, kept, my);
            kept += g.kept() * WIDTH;
        });
    }
}

// The score of a root of a chunk that is a leaf on itself: nothing else is inside.
INLINE float leaf_inside(const Context& c, const View& v, const Nodes& n, int64_t leaf) {
    if (!c.p.include_self || c.is_ignored(v.at.row[leaf])) return -INFINITE;
    return (float)c.p.scale *
           row_product(n.query + leaf * c.s.width, n.key + leaf * c.s.width, c.s.width);
}

// A tree of one leaf.
static void blocks_alone(const Context& c, const View& v, const Nodes& n, int64_t root) {
    const int64_t row = v.at.row[root];
    float* output = n.outer + root * c.s.value_width;
    clear_row(output, c.s.value_width);
    if (c.p.include_self)
        memcpy(output, n.value + root * c.s.value_width, (size_t)c.s.value_width * sizeof(float));
    write_output(c, row, output);
    n.inside[root] = leaf_inside(c, v, n, root);
}

// The roots of trees: all of the mass, nothing from outside, and their energies.
static void start_down(const Context& c, const View& v, Nodes* n) {
    float* sums = c.p.log_sums + (c.batch * c.p.heads + c.head) * c.p.rows;
    for (int64_t i = 0; i < v.roots; i++) {
        if (!v.top && !v.at.count[i]) {
            blocks_alone(c, v, *n, i);
        } else {
            n->mass[i] = 1.0f;
            clear_row(n->outer + i * c.s.value_width, c.s.value_width);
        }
        sums[v.at.node[i]] = n->inside[i];
    }
}

static void read_blocks(const Context& c, const View& v, Nodes* n) {
    const int64_t from = n->in_place = leaves_in_place(c, v);
    n->query_leaves = read_leaves(c, v, c.p.query, c.head, c.p.width, from, n->query);
    n->key_leaves = read_leaves(c, v, c.p.key, c.key_head, c.p.width, from, n->key);
    n->value_leaves = read_leaves(c, v, c.p.value, c.key_head, c.p.value_width, from, n->value);
}

// The chunks of a segment.
template <class Visit>
INLINE void for_chunks(const Context& c, int64_t segment, Visit visit) {
    const int64_t chunks = c.unit.chunks, segments = c.segments();
    for (int64_t i = segment * chunks / segments; i < (segment + 1) * chunks / segments; i++)
        visit(view_of(c.plan, c.unit.piece + i, false));
}

static void blocks_forward(const Work* w, int step, int64_t segment) {
    const Context c(*w, false);
    Scratch own = {w->own}, memory = {w->shared};
    BlocksShared shared;
    shared.reserve(c.s, c.plan, c.unit, &memory);
    BlocksScratch my;
    my.reserve(c.s, &own);
    Nodes n;
    n.reserve(c.s, c.plan.header->chunk_nodes, &own);
    const int64_t width = c.s.width, value_width = c.s.value_width;
    if (step == 1) {
        const View v = view_of(c.plan, c.unit.top, true);
        Nodes &top = shared.top, &roots = shared.roots;
        read_places(c, v, &top);
        count_leaves(c, v, roots, &top);
        take_roots(v, roots.query, width, top.query);
        take_roots(v, roots.key, width, top.key);
        take_roots(v, roots.value, value_width, top.value);
        take_roots(v, roots.inside, 1, top.inside);
        blocks_up(c, v, &top, my, shared.kept_top);
        start_down(c, v, &top);
        blocks_down(c, v, &top, my, shared.kept_top);
        give_roots(v, top.outer, value_width, roots.outer);
        give_roots(v, top.mass, 1, roots.mass);
        return;
    }
    for_chunks(c, segment, [&](const View& v) {
        float* kept = shared.kept + v.kept_before * WIDTH;
        count_leaves(c, v, n, &n);
        if (step == 0) {
            read_blocks(c, v, &n);
            read_places(c, v, &n);
            blocks_up(c, v, &n, my, kept);
            if (c.unit.top < 0) {
                start_down(c, v, &n);
                blocks_down(c, v, &n, my, kept);
                return;
            }
            keep_roots(v, n.query, width, shared.roots.query);
            keep_roots(v, n.key, width, shared.roots.key);
            keep_roots(v, n.value, value_width, shared.roots.value);
            keep_roots(v, n.leaves, 1, shared.roots.leaves);
            // A leaf's inside is what it sees of itself: the top holds no product for it.
            for (int64_t i = 0; i < v.roots; i++)
                shared.roots.inside[v.slot + i] = v.at.count[i] ? n.inside[i] : leaf_inside(c, v, n, i);
            return;
        }
        const int64_t from = n.in_place = leaves_in_place(c, v);
        n.value_leaves =
            read_leaves(c, v, c.p.value, c.key_head, c.p.value_width, from, n.value);
        pool<false>(v, n, n.value_leaves, value_width, n.value);
        memcpy(n.mass, shared.roots.mass + v.slot, (size_t)v.roots * sizeof(float));
        memcpy(n.outer, shared.roots.outer + v.slot * value_width,
               (size_t)(v.roots * value_width) * sizeof(float));
        for (int64_t i = 0; i < v.roots; i++)
            if (!v.at.count[i]) {
                float* output = n.outer + i * value_width;
                add_row(output, n.mass[i], n.value + i * value_width, value_width);
                write_output(c, v.at.row[i], output);
            }
        blocks_down(c, v, &n, my, kept);
    });
    if (c.streams) wait_for_memory();
}
