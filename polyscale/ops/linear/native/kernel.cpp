// The library's function: it cuts the work into tasks and runs them on the threads that torch
// already has. It returns 0 when it is done and 1 when it is out of memory.
#include "threads/weight_gradient.h"

extern "C" int linear_weight_gradient(const Arguments* arguments) {
    return guarded([&] { return WeightGradients(*arguments, variant(arguments->variant)).run(); });
}

// 0 portable, 1 AVX2, 2 AVX-512.
extern "C" int linear_best_variant() { return best_variant(); }

extern "C" int64_t linear_arguments_size() { return (int64_t)sizeof(Arguments); }
