/* Attention: the queries that share the keys of one head, and how they are computed. */
#pragma once
#include "tiles.h"

enum { BLOCK = LANES, TOGETHER = 8, WHOLE = 2 * BLOCK, STRETCH = 8 * WHOLE, WIDEST = 256 };

#if LANES == 16
static const bits places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
static const bits places = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const bits places = {0, 1, 2, 3};
#endif

/* A query: a node, as the `place`-th of its row that is read, and a head. Its path from the root
 * on, and where its window begins. */
typedef struct {
    int64_t place, head, start, deep;
    const int64_t *path;
    float share;                                /* one divided by the sum of its chances */
} Query;

/* Queries of one head of keys, in one row, and what they are reckoned with. */
typedef struct Heard Heard;

/* How that is done: so many queries at a time; of chances in bfloat16, sums of values by so many
 * places of the text, or 1. */
typedef struct {
    int64_t together, whole;
    void (*scored)(const Heard *of, float scale);
    void (*summed)(const Heard *of);
} Way;

struct Heard {
    const Way *way;
    Query *queries;
    /* [slots][size]; the keys this thread needs after these */
    const bf16 *keys, *values, *next;
    int64_t size, count, padded, stride, earliest, length, nodes, capacity;
    bf16 *heads;                                /* [padded][size] */
    /* [padded][stride], later chances; [padded][size] */
    float *scores, *sums;
    void *room;                                 /* for STRETCH / 2 times size numbers */
};

/* Ask memory for what is wanted next of the BLOCK slots from `slot` on: their values, and what this
 * thread scores thereafter. */
static inline void ahead(const Heard *of, int64_t slot) {
    const bf16 *values = of->values + slot * of->size, *next = of->next + slot * of->size;
    for (int64_t i = 0; i < BLOCK * of->size; i += 2 * LANES)
        __builtin_prefetch(values + i), __builtin_prefetch(next + i);
}
