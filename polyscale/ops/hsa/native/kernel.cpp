// The library's functions: they cut the work in tasks and run them on the threads that torch has
// already.
#include <math.h>

#include "hsa/native/arguments.h"
#include "hsa/native/threads/decode.h"
#include "hsa/native/threads/plan.h"
#include "native/threads/instructions.h"
#include "native/threads/team.h"

DECLARE_VARIANTS(hsa)

namespace {

struct Task {
    int64_t unit, copy;
};

// Waking threads takes longer than a small call.
int worthwhile_threads(const AttentionArguments& p) {
    const double work = (double)p.batch * (double)p.heads * (double)p.rows *
                        (double)(2 * p.width + p.value_width);
    return (int)fmin((double)p.threads, 1.0 + work / 5e4);
}

// Copies of units, and the steps of each: all steps in one task, or one step of a segment.
class Steps : public Team {
   public:
    Steps(const AttentionArguments& p, const Variant& v, const TreePlan& plan, bool backward,
          const std::vector<Task>& tasks, int64_t own, int64_t shared, const Seen* seen)
        : Team((int64_t)tasks.size(), worthwhile_threads(p), own + shared), p_(p), v_(v),
          plan_(plan), backward_(backward), tasks_(tasks), own_(own), seen_(seen) {}

    void task(int64_t number, float* scratch) override {
        const Task& t = tasks_[(size_t)number];
        const Unit& unit = plan_.units[t.unit];
        const Work work = {&p_, &unit, t.copy / p_.heads, t.copy % p_.heads, scratch + own_,
                           scratch, seen_};
        const int64_t segments = least(unit.chunks, SEGMENTS);
        const int steps = unit.top < 0 ? 1 : backward_ && p_.columns ? 5 : 3;
        for (int step = 0; step < steps; step++)
            for (int64_t s = 0; s < (step % 2 ? 1 : segments); s++)
                (backward_ ? v_.backward : v_.forward)(&work, step, s);
    }

   private:
    const AttentionArguments& p_;
    const Variant& v_;
    const TreePlan& plan_;
    const bool backward_;
    const std::vector<Task>& tasks_;
    const int64_t own_;
    const Seen* const seen_;
};

// One step of trees that several threads share: a task is a segment of a copy of a unit.
class Step : public Team {
   public:
    Step(const AttentionArguments& p, const Variant& v, const TreePlan& plan, bool backward,
         const std::vector<Task>& tasks, int64_t own, float* shared,
         const std::vector<int64_t>& offsets, int step, const Seen* seen)
        : Team((int64_t)tasks.size() * (step % 2 ? 1 : SEGMENTS), worthwhile_threads(p), own),
          p_(p), v_(v), plan_(plan), backward_(backward), tasks_(tasks), shared_(shared),
          offsets_(offsets), step_(step), seen_(seen) {}

    void task(int64_t number, float* scratch) override {
        const int64_t parts = step_ % 2 ? 1 : SEGMENTS;
        const size_t at = (size_t)(number / parts);
        const int64_t segment = number % parts;
        const Task& t = tasks_[at];
        const Unit& unit = plan_.units[t.unit];
        if (segment >= least(unit.chunks, SEGMENTS)) return;
        const Work work = {&p_, &unit, t.copy / p_.heads, t.copy % p_.heads,
                           shared_ + offsets_[at], scratch, seen_};
        (backward_ ? v_.backward : v_.forward)(&work, step_, segment);
    }

   private:
    const AttentionArguments& p_;
    const Variant& v_;
    const TreePlan& plan_;
    const bool backward_;
    const std::vector<Task>& tasks_;
    float* const shared_;
    const std::vector<int64_t>& offsets_;
    const int step_;
    const Seen* const seen_;
};

// What every leaf sees if masks do not make it differ, where enough heads and batch entries share it.
class Sights {
   public:
    ~Sights() { free(seen_.data); }

    bool find(const AttentionArguments& p, const Variant& v, const TreePlan& plan, int64_t own) {
        // One thread finds it while the others wait.
        if (!p.columns || p.ignored || p.batch * p.heads < 2 * worthwhile_threads(p)) return true;
        starts_.resize((size_t)plan.header->pieces);
        seen_.starts = starts_.data();
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, (size_t)(own + 64) * sizeof(float))) return false;
        found_ = true;
        for (int64_t unit = 0; found_ && unit < plan.header->units; unit++) {
            const Work work = {&p, &plan.units[unit], 0, 0, nullptr, (float*)memory, nullptr};
            found_ = v.see(&work, &seen_);
        }
        free(memory);
        return found_;
    }

    const Seen* get() const { return found_ ? &seen_ : nullptr; }

   private:
    Seen seen_ = {nullptr, 0, 0, nullptr};
    std::vector<int64_t> starts_;
    bool found_ = false;
};

// Rows without a leaf: zero, and nothing to add up.
void clear_outside(const AttentionArguments& p, const TreePlan& plan, bool backward) {
    for (int64_t i = 0; i < plan.header->outside; i++)
        for (int64_t copy = 0; copy < p.batch * p.heads; copy++) {
            const int64_t b = copy / p.heads, h = copy % p.heads, row = plan.outside[i];
            const auto clear = [&](const Tensor& t, int64_t width, int64_t size) {
                memset((char*)t.data + (b * t.batch + h * t.head + row * t.row) * size, 0,
                       (size_t)(width * size));
            };
            if (backward) {
                clear(p.grad_query, p.width, 4);
                clear(p.grad_key, p.width, 4);
                clear(p.grad_value, p.value_width, 4);
                continue;
            }
            clear(p.output, p.value_width, p.bfloat16 ? 2 : 4);
            if (p.columns) p.log_sums[copy * p.rows + row] = -INFINITY;
        }
}

bool run(const AttentionArguments& p, bool backward) {
    const TreePlan plan = read_plan(p.plan);
    const Variant& v = variant(p.variant);
    clear_outside(p, plan, backward);
    const int64_t copies = p.batch * p.heads, own = v.own_floats(&p, &plan, backward);
    Sights sights;
    if (!sights.find(p, v, plan, own)) return false;
    const int64_t threads = worthwhile_threads(p), all = copies * plan.header->units;
    // Trees of several chunks are shared among threads where there are too few of them.
    const bool many = all >= 4 * threads || all % threads == 0;
    std::vector<Task> whole, parts;
    std::vector<int64_t> offsets;
    int64_t shared = 0, most_shared = 0;
    for (int64_t copy = 0; copy < copies; copy++)
        for (int64_t unit = 0; unit < plan.header->units; unit++) {
            const int64_t floats =
                round_up(v.shared_floats(&p, &plan.units[unit], backward), 16);
            if (many || plan.units[unit].top < 0) {
                whole.push_back({unit, copy});
                most_shared = most(most_shared, floats);
            } else {
                parts.push_back({unit, copy});
                offsets.push_back(shared);
                shared += floats;
            }
        }
    if (!whole.empty() &&
        !Steps(p, v, plan, backward, whole, round_up(own, 16), most_shared, sights.get()).run())
        return false;
    if (parts.empty()) return true;
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, (size_t)(shared + 64) * sizeof(float))) return false;
    bool done = true;
    for (int step = 0; done && step < (backward && p.columns ? 5 : 3); step++)
        done = Step(p, v, plan, backward, parts, own, (float*)memory, offsets, step,
                    sights.get()).run();
    free(memory);
    return done;
}

}  // namespace

// Both return 0 when they are done and 1 when they are out of memory.
extern "C" int hsa_forward(const AttentionArguments* arguments) {
    return guarded([&] { return run(*arguments, false); });
}

extern "C" int hsa_backward(const AttentionArguments* arguments) {
    return guarded([&] { return run(*arguments, true); });
}

// One new token of every row. If a level has no room, `missing` names it and nothing is done.
extern "C" int hsa_decode(Decode* arguments) {
    return guarded([&] {
        Decoding team(*arguments, variant(arguments->variant));
        if (!team.has_room()) return true;
        team.close();
        if (!team.run()) return false;
        team.add_tokens();
        return true;
    });
}

// Cuts a forest in pieces; sets `room` to the size of the plan, which is written if it fits.
extern "C" int hsa_plan(Forest* forest) {
    return guarded([&] {
        forest->room = Planner(*forest).run();
        return true;
    });
}

// 0 portable, 1 AVX2, 2 AVX-512.
extern "C" int hsa_best_variant() { return best_variant(); }

extern "C" int64_t hsa_arguments_size() { return (int64_t)sizeof(AttentionArguments); }

extern "C" int64_t hsa_decode_size() { return (int64_t)sizeof(Decode); }

extern "C" int64_t hsa_forest_size() { return (int64_t)sizeof(Forest); }
