/* Threads that share out work. */
#pragma once
#include <stdint.h>

/* Compute items `first` to `last` of what `work` describes. Which thread does so, and which items
 * it is given together, must not change a bit of the results. */
typedef void (*Items)(const void *work, int64_t first, int64_t last);

/* Compute `count` items by up to so many threads, the calling one among them; all are done when
 * this returns. They are cut into pieces of `least` items or more, which threads take in turn. The
 * call waits for pieces that were taken, never for a thread that has no core and took none. */
void share_out(Items compute, const void *work, int64_t count, int64_t least, int64_t threads);
