/* Products with weights in the block formats of GGUF files (ggml-common.h), with the bits of the
 * file.
 *
 * A block of an output is a row of 32-bit words and, in formats whose block does not fill words, a
 * rest of one or two bytes. 32 blocks, of the same inputs of a strip of outputs, are stored as one
 * record: word by word, each for all outputs in turn, then the rests. So a vector holds the same
 * word of LANES outputs, and every output is summed in a lane of its own.
 *
 * Activations have 8 bits and a scale per 32 inputs. Products of codes are summed as integers,
 * scaled, and added in single precision in the order of the inputs. Therefore an output depends
 * neither on other rows, nor on threads, nor on the instruction set. */
#pragma once
#include "linear.h"

enum { NO_BLOCKS, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS,
    MXFP4, FORMATS };

/* A block in a file: its number of inputs, its bytes, its words and the byte where these begin, and
 * the bytes of its rest and where this begins. `sums` is the way of summing products; codes are
 * offset by the power of two `shift`, or have a minimum. */
typedef struct {
    int64_t inputs, bytes, words, first, rest, last, sums, shift;
} Format;

/* The way of summing products: the size of codes, which matters without VNNI; whether a scale is
 * for 16 inputs instead of 32; and whether a minimum is subtracted instead of an offset. */
enum { BITS_4 = 0, BITS_6 = 1, BITS_8 = 2, HALF_GROUPS = 4, MINIMUM = 8 };

static const Format formats[FORMATS] = {
    [Q8_0] = {32, 34, 8, 2, 2, 0, BITS_8, 7},
    [Q4_0] = {32, 18, 4, 2, 2, 0, BITS_4, 3},
    [Q4_1] = {32, 20, 5, 0, 0, 0, BITS_4 | MINIMUM, 0},
    [Q5_0] = {32, 22, 5, 2, 2, 0, BITS_6, 4},
    [Q5_1] = {32, 24, 6, 0, 0, 0, BITS_6 | MINIMUM, 0},
    [Q2_K] = {256, 84, 21, 0, 0, 0, BITS_6 | HALF_GROUPS | MINIMUM, 0},
    [Q3_K] = {256, 110, 27, 0, 2, 108, BITS_6 | HALF_GROUPS, 2},
    [Q4_K] = {256, 144, 36, 0, 0, 0, BITS_4 | MINIMUM, 0},
    [Q5_K] = {256, 176, 44, 0, 0, 0, BITS_6 | MINIMUM, 0},
    [Q6_K] = {256, 210, 52, 0, 2, 208, BITS_6 | HALF_GROUPS, 5},
    [IQ4_NL] = {32, 18, 4, 2, 2, 0, BITS_8, 7},
    [IQ4_XS] = {256, 136, 34, 0, 0, 0, BITS_8, 7},
    [MXFP4] = {32, 17, 4, 1, 1, 0, BITS_8, 7},
};

/* The inputs, and groups of 32 or 16 inputs, whose scales are unpacked at a time. */
enum { SPAN = 256, SPAN_WORDS = SPAN / 4, GROUPS = SPAN / 32, HALVES = SPAN / 16 };
/* The distances of prefetching in bytes, and its caches as numbered by __builtin_prefetch. */
enum { FAR = 12288, NEAR = 2048, SECOND_CACHE = 2, FIRST_CACHE = 3 };
/* Rows whose activations and sums stay in the L1 cache while a span is multiplied with them. */
enum { BLOCK_ROWS = 32, BLOCK_CHUNKS = ROWS / BLOCK_ROWS };
/* Vectors of outputs whose codes for a group of inputs are in registers at a time. */
#define BLOCK_SIDES (LANES == 8 ? 1 : 2)

/* SPAN activations of a row. `offset` has minus the sum of the codes of each 16 inputs, then of
 * each 32, times the power of two that weights are less by; `sum` has minus the sum of the codes
 * times the scale. */
typedef struct {
    int32_t codes[SPAN_WORDS];
    float scale[GROUPS];
    int32_t offset[HALVES + GROUPS];
    float sum[HALVES + GROUPS];
} Activations;

/* The scales and minimums of SPAN inputs of a strip: one for each group, or half of one. */
typedef struct {
    float scale[HALVES][STRIP], minimum[HALVES][STRIP];
} Scales;

typedef struct {
    const Linear *layer;
    const bf16 *inputs;
    bf16 *out;
    int64_t stride, rows, chunks, spans;        /* stride: numbers of `out` between rows */
    Activations *activations;                   /* chunk by chunk, span by span, row by row */
} BlockProduct;

ALWAYS bits word_at(const char *record, int64_t word, int64_t side) {
    const char *from = record + (word * STRIP + side * LANES) * 4;
    bits w;
    memcpy(&w, from, sizeof w);
    return w;
}

/* The rests of a record, in half precision, after this many words. */
ALWAYS lanes rest_at(const char *record, int64_t words, int64_t side) {
    return from_half((const uint16_t *)(record + words * 4 * STRIP + side * LANES * 2));
}

/* Converts the half precision in the lower 16 bits to single precision. */
ALWAYS lanes half_of(bits w) {
    return from_halves(lower_halves(w & 0xffff));
}

ALWAYS bits shifted(bits w, int64_t right) {                            /* unsigned */
    return (bits)((words)w >> (int)right);
}

ALWAYS bits byte_of(bits w, const int number) { return shifted(w, 8 * number) & 0xff; }

ALWAYS bits signed_byte_of(bits w, const int number) { return w << (24 - 8 * number) >> 24; }

/* Values of IQ4_NL and IQ4_XS, and twice those of MXFP4, plus 128. */
static const uint8_t nonlinear[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197,
    217, 241};
static const uint8_t floats_of_4[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125,
    124, 122, 120, 116};

#define LOW_2 0x03030303
#define LOW_4 0x0f0f0f0f
#define LOW_6 0x3f3f3f3f
#define EACH_NUMBER(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < count; i++)

ALWAYS void put_scale(Scales *to, int group, int side, lanes scale) {
    memcpy(&to->scale[group][side * LANES], &scale, sizeof scale);
}

ALWAYS void put_minimum(Scales *to, int group, int side, lanes minimum) {
    memcpy(&to->minimum[group][side * LANES], &minimum, sizeof minimum);
}

#define EACH_SIDE_OF_STRIP _Pragma("GCC unroll 4") for (int side = 0; side < SIDES; side++)

/* Scales of formats with blocks of 32 inputs, which have a record for each group. */
ALWAYS void scales_of_groups(const int format, const char *record, int64_t groups, Scales *to) {
    const Format *form = formats + format;
    for (int g = 0; g < groups; g++, record += form->bytes * STRIP) EACH_SIDE_OF_STRIP {
        if (form->sums & MINIMUM) {
            bits both = word_at(record, 0, side);
            put_scale(to, g, side, half_of(both));
            /* stored as the subtrahend */
            put_minimum(to, g, side, -half_of(shifted(both, 16)));
        } else if (format == MXFP4) {
            const char *exponents = record + form->words * 4 * STRIP + side * LANES;
            bits e = from_unsigned_bytes(exponents), tiny = e < 2;
            put_scale(to, g, side, (lanes)((tiny & (((e & 1) + 1) << 21))
                                           | (~tiny & ((e - 1) << 23))));
        } else put_scale(to, g, side, rest_at(record, form->words, side));
    }
}

/* The scales and minimums of Q4_K and Q5_K, 6 bits each in three words. */
ALWAYS void scales_of_4_or_5(const char *record, Scales *to) {
    EACH_SIDE_OF_STRIP {
        bits head = word_at(record, 0, side), a = word_at(record, 1, side);
        bits b = word_at(record, 2, side), c = word_at(record, 3, side);
        lanes unit = half_of(head), least = half_of(shifted(head, 16));
        bits scale[2] = {a & LOW_6, (c & LOW_4) | (shifted(a, 6) & LOW_2) << 4};
        bits minimum[2] = {b & LOW_6, (shifted(c, 4) & LOW_4) | (shifted(b, 6) & LOW_2) << 4};
        EACH_NUMBER(g, GROUPS) {
            put_scale(to, g, side, unit * number(byte_of(scale[g / 4], g % 4)));
            put_minimum(to, g, side, least * number(byte_of(minimum[g / 4], g % 4)));
        }
    }
}

ALWAYS void scales_of_6(const char *record, Scales *to) {
    EACH_SIDE_OF_STRIP {
        lanes unit = rest_at(record, 52, side);
        for (int i = 0; i < 4; i++) {
            bits scales = word_at(record, 48 + i, side);
            EACH_NUMBER(k, 4)
                put_scale(to, 4 * i + k, side, unit * number(signed_byte_of(scales, k)));
        }
    }
}

ALWAYS void scales_of_2(const char *record, Scales *to) {
    for (int side = 0; side < SIDES; side++) {
        bits head = word_at(record, 20, side);
        lanes unit = half_of(head), least = half_of(shifted(head, 16));
        for (int i = 0; i < 4; i++) {
            bits both = word_at(record, i, side);
            EACH_NUMBER(k, 4) {
                put_scale(to, 4 * i + k, side, unit * number(byte_of(both, k) & 15));
                put_minimum(to, 4 * i + k, side, least * number(shifted(byte_of(both, k), 4)));
            }
        }
    }
}

ALWAYS void scales_of_3(const char *record, Scales *to) {
    for (int side = 0; side < SIDES; side++) {
        bits a = word_at(record, 24, side), b = word_at(record, 25, side);
        bits c = word_at(record, 26, side);
        bits scales[4] = {(a & LOW_4) | (c & LOW_2) << 4,
            (b & LOW_4) | (shifted(c, 2) & LOW_2) << 4,
            (shifted(a, 4) & LOW_4) | (shifted(c, 4) & LOW_2) << 4,
            (shifted(b, 4) & LOW_4) | (shifted(c, 6) & LOW_2) << 4};
        lanes unit = rest_at(record, 27, side);
        EACH_NUMBER(i, HALVES)
            put_scale(to, i, side, unit * number(byte_of(scales[i / 4], i % 4) - 32));
    }
}

ALWAYS void scales_of_nonlinear(const char *record, Scales *to) {
    for (int side = 0; side < SIDES; side++) {
        bits head = word_at(record, 0, side), low = word_at(record, 1, side);
        lanes unit = half_of(head);
        bits high = shifted(head, 16);
        EACH_NUMBER(g, GROUPS) {
            bits scale = (shifted(low, 4 * g) & 15) | (shifted(high, 2 * g) & 3) << 4;
            put_scale(to, g, side, unit * number(scale - 32));
        }
    }
}

/* The scales of a span with `groups` groups: all of them where a block has SPAN inputs. */
ALWAYS void scales_of(const int format, const char *record, int64_t groups, Scales *to) {
    switch (format) {
    case Q2_K: scales_of_2(record, to); break;
    case Q3_K: scales_of_3(record, to); break;
    case Q4_K: case Q5_K: scales_of_4_or_5(record, to); break;
    case Q6_K: scales_of_6(record, to); break;
    case IQ4_XS: scales_of_nonlinear(record, to); break;
    default: scales_of_groups(format, record, groups, to);
    }
}

/* Groups of a span whose codes share words in such a way that it pays to unpack each group with its
 * own instructions. */
ALWAYS int together(const int format) { return format == Q4_K ? 2 : format == Q6_K ? 4 : 1; }

/* Whether codes of group `g`, of those unpacked together, stay in the upper halves of bytes where
 * products of unsigned bytes are summed in 32 bits. The sum of products is shifted then. */
ALWAYS int is_raised(const int format, const int g) {
    return !WIDE_CODES && !SIGNED_WEIGHTS && format == Q4_K && g;
}

/* Word `w` of the codes of 32 inputs whose lower halves of bytes are the first 16. */
ALWAYS bits nibble_word(const char *record, int64_t from, const int w, int64_t side,
        const uint8_t *table) {
    bits both = word_at(record, from + w % 4, side);
    bits codes = (w < 4 ? both : shifted(both, 4)) & LOW_4;
    return table ? looked_up(table, codes) : codes;
}

/* Word `w` of the codes of group `first + g` of a span, in bytes: unsigned, four inputs each, or if
 * raised, 16 times as large. `first` is a multiple of `together(format)`, which `g` is less than. */
ALWAYS bits code_word(const int format, const char *record, int64_t first, const int g,
        const int w, int64_t side, const int raised) {
    const Format *form = formats + format;
    const int64_t group = first + g;
    if (form->inputs == 32) record += group * form->bytes * STRIP;
    int64_t half = group / 4, part = group % 4;         /* of formats with 2 bits in a byte */
    switch (format) {
    case Q8_0: return word_at(record, w, side);
    case Q4_0: return nibble_word(record, 0, w, side, NULL);
    case Q4_1: return nibble_word(record, 1, w, side, NULL);
    case Q5_0: case Q5_1: {
        const int pair = format == Q5_1;
        bits fifth = shifted(word_at(record, pair, side), w) & 0x01010101;
        return nibble_word(record, pair + 1, w, side, NULL) | fifth << 4;
    }
    case IQ4_NL: return nibble_word(record, 0, w, side, nonlinear);
    case MXFP4: return nibble_word(record, 0, w, side, floats_of_4);
    case IQ4_XS: return nibble_word(record, 2 + 4 * group, w, side, nonlinear);
    case Q4_K: {
        bits both = word_at(record, 4 + 4 * first + w, side);
        return raised ? both & ~LOW_4 : (g ? shifted(both, 4) : both) & LOW_4;
    }
    case Q5_K: {
        bits low = shifted(word_at(record, 12 + group / 2 * 8 + w, side), group % 2 * 4) & LOW_4;
        return low | (shifted(word_at(record, 4 + w, side), group) & 0x01010101) << 4;
    }
    case Q6_K: {
        int64_t at = 6 * first + 3 * w;
        bits both = word_at(record, at + g % 2, side), high = word_at(record, at + 2, side);
        bits low = (g < 2 ? both : shifted(both, 4)) & LOW_4;
        if (!g) return low | (high & LOW_2) << 4;
        return low | ((g == 1 ? high << 2 : g == 2 ? high : shifted(high, 2)) & 0x30303030);
    }
    case Q2_K: return shifted(word_at(record, 4 + 8 * half + w, side), 2 * part) & LOW_2;
    default: {                                          /* Q3_K */
        bits low = shifted(word_at(record, 8 + 8 * half + w, side), 2 * part) & LOW_2;
        return low | (shifted(word_at(record, w, side), group) & 0x01010101) << 2;
    }
    }
}

/* `start` and the products of `count` words of codes with those of a row. Codes of weights are
 * unsigned; if raised, they are 16 times as large. Without VNNI products are summed in 16 bits, so
 * many words of them as these hold: 8 of small codes, up to 15; 2 of medium ones, up to 63; of large
 * ones, one word of their distances from 128, the signs of which go over to the activations. */
ALWAYS bits dot_of(const int sums, const int count, const int raised, const bits *weight,
        const int32_t *codes, bits start) {
#if !WIDE_CODES
    (void)sums;
    bits other = {};                            /* two chains halve the latency */
    _Pragma("GCC unroll 4") for (int k = 0; k < count; k += 2) {
        start = dotted(start, weight[k], codes[k]);
        other = dotted(other, weight[k + 1], codes[k + 1]);
    }
    start += other;
    if (raised) start >>= 4;                    /* formats with a minimum start from zero */
#else
    (void)raised;
    const int together = sums & BITS_8 ? 1 : sums & BITS_6 ? 2 : count;
    const __m256i units = _mm256_set1_epi16(1);
    _Pragma("GCC unroll 8") for (int k = 0; k < count; k += together) {
        __m256i sum = {};
        _Pragma("GCC unroll 8") for (int j = k; j < k + together; j++) {
            __m256i code = _mm256_set1_epi32(codes[j]), w = (__m256i)weight[j];
            __m256i two = sums & BITS_8
                    ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(code, w))
                    : _mm256_maddubs_epi16(w, code);
            sum = j > k ? _mm256_add_epi16(sum, two) : two;
        }
        start += (bits)_mm256_madd_epi16(sum, units);
    }
#endif
    return start;
}

/* Prefetches part number `step` of `steps` of the memory after a span of this many lines, so that
 * it is one stream in whatever order the words are read: first to the L2 cache, later to L1. */
ALWAYS void prefetch_part(const char *record, const int lines, int64_t step, const int steps) {
    record += step * lines / steps * 64;
    _Pragma("GCC unroll 8") for (int i = 0; i < (lines + steps - 1) / steps; i++) {
        __builtin_prefetch(record + i * 64 + FAR, 0, SECOND_CACHE);
        __builtin_prefetch(record + i * 64 + NEAR, 0, FIRST_CACHE);
    }
}

/* Adds a span of a strip to the sums of `rows` rows, or of a single row. The codes of a group are
 * unpacked into registers once, for all rows. */
ALWAYS void add_span(const int format, const char *record, const Scales *scales,
        const Activations *x, int64_t rows, const int single, int64_t groups, int first_rows,
        lanes (*to)[SIDES]) {
    const int sums = (int)formats[format].sums, minimum = sums & MINIMUM, V = BLOCK_SIDES;
    const int parts = sums & HALF_GROUPS ? 2 : 1, count = 8 / parts, start = parts == 2 ? 0 : HALVES;
    /* subtracts the offset from the codes */
    const int signs = sums & BITS_8 && (WIDE_CODES || SIGNED_WEIGHTS);
    const int lines = (int)(formats[format].bytes * (SPAN / formats[format].inputs) * STRIP / 64);
    const int shared = together(format);
    for (int64_t side = 0; side < SIDES; side += V) {
        lanes only[2];                          /* the sums of a single row, in registers */
        if (single) EACH_NUMBER(v, V) only[v] = to[0][side + v];
        for (int64_t first = 0; first < groups; first += shared)
            _Pragma("GCC unroll 8") for (int p = 0; p < shared * parts; p++) {
            const int g = p / parts, half = p % parts;
            const int raised = is_raised(format, g);
            const int64_t group = first + g, part = first * parts + p, at = start + part;
            bits weight[2][8];
            _Pragma("GCC unroll 2") for (int v = 0; v < V; v++)
                _Pragma("GCC unroll 8") for (int k = 0; k < count; k++) {
                    weight[v][k] = code_word(format, record, first, g, 4 * half + k, side + v,
                            raised);
                    if (signs) weight[v][k] ^= (int)0x80808080;
                }
            if (first_rows)
                prefetch_part(record, lines, side / V * GROUPS * parts + part,
                        SIDES / V * GROUPS * parts);
            lanes scale[2], least[2];
            _Pragma("GCC unroll 2") for (int v = 0; v < V; v++) {
                scale[v] = loaded(scales->scale[part] + (side + v) * LANES);
                if (minimum) least[v] = loaded(scales->minimum[part] + (side + v) * LANES);
            }
            for (int64_t r = 0; r < (single ? 1 : rows); r++) {
                const int32_t *codes = x[r].codes + 8 * group + 4 * half;
                lanes unit = spread(x[r].scale[group]);
                bits dot[2];
                _Pragma("GCC unroll 2") for (int v = 0; v < V; v++)
                    dot[v] = minimum || signs ? (bits){} : (bits){} + x[r].offset[at];
                _Pragma("GCC unroll 2") for (int v = 0; v < V; v++)
                    dot[v] = dot_of(sums, count, raised, weight[v], codes, dot[v]);
                _Pragma("GCC unroll 2") for (int v = 0; v < V; v++) {
                    lanes *sum = single ? only + v : to[r] + side + v;
                    *sum = fused(scale[v] * unit, number(dot[v]), *sum);
                    if (minimum) *sum = fused(least[v], spread(x[r].sum[at]), *sum);
                }
            }
        }
        if (single) EACH_NUMBER(v, V) to[0][side + v] = only[v];
    }
}

/* The codes of a span of a strip. */
typedef struct {
    uint32_t words[SPAN_WORDS][STRIP];
} Codes;

/* Unpacks the codes of a span to memory: unsigned, or for tiles less their offset, with the weights
 * that follow prefetched. */
ALWAYS void codes_of(const int format, const char *record, int64_t groups, const int for_tiles,
        Codes *to) {
    typedef uint8_t octets __attribute__((vector_size(4 * LANES)));
    const Format *form = formats + format;
    const int lines = (int)(form->bytes * (SPAN / form->inputs) * STRIP / 64);
    const int shared = together(format), signs = for_tiles && !(form->sums & MINIMUM);
    for (int side = 0; side < SIDES; side++)
        for (int64_t first = 0; first < groups; first += shared)
            _Pragma("GCC unroll 4") for (int g = 0; g < shared; g++) {
                if (for_tiles)
                    prefetch_part(record, lines, side * GROUPS + first + g, SIDES * GROUPS);
                EACH_NUMBER(w, 8) {
                    bits codes = code_word(format, record, first, g, w, side, 0);
                    if (signs) codes = (bits)((octets)codes - (uint8_t)(1 << form->shift));
                    memcpy(&to->words[8 * (first + g) + w][side * LANES], &codes, sizeof codes);
                }
            }
}

#if TILES
/* From so many rows on, tiles are quicker than vectors, although codes are unpacked to memory. */
enum { TILED_FROM = 64 };
/* The groups, or halves of them, whose products are in the L1 cache at a time. */
enum { PARTS = 4 };

/* Adds the scaled products of `parts` parts of a span from `first` on to the sums of a side of two
 * rows, so that the sums of one need not wait for those of the other. */
ALWAYS void add_products(const int format, const bits (*products)[2 * TILE_ROWS][SIDES],
        const Scales *scales, const Activations *x, int64_t row, int64_t other, int64_t first,
        int64_t parts, lanes (*to)[SIDES]) {
    const int minimum = formats[format].sums & MINIMUM;
    const int halved = formats[format].sums & HALF_GROUPS ? 2 : 1;
    const int start = halved == 2 ? 0 : HALVES;
    const int64_t rows[2] = {row, other};
    lanes sum[2][SIDES];
    EACH_NUMBER(i, 2) EACH_SIDE_OF_STRIP sum[i][side] = to[rows[i]][side];
    for (int64_t p = 0; p < parts; p++) {
        int64_t part = first + p;
        EACH_NUMBER(i, 2) {
            lanes unit = spread(x[rows[i]].scale[part / halved]);
            EACH_SIDE_OF_STRIP sum[i][side] = fused(
                    loaded(scales->scale[part] + side * LANES) * unit,
                    number(products[p][rows[i]][side]), sum[i][side]);
            if (!minimum) continue;
            lanes offset = spread(x[rows[i]].sum[start + part]);
            EACH_SIDE_OF_STRIP sum[i][side] = fused(
                    loaded(scales->minimum[part] + side * LANES), offset, sum[i][side]);
        }
    }
    EACH_NUMBER(i, 2) EACH_SIDE_OF_STRIP to[rows[i]][side] = sum[i][side];
}

/* As `add_span` with unpacked codes, for up to BLOCK_ROWS rows: tiles sum the same products of
 * codes. The second tile of rows may begin within the first. */
ALWAYS void add_tiles(const int format, const Codes *weights, const Scales *scales,
        const Activations *x, int64_t rows, int64_t groups, lanes (*to)[SIDES]) {
    const int halved = formats[format].sums & HALF_GROUPS ? 2 : 1, count = 8 / halved;
    int64_t parts = groups * halved, size = rows < TILE_ROWS ? rows : TILE_ROWS, low = rows - size;
    bits products[PARTS][2 * TILE_ROWS][SIDES];
    tiled(size, 0, count);
    for (int64_t first = 0; first < parts; first += PARTS) {
        int64_t some = parts - first < PARTS ? parts - first : PARTS;
        WRITTEN;
        for (int64_t p = 0; p < some; p++) {
            int64_t word = (first + p) * count;
            _tile_zero(0); _tile_zero(1);
            _tile_loadd(4, x->codes + word, sizeof *x);
            _tile_loadd(6, weights->words[word], sizeof *weights->words);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, weights->words[word] + LANES, sizeof *weights->words);
            _tile_dpbssd(1, 4, 7);
            _tile_stored(0, products[p], sizeof **products);
            _tile_stored(1, &products[p][0][1], sizeof **products);
            if (!low) continue;
            _tile_zero(2); _tile_zero(3);
            _tile_loadd(5, x[low].codes + word, sizeof *x);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
            _tile_stored(2, products[p][low], sizeof **products);
            _tile_stored(3, &products[p][low][1], sizeof **products);
        }
        WRITTEN;
        for (int64_t r = 0; r < rows; r += 2)
            add_products(format, products, scales, x, r, r + 1 < rows ? r + 1 : r, first, some, to);
    }
}
#endif

#define EACH_FORMAT(X) X(Q8_0) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) \
    X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4)

#if TILES
#define UNPACK_FOR_TILES(FORMAT) \
    Codes codes __attribute__((aligned(64))); \
    int tiles = rows >= TILED_FROM; \
    if (tiles) codes_of(FORMAT, record, groups, 1, &codes);
#define ADD_BY_TILES(FORMAT) \
    if (tiles) add_tiles(FORMAT, &codes, &scales, x, count, groups, to); \
    else
#else
#define UNPACK_FOR_TILES(FORMAT)
#define ADD_BY_TILES(FORMAT)
#endif

/* Multiplies a span of a strip with the rows of chunks `top` to `bottom`. */
#define MULTIPLY_SPAN(FORMAT) \
    static void span_##FORMAT(const BlockProduct *of, const char *record, int64_t span, \
            int64_t groups, int64_t top, int64_t bottom, lanes (*sums)[SIDES]) { \
        Scales scales __attribute__((aligned(64))); \
        scales_of(FORMAT, record, groups, &scales); \
        int64_t rows = of->rows, chunks = of->chunks, row = rows * top / chunks; \
        UNPACK_FOR_TILES(FORMAT) \
        for (int64_t c = top; c < bottom; c++) { \
            int64_t from = rows * c / chunks, count = rows * (c + 1) / chunks - from; \
            const Activations *x = of->activations + from * of->spans + span * count; \
            lanes (*to)[SIDES] = sums + (from - row); \
            ADD_BY_TILES(FORMAT) \
            if (count > 1) add_span(FORMAT, record, &scales, x, count, 0, groups, c == top, to); \
            else add_span(FORMAT, record, &scales, x, 1, 1, groups, c == top, to); \
        } \
    }
EACH_FORMAT(MULTIPLY_SPAN)
#define SPAN_OF(FORMAT) [FORMAT] = span_##FORMAT,
static void (*const spans_of[FORMATS])(const BlockProduct *, const char *, int64_t, int64_t,
        int64_t, int64_t, lanes (*)[SIDES]) = {EACH_FORMAT(SPAN_OF)};

/* The codes and scales of a span, for reading rows of weights, not for products. */
typedef struct {
    Codes codes;
    Scales scales;
} Weights;

#define UNPACK_SPAN(FORMAT) \
    static void unpack_##FORMAT(const char *record, int64_t groups, Weights *to) { \
        scales_of(FORMAT, record, groups, &to->scales); \
        codes_of(FORMAT, record, groups, 0, &to->codes); \
    }
EACH_FORMAT(UNPACK_SPAN)
#define UNPACK_OF(FORMAT) [FORMAT] = unpack_##FORMAT,
static void (*const unpack_span[FORMATS])(const char *, int64_t, Weights *) = {
    EACH_FORMAT(UNPACK_OF)};

/* The record of a strip at which a span begins. */
static inline const char *record_at(const Linear *layer, int64_t strip, int64_t span) {
    const Format *format = formats + layer->format;
    int64_t blocks = layer->padded / format->inputs;
    int64_t block = strip * blocks + span * (SPAN / format->inputs);
    return (const char *)layer->weights + block * format->bytes * STRIP;
}

static inline int64_t groups_of(const Linear *layer, int64_t span) {
    int64_t left = layer->padded / 32 - span * GROUPS;
    return left < GROUPS ? left : GROUPS;
}

/* Turns sums of a strip into outputs of rows `row` to `end`. */
static void finish_blocks(const BlockProduct *of, int64_t strip, int64_t row, int64_t end,
        lanes (*sums)[SIDES]) {
    const Linear *layer = of->layer;
    int64_t start = strip * STRIP, left = layer->outputs - start;
    for (int64_t r = row; r < end; r++) {
        bf16 rest[STRIP], *to = of->out + r * of->stride + start, *done = left < STRIP ? rest : to;
        for (int h = 0; h < SIDES; h++) {
            lanes sum = sums[r - row][h];
            if (layer->bias) sum += wide(layer->bias + start + h * LANES);
            narrowed(done + h * LANES, sum);
        }
        if (done == rest) memcpy(to, rest, (size_t)left * sizeof(bf16));
    }
}

/* The outputs of strips `first` to `last`, at most STRIPS, for chunks `top` to `bottom`, at most
 * BLOCK_CHUNKS. */
static void block_panel(const BlockProduct *of, int64_t first, int64_t last, int64_t top,
        int64_t bottom) {
    int64_t rows = of->rows, chunks = of->chunks, row = rows * top / chunks,
            end = rows * bottom / chunks;
    lanes sums[STRIPS][ROWS][SIDES];
    for (int64_t s = first; s < last; s++)
        memset(sums[s - first], 0, (size_t)(end - row) * sizeof *sums[0]);
    for (int64_t span = 0; span < of->spans; span++)
        for (int64_t s = first; s < last; s++)
            spans_of[of->layer->format](of, record_at(of->layer, s, span), span,
                    groups_of(of->layer, span), top, bottom, sums[s - first]);
    for (int64_t s = first; s < last; s++) finish_blocks(of, s, row, end, sums[s - first]);
}
