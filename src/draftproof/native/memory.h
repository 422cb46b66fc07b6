/* Aligned memory, which operating systems name differently. */
#pragma once
#include <stdlib.h>

#ifdef _WIN32
#include <malloc.h>
#endif

/* Memory aligned to a cache line, or null. Free it with `free_lines`. */
static inline void *allocate_lines(size_t bytes) {
#ifdef _WIN32
    return _aligned_malloc(bytes, 64);
#else
    void *memory;
    return posix_memalign(&memory, 64, bytes) ? NULL : memory;
#endif
}

static inline void free_lines(void *memory) {
#ifdef _WIN32
    _aligned_free(memory);
#else
    free(memory);
#endif
}
