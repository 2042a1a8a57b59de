// The library's functions: they cut the work into tasks and run them on the threads that torch
// already has. Each returns 0 when it is done and 1 when it is out of memory.
#include "threads/downsample.h"

extern "C" int downsample_forward(const Arguments* arguments) {
    return guarded(
        [&] { return Downsampling(*arguments, variant(arguments->variant), false).run(); });
}

extern "C" int downsample_backward(const Arguments* arguments) {
    return guarded([&] {
        Downsampling team(*arguments, variant(arguments->variant), true);
        if (!team.run()) return false;
        team.finish();
        return true;
    });
}

// 0 portable, 1 AVX2, 2 AVX-512.
extern "C" int downsample_best_variant() { return best_variant(); }

extern "C" int64_t downsample_arguments_size() { return (int64_t)sizeof(Arguments); }
