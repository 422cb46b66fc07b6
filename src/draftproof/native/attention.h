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

/* What one head stores of one row: [slots][size] in bfloat16, or in 8 bits, with a scale per slot. */
typedef struct {
    void *keys, *values;
    bf16 *key_scales, *value_scales;
} Held;

struct Heard {
    const Way *way;
    Query *queries;
    Held held;
    const void *next;                           /* the keys this thread needs after these */
    int64_t size, count, padded, stride, earliest, length, nodes, capacity;
    bf16 *heads;                                /* [padded][size] */
    /* [padded][stride], later chances; [padded][size] */
    float *scores, *sums;
    void *room;                                 /* for STRETCH / 2 times size numbers */
};

/* Bytes of one slot's keys, or values. */
static inline int64_t slot_of(const Heard *of) {
    return of->size * (of->held.key_scales ? 1 : (int64_t)sizeof(bf16));
}

/* Ask memory for what is wanted next of the BLOCK slots from `slot` on: their values, and what this
 * thread scores thereafter. */
static inline void ahead(const Heard *of, int64_t slot) {
    int64_t size = slot_of(of);
    const char *values = (const char *)of->held.values + slot * size,
            *next = (const char *)of->next + slot * size;
    for (int64_t i = 0; i < BLOCK * size; i += 64)
        __builtin_prefetch(values + i), __builtin_prefetch(next + i);
}

/* Keys of the BLOCK slots from `slot` on, [BLOCK][size]; in `room` where they have 8 bits, or end
 * before: what lies behind may be nobody's. */
static inline const bf16 *keys_at(const Heard *of, int64_t slot, bf16 *room) {
    int64_t size = of->size, some = of->length + of->nodes - slot;
    const bf16 *keys = (const bf16 *)of->held.keys + slot * size;
    if (some >= BLOCK && !of->held.key_scales) return keys;
    some = some < BLOCK ? some : BLOCK;
    memset(room + some * size, 0, (size_t)((BLOCK - some) * size) * sizeof *room);
    if (!of->held.key_scales) return memcpy(room, keys, (size_t)(some * size) * sizeof *room);
    for (int64_t s = slot; s < slot + some; s++)
        for (int64_t i = 0; i < size; i += LANES)
            narrowed(room + (s - slot) * size + i, decoded((const int8_t *)of->held.keys + s * size
                    + i, of->held.key_scales[s]));
    return room;
}

/* LANES numbers of the values of a slot, from the `i`-th on. */
static inline __attribute__((always_inline)) lanes value_at(const Heard *of, const int coded,
        int64_t slot, int64_t i) {
    if (!coded) return wide((const bf16 *)of->held.values + slot * of->size + i);
    return decoded((const int8_t *)of->held.values + slot * of->size + i,
            of->held.value_scales[slot]);
}
