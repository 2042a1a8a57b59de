// Which tokens of the coarse level are opened: those with the greatest mass over all heads.
#pragma once
#include "codes.h"

// A token and its mass in one number: the greater first, of equal ones the earlier.
INLINE uint64_t ranked(float mass, int64_t token) {
    return (uint64_t)read<uint32_t>(&mass) << 32 | (uint32_t)~(uint32_t)token;
}
INLINE float mass_of(uint64_t rank) {
    const uint32_t high = (uint32_t)(rank >> 32);
    return read<float>(&high);
}
INLINE int64_t token_of(uint64_t rank) { return (int64_t)(uint32_t)~(uint32_t)rank; }

// Moves the `count` greatest to the front.
static void bring_greatest(uint64_t* x, int64_t size, int64_t count) {
    int64_t low = 0, high = size - 1;
    while (low < high) {
        const uint64_t pivot = x[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot) i++;
            while (x[j] < pivot) j--;
            if (i > j) break;
            const uint64_t kept = x[i];
            x[i++] = x[j], x[j--] = kept;
        }
        if (count - 1 <= j) high = j;
        else if (count - 1 >= i) low = i;
        else return;
    }
}

// Ascending, Shell's way: nothing from the standard library may be compiled for one set of instructions.
static void sort(uint64_t* x, int64_t size) {
    int64_t gap = 1;
    while (gap < size / 3) gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3)
        for (int64_t i = gap; i < size; i++) {
            const uint64_t moved = x[i];
            int64_t j = i;
            for (; j >= gap && x[j - gap] > moved; j -= gap) x[j] = x[j - gap];
            x[j] = moved;
        }
}

// For each stretch and head, what turns its exponentials into shares; returns the share of the mass
// that is opened whatever it is. `factors` [stretches][group].
static float find_shares(const Unit& u, float* factors) {
    float certain = 0.0f;
    const int64_t stretches = u.stretch_count(), always = u.always_count();
    for (int64_t g = 0; g < u.group; g++) {
        float top = -INFINITE, total = 0.0f, opened = 0.0f;
        for (int64_t s = 0; s < stretches; s++) {
            const float x = u.stretches[(s * u.group + g) * 2];
            top = x > top ? x : top;
        }
        const float* scores = u.always + g * u.always_pitch;
        Wide highest = all(top), sum = all(0.0f);
        for (int64_t n = 0; n < always; n += LANES)
            highest = wider(first_of(read<Wide>(scores + n), always - n), highest);
        top = largest_of(highest);
        for (int64_t s = 0; s < stretches; s++) {
            const float* x = u.stretches + (s * u.group + g) * 2;
            const float factor = exponential_of(x[0] - top);
            factors[s * u.group + g] = factor;
            total += factor * x[1];
        }
        for (int64_t n = 0; n < always; n += LANES)
            sum += exponentials_of(first_of(read<Wide>(scores + n), always - n) - all(top));
        opened = sum_of(sum);
        total += opened;
        certain += opened / total;
        for (int64_t s = 0; s < stretches; s++) factors[s * u.group + g] /= total;
    }
    return certain;
}

INLINE Wide masses_at(const Unit& u, const float* factors, int64_t token) {
    const float* factor = factors + token / STRETCH * u.group;
    Wide mass = all(factor[0]) * read<Wide>(u.coarse + token);
    for (int64_t g = 1; g < u.group; g++)
        mass += all(factor[g]) * read<Wide>(u.coarse + g * u.pitch + token);
    return mass;
}

INLINE bool any_above(Wide x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    const WideIntegers above = x > all(limit);
    int64_t halves[8], any = 0;
    memcpy(halves, &above, sizeof halves);
    for (int i = 0; i < 8; i++) any |= halves[i];
    return any != 0;
#endif
}

enum { MORE_CANDIDATES = 192 };

// The `heavy` greatest masses; `candidates` has room for MORE_CANDIDATES more.
static int64_t choose_heaviest(Unit& u, const float* factors, int64_t heavy,
                               uint64_t* candidates) {
    const int64_t first = u.first / LANES * LANES;
    heavy = least(heavy, u.newest - u.first);
    if (heavy <= 0) return 0;
    // Candidates are above `limit`; as long as there are too few of them anything is.
    float limit = -1.0f;
    int64_t count = 0;
    for (int64_t token = first; token < u.newest; token += LANES) {
        const Wide mass = masses_at(u, factors, token);
        if (!any_above(mass, limit)) continue;
        float masses[LANES];
        write(masses, mass);
        const int64_t end = least(LANES, u.newest - token);
        for (int64_t i = most(0, u.first - token); i < end; i++)
            if (masses[i] > limit) candidates[count++] = ranked(masses[i], token + i);
        if (count + LANES > heavy + MORE_CANDIDATES) {
            bring_greatest(candidates, count, heavy);
            count = heavy;
            uint64_t lowest = candidates[0];
            for (int64_t n = 1; n < count; n++) lowest = candidates[n] < lowest ? candidates[n] : lowest;
            limit = mass_of(lowest);
        }
    }
    if (count > heavy) bring_greatest(candidates, count, heavy);
    count = least(count, heavy);
    for (int64_t n = 0; n < count; n++) u.opened[n] = (int32_t)token_of(candidates[n]);
    return count;
}

enum { BUCKETS = 4096, BUCKET_SHIFT = 19 };  // exponents and four bits more

// As few tokens as hold `missing` of the mass.
static int64_t choose_share(Unit& u, const float* factors, double missing, double* buckets,
                            uint64_t* ranks) {
    if (!(missing > 0.0)) return 0;
    for (int64_t n = 0; n < BUCKETS; n++) buckets[n] = 0.0;
    for (int64_t token = u.first / LANES * LANES; token < u.newest; token += LANES)
        write(u.masses + token, masses_at(u, factors, token));
    for (int64_t t = u.first; t < u.newest; t++)
        buckets[read<uint32_t>(u.masses + t) >> BUCKET_SHIFT & (BUCKETS - 1)] += (double)u.masses[t];
    int64_t bucket = BUCKETS - 1;
    double held = 0.0;
    for (; bucket > 0 && held + buckets[bucket] < missing; bucket--) held += buckets[bucket];
    int64_t count = 0;
    for (int64_t t = u.first; t < u.newest; t++)
        if ((int64_t)(read<uint32_t>(u.masses + t) >> BUCKET_SHIFT & (BUCKETS - 1)) == bucket)
            ranks[count++] = ranked(u.masses[t], t);
    sort(ranks, count);
    uint64_t lowest = (uint64_t)(bucket + 1) << (BUCKET_SHIFT + 32);
    for (int64_t n = count - 1; n >= 0 && held < missing; n--) {
        lowest = ranks[n];
        held += (double)mass_of(lowest);
    }
    int64_t taken = 0;
    for (int64_t t = u.first; t < u.newest; t++)
        if (ranked(u.masses[t], t) >= lowest) u.opened[taken++] = (int32_t)t;
    return taken;
}

static void choose(const Attention* attention, Unit* unit, float* scratch) {
    Unit& u = *unit;
    float* factors = scratch;
    scratch += round_up(u.stretch_count() * u.group, LANES);
    u.chosen = 0;
    if (u.newest <= u.first) return;
    const float certain = find_shares(u, factors);
    if (attention->mass < 0.0) {
        u.chosen = choose_heaviest(u, factors, attention->heavy, (uint64_t*)scratch);
    } else {
        double* buckets = (double*)scratch;
        const double missing = attention->mass * (double)u.group - (double)certain;
        u.chosen = choose_share(u, factors, missing, buckets, (uint64_t*)(buckets + BUCKETS));
    }
    for (int64_t g = 0; g < u.group; g++)
        for (int64_t n = 0; n < u.chosen; n++) u.coarse[g * u.pitch + u.opened[n]] = 0.0f;
}

static void merge(const Unit* unit, int64_t parts) {
    const Unit& u = *unit;
    const int64_t size = u.part_size(), wide = u.from.value_wide;
    for (int64_t g = 0; g < u.group; g++) {
        float top = -INFINITE, total = 0.0f;
        for (int64_t n = 0; n < parts; n++) {
            const float* x = u.part(n) + g * size;
            if (x[1] != 0.0f && x[0] > top) top = x[0];
        }
        float* result = u.part(0) + g * size;
        for (int64_t n = 0; n < parts; n++) {
            const float* x = u.part(n) + g * size;
            const float factor = x[1] == 0.0f ? 0.0f : exponential_of(x[0] - top);
            total += factor * x[1];
            for (int64_t c = 2; c < 2 + wide; c += LANES) {
                const Wide more = all(factor) * read<Wide>(x + c);
                write(result + c, n ? read<Wide>(result + c) + more : more);
            }
        }
        const Wide inverse = all(1.0f / total);
        for (int64_t c = 2; c < 2 + wide; c += LANES)
            write(result + c, read<Wide>(result + c) * inverse);
    }
}
