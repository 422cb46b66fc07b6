/* What operating systems name differently: memory that is aligned. */
#pragma once
#include <stdlib.h>

#ifdef _WIN32
#include <malloc.h>
#endif

/* Memory that begins a cache line; null if there is none. To be freed by `free_lines`. */
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
