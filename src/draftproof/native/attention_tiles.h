/* Scores of keys in bfloat16 by tiles (AMX). Each score is a sum along size in an order of its own,
 * whatever keys and queries are in a tile. Included by attention.c. */
#pragma once

#if TILES
/* Writes a query's numbers to tiles of BLOCK queries, whose columns are queries and whose rows are
 * words of a head. */
static void paired_query(const Pass *of, int64_t query) {
    int32_t *to = of->query_tiles + query / BLOCK * of->size / 2 * BLOCK + query % BLOCK;
    bf16 numbers[WIDEST];
    for (int64_t i = 0; i < of->size; i += LANES)
        narrowed(numbers + i, loaded(of->heads + query * of->size + i));
    for (int64_t w = 0; w < of->size / 2; w++)
        memcpy(to + w * BLOCK, numbers + 2 * w, sizeof *to);
}

/* The scores of all queries for the BLOCK keys from `slot` on, by tiles, whose rows are keys. */
static void scored_pairs(const Pass *of, int64_t slot, float scale) {
    int64_t size = of->size, line = size * (int64_t)sizeof(bf16);
    int64_t keys = of->length + of->nodes - slot;
    const char *from = (const char *)of->held.keys + slot * line;
    bf16 last[BLOCK * WIDEST];
    for (int64_t i = 0; i < BLOCK * line; i += 64) __builtin_prefetch(from + 2 * BLOCK * line + i);
    if (keys < BLOCK) {
        memset(last, 0, (size_t)(BLOCK * line));
        memcpy(last, from, (size_t)(keys * line));
        from = (const char *)last;
    }
    for (int64_t first = 0; first < of->count; first += BLOCK) {
        const int32_t *words = of->query_tiles + first * size / 2;
        lanes scores[BLOCK];
        WRITTEN;
        _tile_zero(0);
        for (int64_t i = 0; i < size; i += 4 * WORDS) {
            _tile_loadd(1, from + i * 2, line);
            _tile_loadd(2, words + i / 2 * BLOCK, 64);
            _tile_dpbf16ps(0, 1, 2);
            if (i + 2 * WORDS == size) break;
            _tile_loadd(3, from + i * 2 + 64, line);
            _tile_loadd(4, words + (i / 2 + WORDS) * BLOCK, 64);
            _tile_dpbf16ps(0, 3, 4);
        }
        _tile_stored(0, scores, sizeof *scores);
        WRITTEN;
        transposed(scores);
        for (int64_t q = first; q < first + BLOCK && q < of->count; q++) {
            lanes score = scores[q - first] * scale;
            memcpy(of->scores + q * of->stride + slot - of->base, &score, sizeof score);
        }
    }
}
#endif
