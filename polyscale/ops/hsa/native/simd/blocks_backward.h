// Gradients of tie="blocks". Up: everything of the forward pass again, the sums of the output's
// gradient, and what a node's mass is worth. Down: gradients of the weights, and of the means, which
// reach every leaf below.

// What the weights of a group are worth before their mass is known: P (t - sum P t), where t is the
// product of the output's gradient and the value, or the worth of the mass that a node keeps.
static void family_worth(const Context& c, const View& v, const Nodes& n, const Group& g,
                         int64_t low, int64_t high, const BlocksScratch& my, float* x) {
    family_products<true>(g, n.grads(g.lane0), n.values(g.lane0), c.s.value_width, low, high,
                          my.turned, x);
    for (int64_t l = 0; l < g.lanes; l++) {
        const int64_t node = g.lane0 + l, own = g.own[l];
        if ((v.top || v.at.count[node]) && own >= low && own < high)
            x[(own - low) * WIDTH + l] = n.grad_mass[node];
    }
}

INLINE void add_masses(const Group& g, Vector sums, Nodes* n) {
    alignas(64) float sum[WIDTH];
    store(sum, sums);
    for (int64_t l = 0; l < g.lanes; l++) n->grad_mass[g.above[l]] += sum[l];
}

static Vector group_worth(const Context& c, const View& v, const Nodes& n, const Group& g,
                          const BlocksScratch& my, float* kept) {
    Vector sum = Vector{};
    if (g.stored()) {
        float* worth = kept + g.columns * WIDTH;
        family_worth(c, v, n, g, 0, g.columns, my, worth);
        for (int64_t k = 0; k < g.columns; k++)
            sum = load(kept + k * WIDTH) * load(worth + k * WIDTH) + sum;
        for (int64_t k = 0; k < g.columns; k++)
            store(worth + k * WIDTH, load(kept + k * WIDTH) * (load(worth + k * WIDTH) - sum));
        return sum;
    }
    for (int64_t low = 0; low < g.columns; low += TILE) {
        const int64_t high = least(low + TILE, g.columns);
        const float* weights = weights_again(c, v, n, g, low, high, my, kept);
        family_worth(c, v, n, g, low, high, my, my.others);
        for (int64_t k = 0; k < high - low; k++)
            sum = load(weights + k * WIDTH) * load(my.others + k * WIDTH) + sum;
    }
    store(kept + WIDTH, sum);
    return sum;
}

static void worth_up(const Context& c, const View& v, Nodes* n, const BlocksScratch& my,
                     float* kept) {
    for (int64_t l = v.levels - 2; l >= 0; l--) {
        start_insides(v, l, n);
        for (int64_t i = v.begin(l); i < v.end(l); i++)
            if (v.at.count[i]) n->grad_mass[i] = 0.0f;
        float* to = kept + 2 * v.kept_above(l) * WIDTH;
        for_groups(v, l, [&](const Group& g) {
            add_insides(g, family_weights(c, v, *n, g, my, to), n);
            add_masses(g, group_worth(c, v, *n, g, my, to), n);
            pool_group(c, v, *n, g);
            to += 2 * g.kept() * WIDTH;
        });
    }
}

// Numbers of each lane's family that the way down has found.
struct LaneMass {
    Vector mass, energy;  // of the parent; its gradient times the lane's share of the leaves
    explicit LaneMass(const Nodes& n, const Group& g) {
        alignas(64) float m[WIDTH] = {}, e[WIDTH] = {};
        for (int64_t l = 0; l < g.lanes; l++) {
            const int64_t above = g.above[l];
            m[l] = n.mass[above];
            const float share = n.share[g.lane0 + l];
            e[l] = share > 0.0f ? share * n.grad_inside[above] : 0.0f;
        }
        mass = load(m);
        energy = load(e);
    }
};

// Adds a group's part to the gradients of its families' means. `weights` become those times the
// mass and `worth` the gradients of the logits.
static void add_gradients(const Context& c, const View& v, Nodes* n, const Group& g, int64_t low,
                          int64_t high, const LaneMass& lane, float* weights, float* worth) {
    const int64_t width = c.s.width, value_width = c.s.value_width;
    for (int64_t k = 0; k < high - low; k++) {
        const Vector weight = load(weights + k * WIDTH);
        store(worth + k * WIDTH, lane.mass * load(worth + k * WIDTH) + lane.energy * weight);
        store(weights + k * WIDTH, lane.mass * weight);
    }
    for (int64_t l = 0; l < g.lanes; l++) {
        const int64_t node = g.lane0 + l, own = g.own[l];
        if (own < low || own >= high || !(v.top || v.at.count[node])) continue;
        float *weight = weights + (own - low) * WIDTH + l, *gradient = worth + (own - low) * WIDTH + l;
        n->mass[node] = *weight;
        n->grad_inside[node] = *gradient;
        *weight = *gradient = 0.0f;
    }
    mix_rows(g, worth, n->keys(g.lane0), width, low, high, n->to_query + g.lane0 * width);
    mix_turned(g, worth, n->queries(g.lane0), width, low, high, n->to_key);
    mix_turned(g, weights, n->grads(g.lane0), value_width, low, high, n->to_value);
    if (!c.s.places) return;
    for (int64_t l = 0; l < g.lanes; l++)
        if (g.own[l] >= low && g.own[l] < high) worth[(g.own[l] - low) * WIDTH + l] = 0.0f;
    mix_rows(g, worth, {n->place_key, c.s.places}, c.s.places, low, high,
             n->to_place_query + g.lane0 * c.s.places);
    mix_turned(g, worth, {n->place_query, c.s.places}, c.s.places, low, high, n->to_place_key);
}

static void write_gradients(const Context& c, int64_t row, const float* query, const float* key,
                            const float* value) {
    const float keep = c.is_ignored(row) ? 0.0f : 1.0f;
    const AttentionArguments& p = c.p;
    put_floats(query, keep * (float)p.scale, p.width,
               gradient_row(p.grad_query, c.batch, c.head, row));
    put_floats(key, keep * (float)p.scale, p.width,
               gradient_row(p.grad_key, c.batch, c.head, row));
    put_floats(value, keep, p.value_width, gradient_row(p.grad_value, c.batch, c.head, row));
}

// A leaf's row of a gradient: its own part, and what comes from above.
INLINE void write_leaf(const float* own, const float* above, float factor, int64_t width,
                       bool stream, float* to) {
    int64_t i = 0;
    if (stream && (uintptr_t)to % (4 * WIDTH) == 0)
        for (; i + WIDTH <= width; i += WIDTH)
            store_to_memory(to + i, splat(factor) * (load(own + i) + load(above + i)));
    for (; i + WIDTH <= width; i += WIDTH)
        store(to + i, splat(factor) * (load(own + i) + load(above + i)));
    for (; i < width; i++) to[i] = factor * (own[i] + above[i]);
}

static void write_leaf_gradients(const Context& c, const View& v, const Nodes& n, int64_t leaf) {
    const AttentionArguments& p = c.p;
    const int64_t row = v.at.row[leaf], width = c.s.width, value_width = c.s.value_width;
    const int64_t above = v.at.parent[leaf], soon = leaf + ROWS_AHEAD;
    if (!c.streams && soon < v.nodes && v.at.row[soon] >= 0) {
        const int64_t next = v.at.row[soon];
        fetch_row_to_write(gradient_row(p.grad_query, c.batch, c.head, next), p.width * 4);
        fetch_row_to_write(gradient_row(p.grad_key, c.batch, c.head, next), p.width * 4);
        fetch_row_to_write(gradient_row(p.grad_value, c.batch, c.head, next), p.value_width * 4);
    }
    const float keep = c.is_ignored(row) ? 0.0f : 1.0f;
    write_leaf(n.to_query + leaf * width, n.to_query + above * width, keep * (float)p.scale,
               p.width, c.streams, gradient_row(p.grad_query, c.batch, c.head, row));
    write_leaf(n.to_key + leaf * width, n.to_key + above * width, keep * (float)p.scale, p.width,
               c.streams, gradient_row(p.grad_key, c.batch, c.head, row));
    write_leaf(n.to_value + leaf * value_width, n.to_value + above * value_width, keep,
               p.value_width, c.streams, gradient_row(p.grad_value, c.batch, c.head, row));
}

// Every node's own part becomes what each leaf under it gets, with what comes from above.
INLINE void hand_down(const Nodes& n, int64_t node, int64_t above, int64_t width, float* rows) {
    const float part = n.leaves[node] > 0.0f ? 1.0f / n.leaves[node] : 0.0f;
    float* to = rows + node * width;
    const float* from = rows + above * width;
    for (int64_t d = 0; d < width; d += WIDTH)
        store(to + d, splat(part) * load(to + d) + load(from + d));
}

static void write_places(const Context& c, const View& v, const Nodes& n, int64_t node) {
    const int64_t width = c.p.position_width, to = v.at.node[node] * width;
    put_floats(n.to_place_query + node * c.s.places, 1.0f, width, c.grad_position_query + to);
    put_floats(n.to_place_key + node * c.s.places, 1.0f, width, c.grad_position_key + to);
}

static void worth_down(const Context& c, const View& v, Nodes* n, const BlocksScratch& my,
                       float* kept) {
    const int64_t width = c.s.width, value_width = c.s.value_width;
    for (int64_t l = 0; l + 1 < v.levels; l++) {
        const int64_t low_node = v.begin(l + 1), high_node = v.end(l + 1);
        for_groups(v, l, [&](const Group& g) {
            const LaneMass lane(*n, g);
            for (int64_t low = 0; low < g.columns; low += tile_of(g)) {
                const int64_t high = least(low + tile_of(g), g.columns);
                float* weights = weights_again(c, v, *n, g, low, high, my, kept);
                float* worth = g.stored() ? kept + g.columns * WIDTH : my.others;
                if (!g.stored()) {
                    family_worth(c, v, *n, g, low, high, my, worth);
                    const Vector sum = load(kept + WIDTH);
                    for (int64_t k = 0; k < high - low; k++)
                        store(worth + k * WIDTH,
                              load(weights + k * WIDTH) * (load(worth + k * WIDTH) - sum));
                }
                add_gradients(c, v, n, g, low, high, lane, weights, worth);
            }
            kept += 2 * g.kept() * WIDTH;
        });
        for (int64_t i = low_node; i < high_node; i++) {
            const int64_t above = v.at.parent[i];
            if (c.s.places) write_places(c, v, *n, i);
            if (!v.top && !v.at.count[i]) {
                write_leaf_gradients(c, v, *n, i);
                continue;
            }
            hand_down(*n, i, above, width, n->to_query);
            hand_down(*n, i, above, width, n->to_key);
            hand_down(*n, i, above, value_width, n->to_value);
        }
    }
}

// A leaf that is a root of a chunk: what comes from above, and what it sees of itself.
static void leaf_gradients(const Context& c, const View& v, const Nodes& n, int64_t leaf) {
    const int64_t width = c.s.width, value_width = c.s.value_width;
    float *query = n.to_query + leaf * width, *key = n.to_key + leaf * width,
          *value = n.to_value + leaf * value_width;
    if (c.p.include_self) {
        add_row(query, n.grad_inside[leaf], n.key + leaf * width, width);
        add_row(key, n.grad_inside[leaf], n.query + leaf * width, width);
        add_row(value, n.mass[leaf], n.grad + leaf * value_width, value_width);
    }
    write_gradients(c, v.at.row[leaf], query, key, value);
}

static void start_worth_down(const Context& c, const View& v, Nodes* n) {
    const float* sums = c.p.grad_log_sums;
    if (sums) sums += (c.batch * c.p.heads + c.head) * c.p.rows;
    for (int64_t i = 0; i < v.roots; i++) {
        n->mass[i] = 1.0f;
        n->grad_inside[i] = sums ? sums[v.at.node[i]] : 0.0f;
        clear_row(n->to_query + i * c.s.width, c.s.width);
        clear_row(n->to_key + i * c.s.width, c.s.width);
        clear_row(n->to_value + i * c.s.value_width, c.s.value_width);
        if (!v.top && !v.at.count[i]) leaf_gradients(c, v, *n, i);
    }
}

static void take_worth(const Context& c, const View& v, const Nodes& roots, Nodes* n) {
    const int64_t width = c.s.width, value_width = c.s.value_width;
    const size_t count = (size_t)v.roots * sizeof(float);
    memcpy(n->mass, roots.mass + v.slot, count);
    memcpy(n->grad_inside, roots.grad_inside + v.slot, count);
    memcpy(n->to_query, roots.to_query + v.slot * width, count * (size_t)width);
    memcpy(n->to_key, roots.to_key + v.slot * width, count * (size_t)width);
    memcpy(n->to_value, roots.to_value + v.slot * value_width, count * (size_t)value_width);
    for (int64_t i = 0; i < v.roots; i++)
        if (!v.at.count[i]) leaf_gradients(c, v, *n, i);
}

static void worth_top(const Context& c, const BlocksScratch& my, BlocksShared* shared) {
    const View v = view_of(c.plan, c.unit.top, true);
    const int64_t width = c.s.width, value_width = c.s.value_width;
    Nodes &top = shared->top, &roots = shared->roots;
    read_places(c, v, &top);
    count_leaves(c, v, roots, &top);
    take_roots(v, roots.query, width, top.query);
    take_roots(v, roots.key, width, top.key);
    take_roots(v, roots.value, value_width, top.value);
    take_roots(v, roots.grad, value_width, top.grad);
    take_roots(v, roots.inside, 1, top.inside);
    take_roots(v, roots.grad_mass, 1, top.grad_mass);
    worth_up(c, v, &top, my, shared->kept_top);
    start_worth_down(c, v, &top);
    worth_down(c, v, &top, my, shared->kept_top);
    give_roots(v, top.mass, 1, roots.mass);
    give_roots(v, top.grad_inside, 1, roots.grad_inside);
    give_roots(v, top.to_query, width, roots.to_query);
    give_roots(v, top.to_key, width, roots.to_key);
    give_roots(v, top.to_value, value_width, roots.to_value);
}

static void blocks_backward(const Work* w, int step, int64_t segment) {
    const Context c(*w, true);
    Scratch own = {w->own}, memory = {w->shared};
    BlocksShared shared;
    shared.reserve(c.s, c.plan, c.unit, &memory);
    BlocksScratch my;
    my.reserve(c.s, &own);
    Nodes n;
    n.reserve(c.s, c.plan.header->chunk_nodes, &own);
    const int64_t width = c.s.width, value_width = c.s.value_width;
    if (step == 1) return worth_top(c, my, &shared);
    for_chunks(c, segment, [&](const View& v) {
        float* kept = shared.kept + 2 * v.kept_before * WIDTH;
        count_leaves(c, v, n, &n);
        const int64_t from = n.in_place = leaves_in_place(c, v);
        n.query_leaves = read_leaves(c, v, c.p.query, c.head, c.p.width, from, n.query);
        n.key_leaves = read_leaves(c, v, c.p.key, c.key_head, c.p.width, from, n.key);
        n.grad_leaves = read_leaves(c, v, c.p.grad_output, c.head, c.p.value_width, from, n.grad);
        read_places(c, v, &n);
        if (step == 0) {
            n.value_leaves =
                read_leaves(c, v, c.p.value, c.key_head, c.p.value_width, from, n.value);
            worth_up(c, v, &n, my, kept);
            if (c.unit.top < 0) {
                start_worth_down(c, v, &n);
                worth_down(c, v, &n, my, kept);
                return;
            }
            keep_roots(v, n.query, width, shared.roots.query);
            keep_roots(v, n.key, width, shared.roots.key);
            keep_roots(v, n.value, value_width, shared.roots.value);
            keep_roots(v, n.grad, value_width, shared.roots.grad);
            keep_roots(v, n.leaves, 1, shared.roots.leaves);
            for (int64_t i = 0; i < v.roots; i++) {
                const bool leaf = !v.at.count[i];
                const float* grad = n.grad + i * value_width;
                shared.roots.inside[v.slot + i] = leaf ? leaf_inside(c, v, n, i) : n.inside[i];
                shared.roots.grad_mass[v.slot + i] =
                    leaf ? row_product(grad, n.value + i * value_width, value_width)
                         : n.grad_mass[i];
            }
            return;
        }
        pool<false>(v, n, n.query_leaves, width, n.query);
        pool<false>(v, n, n.key_leaves, width, n.key);
        pool<true>(v, n, n.grad_leaves, value_width, n.grad);
        take_worth(c, v, shared.roots, &n);
        worth_down(c, v, &n, my, kept);
    });
    if (c.streams) wait_for_memory();
}
