// The library's functions: they cut the work in tasks and run them on the threads that torch has
// already.
#include "threads/sequences.h"

namespace {

class Choose : public Team {
   public:
    struct Run {
        const Sequence* sequence;
        int64_t key_head, first_unit, count;
    };

    Choose(const Arguments& p, const Variant& v, const Sequences& sequences,
           const std::vector<Run>& runs, int threads)
        : Team((int64_t)runs.size(), threads,
               v.choose_floats(&p, sequences.longest, sequences.most_sinks)),
          p_(p), v_(v), runs_(runs) {}

    void task(int64_t number, float* scratch) override {
        // The last ones see most keys: first, so that all threads end together.
        const Run& run = runs_[runs_.size() - 1 - (size_t)number];
        v_.choose(&p_, run.sequence, run.key_head, run.first_unit, run.count, scratch);
    }

   private:
    const Arguments& p_;
    const Variant& v_;
    const std::vector<Run>& runs_;
};

std::vector<Choose::Run> runs_of(const Arguments& p, const Variant& v, const Sequences& sequences) {
    const int64_t together = v.choose_units(&p);
    std::vector<Choose::Run> runs;
    for (const Sequence& s : sequences.all)
        for (int64_t unit = 0; unit < units(p, s); unit += together)
            for (int64_t head = 0; head < p.key_heads; head++)
                runs.push_back({&s, head, s.first_unit + unit, least(together, units(p, s) - unit)});
    return runs;
}

// Means of the key blocks of every sequence and head, where the rest is pooled; and their gradients.
class Means {
   public:
    Means(const Arguments& p, const Sequences& sequences, bool gradients) : p_(p) {
        if (!p.pool) return;
        int64_t floats = 0;
        for (const Sequence& s : sequences.all)
            for (int64_t head = 0; head < p.key_heads; head++) {
                starts_.push_back(floats);
                floats += key_blocks(p, s) * (p.width + p.value_width);
            }
        means_.resize((size_t)floats);
        if (gradients) grads_.resize((size_t)floats);
    }

    Nodes nodes(int64_t number) {
        if (starts_.empty()) return {nullptr, nullptr};
        const size_t start = (size_t)starts_[(size_t)number];
        return {means_.data() + start, grads_.empty() ? nullptr : grads_.data() + start};
    }

    float* means(int64_t number) { return means_.data() + starts_[(size_t)number]; }
    bool is_empty() const { return starts_.empty(); }

   private:
    const Arguments& p_;
    std::vector<int64_t> starts_;
    std::vector<float> means_, grads_;
};

// A task for each sequence and key head.
class Pool : public Team {
   public:
    Pool(const Arguments& p, const Variant& v, const Sequences& sequences, Means& means, bool back)
        : Team((int64_t)sequences.all.size() * p.key_heads, p.threads, 0),
          p_(p), v_(v), sequences_(sequences), means_(means), back_(back) {}

    void task(int64_t number, float*) override {
        const Sequence& s = sequences_.all[(size_t)(number / p_.key_heads)];
        const int64_t head = number % p_.key_heads;
        if (back_)
            v_.unpool(&p_, &s, head, means_.nodes(number).grad_means);
        else
            v_.pool(&p_, &s, head, means_.means(number));
    }

   private:
    const Arguments& p_;
    const Variant& v_;
    const Sequences& sequences_;
    Means& means_;
    bool back_;
};

double pairs_of(const std::vector<Task>& tasks, int64_t view, const Arguments& p) {
    return (double)tasks.size() * (double)view * (double)p.unit;
}

int64_t most_heads(const std::vector<Task>& tasks) {
    int64_t heads = 1;
    for (const Task& t : tasks) heads = most(heads, t.part.heads);
    return heads;
}

class Attend : public Team {
   public:
    Attend(const Arguments& p, const Variant& v, const std::vector<Task>& tasks, Means& means,
           int64_t view)
        : Team((int64_t)tasks.size(), worthwhile_threads(p, pairs_of(tasks, view, p)),
               v.attend_floats(&p, most_heads(tasks), view)),
          p_(p), v_(v), tasks_(tasks), means_(means) {}

    void task(int64_t number, float* scratch) override {
        const Task& t = tasks_[(size_t)number];
        const Nodes nodes = means_.nodes(t.counter);
        v_.attend(&p_, t.sequence, &t.part, &nodes, scratch);
    }

   private:
    const Arguments& p_;
    const Variant& v_;
    const std::vector<Task>& tasks_;
    Means& means_;
};

// Query blocks add to the gradients of the same keys. They do so in turn, so that any number of
// threads gives the same bits: tasks are handed out in order, and who is early waits.
class Backward : public Team {
   public:
    Backward(const Arguments& p, const Variant& v, const std::vector<Task>& tasks, Means& means,
             int64_t view, size_t counters)
        : Team((int64_t)tasks.size(), worthwhile_threads(p, pairs_of(tasks, view, p)),
               v.backward_floats(&p, most_heads(tasks), view)),
          p_(p), v_(v), tasks_(tasks), means_(means), turns_(counters) {
        for (std::atomic<int64_t>& turn : turns_) turn = 0;
    }

    void task(int64_t number, float* scratch) override {
        const Task& t = tasks_[(size_t)number];
        const Nodes nodes = means_.nodes(t.counter);
        v_.backward(&p_, t.sequence, &t.part, &nodes, scratch);
        std::atomic<int64_t>& turn = turns_[(size_t)t.counter];
        while (turn.load(std::memory_order_acquire) != t.turn) std::this_thread::yield();
        v_.add_gradients(&p_, t.sequence, &t.part, &nodes, scratch);
        turn.store(t.turn + 1, std::memory_order_release);
    }

   private:
    const Arguments& p_;
    const Variant& v_;
    const std::vector<Task>& tasks_;
    Means& means_;
    std::vector<std::atomic<int64_t>> turns_;
};

}  // namespace

// Every function returns 0 when it is done and 1 when it is out of memory.
extern "C" int opened_choose(const Arguments* arguments) {
    return guarded([&] {
        const Arguments& p = *arguments;
        const Variant& v = variant(p.variant);
        const Sequences sequences(p);
        const std::vector<Choose::Run> runs = runs_of(p, v, sequences);
        const double pairs = (double)p.rows * (double)p.keys * (double)(p.batch * p.heads);
        return Choose(p, v, sequences, runs, worthwhile_threads(p, pairs)).run();
    });
}

extern "C" int opened_attend(const Arguments* arguments) {
    return guarded([&] {
        const Arguments& p = *arguments;
        const Variant& v = variant(p.variant);
        const Sequences sequences(p);
        Means means(p, sequences, false);
        if (!means.is_empty() && !Pool(p, v, sequences, means, false).run()) return false;
        const std::vector<Task> tasks = tasks_of(p, sequences);
        return Attend(p, v, tasks, means, largest_view(p, sequences)).run();
    });
}

// Gradients are float32, whatever the inputs are; those of keys and values are added to.
extern "C" int opened_backward(const Arguments* arguments) {
    return guarded([&] {
        const Arguments& p = *arguments;
        const Variant& v = variant(p.variant);
        const Sequences sequences(p);
        Means means(p, sequences, true);
        if (!means.is_empty() && !Pool(p, v, sequences, means, false).run()) return false;
        const std::vector<Task> tasks = tasks_of(p, sequences);
        const size_t counters = sequences.all.size() * (size_t)p.key_heads;
        Backward team(p, v, tasks, means, largest_view(p, sequences), counters);
        if (!team.run()) return false;
        return means.is_empty() || Pool(p, v, sequences, means, true).run();
    });
}

// 0 portable, 1 AVX2, 2 AVX-512.
extern "C" int opened_best_variant() { return best_variant(); }

extern "C" int64_t opened_arguments_size() { return (int64_t)sizeof(Arguments); }
