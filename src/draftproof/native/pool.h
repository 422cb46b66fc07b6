/* Threads that share work. */
#pragma once
#include <stdint.h>

/* Compute items `first` to `last` of `work`. Results must not depend, bit for bit, on the thread or
 * on which items are computed together. */
typedef void (*Items)(const void *work, int64_t first, int64_t last);

/* Compute `count` items with up to this many threads, the calling one included, and return when all
 * are done. Threads take pieces of at least `least` items in turn. The call waits for pieces that
 * were taken, never for a thread that has no core and took none. */
void share_out(Items compute, const void *work, int64_t count, int64_t least, int64_t threads);
