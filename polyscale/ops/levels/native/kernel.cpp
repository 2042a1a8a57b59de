// The library's functions: they cut the work in tasks and run them on the threads that torch has
// already.
#include "threads/append.h"

// Every function returns 0 when it is done and 1 when it is out of memory.
extern "C" int levels_attend(const Attention* arguments) {
    return guarded([&] { return attend(*arguments); });
}

// New tokens into arrays that have room for them; the lengths stay as they are.
extern "C" int levels_append(const Append* arguments) {
    return guarded([&] { return Appending(*arguments, variant(arguments->variant)).run(); });
}

// 0 portable, 1 AVX2, 2 AVX-512.
extern "C" int levels_best_variant() { return best_variant(); }

extern "C" int64_t levels_store_size() { return (int64_t)sizeof(Store); }

extern "C" int64_t levels_attention_size() { return (int64_t)sizeof(Attention); }

extern "C" int64_t levels_append_size() { return (int64_t)sizeof(Append); }
