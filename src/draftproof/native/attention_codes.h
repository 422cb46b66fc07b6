/* Scores and sums of values where the cache has codes of 8 bits: in integers.
 *
 * Queries and probabilities get codes too, of 14 bits, so that a product is a sum of products of
 * bytes. Sums of integers are exact, in whatever order they are made. Included by attention.c. */
#pragma once

/* A code of 14 bits is two digits of 7 bits, since two products of a digit and a code fit in 16
 * bits. Queries are less by ZERO than their codes, which are not negative. */
enum { DIGIT = 7, LARGEST_CODE = (1 << 2 * DIGIT) - 1, ZERO = 1 << (2 * DIGIT - 1) };
/* Slots whose values are interleaved at a time, in fours, and the most queries for which registers
 * hold the sums of both digits: with one vector of values, and with two. */
enum { NEAR_CODES = 64, FOUR = 4, TOGETHER_CODES = LANES == 8 ? 4 : 8,
    MOST_CODES_OF_TWO = LANES == 8 ? 0 : 6 };

/* The queries whose digits are the rows, or the columns, of a tile. */
enum { GROUP = 8 };

/* Queries up to whole groups, for which there is memory. */
static inline int64_t whole_groups(int64_t count) { return (count + GROUP - 1) / GROUP * GROUP; }

/* Numbers of a row of values, up to whole vectors of bytes. */
static inline int64_t whole_rows(int64_t size) {
    return (size + 4 * LANES - 1) / (4 * LANES) * (4 * LANES);
}

/* The two digits of LANES codes, which are not negative. */
static inline void put_digits(bits codes, uint8_t *upper, uint8_t *lower) {
    bytes high = lower_bytes(codes >> DIGIT), low = lower_bytes(codes & ((1 << DIGIT) - 1));
    memcpy(upper, &high, sizeof high);
    memcpy(lower, &low, sizeof low);
}

/* Copies words of four digits to every `stride`-th of `to`: an upper word, and the lower one next
 * to it. */
static inline void put_words(const uint8_t *upper, const uint8_t *lower, int64_t words, int32_t *to,
        int64_t stride) {
    for (int64_t w = 0; w < words; w++, to += stride) {
        memcpy(to, upper + 4 * w, sizeof *to);
        memcpy(to + 1, lower + 4 * w, sizeof *to);
    }
}

/* The word of a group's first query in tiles of queries [group][size / 4][GROUP][2]. */
static inline int32_t *tile_of(const Pass *of, int64_t query) {
    return of->query_tiles + query / GROUP * of->size / 4 * 2 * GROUP;
}

/* Writes the codes of a query's numbers, as `put_words`, and for tiles, with signed upper digits;
 * returns what a code of 1 stands for, NaN if a number is NaN. */
static float encoded_query(const Pass *of, int64_t query) {
    int64_t size = of->size;
    const float *numbers = of->heads + query * size;
    uint8_t upper[WIDEST], lower[WIDEST];
    lanes top = {};
    bits broken = {};
    for (int64_t i = 0; i < size; i += LANES) {
        lanes x = loaded(numbers + i);
        top = larger(absolute(x), top);
        broken |= x != x;
    }
    float most = largest(top), inverse = most > 0 ? (ZERO - 1) / most : 0;
    for (int64_t i = 0; i < size; i += LANES)
        put_digits((nearest_integers(loaded(numbers + i) * inverse) + ZERO) & LARGEST_CODE,
                upper + i, lower + i);
    put_words(upper, lower, size / 4, of->query_words + 2 * query, 2 * of->count);
    if (by_tiles(of)) {
        for (int64_t i = 0; i < size; i++) upper[i] -= ZERO >> DIGIT;
        put_words(upper, lower, size / 4, tile_of(of, query) + query % GROUP * 2, 2 * GROUP);
    }
    return some_of(broken) ? NAN : most / (ZERO - 1);
}

/* Scores of `some` queries from `first` on for the BLOCK slots from `slot` on; the tile has all
 * words of these keys, and `factor` the scale of each, times that of scores. */
ALWAYS void scored_codes(const Pass *of, int64_t first, const int some, int64_t slot,
        const bits *tile, bits zeros, lanes factor) {
    const int32_t *words = of->query_words + 2 * first;
    bits upper[TOGETHER_CODES] = {}, lower[TOGETHER_CODES] = {};
    for (int64_t w = 0; w < of->size / 4; w++, words += 2 * of->count)
        _Pragma("GCC unroll 8") for (int q = 0; q < some; q++) {
            upper[q] = dotted_digits(upper[q], tile[w], words[2 * q]);
            lower[q] = dotted_digits(lower[q], tile[w], words[2 * q + 1]);
        }
    _Pragma("GCC unroll 8") for (int q = 0; q < some; q++) {
        bits sum = (upper[q] << DIGIT) + lower[q] - zeros;
        lanes score = number(sum) * (factor * of->query_units[first + q]);
        memcpy(of->scores + (first + q) * of->stride + slot - of->base, &score, sizeof score);
    }
}

/* `CALL(c, keys, words)` for each 64 numbers of a head of 64, 128, 192 or 256: the tiles of keys,
 * and of words of queries. */
#define EACH_TILE(size, CALL) CALL(0, 4, 1) \
    if (size > 64) { CALL(1, 5, 2) } \
    if (size > 128) { CALL(2, 6, 3) } \
    if (size > 192) { CALL(3, 7, 1) }

/* As `scored_codes`, by tiles, for all queries and BLOCK whole keys. A tile's rows are keys, its
 * columns the digits of queries. */
static void codes_scored_by_tiles(const Pass *of, int64_t slot, lanes factor) {
#if TILES
    const char *keys = (const char *)of->held.keys + slot * of->size;
#define LOAD_KEYS(c, to, other) _tile_loadd(to, keys + 64 * c, of->size);
    EACH_TILE(of->size, LOAD_KEYS)
    for (int64_t first = 0; first < of->count; first += GROUP) {
        const int32_t *words = tile_of(of, first);
        lanes sums[BLOCK];
        _tile_zero(0);
#define ADD_KEYS(c, from, to) \
        _tile_loadd(to, words + c * WORDS * 2 * GROUP, 64); _tile_dpbssd(0, from, to);
        EACH_TILE(of->size, ADD_KEYS)
        _tile_stored(0, sums, sizeof *sums);
        WRITTEN;
        transposed(sums);
        for (int64_t q = first; q < first + GROUP && q < of->count; q++) {
            bits upper = (bits)sums[2 * (q - first)], lower = (bits)sums[2 * (q - first) + 1];
            lanes score = number((upper << DIGIT) + lower) * (factor * of->query_units[q]);
            memcpy(of->scores + q * of->stride + slot - of->base, &score, sizeof score);
        }
    }
#else
    (void)of, (void)slot, (void)factor;
#endif
}

/* Prefetches the BLOCK keys from `slot` on. */
static inline void prefetched_keys(const Pass *of, int64_t slot) {
    const char *from = (const char *)of->held.keys + slot * of->size;
    for (int64_t i = 0; i < BLOCK * of->size; i += 64) __builtin_prefetch(from + i);
}

static void all_codes_scored(const Pass *of, float scale) {
    int64_t first = of->earliest > of->base ? of->earliest / BLOCK * BLOCK : of->base;
    for (int64_t s = first; s < of->length + of->nodes; s += BLOCK) {
        prefetched_keys(of, s + 2 * BLOCK);
        if (by_tiles(of) && s + BLOCK <= of->length + of->nodes) {
            codes_scored_by_tiles(of, s, wide(of->held.key_scales + s) * scale);
            continue;
        }
        lanes tile[WIDEST / 4];
        bits sums[4] = {};
        int64_t keys = of->length + of->nodes - s, words = of->size / 4;
        for (int64_t w = 0; w < words; w += WORDS)
            transposed_keys(of, s, 4 * w, words - w < WORDS ? words - w : WORDS, tile + w);
        for (int64_t w = 0; w < words; w++)
            sums[w % 4] = dotted_digits(sums[w % 4], (bits)tile[w], 0x01010101);
        bits zeros = (sums[0] + sums[1] + (sums[2] + sums[3])) * ZERO;
        lanes factor = partly(of->held.key_scales + s, keys < BLOCK ? keys : BLOCK) * scale;
#define SCORED_CODES(n) scored_codes(of, q, n, s, (const bits *)tile, zeros, factor)
        for (int64_t q = 0, left; q < of->count; q += TOGETHER_CODES) {
            left = of->count - q < TOGETHER_CODES ? of->count - q : TOGETHER_CODES;
            WITH_NUMBER(left, SCORED_CODES)
        }
    }
}

/* Slots whose values are summed: those from `from` to `to`, and `count` nodes. */
typedef struct {
    int64_t from, to, count;
    const int64_t *nodes;
} Slots;

static inline int64_t number_of_slots(const Slots *slots) {
    return slots->to - slots->from + slots->count;
}

static inline int64_t slot_at(const Slots *slots, int64_t i) {
    int64_t whole = slots->to - slots->from;
    return i < whole ? slots->from + i : slots->nodes[i - whole];
}

/* Writes the codes of a query's probabilities, each times the scale of its slot's values, with
 * zeros up to a multiple of four: as `put_words`, or for tiles, in which they are rows. Returns what
 * a code of 1 stands for. */
static float encoded_probabilities(const Pass *of, int64_t query, const Slots *slots) {
    int64_t whole = slots->to - slots->from, count = number_of_slots(slots);
    float chances[SPAN + of->nodes + LANES];
    uint8_t held[2][SPAN + of->nodes + LANES], *upper = held[0], *lower = held[1];
    const float *at = of->scores + query * of->stride - of->base;
    const bf16 *scales = of->held.value_scales;
    lanes top = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        const bf16 *from = scales + slots->from + i;
        lanes scale = whole - i < LANES ? partly(from, whole - i) : wide(from);
        lanes chance = loaded(at + slots->from + i) * scale;
        memcpy(chances + i, &chance, sizeof chance);
    }
    for (int64_t n = 0; n < slots->count; n++) {
        int64_t slot = slots->nodes[n];
        chances[whole + n] = at[slot] * widen(scales[slot]);
    }
    memset(chances + count, 0, LANES * sizeof *chances);
    for (int64_t i = 0; i < count; i += LANES) top = larger(loaded(chances + i), top);
    float most = largest(top), inverse = most > 0 ? LARGEST_CODE / most : 0;
    if (by_tiles(of)) {
        upper = of->probability_tiles + 2 * query * of->tile_stride;
        lower = upper + of->tile_stride;
        memset(upper + count / 64 * 64, 0, 64), memset(lower + count / 64 * 64, 0, 64);
    }
    for (int64_t i = 0; i < count; i += LANES)
        put_digits(nearest_integers(loaded(chances + i) * inverse), upper + i, lower + i);
    if (!by_tiles(of))
        put_words(upper, lower, (count + FOUR - 1) / FOUR, of->probability_words + 2 * query,
                2 * of->count);
    return most / LARGEST_CODE;
}

/* Interleaves the values of `count` of the slots from the `i`-th on, at most NEAR_CODES: each word
 * has a number of four slots. Prefetches the slots that follow. */
static void interleaved_values(const Pass *of, const Slots *slots, int64_t i, int64_t count,
        bits *to) {
    int64_t size = of->size, whole = size / (4 * LANES) * (4 * LANES);
    for (int64_t n = 0; n < count; n += FOUR) {
        const char *from[FOUR];
        bits rows[FOUR];
        for (int64_t j = 0; j < FOUR; j++)
            from[j] = (const char *)of->held.values
                    + slot_at(slots, n + j < count ? i + n + j : i) * size;
#define EACH_ROW _Pragma("GCC unroll 4") for (int j = 0; j < FOUR; j++)
        for (int64_t d = 0; d < whole; d += 4 * LANES, to += 4) {
            EACH_ROW __builtin_prefetch(from[j] + NEAR_CODES * size + d);
            EACH_ROW memcpy(rows + j, from[j] + d, sizeof *rows);
            interleaved(rows, to);
        }
        if (whole == size) continue;
        memset(rows, 0, sizeof rows);
        EACH_ROW memcpy(rows + j, from[j] + whole, (size_t)(size - whole));
        interleaved(rows, to), to += 4;
    }
}

/* Continues sums of both digits [query][2][whole rows] of `some` queries from `first` on over the
 * `fours` of interleaved values, V vectors at a time; `words` are those of the first four. */
ALWAYS void summed_codes_on(const Pass *of, int64_t first, const int some, const int V,
        const int32_t *words, int64_t fours, const bits *values) {
    int64_t whole = whole_rows(of->size), vectors = whole / LANES, stride = 2 * of->count;
    for (int64_t v = 0; v < vectors; v += V) {
        bits upper[TOGETHER_CODES][2], lower[TOGETHER_CODES][2];
        int32_t *sums = of->code_sums + 2 * first * whole + v * LANES;
        const int32_t *of_four = words + 2 * first;
        const bits *value = values + v;
#define EACH_CODE_SUM _Pragma("GCC unroll 8") for (int q = 0; q < some; q++) \
        _Pragma("GCC unroll 2") for (int u = 0; u < V; u++)
        EACH_CODE_SUM {
            memcpy(&upper[q][u], sums + 2 * q * whole + u * LANES, sizeof(bits));
            memcpy(&lower[q][u], sums + (2 * q + 1) * whole + u * LANES, sizeof(bits));
        }
        for (int64_t n = 0; n < fours; n++, of_four += stride, value += vectors)
            EACH_CODE_SUM {
                upper[q][u] = dotted_digits(upper[q][u], value[u], of_four[2 * q]);
                lower[q][u] = dotted_digits(lower[q][u], value[u], of_four[2 * q + 1]);
            }
        EACH_CODE_SUM {
            memcpy(sums + 2 * q * whole + u * LANES, &upper[q][u], sizeof(bits));
            memcpy(sums + (2 * q + 1) * whole + u * LANES, &lower[q][u], sizeof(bits));
        }
    }
}

/* As `summed_codes_on`, by tiles, for all queries over the NEAR_CODES slots from the `i`-th on. A
 * tile's rows are the digits of queries, its columns numbers of a head. */
static void codes_summed_by_tiles(const Pass *of, int64_t i, const bits *values) {
#if TILES
    int64_t line = of->size * (int64_t)sizeof(int32_t);
    WRITTEN;
    for (int64_t first = 0; first < of->count; first += GROUP) {
        _tile_loadd(4, of->probability_tiles + 2 * first * of->tile_stride + i, of->tile_stride);
        for (int64_t v = 0; v < of->size / LANES; v += 4) {
            int32_t *sums = of->code_sums + 2 * first * of->size + v * LANES;
#define EACH_OF_FOUR(CALL) CALL(0, 5) CALL(1, 6) CALL(2, 7) CALL(3, 5)
#define BEGIN_SUM(u, other) if (i) _tile_loadd(u, sums + u * LANES, line); else _tile_zero(u);
            EACH_OF_FOUR(BEGIN_SUM)
#define ADD_VALUES(u, to) _tile_loadd(to, values + v + u, line); _tile_dpbusd(u, 4, to);
            EACH_OF_FOUR(ADD_VALUES)
#define END_SUM(u, other) _tile_stored(u, sums + u * LANES, line);
            EACH_OF_FOUR(END_SUM)
        }
    }
    WRITTEN;
#else
    (void)of, (void)i, (void)values;
#endif
}

/* The numbers that sums of both digits stand for, in the order of `interleaved`. */
static void decoded_sums(const int32_t *sums, float unit, float *out, int64_t size) {
    int64_t whole = whole_rows(size);
    for (int64_t v = 0; v < whole / LANES; v++) {
        bits upper, lower;
        memcpy(&upper, sums + v * LANES, sizeof upper);
        memcpy(&lower, sums + whole + v * LANES, sizeof lower);
        lanes sum = number((upper << DIGIT) + lower) * unit;
        for (int64_t part = 0; part < LANES / 4; part++) {
            int64_t d = v / 4 * 4 * LANES + 16 * part + v % 4 * 4;
            if (d < size) memcpy(out + d, (const float *)&sum + 4 * part, 4 * sizeof *out);
        }
    }
}

/* Sums of values of all queries over these slots, which are of one span. */
static void all_codes_summed(const Pass *of, const Slots *slots) {
    int64_t whole = whole_rows(of->size), count = number_of_slots(slots);
    bits values[NEAR_CODES / FOUR * WIDEST / LANES];
    float units[of->count];
    memset(of->code_sums, 0, (size_t)(2 * of->count * whole) * sizeof *of->code_sums);
    for (int64_t q = 0; q < of->count; q++) units[q] = encoded_probabilities(of, q, slots);
    for (int64_t i = 0; i < count; i += NEAR_CODES) {
        int64_t some = count - i < NEAR_CODES ? count - i : NEAR_CODES;
        interleaved_values(of, slots, i, some, values);
        if (by_tiles(of)) {
            codes_summed_by_tiles(of, i, values);
            continue;
        }
        int64_t fours = (some + FOUR - 1) / FOUR;
        const int32_t *words = of->probability_words + i / FOUR * 2 * of->count;
#define SUMMED_CODES(n) n <= MOST_CODES_OF_TWO \
        ? summed_codes_on(of, q, n, 2, words, fours, values) \
        : summed_codes_on(of, q, n, 1, words, fours, values)
        for (int64_t q = 0, left; q < of->count; q += TOGETHER_CODES) {
            left = of->count - q < TOGETHER_CODES ? of->count - q : TOGETHER_CODES;
            WITH_NUMBER(left, SUMMED_CODES)
        }
    }
    for (int64_t q = 0; q < of->count; q++)
        decoded_sums(of->code_sums + 2 * q * whole, units[q], of->sums + q * of->size, of->size);
}
