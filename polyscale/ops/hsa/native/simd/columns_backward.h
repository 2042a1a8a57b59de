// Gradients of tie="columns": of what each leaf sees, to the means of keys and values, and from
// these to every leaf below.

struct ColumnGradients {
    const Columns& at;
    Nodes *n, *part;  // of the chunk; of the top, as far as this segment adds to it

    float* target(const Sight& s, float* Nodes::*rows) const { return (s.top ? part : n)->*rows; }

    // rows of the nodes seen += sum over lanes of x[column][lane] from[lane].
    void add(const Leaves& g, const float* x, const float* from, float* Nodes::*rows,
             int64_t width) const {
        const ColumnsScratch& my = at.my;
        for (int64_t l = 0; l < g.lanes; l++)
            for (int64_t k = 0; k < g.narrow; k++) {
                const int64_t i = k * WIDTH + l;
                if (x[i] != 0.0f) add_row(n->*rows + my.at[i] * width, x[i], from + l * width, width);
            }
        for (int64_t i = 0; i < g.sights; i++) {
            const Sight& s = my.sights[i];
            multiply_rows<false, false>(s.count, g.lanes, x + s.column * WIDTH, WIDTH, from, width,
                                        target(s, rows) + s.first * width, width, width);
        }
    }

    // What the weights are worth: the product of the output's gradient and the value.
    void find_worth(const Leaves& g) const {
        const ColumnsScratch& my = at.my;
        const int64_t width = at.c.s.value_width;
        at.turn(my.grad, width, my.turned_grad);
        if (g.narrow) at.narrow_products(g, my.grad, at.n.all_values(), width, my.worth);
        at.wide_products(g, my.values, my.turned_grad, width, my.worth);
    }

    // The gradients of the logits, in place of what the weights are worth.
    void find_scores(const Leaves& g) const {
        const ColumnsScratch& my = at.my;
        const AttentionArguments& p = at.c.p;
        alignas(64) float given[WIDTH] = {};
        if (p.grad_log_sums)
            for (int64_t l = 0; l < g.lanes; l++)
                given[l] = p.grad_log_sums[(at.c.batch * p.heads + at.c.head) * p.rows + g.row[l]];
        Vector sum = Vector{};
        for (int64_t k = 0; k < g.columns; k++)
            sum = load(my.weights + k * WIDTH) * load(my.worth + k * WIDTH) + sum;
        const Vector less = sum - load(given);
        const Integers lanes = lane_numbers() < (int32_t)g.lanes;
        for (int64_t k = 0; k < g.columns; k++) {
            const Vector weight = load(my.weights + k * WIDTH);
            const Vector score = weight * (load(my.worth + k * WIDTH) - less);
            store(my.worth + k * WIDTH, choose(lanes, score, Vector{}));
            store(my.weights + k * WIDTH, choose(lanes, weight, Vector{}));
        }
    }

    void add_places(const Leaves& g) const {
        const ColumnsScratch& my = at.my;
        const int64_t width = at.c.s.places;
        for (int64_t i = 0; i < g.narrow * WIDTH; i++) {
            const int64_t one = my.above[i], other = my.at[i];
            if (one == other || my.worth[i] == 0.0f) continue;
            add_row(n->to_place_query + one * width, my.worth[i],
                    at.n.place_key + other * width, width);
            add_row(n->to_place_key + other * width, my.worth[i],
                    at.n.place_query + one * width, width);
        }
        for (int64_t i = 0; i < g.sights; i++) {
            const Sight& s = my.sights[i];
            const Nodes& from = at.nodes(s);
            float* x = my.worth + s.column * WIDTH;
            for (int64_t l = s.low; l < s.high; l++)
                if (s.own[l] < s.count) x[s.own[l] * WIDTH + l] = 0.0f;
            for (int64_t l = s.low; l < s.high; l++) {
                const int64_t one = s.first + s.own[l];
                memcpy(my.place + l * width, from.place_query + one * width,
                       (size_t)width * sizeof(float));
                multiply_rows<true, false>(1, s.count, x + l, WIDTH,
                                           from.place_key + s.first * width, width,
                                           target(s, &Nodes::to_place_query) + one * width, width,
                                           width);
            }
            multiply_rows<false, false>(s.count, s.high - s.low, x + s.low, WIDTH,
                                        my.place + s.low * width, width,
                                        target(s, &Nodes::to_place_key) + s.first * width, width,
                                        width);
        }
    }

    void run(const Leaves& g) const {
        const ColumnsScratch& my = at.my;
        const Context& c = at.c;
        at.attend(g);
        at.fetch_next(g, c.p.grad_output, c.p.value_width);
        for (int64_t l = 0; l < WIDTH; l++) {
            float* to = my.grad + l * c.s.value_width;
            if (l >= g.lanes || c.is_ignored(g.row[l]))
                clear_row(to, c.s.value_width);
            else
                read_row(c.p, row_of(c.p, c.p.grad_output, c.batch, c.head, g.row[l]),
                         c.p.value_width, 1.0f, to);
        }
        find_worth(g);
        find_scores(g);
        at.mix(g, my.worth, at.n.all_keys(), my.keys, c.s.width, my.output);
        for (int64_t l = 0; l < g.lanes; l++)
            put_floats(my.output + l * c.s.width,
                       c.is_ignored(g.row[l]) ? 0.0f : (float)c.p.scale, c.p.width,
                       gradient_row(c.p.grad_query, c.batch, c.head, g.row[l]));
        add(g, my.worth, my.query, &Nodes::to_key, c.s.width);
        add(g, my.weights, my.grad, &Nodes::to_value, c.s.value_width);
        if (c.s.places) add_places(g);
    }
};

static void clear_gradients(const Shape& s, int64_t nodes, Nodes* n) {
    const size_t count = (size_t)nodes * sizeof(float);
    memset(n->to_key, 0, count * (size_t)s.width);
    memset(n->to_value, 0, count * (size_t)s.value_width);
    if (!s.places) return;
    memset(n->to_place_query, 0, count * (size_t)s.places);
    memset(n->to_place_key, 0, count * (size_t)s.places);
}

static void hand_down_columns(const Context& c, const View& v, Nodes* n) {
    for (int64_t i = v.roots; i < v.nodes; i++) {
        hand_down(*n, i, v.at.parent[i], c.s.width, n->to_key);
        hand_down(*n, i, v.at.parent[i], c.s.value_width, n->to_value);
        if (c.s.places) write_places(c, v, *n, i);
    }
}

static void differentiate_chunk(const Context& c, const View& v, const View* above, Nodes* n,
                                const Nodes& top, Nodes* part, ColumnsScratch my) {
    clear_gradients(c.s, v.nodes, n);
    const Columns columns = {c, v, above, *n, top, my, seen_in(c, v)};
    const ColumnGradients gradients = {columns, n, part};
    for (int64_t first = 0; first < v.leaves; first += WIDTH)
        gradients.run(columns.leaves_from(first));
    hand_down_columns(c, v, n);
    const AttentionArguments& p = c.p;
    for (int64_t i = 0; i < v.nodes; i++) {
        if (v.at.count[i]) continue;
        const int64_t row = v.at.row[i];
        const float keep = c.is_ignored(row) ? 0.0f : 1.0f;
        put_floats(n->to_key + i * c.s.width, keep, p.width,
                   gradient_row(p.grad_key, c.batch, c.head, row));
        put_floats(n->to_value + i * c.s.value_width, keep, p.value_width,
                   gradient_row(p.grad_value, c.batch, c.head, row));
    }
}

// The segments' parts, in their order, and what each chunk root gets of them.
static void differentiate_top(const Context& c, ColumnsShared* shared) {
    const View v = view_of(c.plan, c.unit.top, true);
    Nodes &top = shared->top, &roots = shared->roots;
    clear_gradients(c.s, v.nodes, &top);
    for (int64_t i = 0; i < c.segments(); i++) {
        add_row(top.to_key, 1.0f, shared->parts[i].to_key, v.nodes * c.s.width);
        add_row(top.to_value, 1.0f, shared->parts[i].to_value, v.nodes * c.s.value_width);
        if (!c.s.places) continue;
        add_row(top.to_place_query, 1.0f, shared->parts[i].to_place_query, v.nodes * c.s.places);
        add_row(top.to_place_key, 1.0f, shared->parts[i].to_place_key, v.nodes * c.s.places);
    }
    hand_down_columns(c, v, &top);
    give_roots(v, top.to_key, c.s.width, roots.to_key);
    give_roots(v, top.to_value, c.s.value_width, roots.to_value);
}

INLINE void add_floats(float* to, const float* from, int64_t width) {
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) store(to + i, load(to + i) + load(from + i));
    for (; i < width; i++) to[i] += from[i];
}

// What comes from above a chunk.
static void add_above(const Context& c, const View& v, const Nodes& roots) {
    const AttentionArguments& p = c.p;
    for (int64_t i = 0; i < v.roots; i++) {
        const float *key = roots.to_key + (v.slot + i) * c.s.width,
                    *value = roots.to_value + (v.slot + i) * c.s.value_width;
        for (int64_t leaf = v.at.begin[i]; leaf < v.at.begin[i] + v.at.leaves[i]; leaf++) {
            const int64_t row = v.at.row[v.leaf_order[leaf]];
            if (c.is_ignored(row)) continue;
            add_floats(gradient_row(p.grad_key, c.batch, c.head, row), key, p.width);
            add_floats(gradient_row(p.grad_value, c.batch, c.head, row), value, p.value_width);
        }
    }
}

static void columns_backward(const Work* w, int step, int64_t segment) {
    const Context c(*w, true);
    Scratch own = {w->own}, memory = {w->shared};
    ColumnsShared shared;
    shared.reserve(c.s, c.plan, c.unit, &memory);
    if (step == 1) return pool_top(c, &shared);
    if (step == 3) return differentiate_top(c, &shared);
    ColumnsScratch my;
    my.reserve(c.s, *c.plan.header, &own);
    Nodes n;
    n.reserve(c.s, c.plan.header->chunk_nodes, &own);
    View above;
    const bool whole = c.unit.top < 0;
    if (!whole) above = view_of(c.plan, c.unit.top, true);
    if (step == 2) clear_gradients(c.s, above.nodes, &shared.parts[segment]);
    for_chunks(c, segment, [&](const View& v) {
        if (step == 4) return add_above(c, v, shared.roots);
        pool_chunk(c, v, &n);
        if (step == 0 && !whole) return keep_chunk(c, v, n, &shared.roots);
        differentiate_chunk(c, v, whole ? nullptr : &above, &n, shared.top,
                            &shared.parts[segment], my);
    });
}
