// The forward pass of columns: chunks of leaves, and what their leaves see.

// Means of a chunk's keys and values.
static void pool_chunk(const Context& c, const View& v, Nodes* n) {
    count_leaves(c, v, *n, n);
    const int64_t from = n->in_place = leaves_in_place(c, v);
    n->key_leaves = read_leaves(c, v, c.p.key, c.key_head, c.p.width, from, n->key);
    n->value_leaves = read_leaves(c, v, c.p.value, c.key_head, c.p.value_width, from, n->value);
    read_places(c, v, n);
    pool<false>(v, *n, n->key_leaves, c.s.width, n->key);
    pool<false>(v, *n, n->value_leaves, c.s.value_width, n->value);
}

static void pool_top(const Context& c, ColumnsShared* shared) {
    const View v = view_of(c.plan, c.unit.top, true);
    Nodes &top = shared->top, &roots = shared->roots;
    read_places(c, v, &top);
    count_leaves(c, v, roots, &top);
    take_roots(v, roots.key, c.s.width, top.key);
    take_roots(v, roots.value, c.s.value_width, top.value);
    pool<false>(v, top, {top.key, c.s.width}, c.s.width, top.key);
    pool<false>(v, top, {top.value, c.s.value_width}, c.s.value_width, top.value);
}

static void keep_chunk(const Context& c, const View& v, const Nodes& n, Nodes* roots) {
    keep_roots(v, n.key, c.s.width, roots->key);
    keep_roots(v, n.value, c.s.value_width, roots->value);
    keep_roots(v, n.leaves, 1, roots->leaves);
}

// Where what the leaves of a chunk see begins, or null if it is not known.
INLINE const char* seen_in(const Context& c, const View& v) {
    return c.seen ? c.seen->data + c.seen->starts[v.piece] : nullptr;
}

// Past the caches if the output is too large to stay in them.
INLINE void put_output(const Context& c, int64_t row, const float* from) {
    float* to = c.streams ? output_row(c, row) : nullptr;
    if (!to || (uintptr_t)to % 64) return write_output(c, row, from);
    for (int64_t d = 0; d < c.s.value_width; d += WIDTH) store_to_memory(to + d, load(from + d));
}

static void attend_chunk(const Context& c, const View& v, const View* above, const Nodes& n,
                         const Nodes& top, ColumnsScratch my) {
    const Columns columns = {c, v, above, n, top, my, seen_in(c, v)};
    float* sums = c.p.log_sums + (c.batch * c.p.heads + c.head) * c.p.rows;
    const int64_t width = c.s.value_width;
    for (int64_t first = 0; first < v.leaves; first += WIDTH) {
        const Leaves g = columns.leaves_from(first);
        alignas(64) float sum[WIDTH];
        store(sum, columns.attend(g));
        columns.mix(g, my.weights, n.all_values(), my.values, width, my.output);
        for (int64_t l = 0; l < g.lanes; l++) {
            put_output(c, g.row[l], my.output + l * width);
            sums[g.row[l]] = c.is_ignored(g.row[l]) ? -INFINITE : sum[l];
        }
    }
}

static void columns_forward(const Work* w, int step, int64_t segment) {
    const Context c(*w, false);
    Scratch own = {w->own}, memory = {w->shared};
    ColumnsShared shared;
    shared.reserve(c.s, c.plan, c.unit, &memory);
    if (step == 1) return pool_top(c, &shared);
    ColumnsScratch my;
    my.reserve(c.s, *c.plan.header, &own);
    Nodes n;
    n.reserve(c.s, c.plan.header->chunk_nodes, &own);
    View above;
    const bool whole = c.unit.top < 0;
    if (!whole) above = view_of(c.plan, c.unit.top, true);
    for_chunks(c, segment, [&](const View& v) {
        pool_chunk(c, v, &n);
        if (step == 0 && !whole) return keep_chunk(c, v, n, &shared.roots);
        attend_chunk(c, v, whole ? nullptr : &above, n, shared.top, my);
    });
    if (c.streams) wait_for_memory();
}

static bool make_room(Seen* seen, int64_t bytes) {
    if (seen->size + bytes <= seen->room) return true;
    const int64_t room = 2 * (seen->size + bytes);
    char* data = (char*)realloc(seen->data, (size_t)room);
    if (!data) return false;
    seen->data = data;
    seen->room = room;
    return true;
}

// What the leaves of a unit see, of no head in particular.
static bool see_unit(const Work* w, Seen* seen) {
    const Context c(*w, false);
    Scratch own = {w->own};
    ColumnsScratch my;
    my.reserve(c.s, *c.plan.header, &own);
    Nodes n;
    n.reserve(c.s, c.plan.header->chunk_nodes, &own);
    View above;
    const bool whole = c.unit.top < 0;
    if (!whole) above = view_of(c.plan, c.unit.top, true);
    for (int64_t i = 0; i < c.unit.chunks; i++) {
        const View v = view_of(c.plan, c.unit.piece + i, false);
        count_leaves(c, v, n, &n);
        seen->starts[v.piece] = seen->size;
        const Columns columns = {c, v, whole ? nullptr : &above, n, n, my, nullptr};
        for (int64_t first = 0; first < v.leaves; first += WIDTH) {
            Leaves g;
            columns.find(first, &g);
            const int64_t bytes = round_up(columns.bytes_of(g), 64);
            if (!make_room(seen, bytes)) return false;
            columns.put(g, seen->data + seen->size);
            seen->size += bytes;
        }
    }
    return true;
}
