// New tokens on several threads: blocks that become full are packed, each by one of them.
#pragma once
#include "attend.h"

namespace {

class Appending {
   public:
    Appending(const Append& a, const Variant& v) : a_(a), v_(v), store_(*a.store) {
        plan();
    }

    bool run() {
        const int64_t floats = v_.packing_floats(&store_);
        const double numbers = (double)(jobs_.size() * BLOCK) * (double)store_.width;
        const int threads = (int)least(a_.threads, (int64_t)(1.0 + numbers / 1e5));
        for (const std::vector<Job>* jobs : {&jobs_, &last_})
            if (!Pass(*this, *jobs, threads, floats).run()) return false;
        return true;
    }

   private:
    struct Job {
        int64_t batch, head, block, length, end;
    };

    // The jobs: blocks of a head that gain tokens.
    void plan() {
        columns_.resize((size_t)store_.batch);
        for (int64_t b = 0; b < store_.batch; b++) {
            std::vector<int64_t>& mine = columns_[(size_t)b];
            for (int64_t n = 0; n < a_.tokens; n++)
                if (!a_.real || a_.real[b * a_.tokens + n]) mine.push_back(n);
            if (mine.empty()) continue;
            const int64_t length = store_.lengths[b], end = length + (int64_t)mine.size();
            for (int64_t block = length / BLOCK; block <= (end - 1) / BLOCK; block++)
                for (int64_t h = 0; h < store_.heads; h++) {
                    const Job job{b, h, block, length, end};
                    // The newest block goes where an older one waits to be packed.
                    (store_.is_8bit && end < (block + 1) * BLOCK ? last_ : jobs_).push_back(job);
                }
        }
    }

    class Pass : public Team {
       public:
        Pass(Appending& of, const std::vector<Job>& jobs, int threads, int64_t floats)
            : Team((int64_t)jobs.size(), threads, floats), of_(of), jobs_(jobs) {}
        void task(int64_t number, float* scratch) override {
            of_.append(jobs_[(size_t)number], scratch);
        }

       private:
        Appending& of_;
        const std::vector<Job>& jobs_;
    };

    const char* row(const Tensor& t, const Job& j, int64_t token) const {
        const int64_t column = columns_[(size_t)j.batch][(size_t)(token - j.length)];
        const int64_t at = j.batch * t.batch + j.head * t.head + column * t.row;
        return (const char*)t.data + at * (store_.bfloat16 ? 2 : 4);
    }

    // A new token's row as the store keeps it; `memory` is room for 16 bits of each channel.
    const char* kept(const char* row, int64_t width, float* memory) const {
        if (!store_.halves()) return row;
        v_.halve((const float*)row, width, (uint16_t*)memory);
        return (const char*)memory;
    }

    void append(const Job& j, float* scratch) {
        const Head head(store_, j.batch, j.head);
        const int64_t begin = j.block * BLOCK, full = begin + BLOCK;
        const bool whole = j.end >= full, keeps = !store_.is_8bit || !whole;
        float *values = scratch + BLOCK * head.wide, *rows = values + BLOCK * head.value_wide;
        for (int64_t token = begin; token < least(full, j.end); token++) {
            const int64_t place = store_.is_8bit ? token - begin : token;
            char* key = head.keys + place * head.key_bytes;
            char* value = head.values + place * head.value_bytes;
            const char *new_key = key, *new_value = value;
            if (token >= j.length) {
                new_key = kept(row(a_.key, j, token), store_.width, rows);
                new_value = kept(row(a_.value, j, token), store_.value_width, rows + head.wide);
                if (keeps) memcpy(key, new_key, (size_t)head.key_bytes);
                if (keeps) memcpy(value, new_value, (size_t)head.value_bytes);
                if (store_.is_8bit && token < store_.sinks)
                    memcpy(head.sink_keys + token * head.key_bytes, new_key,
                           (size_t)head.key_bytes);
            }
            if (!whole) continue;
            const int64_t n = token - begin;
            v_.widen(&store_, new_key, store_.width, head.wide, scratch + n * head.wide);
            v_.widen(&store_, new_value, store_.value_width, head.value_wide,
                     values + n * head.value_wide);
        }
        if (whole) v_.pack(&head, j.block, scratch);
    }

    const Append& a_;
    const Variant& v_;
    const Store& store_;
    std::vector<std::vector<int64_t>> columns_;
    std::vector<Job> jobs_, last_;
};

}  // namespace
