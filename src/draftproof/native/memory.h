/* Memory and its pages, which operating systems name differently. */
#pragma once
#include <stdint.h>
#include <stdlib.h>

#ifdef _WIN32
#include <malloc.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
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

/* Drop the whole pages within memory of a mapped file that nobody wrote to: they no longer count as
 * resident, and are read again from the file when they are needed. */
static inline void drop_pages(const void *memory, int64_t bytes) {
#ifdef __linux__
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)memory + page - 1;
    uintptr_t last = (uintptr_t)memory + (uintptr_t)bytes;
    first -= first % page, last -= last % page;
    if (last > first) madvise((void *)first, last - first, MADV_DONTNEED);
#else
    (void)memory, (void)bytes;
#endif
}
