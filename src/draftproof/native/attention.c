/* Attention over the cache and the tree, in text order: rotation, scores, softmax, weighted sums of
 * values. */
#ifndef __clang__
#pragma GCC optimize("no-tree-pre")             /* which keeps sums in memory */
#endif
#include "model.h"
#include "tiles.h"

/* Keys are taken BLOCK at a time, WORDS of 32 bits of each, a line of the cache; queries
 * TOGETHER; and a thread takes up to MOST queries. */
enum { BLOCK = LANES, WORDS = 16, TOGETHER = 8, MOST = 48, WIDEST = 256 };
/* A text is read in spans of this many positions from its beginning, whatever is committed: each
 * span has its own softmax, and spans are merged in text order. Up to FEW nodes, the threads share
 * the spans. */
enum { SPAN = 512, FEW = 64, MOST_MERGED = 1 << 24 };
/* Slots whose values stay in the L1 cache, and the most queries for which the registers hold the sums
 * of two, or of four, vectors of values at a time. */
enum { NEAR = 32, MOST_OF_TWO = LANES == 8 ? 6 : TOGETHER, MOST_OF_FOUR = LANES == 16 ? 6 : 0 };

/* A query: a node, the `place`-th of its row in this read, and a head. Its path from the root, and
 * the beginning of its window. */
typedef struct {
    int64_t place, head, start, deep;
    const int64_t *path;
} Query;

/* The softmax of some scores: the largest, and the sum of exponentials of the scores less the
 * largest; 0 if there are none. */
typedef struct {
    float most, sum;
} Softmax;

/* One head's store in one row: [slots][size] in bfloat16, or in 8 bits, with a scale per slot. */
typedef struct {
    void *keys, *values;
    bf16 *key_scales, *value_scales;
} Held;

/* Queries of one key head in one row, and their working memory for the slots from `base`, a
 * multiple of SPAN, to `length`, and the `nodes` after it: heads and sums [count] [size], scores
 * and then probabilities [count][stride]. Over a store in 8 bits also words of the codes of heads
 * [size / 4][count][2] and of probabilities [stride / 4][count][2], what a code of 1 of each head
 * stands for, and sums of products of codes [count][2][whole rows]; and for tiles, words of heads
 * [group][size / 4][GROUP][2] and digits of probabilities [count][2][tile_stride]. Over bfloat16,
 * tiles have words of heads [count / 16][size / 2][16]. */
typedef struct {
    Query *queries;
    Held held;
    int64_t size, count, stride, base, earliest, length, nodes;
    float *heads, *scores, *sums, *query_units;
    int32_t *query_words, *probability_words, *code_sums, *query_tiles;
    uint8_t *probability_tiles;
    int64_t tile_stride;
} Pass;

/* Whether tiles multiply keys, which they can if a key fills lines of the cache. */
static inline int by_tiles(const Pass *of) {
    int64_t each = of->held.key_scales ? 1 : (int64_t)sizeof(bf16);
    return TILES && of->size * each % 64 == 0;
}

static void normed(const bf16 *x, const float *weight, const Norm *norm, bf16 *out, int64_t size) {
    float factor = factor_of(x, norm->epsilon, size);
    for (int64_t i = 0; i < size; i += LANES)
        narrowed(out + i, rounded(wide(x + i) * factor) * loaded(weight + i));
}

/* One head of one token, normed if there is a weight; the rotary part of it is rotated to its
 * position. */
static void rotated(const Read *read, const AttentionKind *kind, const bf16 *x, const float *weight,
        const Norm *norm, int64_t position, bf16 *out) {
    int64_t size = read->head_dim, half = kind->rotary_dim / 2;
    int64_t known = position < read->context ? position : read->context - 1;
    const bf16 *cosines = kind->cosines + known * size, *sines = kind->sines + known * size;
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
        /* exact, like any product of two */
        lanes across = wide(other + i) * wide(sines + i);
        narrowed(out + i, rounded(wide(x + i) * wide(cosines + i)) + (lanes)((bits)across ^ minus));
    }
}

static int64_t depth_of(const int64_t *parents, int64_t node) {
    int64_t depth = 0;
    for (; (node = parents[node]) >= 0;) depth++;
    return depth;
}

/* Masks those of the scores of LANES slots from `slot` on that are outside of [start, end). */
static inline void bounded(float *scores, int64_t slot, int64_t start, int64_t end) {
    bits at = places + (int32_t)slot, outside = (at < (int32_t)start) | (at >= (int32_t)end);
    bits nothing = (bits)((lanes){} - INFINITY) & outside;
    lanes x = (lanes)(((bits)loaded(scores + slot) & ~outside) | nothing);
    memcpy(scores + slot, &x, sizeof x);
}

/* Turns a query's scores at positions `start` to `end`, in one span, into probabilities. Scores
 * begin at the span's first position. */
static Softmax softened(float *scores, int64_t start, int64_t end) {
    int64_t first = start / LANES * LANES, whole = (end + LANES - 1) / LANES * LANES;
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
    return (Softmax){top, total(sum)};
}

/* Turns a query's scores into probabilities, in text order: from the beginning of its window to
 * `length`, then the nodes of its path, each span by itself. Those of other nodes, and of slots
 * that only other queries see, become 0. */
static void all_softened(const Pass *of, const Query *query, float *scores, Softmax *found) {
    int64_t base = of->base, last = of->length - base, deep = of->nodes ? query->deep : 0;
    int64_t start = query->start > base ? query->start - base : 0, end = last + deep;
    /* whether nodes of other paths lie between its own */
    int64_t apart = deep && query->path[deep - 1] >= deep;
    float on[deep + 1];
    if (apart) {
        for (int64_t d = 0; d < deep; d++) on[d] = scores[last + query->path[d]];
        memcpy(scores + last, on, (size_t)deep * sizeof *on);
    }
    for (int64_t span = 0; span < last + of->nodes; span += SPAN, found++) {
        int64_t from = start > span ? start : span, to = end < span + SPAN ? end : span + SPAN;
        *found = (Softmax){0, 0};
        if (from < to) *found = softened(scores + span, from - span, to - span);
    }
    int64_t first = start / LANES * LANES, begin = of->earliest > base ? of->earliest - base : 0;
    for (int64_t s = begin; s < first && s < last + of->nodes; s++) scores[s] = 0;
    if (apart) memcpy(on, scores + last, (size_t)deep * sizeof *on);
    int64_t kept = apart ? 0 : deep;
    memset(scores + last + kept, 0, (size_t)(of->nodes - kept) * sizeof *scores);
    for (int64_t d = 0; apart && d < deep; d++) scores[last + query->path[d]] = on[d];
}

/* `CALL(n)` with n = `some`, 1 to TOGETHER: so many sums stay in registers. */
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

/* Transposes WORDS words of the BLOCK keys from `slot` on, from the `i`-th number on: each word of
 * all these keys side by side. Only `some` words belong to the keys. Memory after the last slot may
 * not belong to the store, and is not read. */
static void transposed_keys(const Pass *of, int64_t slot, int64_t i, int64_t some, lanes *tile) {
    int64_t each = of->held.key_scales ? 1 : (int64_t)sizeof(bf16), stride = of->size * each;
    int64_t keys = of->length + of->nodes - slot, word = (int64_t)sizeof(int32_t);
    const char *from = (const char *)of->held.keys + slot * stride + i * each;
    int32_t own[BLOCK * WORDS];
    if (keys < BLOCK || some < WORDS) {
        memset(own, 0, sizeof own);
        for (int64_t j = 0; j < (keys < BLOCK ? keys : BLOCK); j++)
            memcpy(own + j * WORDS, from + j * stride, (size_t)(some * word));
        from = (const char *)own, stride = WORDS * word;
    }
    for (int64_t w = 0; w < WORDS; w += LANES) {
        lanes square[BLOCK];
        _Pragma("GCC unroll 16") for (int64_t j = 0; j < BLOCK; j++)
            square[j] = loaded((const float *)(from + j * stride + w * word));
        transposed(square);
        memcpy(tile + w, square, sizeof square);
    }
}

/* The `n`-th of the two numbers in each word. */
ALWAYS lanes number_of(bits word, const int n) { return (lanes)(n ? word & ~0xffff : word << 16); }

/* Continues the scores of `some` queries from `first` on for the BLOCK slots from `slot` on by the
 * `count` words in the tile, whose first is the `i`-th number. Each score is a sum along size.
 * Prefetches the same words of keys 2 * BLOCK slots ahead, while it reads the tile for the first
 * queries. */
ALWAYS void scored(const Pass *of, int64_t first, const int some, int64_t slot, int64_t i,
        int64_t count, const lanes *tile, float scale) {
    const float *heads = of->heads + first * of->size + i;
    float *scores = of->scores + first * of->stride + slot - of->base;
    int64_t bytes = of->size * (int64_t)sizeof(bf16);
    const char *ahead = (const char *)of->held.keys + (slot + 2 * BLOCK) * bytes + i * 2;
    lanes sum[TOGETHER];
    _Pragma("GCC unroll 8") for (int q = 0; q < some; q++)
        sum[q] = i ? loaded(scores + q * of->stride) : (lanes){};
    for (int64_t w = 0; w < count; w++) {
        if (!first && w < BLOCK) __builtin_prefetch(ahead + w * bytes);
        _Pragma("GCC unroll 2") for (int n = 0; n < 2; n++) {
            lanes key = number_of((bits)tile[w], n);
            _Pragma("GCC unroll 8") for (int q = 0; q < some; q++)
                sum[q] += key * heads[q * of->size + 2 * w + n];
        }
    }
    if (i + 2 * count == of->size)
        _Pragma("GCC unroll 8") for (int q = 0; q < some; q++) sum[q] *= scale;
    _Pragma("GCC unroll 8") for (int q = 0; q < some; q++)
        memcpy(scores + q * of->stride, &sum[q], sizeof sum[q]);
}

#include "attention_tiles.h"

static void all_scored(const Pass *of, float scale) {
    int64_t first = of->earliest > of->base ? of->earliest / BLOCK * BLOCK : of->base;
    lanes tile[WORDS];
#if TILES
    if (by_tiles(of)) {
        for (int64_t s = first; s < of->length + of->nodes; s += BLOCK)
            scored_pairs(of, s, scale);
        return;
    }
#endif
    for (int64_t s = first; s < of->length + of->nodes; s += BLOCK)
        for (int64_t i = 0, count; i < of->size; i += 2 * count) {
            count = of->size - i < 2 * WORDS ? (of->size - i) / 2 : WORDS;
            transposed_keys(of, s, i, count, tile);
#define SCORED(n) scored(of, q, n, s, i, count, tile, scale)
            for (int64_t q = 0; q < of->count; q += TOGETHER) WITH_NUMBER(of->count - q, SCORED)
        }
}

#include "attention_codes.h"

/* LANES numbers of the values of a slot, from the `i`-th on. */
ALWAYS lanes value_at(const Pass *of, int64_t slot, int64_t i) {
    return wide((const bf16 *)of->held.values + slot * of->size + i);
}

/* Continues the sums of values of `some` queries from `first` on over slots `from` to `to`, V
 * vectors at a time. Prefetches slots NEAR ahead. */
ALWAYS void summed_on(const Pass *of, int64_t first, const int some, const int V, int64_t from,
        int64_t to) {
    const float *chances = of->scores + first * of->stride - of->base;
    const char *values = of->held.values;
    int64_t bytes = (int64_t)sizeof(bf16);
    for (int64_t i = 0; i < of->size; i += V * LANES) {
#define EACH_SUM _Pragma("GCC unroll 8") for (int q = 0; q < some; q++) \
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
        lanes sum[TOGETHER][4];
        EACH_SUM
            sum[q][v] = loaded(of->sums + (first + q) * of->size + i + v * LANES);
        for (int64_t s = from; s < to; s++) {
            lanes value[4];
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
                value[v] = value_at(of, s, i + v * LANES);
            _Pragma("GCC unroll 2") for (int v = 0; v < V; v += 2)
                __builtin_prefetch(values + ((s + NEAR) * of->size + i + v * LANES) * bytes);
            EACH_SUM sum[q][v] += chances[q * of->stride + s] * value[v];
        }
        EACH_SUM
            memcpy(of->sums + (first + q) * of->size + i + v * LANES, &sum[q][v], sizeof(lanes));
    }
}

/* Sums of values of `some` queries from `first` on, over slots `from` to `to`, in groups that stay
 * in the L1 cache, and these `count` slots after them. */
ALWAYS void summed(const Pass *of, int64_t first, const int some, int64_t from, int64_t to,
        const int64_t *slots, int64_t count) {
    memset(of->sums + first * of->size, 0, (size_t)(some * of->size) * sizeof(float));
    for (int64_t s = from, next; s < to; s = next) {
        next = s + NEAR < to ? s + NEAR : to;
        if (some <= MOST_OF_FOUR && of->size % (4 * LANES) == 0)
            summed_on(of, first, some, 4, s, next);
        else if (some <= MOST_OF_TWO && of->size % (2 * LANES) == 0)
            summed_on(of, first, some, 2, s, next);
        else summed_on(of, first, some, 1, s, next);
    }
    for (int64_t n = 0; n < count; n++)
        summed_on(of, first, some, 1, slots[n], slots[n] + 1);
}

/* All slots with positions in the span from `begin` on, except those of nodes on no path, which may
 * never have been written. */
static void all_summed(const Pass *of, int64_t begin) {
    int64_t deep[of->nodes + 1], slots[of->nodes + 1], some = 0, end = begin + SPAN;
    memset(deep, 0, sizeof deep);
    for (int64_t q = 0; of->nodes && q < of->count; q++)
        for (int64_t d = 0; d < of->queries[q].deep; d++) deep[of->queries[q].path[d]] = d + 1;
    for (int64_t n = 0; n < of->nodes; n++) {
        int64_t position = of->length + deep[n] - 1;
        if (deep[n] && position >= begin && position < end) slots[some++] = of->length + n;
    }
    int64_t from = of->earliest > begin ? of->earliest : begin;
    int64_t to = of->length < end ? of->length : end;
    if (of->held.value_scales) {
        all_codes_summed(of, &(Slots){from, to > from ? to : from, some, slots});
        return;
    }
#define SUMMED(n) summed(of, q, n, from, to, slots, some)
    for (int64_t q = 0; q < of->count; q += TOGETHER) WITH_NUMBER(of->count - q, SUMMED)
}

/* Merges the softmax and the sums of values [size] of one more span with those of the spans before
 * it, in text order. */
static void merged(Softmax *whole, float *sums, Softmax more, const float *others, int64_t size) {
    if (more.sum == 0) return;
    if (whole->sum == 0) {
        *whole = more;
        memcpy(sums, others, (size_t)size * sizeof *sums);
        return;
    }
    float top = more.most > whole->most ? more.most : whole->most;
    lanes before = expo(spread(whole->most - top)), factor = expo(spread(more.most - top));
    *whole = (Softmax){top, fused(spread(whole->sum), before, factor * more.sum)[0]};
    for (int64_t i = 0; i < size; i += LANES) {
        lanes sum = fused(loaded(sums + i), before, factor * loaded(others + i));
        memcpy(sums + i, &sum, sizeof sum);
    }
}

/* The output of a query: the sums of values divided by the sum of probabilities. */
static void put(bf16 *out, Softmax whole, const float *sums, int64_t size) {
    float share = 1.0f / whole.sum;
    for (int64_t i = 0; i < size; i += LANES) narrowed(out + i, loaded(sums + i) * share);
}

/* The results of spans for queries before they are merged: [heads of all rows, spans, queries],
 * sums [size] each. */
typedef struct {
    Softmax *softmaxes;
    float *sums;
    int64_t spans, queries;
} Spans;

/* Attention of queries `from` to `to` that share a key head, in one row, over spans `first` to
 * `last`, of which the text's last one has all slots in or after that of the last committed one. A
 * query is (node, head of the group). Writes to `out`, or to this head's `spans`, if there are any,
 * for merging. */
static void attended(const Read *read, const Layer *layer, int64_t row, int64_t key_head,
        Held held, const bf16 *inner, const Norm *norm, bf16 *out, int64_t from, int64_t to,
        int64_t first, int64_t last, const Spans *spans) {
    const AttentionKind *kind = read->attention_kinds + layer->kind;
    int64_t size = read->head_dim, group = read->heads / read->key_heads, nodes = read->nodes;
    int64_t begin = start_of(read, row), count = to - from, length = read->lengths[row];
    int64_t stride = (SPAN + nodes + BLOCK - 1) / BLOCK * BLOCK + LANES, paths[count][nodes];
    int64_t most = nodes / SPAN + 2;                        /* spans after the full ones */
    int64_t groups = whole_groups(count);
    Query queries[count];
    Softmax found[most], whole[count], parts[most][count];
    Pass pass = {
        .queries = queries, .held = held, .size = size, .count = count, .stride = stride,
        .earliest = length,
        .tile_stride = stride + 64,
        .heads = scratch(count * (stride + 3 * size) + (held.key_scales
                ? groups * (1 + size + stride + 64 + 2 * whole_rows(size))
                : (count + BLOCK) * size / 2)),
    };
    float *all = pass.heads + count * size;
    pass.sums = all + count * size, pass.scores = pass.sums + count * size;
    pass.query_units = pass.scores + count * stride;
    pass.code_sums = (int32_t *)(pass.query_units + groups);
    pass.query_words = pass.code_sums + 2 * groups * whole_rows(size);
    pass.query_tiles = pass.query_words + groups * size / 2;
    pass.probability_words = pass.query_tiles + groups * size / 2;
    pass.probability_tiles = (uint8_t *)pass.probability_words;     /* either of them */
    if (!held.key_scales) pass.query_tiles = (int32_t *)pass.query_units;
#if TILES
    whole_tiles();
#endif
    for (int64_t q = 0; q < count; q++) {
        int64_t place = (from + q) / group, node = node_at(read, row, place);
        int64_t head = key_head * group + (from + q) % group;
        const int64_t *parents = read->parents + row * nodes;
        int64_t depth = depth_of(parents, node), position = length + depth;
        const bf16 *x = inner + ((begin + place) * (read->heads + 2 * read->key_heads) + head)
                * size;
        bf16 own[WIDEST];
        rotated(read, kind, x, layer->query, norm, position, own);
        for (int64_t i = 0; i < size; i += LANES) {
            lanes number = wide(own + i);
            memcpy(pass.heads + q * size + i, &number, sizeof number);
        }
        if (held.key_scales) pass.query_units[q] = encoded_query(&pass, q);
#if TILES
        else if (by_tiles(&pass)) paired_query(&pass, q);
#endif
        for (int64_t d = depth, n = node; d >= 0; d--, n = parents[n]) paths[q][d] = n;
        queries[q] = (Query){.place = place, .head = head, .deep = depth + 1, .path = paths[q]};
        whole[q] = (Softmax){0, 0};
        if (kind->window && position >= kind->window)
            queries[q].start = position + 1 - kind->window;
        if (queries[q].start < pass.earliest) pass.earliest = queries[q].start;
    }
    for (int64_t span = first; span < last; span++) {
        int64_t base = span * SPAN, last_of_text = length / SPAN == span;
        pass.base = base, pass.length = last_of_text ? length : base + SPAN;
        pass.nodes = last_of_text ? nodes : 0;
        if (!last_of_text && pass.earliest >= pass.length) {
            for (int64_t q = 0; spans && q < count; q++)
                spans->softmaxes[span * spans->queries + from + q] = (Softmax){0, 0};
            continue;
        }
        int64_t some = (pass.length + pass.nodes - base + SPAN - 1) / SPAN;
        (held.key_scales ? all_codes_scored : all_scored)(&pass, read->scale);
        for (int64_t q = 0; q < count; q++) {
            all_softened(&pass, queries + q, pass.scores + q * stride, found);
            for (int64_t s = 0; s < some; s++) parts[s][q] = found[s];
        }
        for (int64_t s = 0; s < some; s++) {
            all_summed(&pass, base + s * SPAN);
            for (int64_t q = 0; q < count; q++) {
                const float *sums = pass.sums + q * size;
                if (!spans) {
                    merged(whole + q, all + q * size, parts[s][q], sums, size);
                    continue;
                }
                int64_t at = (span + s) * spans->queries + from + q;
                spans->softmaxes[at] = parts[s][q];
                memcpy(spans->sums + at * size, sums, (size_t)size * sizeof *sums);
            }
        }
        for (int64_t s = span + some; spans && last_of_text && s < spans->spans; s++)
            for (int64_t q = 0; q < count; q++)
                spans->softmaxes[s * spans->queries + from + q] = (Softmax){0, 0};
    }
    for (int64_t q = 0; !spans && q < count; q++)
        put(out + ((begin + queries[q].place) * read->heads + queries[q].head) * size, whole[q],
                all + q * size, size);
}

/* 8-bit codes of a head's numbers, the largest of which is 127; returns their scale. */
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

/* The store of the `which`-th key head of all rows. */
static Held held_of(const Read *read, void *const *stores, int64_t which) {
    int64_t slot = which * read->capacity, coded = read->stores > 2,
            at = slot * read->head_dim * (coded ? 1 : (int64_t)sizeof(bf16));
    return (Held){(char *)stores[0] + at, (char *)stores[1] + at,
            coded ? (bf16 *)stores[2] + slot : NULL, coded ? (bf16 *)stores[3] + slot : NULL};
}

/* Stores one head's keys and values of a row's nodes in this read, after the committed ones; keys
 * are normed if there is a weight, and rotated. */
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
        rotated(read, read->attention_kinds + layer->kind, x, layer->key, norm, length + depth, key);
        if (held.key_scales) {
            held.key_scales[slot] = encoded(own, (int8_t *)held.keys + slot * size, size);
            held.value_scales[slot] = encoded(value, (int8_t *)held.values + slot * size, size);
        } else
            memcpy((bf16 *)held.values + slot * size, value, (size_t)size * sizeof(bf16));
    }
}

/* The queries, keys and values of a read, their stores, and the output of attention; the queries of
 * a key head are cut into `parts` of `each`, or, if its spans are merged later, its spans are. */
typedef struct {
    const Read *read;
    const Layer *layer;
    const bf16 *inner;
    const Norm *norm;
    void *const *stores;
    bf16 *out;
    int64_t parts, each;
    Spans spans;
} Attention;

/* The results to merge of a key head in one row. */
static Spans spans_of(const Attention *of, int64_t which) {
    int64_t from = which * of->spans.spans * of->spans.queries;
    return (Spans){of->spans.softmaxes + from, of->spans.sums + from * of->read->head_dim,
            of->spans.spans, of->spans.queries};
}

/* Key heads, counted over all rows. */
static void write_heads(const void *work, int64_t first, int64_t last) {
    const Attention *of = work;
    int64_t heads = of->read->key_heads;
    for (int64_t one = first; one < last; one++)
        written(of->read, of->layer, one / heads, one % heads, of->inner, of->norm,
                held_of(of->read, of->stores, one));
}

/* The queries of a row that share one key head. */
static int64_t queries_of(const Read *read, int64_t row) {
    return (start_of(read, row + 1) - start_of(read, row)) * (read->heads / read->key_heads);
}

/* Parts of the queries of key heads, counted over all rows. */
static void attend_parts(const void *work, int64_t first, int64_t last) {
    const Attention *of = work;
    const Read *read = of->read;
    for (int64_t one = first; one < last; one++) {
        int64_t which = one / of->parts, row = which / read->key_heads,
                head = which % read->key_heads, own = queries_of(read, row);
        int64_t from = one % of->parts * of->each, to = from + of->each < own ? from + of->each
                : own;
        if (from < own) attended(read, of->layer, row, head, held_of(read, of->stores, which),
                of->inner, of->norm, of->out, from, to, 0, read->lengths[row] / SPAN + 1, NULL);
    }
#if TILES
    tiles_released();
#endif
}

/* Spans of key heads, counted over all rows. */
static void attend_spans(const void *work, int64_t first, int64_t last) {
    const Attention *of = work;
    const Read *read = of->read;
    for (int64_t one = first; one < last; one++) {
        int64_t which = one / of->parts, row = which / read->key_heads, span = one % of->parts;
        Spans spans = spans_of(of, which);
        int64_t own = queries_of(read, row);
        if (span > read->lengths[row] / SPAN) continue;
        for (int64_t from = 0; from < own; from += MOST)
            attended(read, of->layer, row, which % read->key_heads,
                    held_of(read, of->stores, which), of->inner, of->norm, NULL, from,
                    from + MOST < own ? from + MOST : own, span, span + 1, &spans);
    }
#if TILES
    tiles_released();
#endif
}

/* Merges the spans of key heads, counted over all rows. */
static void merge_heads(const void *work, int64_t first, int64_t last) {
    const Attention *of = work;
    const Read *read = of->read;
    int64_t size = read->head_dim, group = read->heads / read->key_heads;
    for (int64_t which = first; which < last; which++) {
        int64_t row = which / read->key_heads, head = which % read->key_heads;
        Spans spans = spans_of(of, which);
        for (int64_t q = 0; q < queries_of(read, row); q++) {
            float sums[WIDEST];
            Softmax whole = {0, 0};
            for (int64_t s = 0; s < spans.spans; s++) {
                int64_t at = s * spans.queries + q;
                merged(&whole, sums, spans.softmaxes[at], spans.sums + at * size, size);
            }
            int64_t place = start_of(read, row) + q / group;
            put(of->out + (place * read->heads + head * group + q % group) * size, whole, sums,
                    size);
        }
    }
}

/* Memory for results to merge: this thread's own, valid until its next call. */
static float *merging_room(int64_t numbers) {
    static _Thread_local Scratch room;
    return enlarged(&room, numbers);
}

/* Queries, keys and values of the nodes in this read, [start_of(rows), heads + 2 key_heads,
 * head_dim]: rotates them, writes keys and values to `stores` [rows, key_heads, capacity, head_dim]
 * after the committed tokens, and attends to those and to each node's own path; out
 * [start_of(rows), heads, head_dim]. */
void draftproof_attention(const Read *read, const Layer *layer, const bf16 *inner, const Norm *norm,
        void *const *stores, bf16 *out) {
    int64_t group = read->heads / read->key_heads, shared = read->rows * read->key_heads;
    int64_t queries = (read->nodes - read->first) * group;
    int64_t wanted = read->threads > shared ? (read->threads + shared - 1) / shared : 1;
    int64_t each = (queries + wanted - 1) / wanted;
    each = each > MOST ? MOST : (each + TOGETHER - 1) / TOGETHER * TOGETHER;
    Attention of = {read, layer, inner, norm, stores, out, (queries + each - 1) / each, each, {0}};
    share_out(write_heads, &of, shared, 1 + SMALL / 4 / (queries * read->head_dim + 1),
            read->threads);
    int64_t most = 0;
    for (int64_t r = 0; r < read->rows; r++)
        most = read->lengths[r] > most ? read->lengths[r] : most;
    int64_t spans = most / SPAN + 2, merging = shared * spans * queries;
    if (spans == 2 || read->nodes > FEW || merging * (read->head_dim + 2) > MOST_MERGED) {
        share_out(attend_parts, &of, shared * of.parts, 1, read->threads);
        return;
    }
    of.parts = spans - 1;
    of.spans.sums = merging_room(merging * (read->head_dim + 2));
    of.spans.softmaxes = (Softmax *)(of.spans.sums + merging * read->head_dim);
    of.spans.spans = spans, of.spans.queries = queries;
    share_out(attend_spans, &of, shared * of.parts, 1, read->threads);
    share_out(merge_heads, &of, shared, 1, read->threads);
}

/* Attention of one layer for nodes that were rotated before, over `keys` and `values` in bfloat16,
 * to which it writes those of the nodes. The kind of attention has no rotation. */
void draftproof_attend(const Read *read,
        const bf16 *inner /* [width(read), read->heads + 2 * read->key_heads, read->head_dim] */,
        bf16 *keys /* [read->rows, read->key_heads, read->capacity, read->head_dim] */,
        bf16 *values /* [read->rows, read->key_heads, read->capacity, read->head_dim] */,
        bf16 *out /* [width(read), read->heads, read->head_dim] */) {
    Layer layer = {.kind = 0};
    Norm norm = {0};
    Read alone = *read;
    alone.stores = 2;
    draftproof_attention(&alone, &layer, inner, &norm, (void *[]){keys, values}, out);
}
