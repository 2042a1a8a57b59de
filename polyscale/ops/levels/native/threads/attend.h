// Attention on several threads. What is one task does not depend on their number.
#pragma once
#include <memory>

#include "../arguments.h"
#include "native/threads/instructions.h"
#include "native/threads/team.h"

DECLARE_VARIANTS(levels)

namespace {

// Units that are worked on together need memory; these are floats for all of them, 64 MiB.
const int64_t MOST_FLOATS = (int64_t)1 << 24;

// Memory of the calling thread, kept for its next call: fresh pages cost more than a short cache.
class Memory {
   public:
    ~Memory() { free(data_); }
    float* take(int64_t floats) {
        if (floats > size_) {
            free(data_);
            data_ = nullptr, size_ = 0;
            void* fresh = nullptr;
            if (posix_memalign(&fresh, 64, (size_t)floats * sizeof(float))) throw std::bad_alloc();
            data_ = (float*)fresh, size_ = floats;
        }
        return data_;
    }

   private:
    float* data_ = nullptr;
    int64_t size_ = 0;
};

class Units {
   public:
    explicit Units(const Attention& a) : a_(a), store_(*a.store) {
        const Head head(store_, 0, 0);
        group_ = a.heads / store_.heads;
        wide_ = head.wide;
        pitch_ = round_up(a.longest, BLOCK);
        always_pitch_ = round_up(least(a.longest, store_.sinks + most(a.near, BLOCK)), LANES);
        room_ = a.mass < 0.0 ? least(a.heavy, a.longest) : a.longest;
        stretches_ = pitch_ / STRETCH + 1;
        parts_ = stretches_ + always_pitch_ / PIECE + 1 + room_ / PIECE + 1;
        part_size_ = 2 + head.value_wide;
        floats_ = group_ * (wide_ + pitch_ + 2 * stretches_ + always_pitch_ + parts_ * part_size_);
        floats_ += (a.mass < 0.0 ? 0 : pitch_) + room_ + 8 * LANES;
        count_ = store_.batch * store_.heads * a.queries;
    }

    int64_t count() const { return count_; }
    int64_t at_once() const { return most(1, least(count_, MOST_FLOATS / floats_)); }
    int64_t floats() const { return round_up(floats_, LANES); }

    // Unit `number` with memory of its own, its query read.
    Unit make(int64_t number, float* memory) const {
        const int64_t query = number % a_.queries, row = number / a_.queries;
        const int64_t head = row % store_.heads, batch = row / store_.heads;
        Unit u;
        u.from = Head(store_, batch, head);
        u.group = group_, u.chosen = 0;
        u.seen = most(0, store_.lengths[batch] - a_.queries + query + 1);
        u.first = least(store_.sinks, u.seen);
        u.newest = most(u.first, least(u.seen / BLOCK * BLOCK, u.seen - a_.near));
        u.pitch = round_up(most(u.newest, 1), BLOCK);
        u.always_pitch = round_up(u.always_count(), LANES);
        Scratch scratch{memory};
        u.query = scratch.take(group_ * wide_);
        u.coarse = scratch.take(group_ * pitch_);
        u.stretches = scratch.take(group_ * 2 * stretches_);
        u.always = scratch.take(group_ * always_pitch_);
        u.parts = scratch.take(group_ * parts_ * part_size_);
        u.masses = a_.mass < 0.0 ? nullptr : scratch.take(pitch_);
        u.opened = (int32_t*)scratch.take(room_);
        const int64_t from = batch * a_.query.batch + query * a_.query.row;
        const float scale = (float)a_.scale;
        for (int64_t g = 0; g < group_; g++) {
            const int64_t at = from + (head * group_ + g) * a_.query.head;
            float* to = u.query + g * wide_;
            if (store_.bfloat16)
                for (int64_t c = 0; c < store_.width; c++)
                    to[c] = from_bfloat16(((const uint16_t*)a_.query.data)[at + c]) * scale;
            else
                for (int64_t c = 0; c < store_.width; c++)
                    to[c] = ((const float*)a_.query.data)[at + c] * scale;
            for (int64_t c = store_.width; c < wide_; c++) to[c] = 0.0f;
        }
        return u;
    }

    // What a unit found, into the output.
    void write(int64_t number, const Unit& u) const {
        const int64_t query = number % a_.queries, row = number / a_.queries;
        const int64_t head = row % store_.heads, batch = row / store_.heads;
        const int64_t to = batch * a_.output.batch + query * a_.output.row;
        for (int64_t g = 0; g < group_; g++) {
            const int64_t at = to + (head * group_ + g) * a_.output.head;
            const float* from = u.part(0) + g * part_size_ + 2;
            const size_t size = store_.bfloat16 ? 2 : 4, width = (size_t)store_.value_width;
            char* row = (char*)a_.output.data + at * (int64_t)size;
            if (!u.seen)
                memset(row, 0, width * size);
            else if (store_.bfloat16)
                for (size_t c = 0; c < width; c++) ((uint16_t*)row)[c] = to_bfloat16(from[c]);
            else
                memcpy(row, from, width * size);
        }
        if (!a_.opened) return;
        a_.counts[number] = (int32_t)u.chosen;
        memcpy(a_.opened + number * a_.room, u.opened, (size_t)u.chosen * sizeof(int32_t));
    }

    // Waking threads takes longer than a small problem.
    int threads() const {
        const double products = (double)(count_ * group_) * (double)a_.longest *
                                (double)(store_.width + store_.value_width);
        return products < 1e5 ? 1 : (int)least(a_.threads, (int64_t)(1 + products / 1e5));
    }

   private:
    const Attention& a_;
    const Store& store_;
    int64_t group_, wide_, pitch_, always_pitch_, room_, stretches_, parts_, part_size_, floats_;
    int64_t count_;
};

// First scores and what is opened whatever they are, then the weights of all else.
enum Phase { SCORES, WEIGHTS };

int64_t pieces(int64_t tokens) { return (tokens + PIECE - 1) / PIECE; }

int64_t tasks_of(const Unit& u, Phase phase) {
    if (!u.seen) return 0;
    if (phase == SCORES) return u.stretch_count() + u.always_pieces();
    return u.stretch_count() + pieces(u.chosen);
}

// One task of a unit. Parts of the result: stretches, then pieces.
void run_task(const Variant& v, Unit& u, Phase phase, int64_t number, float* scratch) {
    const int64_t stretches = u.stretch_count(), piece = number - stretches;
    if (phase == SCORES) {
        if (piece < 0) {
            v.score_stretch(&u, number, scratch);
        } else {
            v.score_always(&u, piece, scratch);
            v.weigh_always(&u, piece, u.part(number), scratch);
        }
    } else if (piece < 0) {
        v.weigh_stretch(&u, number, u.part(number), scratch);
    } else {
        v.weigh_opened(&u, piece, u.part(number + u.always_pieces()), scratch);
    }
}

// After all tasks of a phase of a unit.
void finish_phase(const Attention& a, const Variant& v, Unit& u, Phase phase, float* scratch) {
    if (phase == SCORES) v.choose(&a, &u, scratch);
    if (phase == WEIGHTS || !tasks_of(u, WEIGHTS))
        v.merge(&u, u.stretch_count() + u.always_pieces() + pieces(u.chosen));
}

// Both phases of all units in one go, since a second start of the threads costs as much as a short
// cache. Tasks are numbered through: the scores of unit after unit, then the weights likewise, as
// many as there can be. They are begun in that order, so that whoever waits for the choice of a unit
// waits for scores that others are computing. Who finishes the last task of a unit's phase finishes
// the phase for it.
class Attend : public Team {
   public:
    Attend(const Attention& a, const Variant& v, std::vector<Unit>& units, int threads,
           const std::vector<int64_t>& starts)
        : Team(starts.back(), threads, v.scratch_floats(&a)),
          a_(a), v_(v), units_(units), starts_(starts), left_(starts.size() - 1) {
        for (size_t n = 0; n < left_.size(); n++) {
            const int64_t tasks = starts[n + 1] - starts[n];
            left_[n] = tasks ? tasks + 1 : 0;
        }
    }

    // Where the tasks of each unit and phase begin.
    static std::vector<int64_t> starts(const Attention& a, const std::vector<Unit>& units) {
        std::vector<int64_t> found(1, 0);
        for (const Unit& u : units) found.push_back(found.back() + tasks_of(u, SCORES));
        for (const Unit& u : units) {
            const int64_t rest = most(0, u.newest - u.first);
            const int64_t opened = a.mass < 0.0 ? least(a.heavy, rest) : rest;
            const int64_t tasks = u.seen ? u.stretch_count() + pieces(opened) : 0;
            found.push_back(found.back() + tasks);
        }
        return found;
    }

    void task(int64_t number, float* scratch) override {
        size_t low = 0, high = left_.size();
        while (high - low > 1) {
            const size_t middle = (low + high) / 2;
            (starts_[middle] <= number ? low : high) = middle;
        }
        const Phase phase = low < units_.size() ? SCORES : WEIGHTS;
        Unit& u = units_[low % units_.size()];
        if (phase == WEIGHTS) wait_for(left_[low - units_.size()]);
        const int64_t task = number - starts_[low];
        if (task < tasks_of(u, phase)) run_task(v_, u, phase, task, scratch);
        if (--left_[low] == 1) {
            finish_phase(a_, v_, u, phase, scratch);
            left_[low] = 0;
        }
    }

   private:
    static void wait_for(const std::atomic<int64_t>& left) {
        for (int64_t n = 0; left; n++)
            if (n > 10000) std::this_thread::yield();
    }

    const Attention& a_;
    const Variant& v_;
    std::vector<Unit>& units_;
    const std::vector<int64_t>& starts_;
    std::vector<std::atomic<int64_t>> left_;  // tasks, and one until the phase is finished
};

// All of a unit as one task, where there are enough units or no other thread.
class AttendWhole : public Team {
   public:
    AttendWhole(const Attention& a, const Variant& v, std::vector<Unit>& units, int threads)
        : Team((int64_t)units.size(), threads, v.scratch_floats(&a)), a_(a), v_(v), units_(units) {}

    void task(int64_t number, float* scratch) override {
        Unit& u = units_[(size_t)number];
        for (Phase phase : {SCORES, WEIGHTS}) {
            const int64_t tasks = tasks_of(u, phase);
            for (int64_t n = 0; n < tasks; n++) run_task(v_, u, phase, n, scratch);
            if (tasks) finish_phase(a_, v_, u, phase, scratch);
        }
    }

   private:
    const Attention& a_;
    const Variant& v_;
    std::vector<Unit>& units_;
};

bool attend_units(const Attention& a, const Variant& v, std::vector<Unit>& units, int threads) {
    if (threads <= 1 || (int64_t)units.size() >= 8 * threads)
        return AttendWhole(a, v, units, threads).run();
    const std::vector<int64_t> starts = Attend::starts(a, units);
    return !starts.back() || Attend(a, v, units, threads, starts).run();
}

bool attend(const Attention& a) {
    static thread_local Memory memory;
    const Variant& v = variant(a.variant);
    const Units all(a);
    const int64_t at_once = all.at_once(), floats = all.floats();
    float* kept = memory.take(at_once * floats);
    std::vector<Unit> units;
    for (int64_t first = 0; first < all.count(); first += at_once) {
        const int64_t count = least(at_once, all.count() - first);
        units.clear();
        for (int64_t n = 0; n < count; n++) units.push_back(all.make(first + n, kept + n * floats));
        if (!attend_units(a, v, units, all.threads())) return false;
        for (int64_t n = 0; n < count; n++) all.write(first + n, units[(size_t)n]);
    }
    return true;
}

}  // namespace
