/* Attention over the cache and the tree, in the order of the text: rotation, scores, chances, sums
 * of values. */
#include <omp.h>

#include "attention.h"

static void normed(const bf16 *x, const float *weight, const Norm *norm, bf16 *out, int64_t size) {
    float factor = factor_of(x, norm->epsilon, size);
    for (int64_t i = 0; i < size; i += LANES)
        narrowed(out + i, rounded(wide(x + i) * factor) * loaded(weight + i));
}

/* One head of one token, normed if there is a weight; of its numbers those that do are turned to
 * its position. */
static void turned(const Read *read, const bf16 *x, const float *weight, const Norm *norm,
        int64_t position, bf16 *out) {
    int64_t size = read->head_dim, half = read->turned / 2,
            known = position < read->context ? position : read->context - 1;
    const bf16 *cosines = read->cosines + known * size, *sines = read->sines + known * size;
    bf16 own[WIDEST], other[WIDEST];
    if (weight) normed(x, weight, norm, own, size), x = own;
    if (!half) {
        memcpy(out, x, (size_t)size * sizeof *out);
        return;
    }
    memcpy(other, x + half, (size_t)half * sizeof *other);
    memcpy(other + half, x, (size_t)half * sizeof *other);
    memset(other + 2 * half, 0, (size_t)(size - 2 * half) * sizeof *other);
    for (int64_t i = 0; i < size; i += LANES) {
        bits minus = (places + (int32_t)i < (int32_t)half) & INT32_MIN;
        /* exact, as any product of two */
        lanes across = wide(other + i) * wide(sines + i);
        narrowed(out + i, rounded(wide(x + i) * wide(cosines + i)) + (lanes)((bits)across ^ minus));
    }
}

static int64_t depth_of(const int64_t *parents, int64_t node) {
    int64_t depth = 0;
    for (; (node = parents[node]) >= 0;) depth++;
    return depth;
}

/* Of the scores of LANES slots from `slot` on, those that are not in [start, end) become those of
 * nothing. */
static inline void bounded(float *scores, int64_t slot, int64_t start, int64_t end) {
    bits at = places + (int32_t)slot, outside = (at < (int32_t)start) | (at >= (int32_t)end);
    lanes x = (lanes)(((bits)loaded(scores + slot) & ~outside) | ((bits)((lanes){}
            - INFINITY) & outside));
    memcpy(scores + slot, &x, sizeof x);
}

/* Scores of a query become chances, summed up in the order of the text: from where its window
 * begins to `length`, then the nodes of its path. Those of other nodes, and of what only others
 * hear, become 0. */
static void softened(const Heard *of, Query *query, float *scores) {
    int64_t length = of->length, start = query->start, deep = query->deep,
            coarse = of->way->whole > 1;
    /* whether nodes that are on other paths lie between its own */
    int64_t apart = query->path[deep - 1] >= deep;
    float on[deep];
    if (apart) {
        for (int64_t d = 0; d < deep; d++) on[d] = scores[length + query->path[d]];
        memcpy(scores + length, on, sizeof on);
    }
    int64_t first = start / LANES * LANES, end = length + deep,
            whole = (end + LANES - 1) / LANES * LANES;
    bounded(scores, first, start, end);
    bounded(scores, whole - LANES, start, end);
    lanes most = loaded(scores + first), sum = {};
    for (int64_t s = first; s < whole; s += LANES) most = larger(loaded(scores + s), most);
    float top = largest(most);
    for (int64_t s = first; s < whole; s += LANES) {
        lanes chance = expo(loaded(scores + s) - top);
        if (coarse) chance = rounded(chance);
        sum += chance;
        memcpy(scores + s, &chance, sizeof chance);
    }
    for (int64_t s = of->earliest / of->way->whole * of->way->whole; s < first; s++) scores[s] = 0;
    if (apart) memcpy(on, scores + length, sizeof on);
    int64_t kept = apart ? 0 : deep;
    memset(scores + length + kept, 0, (size_t)(of->nodes - kept) * sizeof *scores);
    for (int64_t d = 0; apart && d < deep; d++) scores[length + query->path[d]] = on[d];
    query->share = 1.0f / total(sum);
}

/* `CALL(n)` with the number that `some` is, 1 to TOGETHER: sums of so many stay in registers. */
#define WITH_NUMBER(some, CALL) \
    switch (some) { \
    case 1: CALL(1); break; \
    case 2: CALL(2); break; \
    case 3: CALL(3); break; \
    case 4: CALL(4); break; \
    case 5: CALL(5); break; \
    case 6: CALL(6); break; \
    case 7: CALL(7); break; \
    default: CALL(8); \
    }

/* Queries as numbers, where vectors read them: [padded][size], behind the heads. */
static inline float *widened_heads(const Heard *of) {
    return (float *)(of->heads + of->padded * of->size);
}

/* Scores of `some` queries from `first` on with the BLOCK slots from `slot` on; keys [size][BLOCK].
 * Each a sum along size. */
static inline __attribute__((always_inline)) void scored(const Heard *of, int64_t first,
        const int some, int64_t slot, const lanes *keys, float scale) {
    const float *heads = widened_heads(of) + first * of->size;
    lanes sum[TOGETHER] = {};
    for (int64_t i = 0; i < of->size; i++)
        for (int q = 0; q < some; q++) sum[q] += keys[i] * heads[q * of->size + i];
    for (int q = 0; q < some; q++) {
        sum[q] *= scale;
        memcpy(of->scores + (first + q) * of->stride + slot, &sum[q], sizeof sum[q]);
    }
}

/* Numbers of BLOCK keys [.][size] beside those of the others: [size][BLOCK]. */
static inline void beside(const bf16 *keys, int64_t size, lanes *tile) {
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        lanes square[BLOCK];
        int whole = i + 2 * LANES <= size;
        for (int64_t j = 0; j < BLOCK; j++)
            if (whole) memcpy(square + j, keys + j * size + i, sizeof *square);
            else square[j] = half_loaded(keys + j * size + i);
        transposed(square);
        for (int64_t j = 0; j < (whole ? LANES : LANES / 2); j++) {
            *tile++ = (lanes)((bits)square[j] << 16);
            *tile++ = (lanes)((bits)square[j] & ~0xffff);
        }
    }
}

static void all_scored(const Heard *of, float scale) {
    lanes *tile = of->room;
    float *heads = widened_heads(of);
    int64_t end = of->length + of->nodes;
    for (int64_t i = 0; i < of->count * of->size; i += LANES) {
        lanes number = wide(of->heads + i);
        memcpy(heads + i, &number, sizeof number);
    }
    for (int64_t s = of->earliest / BLOCK * BLOCK; s < end; s += BLOCK) {
        ahead(of, s);
        bf16 *room = (bf16 *)((float *)of->room + STRETCH / 4 * of->size);
        beside(keys_at(of, s, room), of->size, tile);
#define SCORED(n) scored(of, q, n, s, tile, scale)
        for (int64_t q = 0; q < of->count; q += TOGETHER) WITH_NUMBER(of->count - q, SCORED)
    }
}

/* Sums of the values of `some` queries from `first` on, over what is committed and these `count`
 * slots behind it. */
static inline __attribute__((always_inline)) void summed(const Heard *of, int64_t first,
        const int some, const int coded, const int64_t *slots, int64_t count) {
    const float *chances = of->scores + first * of->stride;
    for (int64_t i = 0; i < of->size; i += LANES) {
        lanes sum[TOGETHER] = {};
        for (int64_t s = of->earliest; s < of->length; s++) {
            lanes value = value_at(of, coded, s, i);
            for (int q = 0; q < some; q++) sum[q] += chances[q * of->stride + s] * value;
        }
        for (int64_t n = 0; n < count; n++) {
            lanes value = value_at(of, coded, slots[n], i);
            for (int q = 0; q < some; q++) sum[q] += chances[q * of->stride + slots[n]] * value;
        }
        for (int q = 0; q < some; q++)
            memcpy(of->sums + (first + q) * of->size + i, &sum[q], sizeof sum[q]);
    }
}

/* Of all slots that are not for nodes on no path, which may never have been written. */
static void all_summed(const Heard *of) {
    int64_t wanted[of->nodes], slots[of->nodes], some = 0;
    memset(wanted, 0, sizeof wanted);
    for (int64_t q = 0; q < of->count; q++)
        for (int64_t d = 0; d < of->queries[q].deep; d++) wanted[of->queries[q].path[d]] = 1;
    for (int64_t n = 0; n < of->nodes; n++)
        if (wanted[n]) slots[some++] = of->length + n;
#define SUMMED(n) of->held.key_scales ? summed(of, q, n, 1, slots, some) \
        : summed(of, q, n, 0, slots, some)
    for (int64_t q = 0; q < of->count; q += TOGETHER) WITH_NUMBER(of->count - q, SUMMED)
}

static const Way by_vectors = {TOGETHER, 1, all_scored, all_summed};

#if TILES
#include "attention_tiles.h"
#endif

/* Attention of queries `from` to `to` that share the keys of one head, in one row. A query is
 * (node, head of the group). */
static void attended(const Read *read, const Way *way, int64_t row, int64_t key_head, Held held,
        const void *next, const bf16 *inner, const float *weight, const Norm *norm, bf16 *out,
        int64_t from, int64_t to) {
    int64_t size = read->head_dim, group = read->heads / read->key_heads,
            begin = start_of(read, row), count = to - from;
    int64_t length = read->lengths[row], nodes = read->nodes, together = way->together;
    int64_t padded = (count + together - 1) / together * together,
            stride = (length + nodes + BLOCK - 1) / BLOCK * BLOCK + LANES;
    float *sums = scratch(padded * (stride + 3 * size) + STRETCH / 2 * size),
            *scores = sums + padded * size;
    bf16 *heads = (bf16 *)(scores + padded * stride), *room = heads + 4 * padded * size;
    Heard heard = {
        .way = way, .held = held, .next = next, .size = size, .count = count, .padded = padded,
        .stride = stride, .earliest = length, .length = length, .nodes = nodes,
        .heads = heads, .scores = scores, .sums = sums, .room = room,
    };
    Query queries[count];
    int64_t paths[count][nodes];
    heard.queries = queries;
    memset(heads + count * size, 0, (size_t)((padded - count) * size) * sizeof *heads);
    for (int64_t q = 0; q < count; q++) {
        int64_t place = (from + q) / group, node = node_at(read, row, place),
                head = key_head * group + (from + q) % group;
        int64_t depth = depth_of(read->parents + row * nodes, node), position = length + depth;
        const bf16 *x = inner + ((begin + place) * (read->heads + 2 * read->key_heads) + head)
                * size;
        turned(read, x, weight, norm, position, heads + q * size);
        for (int64_t d = depth, n = node; d >= 0; d--, n = read->parents[row * nodes + n])
            paths[q][d] = n;
        queries[q] = (Query){.place = place, .head = head, .deep = depth + 1, .path = paths[q]};
        if (read->window && position >= read->window) queries[q].start
                = position + 1 - read->window;
        if (queries[q].start < heard.earliest) heard.earliest = queries[q].start;
    }
    way->scored(&heard, read->scale);
    for (int64_t q = 0; q < count; q++) softened(&heard, queries + q, scores + q * stride);
    way->summed(&heard);
    for (int64_t q = 0; q < count; q++) {
        bf16 *to = out + ((begin + queries[q].place) * read->heads + queries[q].head) * size;
        for (int64_t i = 0; i < size; i += LANES)
            narrowed(to + i, loaded(sums + q * size + i) * queries[q].share);
    }
}

/* Codes of 8 bits of a head's numbers, the largest of which is 127; returns their scale. */
static bf16 encoded(const bf16 *x, int8_t *out, int64_t size) {
    lanes top = {}, least = (lanes){} - 127.0f;
    for (int64_t i = 0; i < size; i += LANES) top = larger(absolute(wide(x + i)), top);
    float scale = largest(top) / 127.0f, smallest = 1.17549435e-38f;
    bf16 stored = narrow(scale > smallest ? scale : smallest);
    for (int64_t i = 0; i < size; i += LANES) {
        lanes code = larger(least, -larger(least, -(wide(x + i) / widen(stored))));
        bytes codes = __builtin_convertvector((code + 12582912.0f) - 12582912.0f, bytes);
        memcpy(out + i, &codes, sizeof codes);
    }
    return stored;
}

/* What the `which`-th head of keys of all rows stores. */
static Held held_of(const Read *read, void *const *stores, int64_t which) {
    int64_t slot = which * read->capacity, coded = read->stores > 2,
            at = slot * read->head_dim * (coded ? 1 : (int64_t)sizeof(bf16));
    return (Held){(char *)stores[0] + at, (char *)stores[1] + at,
            coded ? (bf16 *)stores[2] + slot : NULL, coded ? (bf16 *)stores[3] + slot : NULL};
}

/* Keys and values of one row's nodes that are read, of one head, behind what is committed; keys
 * normed if there is a weight, and turned. */
static void written(const Read *read, int64_t row, int64_t head, const bf16 *inner,
        const float *weight, const Norm *norm, Held held) {
    int64_t size = read->head_dim, lines = read->heads + 2 * read->key_heads,
            length = read->lengths[row];
    int64_t begin = start_of(read, row), some = start_of(read, row + 1) - begin;
    for (int64_t w = 0; w < some; w++) {
        int64_t node = node_at(read, row, w), slot = length + node;
        const bf16 *x = inner + ((begin + w) * lines + read->heads + head) * size,
                *value = x + read->key_heads * size;
        bf16 own[WIDEST], *key = held.key_scales ? own : (bf16 *)held.keys + slot * size;
        turned(read, x, weight, norm, length + depth_of(read->parents + row * read->nodes, node),
                key);
        if (held.key_scales) {
            held.key_scales[slot] = encoded(own, (int8_t *)held.keys + slot * size, size);
            held.value_scales[slot] = encoded(value, (int8_t *)held.values + slot * size, size);
        } else
            memcpy((bf16 *)held.values + slot * size, value, (size_t)size * sizeof(bf16));
    }
}

/* Queries, keys and values of the nodes that are read, [start_of(rows), heads + 2 key_heads,
 * head_dim]: turn them, write keys and values to `stores` [rows, key_heads, capacity, head_dim]
 * behind the committed tokens, attend to those and to each node's own path; out [start_of(rows), heads,
 * head_dim]. The weights of head norms may be null. By all threads of a team, which do not wait for
 * each other in the end. */
void draftproof_attention(const Read *read, const bf16 *inner, const float *query_weight,
        const float *key_weight, const Norm *norm, void *const *stores, bf16 *out) {
    int64_t group = read->heads / read->key_heads,
            shared = read->rows * read->key_heads;
    int64_t queries = (read->nodes - read->first) * group;
    int64_t wanted = read->threads > shared ? (read->threads + shared - 1) / shared : 1,
            each = (queries + wanted - 1) / wanted;
    each = each > 48 ? 48 : (each + TOGETHER - 1) / TOGETHER * TOGETHER;
    int64_t parts = (queries + each - 1) / each;
    /* several threads read what one has written */
    if (parts > 1) {
#pragma omp for
        for (int64_t one = 0; one < shared; one++)
            written(read, one / read->key_heads, one % read->key_heads, inner, key_weight, norm,
                    held_of(read, stores, one));
    }
    int64_t team = omp_get_num_threads();
    const Way *way = &by_vectors;
#if TILES
    unsigned mode = draftproof_tiles ? tiled() : 0;
    if (draftproof_tiles) way = &by_tiles;
#endif
#pragma omp for schedule(static, 1) nowait
    for (int64_t one = 0; one < shared * parts; one++) {
        int64_t which = one / parts, row = which / read->key_heads, head = which % read->key_heads;
        int64_t own = (start_of(read, row + 1) - start_of(read, row)) * group,
                from = one % parts * each;
        int64_t next = one + team < shared * parts ? (one + team) / parts : which;
        Held held = held_of(read, stores, which);
        if (parts == 1) written(read, row, head, inner, key_weight, norm, held);
        if (from < own)
            attended(read, way, row, head, held, held_of(read, stores, next).keys, inner,
                    query_weight, norm, out, from, from + each < own ? from + each : own);
    }
#if TILES
    if (draftproof_tiles) released(mode);
#endif
}
