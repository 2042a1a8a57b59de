// One new token against the open families above it.

INLINE char* member(const Decode& d, void* rows, int64_t level, int64_t batch, int64_t key_head,
                    int64_t place, int64_t width) {
    const int64_t row = (batch * d.key_heads + key_head) * d.room[level] + place;
    return (char*)rows + row * width * (d.bfloat16 ? 2 : 4);
}

INLINE char* token_row(const Decode& d, const Tensor& t, int64_t batch, int64_t head) {
    return (char*)t.data + (batch * t.batch + head * t.head) * (d.bfloat16 ? 2 : 4);
}

// The leaf-weighted mean of a family that closes, into the level above.
static void close_family(const Decode& d, const AttentionArguments& p, int64_t level, int64_t batch,
                         int64_t key_head, const Closing& closing, void* const* rows,
                         int64_t width, float* row, float* mean) {
    const int64_t* counts = d.counts[level] + batch * d.room[level];
    float total = 0.0f;
    for (int64_t i = 0; i < closing.members; i++) total += (float)counts[i];
    clear_row(mean, padded(width));
    for (int64_t i = 0; i < closing.members; i++) {
        const char* from = member(d, rows[level], level, batch, key_head, i, width);
        read_row(p, from, width, 1.0f, row);
        add_row(mean, (float)counts[i] / total, row, padded(width));
    }
    write_row(p, mean, width,
              member(d, rows[level + 1], level + 1, batch, key_head, closing.place, width));
}

int64_t decode_floats(const Decode* d) {
    int64_t entries = 1;
    for (int64_t l = 0; l < d->levels; l++) entries += d->room[l];
    return round_up(entries, 16) + 4 * padded(most(d->width, d->value_width)) + 64;
}

void decode(const Decode* arguments, int64_t batch, int64_t key_head, const Closing* closing,
            float* scratch) {
    const Decode& d = *arguments;
    AttentionArguments p;
    p.bfloat16 = d.bfloat16;
    const int64_t widest = padded(most(d.width, d.value_width)), group = d.heads / d.key_heads;
    Scratch memory = {scratch};
    float *query = memory.take(widest), *row = memory.take(widest), *sum = memory.take(widest);
    float* logits = memory.take(decode_floats(arguments) - 4 * widest - 64);
    for (int64_t l = 0; l + 1 < d.levels; l++) {
        if (!closing[l].members) continue;
        close_family(d, p, l, batch, key_head, closing[l], d.keys, d.width, row, sum);
        close_family(d, p, l, batch, key_head, closing[l], d.values, d.value_width, row, sum);
    }
    const char *key = token_row(d, d.key, batch, key_head),
               *value = token_row(d, d.value, batch, key_head);
    for (int64_t head = key_head * group; head < (key_head + 1) * group; head++) {
        read_row(p, token_row(d, d.query, batch, head), d.width, (float)d.scale, query);
        int64_t entries = 0;
        float top = -INFINITE;
        const auto score = [&](const char* from, float bias) {
            read_row(p, from, d.width, 1.0f, row);
            logits[entries] = row_product(query, row, padded(d.width)) + bias;
            top = logits[entries] > top ? logits[entries] : top;
            entries++;
        };
        for (int64_t l = 0; l < d.levels; l++)
            for (int64_t i = 0; i < d.filled[l][batch]; i++) {
                const float count = (float)d.counts[l][batch * d.room[l] + i];
                score(member(d, d.keys[l], l, batch, key_head, i, d.width),
                      logarithm(splat(count))[0]);
            }
        if (d.include_self) score(key, 0.0f);
        float total = 0.0f;
        clear_row(sum, widest);
        entries = 0;
        const auto add = [&](const char* from) {
            const float weight = exponential(splat(logits[entries++] - top))[0];
            total += weight;
            read_row(p, from, d.value_width, 1.0f, row);
            add_row(sum, weight, row, padded(d.value_width));
        };
        for (int64_t l = 0; l < d.levels; l++)
            for (int64_t i = 0; i < d.filled[l][batch]; i++)
                add(member(d, d.values[l], l, batch, key_head, i, d.value_width));
        if (d.include_self) add(value);
        const float part = total == 0.0f ? 0.0f : 1.0f / total;
        for (int64_t i = 0; i < padded(d.value_width); i += WIDTH)
            store(sum + i, splat(part) * load(sum + i));
        write_row(p, sum, d.value_width, token_row(d, d.output, batch, head));
    }
    if (!d.rows[batch]) return;
    const int64_t place = d.filled[0][batch], size = d.bfloat16 ? 2 : 4;
    memcpy(member(d, d.keys[0], 0, batch, key_head, place, d.width), key,
           (size_t)(d.width * size));
    memcpy(member(d, d.values[0], 0, batch, key_head, place, d.value_width), value,
           (size_t)(d.value_width * size));
}
