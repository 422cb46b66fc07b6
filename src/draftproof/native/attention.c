/* Attention over the cache and the tree, in the order of the text: rotation, scores, chances, sums
 * of values. */
#include "model.h"

/* Keys are taken BLOCK at a time, queries TOGETHER, and a thread takes up to MOST queries. */
enum { BLOCK = LANES, TOGETHER = 8, MOST = 48, WIDEST = 256 };

/* A query: a node, as the `place`-th of its row that is read, and a head. Its path from the root
 * on, and where its window begins. */
typedef struct {
    int64_t place, head, start, deep;
    const int64_t *path;
    float share;                                /* one divided by the sum of its chances */
} Query;

/* What one head stores of one row: [slots][size] in bfloat16, or in 8 bits, with a scale per slot. */
typedef struct {
    void *keys, *values;
    bf16 *key_scales, *value_scales;
} Held;

/* Queries of one head of keys, in one row, and what they are reckoned with: heads and sums
 * [count][size], scores, later chances, [count][stride], and a tile of keys [size][BLOCK]. */
typedef struct {
    Query *queries;
    Held held;
    int64_t size, count, stride, earliest, length, nodes;
    float *heads, *scores, *sums;
    lanes *tile;
} Heard;

static void normed(const bf16 *x, const float *weight, const Norm *norm, bf16 *out, int64_t size) {
    float factor = factor_of(x, norm->epsilon, size);
    for (int64_t i = 0; i < size; i += LANES)
        narrowed(out + i, rounded(wide(x + i) * factor) * loaded(weight + i));
}

/* One head of one token, normed if there is a weight; of its numbers those that do are turned to
 * its position. */
static void turned(const Read *read, const Way *way, const bf16 *x, const float *weight,
        const Norm *norm, int64_t position, bf16 *out) {
    int64_t size = read->head_dim, half = way->turned / 2;
    int64_t known = position < read->context ? position : read->context - 1;
    const bf16 *cosines = way->cosines + known * size, *sines = way->sines + known * size;
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
    bits nothing = (bits)((lanes){} - INFINITY) & outside;
    lanes x = (lanes)(((bits)loaded(scores + slot) & ~outside) | nothing);
    memcpy(scores + slot, &x, sizeof x);
}

/* Scores of a query become chances, summed up in the order of the text: from where its window
 * begins to `length`, then the nodes of its path. Those of other nodes, and of what only others
 * hear, become 0. */
static void softened(const Heard *of, Query *query, float *scores) {
    int64_t length = of->length, start = query->start, deep = query->deep;
    /* whether nodes that are on other paths lie between its own */
    int64_t apart = query->path[deep - 1] >= deep;
    float on[deep];
    if (apart) {
        for (int64_t d = 0; d < deep; d++) on[d] = scores[length + query->path[d]];
        memcpy(scores + length, on, sizeof on);
    }
    int64_t first = start / LANES * LANES, end = length + deep;
    int64_t whole = (end + LANES - 1) / LANES * LANES;
    bounded(scores, first, start, end);
    bounded(scores, whole - LANES, start, end);
    lanes most = loaded(scores + first), sum = {};
    for (int64_t s = first; s < whole; s += LANES) most = larger(loaded(scores + s), most);
    float top = largest(most);
    for (int64_t s = first; s < whole; s += LANES) {
        lanes chance = expo(loaded(scores + s) - top);
        sum += chance;
        memcpy(scores + s, &chance, sizeof chance);
    }
    for (int64_t s = of->earliest; s < first; s++) scores[s] = 0;
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

/* Numbers of the BLOCK keys from `slot` on beside those of the others, in the tile. What lies
 * behind the last slot may be nobody's, and is not read. */
static void beside(const Heard *of, int64_t slot) {
    int64_t size = of->size, some = of->length + of->nodes - slot;
    const bf16 *keys = (const bf16 *)of->held.keys + slot * size;
    bf16 own[BLOCK * WIDEST];
    if (some < BLOCK || of->held.key_scales) {
        some = some < BLOCK ? some : BLOCK;
        memset(own + some * size, 0, (size_t)((BLOCK - some) * size) * sizeof *own);
        if (!of->held.key_scales) memcpy(own, keys, (size_t)(some * size) * sizeof *own);
        for (int64_t i = 0; of->held.key_scales && i < some * size; i += LANES)
            narrowed(own + i, decoded((const int8_t *)of->held.keys + slot * size + i,
                    of->held.key_scales[slot + i / size]));
        keys = own;
    }
    lanes *tile = of->tile;
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        lanes square[BLOCK] = {};
        int64_t pairs = i + 2 * LANES <= size ? LANES : LANES / 2;
        for (int64_t j = 0; j < BLOCK; j++)
            if (pairs == LANES) memcpy(square + j, keys + j * size + i, sizeof *square);
            else memcpy(square + j, keys + j * size + i, sizeof *square / 2);
        transposed(square);
        for (int64_t j = 0; j < pairs; j++) {
            *tile++ = (lanes)((bits)square[j] << 16);
            *tile++ = (lanes)((bits)square[j] & ~0xffff);
        }
    }
}

/* Scores of `some` queries from `first` on with the BLOCK slots from `slot` on, whose keys are in
 * the tile. Each a sum along size. */
ALWAYS void scored(const Heard *of, int64_t first, const int some, int64_t slot, float scale) {
    const float *heads = of->heads + first * of->size;
    lanes sum[TOGETHER] = {};
    for (int64_t i = 0; i < of->size; i++)
        for (int q = 0; q < some; q++) sum[q] += of->tile[i] * heads[q * of->size + i];
    for (int q = 0; q < some; q++) {
        sum[q] *= scale;
        memcpy(of->scores + (first + q) * of->stride + slot, &sum[q], sizeof sum[q]);
    }
}

static void all_scored(const Heard *of, float scale) {
    for (int64_t s = of->earliest / BLOCK * BLOCK; s < of->length + of->nodes; s += BLOCK) {
        beside(of, s);
#define SCORED(n) scored(of, q, n, s, scale)
        for (int64_t q = 0; q < of->count; q += TOGETHER) WITH_NUMBER(of->count - q, SCORED)
    }
}

/* LANES numbers of the values of a slot, from the `i`-th on. */
ALWAYS lanes value_at(const Heard *of, const int coded, int64_t slot, int64_t i) {
    if (!coded) return wide((const bf16 *)of->held.values + slot * of->size + i);
    return decoded((const int8_t *)of->held.values + slot * of->size + i,
            of->held.value_scales[slot]);
}

/* Sums of the values of `some` queries from `first` on, over what is committed and these `count`
 * slots behind it. */
ALWAYS void summed(const Heard *of, int64_t first, const int some, const int coded,
        const int64_t *slots, int64_t count) {
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

/* Attention of queries `from` to `to` that share the keys of one head, in one row. A query is
 * (node, head of the group). */
static void attended(const Read *read, const Layer *layer, int64_t row, int64_t key_head,
        Held held, const bf16 *inner, const Norm *norm, bf16 *out, int64_t from, int64_t to) {
    const Way *way = read->ways + layer->way;
    int64_t size = read->head_dim, group = read->heads / read->key_heads, nodes = read->nodes;
    int64_t begin = start_of(read, row), count = to - from, length = read->lengths[row];
    int64_t stride = (length + nodes + BLOCK - 1) / BLOCK * BLOCK + LANES, paths[count][nodes];
    Query queries[count];
    Heard heard = {
        .queries = queries, .held = held, .size = size, .count = count, .stride = stride,
        .earliest = length, .length = length, .nodes = nodes,
        .heads = scratch(count * (stride + 2 * size) + BLOCK * size),
    };
    heard.sums = heard.heads + count * size, heard.scores = heard.sums + count * size;
    heard.tile = (lanes *)(heard.scores + count * stride);
    for (int64_t q = 0; q < count; q++) {
        int64_t place = (from + q) / group, node = node_at(read, row, place);
        int64_t head = key_head * group + (from + q) % group;
        const int64_t *parents = read->parents + row * nodes;
        int64_t depth = depth_of(parents, node), position = length + depth;
        const bf16 *x = inner + ((begin + place) * (read->heads + 2 * read->key_heads) + head)
                * size;
        bf16 own[WIDEST];
        turned(read, way, x, layer->query, norm, position, own);
        for (int64_t i = 0; i < size; i += LANES) {
            lanes number = wide(own + i);
            memcpy(heard.heads + q * size + i, &number, sizeof number);
        }
        for (int64_t d = depth, n = node; d >= 0; d--, n = parents[n]) paths[q][d] = n;
        queries[q] = (Query){.place = place, .head = head, .deep = depth + 1, .path = paths[q]};
        if (way->window && position >= way->window)
            queries[q].start = position + 1 - way->window;
        if (queries[q].start < heard.earliest) heard.earliest = queries[q].start;
    }
    all_scored(&heard, read->scale);
    for (int64_t q = 0; q < count; q++) softened(&heard, queries + q, heard.scores + q * stride);
    all_summed(&heard);
    for (int64_t q = 0; q < count; q++) {
        bf16 *to = out + ((begin + queries[q].place) * read->heads + queries[q].head) * size;
        for (int64_t i = 0; i < size; i += LANES)
            narrowed(to + i, loaded(heard.sums + q * size + i) * queries[q].share);
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
        bytes codes = lower_bytes(nearest_integers(code));
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
static void written(const Read *read, const Layer *layer, int64_t row, int64_t head,
        const bf16 *inner, const Norm *norm, Held held) {
    int64_t size = read->head_dim, lines = read->heads + 2 * read->key_heads;
    int64_t length = read->lengths[row], begin = start_of(read, row);
    int64_t some = start_of(read, row + 1) - begin;
    for (int64_t w = 0; w < some; w++) {
        int64_t node = node_at(read, row, w), slot = length + node;
        const bf16 *x = inner + ((begin + w) * lines + read->heads + head) * size,
                *value = x + read->key_heads * size;
        bf16 own[WIDEST], *key = held.key_scales ? own : (bf16 *)held.keys + slot * size;
        int64_t depth = depth_of(read->parents + row * read->nodes, node);
        turned(read, read->ways + layer->way, x, layer->key, norm, length + depth, key);
        if (held.key_scales) {
            held.key_scales[slot] = encoded(own, (int8_t *)held.keys + slot * size, size);
            held.value_scales[slot] = encoded(value, (int8_t *)held.values + slot * size, size);
        } else
            memcpy((bf16 *)held.values + slot * size, value, (size_t)size * sizeof(bf16));
    }
}

/* Queries, keys and values that are read, what is stored, and where what attention makes of them
 * goes; the queries of a head of keys are cut into `parts` of `each`. */
typedef struct {
    const Read *read;
    const Layer *layer;
    const bf16 *inner;
    const Norm *norm;
    void *const *stores;
    bf16 *out;
    int64_t parts, each;
} Attention;

/* Heads of keys, counted through all rows. */
static void write_heads(const void *work, int64_t first, int64_t last) {
    const Attention *of = work;
    int64_t heads = of->read->key_heads;
    for (int64_t one = first; one < last; one++)
        written(of->read, of->layer, one / heads, one % heads, of->inner, of->norm,
                held_of(of->read, of->stores, one));
}

/* Parts of the queries of heads of keys, counted through all rows. */
static void attend_parts(const void *work, int64_t first, int64_t last) {
    const Attention *of = work;
    const Read *read = of->read;
    int64_t group = read->heads / read->key_heads;
    for (int64_t one = first; one < last; one++) {
        int64_t which = one / of->parts, row = which / read->key_heads,
                head = which % read->key_heads;
        int64_t own = (start_of(read, row + 1) - start_of(read, row)) * group;
        int64_t from = one % of->parts * of->each, to = from + of->each < own ? from + of->each
                : own;
        if (from < own) attended(read, of->layer, row, head, held_of(read, of->stores, which),
                of->inner, of->norm, of->out, from, to);
    }
}

/* Queries, keys and values of the nodes that are read, [start_of(rows), heads + 2 key_heads,
 * head_dim]: turn them, write keys and values to `stores` [rows, key_heads, capacity, head_dim]
 * behind the committed tokens, attend to those and to each node's own path; out [start_of(rows), heads,
 * head_dim]. */
void draftproof_attention(const Read *read, const Layer *layer, const bf16 *inner, const Norm *norm,
        void *const *stores, bf16 *out) {
    int64_t group = read->heads / read->key_heads, shared = read->rows * read->key_heads;
    int64_t queries = (read->nodes - read->first) * group;
    int64_t wanted = read->threads > shared ? (read->threads + shared - 1) / shared : 1;
    int64_t each = (queries + wanted - 1) / wanted;
    each = each > MOST ? MOST : (each + TOGETHER - 1) / TOGETHER * TOGETHER;
    Attention of = {read, layer, inner, norm, stores, out, (queries + each - 1) / each, each};
    share_out(write_heads, &of, shared, 1 + SMALL / 4 / (queries * read->head_dim + 1),
            read->threads);
    share_out(attend_parts, &of, shared * of.parts, 1, read->threads);
}
