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

/* A block in a file: how many inputs it has, its bytes, its words and the byte that these begin at,
 * and the bytes of its rest and where this begins. Codes are `bits` wide and are less by `offset`,
 * a power of two, or have a minimum. `per` words share a scale. */
typedef struct {
    int64_t inputs, bytes, words, first, rest, last, kernel, shift;
} Format;

/* How products are summed: with a scale for 8 or for 4 words of codes; with an offset of the codes
 * or a minimum; and how large codes are, which matters without VNNI. The last two unpack codes
 * while they multiply. */
enum { SMALL_OFFSET, SMALL_MINIMUM, MEDIUM_OFFSET, MEDIUM_MINIMUM, HALVES_OFFSET, HALVES_MINIMUM,
    LARGE_OFFSET, Q4_K_IN_PLACE, Q6_K_IN_PLACE, SUMMATIONS };

static const Format formats[FORMATS] = {
    [Q8_0] = {32, 34, 8, 2, 2, 0, LARGE_OFFSET, 7},
    [Q4_0] = {32, 18, 4, 2, 2, 0, SMALL_OFFSET, 3},
    [Q4_1] = {32, 20, 5, 0, 0, 0, SMALL_MINIMUM, 0},
    [Q5_0] = {32, 22, 5, 2, 2, 0, MEDIUM_OFFSET, 4},
    [Q5_1] = {32, 24, 6, 0, 0, 0, MEDIUM_MINIMUM, 0},
    [Q2_K] = {256, 84, 21, 0, 0, 0, HALVES_MINIMUM, 0},
    [Q3_K] = {256, 110, 27, 0, 2, 108, HALVES_OFFSET, 2},
    [Q4_K] = {256, 144, 36, 0, 0, 0, SMALL_MINIMUM, 0},
    [Q5_K] = {256, 176, 44, 0, 0, 0, MEDIUM_MINIMUM, 0},
    [Q6_K] = {256, 210, 52, 0, 2, 208, HALVES_OFFSET, 5},
    [IQ4_NL] = {32, 18, 4, 2, 2, 0, LARGE_OFFSET, 7},
    [IQ4_XS] = {256, 136, 34, 0, 0, 0, LARGE_OFFSET, 7},
    [MXFP4] = {32, 17, 4, 1, 1, 0, LARGE_OFFSET, 7},
};

/* Inputs, words and groups of 32 inputs that are unpacked and multiplied at a time. */
enum { SPAN = 256, SPAN_WORDS = SPAN / 4, GROUPS = SPAN / 32, HALVES = SPAN / 16 };
/* Bytes that memory is asked for ahead of time, and the caches that it is asked for, as
 * __builtin_prefetch numbers them. */
enum { AHEAD = 8192, FAR = 12288, NEAR = 2048, SECOND_CACHE = 2, FIRST_CACHE = 3 };
/* Rows that are multiplied at a time, so that their sums stay in registers. */
enum { BLOCK_ROWS = 8, BLOCK_CHUNKS = ROWS / BLOCK_ROWS };

/* SPAN activations of a row. `offset` has minus the sum of the codes of each 16 inputs, then of
 * each 32; `sum` has these times the scale. */
typedef struct {
    int32_t codes[SPAN_WORDS];
    float scale[GROUPS];
    int32_t offset[HALVES + GROUPS];
    float sum[HALVES + GROUPS];
} Activations;

/* SPAN inputs of a strip of weights: codes of 8 bits, words of a group `stride` bytes after those
 * of the group before; a scale and a minimum for each group, or half of one. Codes that are read
 * where they are stored are asked for `ahead` bytes ahead. */
typedef struct {
    uint32_t words[SPAN_WORDS][STRIP];
    float scale[HALVES][STRIP], minimum[HALVES][STRIP];
    const char *codes, *record;
    int64_t stride, ahead;
} Weights;

typedef struct {
    const Linear *layer;
    const Format *format;
    const bf16 *inputs;
    bf16 *out;
    int64_t stride, rows, chunks, spans;        /* stride: numbers of `out` between rows */
    Activations *activations;                   /* chunk by chunk, span by span, row by row */
} BlockProduct;

ALWAYS bits word_at(const char *record, int64_t word, int64_t side) {
    const char *from = record + (word * STRIP + side * LANES) * 4;
    bits w;
    memcpy(&w, from, sizeof w);
    __builtin_prefetch(from + AHEAD, 0, SECOND_CACHE);
    return w;
}

/* The rests of a record, in half precision, after so many words. */
ALWAYS lanes rest_at(const char *record, int64_t words, int64_t side) {
    const char *from = record + words * 4 * STRIP + side * LANES * 2;
    __builtin_prefetch(from + AHEAD, 0, SECOND_CACHE);
    return from_half((const uint16_t *)from);
}

/* Single precision of the half precision in the lower 16 bits. */
ALWAYS lanes half_of(bits w) {
    return from_halves(lower_halves(w & 0xffff));
}

ALWAYS bits shifted(bits w, const int right) {                          /* unsigned */
    return (bits)((words)w >> right);
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

ALWAYS void put(Weights *to, int word, int side, bits codes) {
    memcpy(&to->words[word][side * LANES], &codes, sizeof codes);
}

ALWAYS void put_scale(Weights *to, int group, int side, lanes scale) {
    memcpy(&to->scale[group][side * LANES], &scale, sizeof scale);
}

ALWAYS void put_minimum(Weights *to, int group, int side, lanes minimum) {
    memcpy(&to->minimum[group][side * LANES], &minimum, sizeof minimum);
}

/* Words `from` to `from + 4` of 32 codes: the lower halves of bytes are the first 16. */
ALWAYS void put_nibbles(Weights *to, int group, int side, const char *record, int from,
        const uint8_t *table, const int fifth, bits high) {
    EACH_NUMBER(w, 4) {
        bits both = word_at(record, from + w, side), low = both & LOW_4;
        bits upper = shifted(both, 4) & LOW_4;
        if (table) low = looked_up(table, low), upper = looked_up(table, upper);
        if (fifth) {
            low |= (shifted(high, w) & 0x01010101) << 4;
            upper |= (shifted(high, w + 4) & 0x01010101) << 4;
        }
        put(to, group * 8 + w, side, low), put(to, group * 8 + 4 + w, side, upper);
    }
}

/* Formats with blocks of 32 inputs: a record for each group. */
ALWAYS void unpack_groups(const int format, const char *record, int64_t groups, Weights *to) {
    const Format *form = formats + format;
    const int pair = format == Q4_1 || format == Q5_1, fifth = format == Q5_0 || format == Q5_1;
    const uint8_t *table = format == IQ4_NL ? nonlinear : format == MXFP4 ? floats_of_4 : NULL;
    for (int g = 0; g < groups; g++, record += form->bytes * STRIP)
        _Pragma("GCC unroll 4") for (int side = 0; side < SIDES; side++) {
            if (pair) {
                bits both = word_at(record, 0, side);
                put_scale(to, g, side, half_of(both));
                /* stored as what is subtracted */
                put_minimum(to, g, side, -half_of(shifted(both, 16)));
            } else if (format == MXFP4) {
                const char *exponents = record + form->words * 4 * STRIP + side * LANES;
                bits e = from_unsigned_bytes(exponents), tiny = e < 2;
                put_scale(to, g, side, (lanes)((tiny & (((e & 1) + 1) << 21))
                                               | (~tiny & ((e - 1) << 23))));
            } else put_scale(to, g, side, rest_at(record, form->words, side));
            if (format == Q8_0) continue;
            bits high = fifth ? word_at(record, pair, side) : (bits){};
            put_nibbles(to, g, side, record, pair + fifth, table, fifth, high);
        }
}

/* The scales and minimums of Q4_K and Q5_K, 6 bits each in three words. */
ALWAYS void unpack_scales(const char *record, int side, Weights *to) {
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

#define EACH_SIDE_OF_STRIP _Pragma("GCC unroll 4") for (int side = 0; side < SIDES; side++)

ALWAYS void unpack_4_or_5(const int fifth, const char *record, Weights *to) {
    for (int pair = 0; pair < 4; pair++) EACH_NUMBER(w, 8) EACH_SIDE_OF_STRIP {
        bits both = word_at(record, 4 + 8 * fifth + 8 * pair + w, side), low = both & LOW_4;
        bits upper = shifted(both, 4) & LOW_4;
        if (fifth) {
            bits high = shifted(word_at(record, 4 + w, side), 2 * pair);
            low |= (high & 0x01010101) << 4, upper |= (shifted(high, 1) & 0x01010101) << 4;
        }
        put(to, 16 * pair + w, side, low), put(to, 16 * pair + 8 + w, side, upper);
    }
}

ALWAYS void unpack_6(const char *record, Weights *to) {
    for (int n = 0; n < 2; n++) EACH_NUMBER(w, 8) EACH_SIDE_OF_STRIP {
        int at = 24 * n + 3 * w;
        bits a = word_at(record, at, side), b = word_at(record, at + 1, side);
        bits high = word_at(record, at + 2, side);
        put(to, 32 * n + w, side, (a & LOW_4) | (high & LOW_2) << 4);
        put(to, 32 * n + 8 + w, side, (b & LOW_4) | (high << 2 & 0x30303030));
        put(to, 32 * n + 16 + w, side, (shifted(a, 4) & LOW_4) | (high & 0x30303030));
        put(to, 32 * n + 24 + w, side, (shifted(b, 4) & LOW_4) | (shifted(high, 2) & 0x30303030));
    }
}

ALWAYS void unpack_scales_6(const char *record, Weights *to) {
    EACH_SIDE_OF_STRIP {
        lanes unit = rest_at(record, 52, side);
        for (int i = 0; i < 4; i++) {
            bits scales = word_at(record, 48 + i, side);
            EACH_NUMBER(k, 4)
                put_scale(to, 4 * i + k, side, unit * number(signed_byte_of(scales, k)));
        }
    }
}

ALWAYS void unpack_2(const char *record, Weights *to) {
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
        for (int n = 0; n < 2; n++) EACH_NUMBER(w, 8) {
            bits all = word_at(record, 4 + 8 * n + w, side);
            EACH_NUMBER(j, 4) put(to, 32 * n + 8 * j + w, side, shifted(all, 2 * j) & LOW_2);
        }
    }
}

ALWAYS void unpack_3(const char *record, Weights *to) {
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
        for (int n = 0; n < 2; n++) EACH_NUMBER(w, 8) {
            bits all = word_at(record, 8 + 8 * n + w, side), high = word_at(record, w, side);
            EACH_NUMBER(j, 4) put(to, 32 * n + 8 * j + w, side, (shifted(all, 2 * j) & LOW_2)
                    | (shifted(high, 4 * n + j) & 0x01010101) << 2);
        }
    }
}

ALWAYS void unpack_nonlinear(const char *record, Weights *to) {
    for (int side = 0; side < SIDES; side++) {
        bits head = word_at(record, 0, side), low = word_at(record, 1, side);
        lanes unit = half_of(head);
        bits high = shifted(head, 16);
        EACH_NUMBER(g, GROUPS) {
            bits scale = (shifted(low, 4 * g) & 15) | (shifted(high, 2 * g) & 3) << 4;
            put_scale(to, g, side, unit * number(scale - 32));
            put_nibbles(to, g, side, record, 2 + 4 * g, nonlinear, 0, (bits){});
        }
    }
}

/* Unpack the scales of a record in a format whose codes are unpacked while they are multiplied. */
static void unpack_scales_of(int64_t format, const char *record, Weights *to) {
    to->record = record;
    if (format == Q6_K) unpack_scales_6(record, to);
    else EACH_SIDE_OF_STRIP unpack_scales(record, side, to);
}

/* Unpack `groups` groups of 32 inputs, all GROUPS where a block has SPAN inputs. */
static void unpack_span(int64_t format, const char *record, int64_t groups, Weights *to) {
    if (format == Q4_K || format == Q5_K || format == Q6_K) unpack_scales_of(format, record, to);
    to->codes = (const char *)to->words, to->stride = 8 * LINE, to->ahead = 0;
    switch (format) {
    case Q8_0:
        to->codes = record, to->stride = formats[Q8_0].bytes * STRIP, to->ahead = AHEAD;
        unpack_groups(Q8_0, record, groups, to);
        break;
    case Q4_0: unpack_groups(Q4_0, record, groups, to); break;
    case Q4_1: unpack_groups(Q4_1, record, groups, to); break;
    case Q5_0: unpack_groups(Q5_0, record, groups, to); break;
    case Q5_1: unpack_groups(Q5_1, record, groups, to); break;
    case IQ4_NL: unpack_groups(IQ4_NL, record, groups, to); break;
    case MXFP4: unpack_groups(MXFP4, record, groups, to); break;
    case Q2_K: unpack_2(record, to); break;
    case Q3_K: unpack_3(record, to); break;
    case Q4_K: unpack_4_or_5(0, record, to); break;
    case Q5_K: unpack_4_or_5(1, record, to); break;
    case Q6_K: unpack_6(record, to); break;
    case IQ4_XS: unpack_nonlinear(record, to); break;
    }
}

#define EACH_ROW _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
#define EACH_SIDE _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)

/* Add the products of `count` words of weights, V vectors of outputs, with those of R rows. Codes
 * of weights are unsigned. Without VNNI products are summed in 16 bits, so many words of them as
 * these hold: 8 of codes up to 15, 2 of codes up to 63; of larger codes, one word of their
 * distances from 128, the signs of which go over to the activations. */
ALWAYS void add_words(const int large, const int small, const int R, const int V, const int count,
        const char *codes, int64_t ahead, const Activations *x, int64_t word, bits (*dot)[4]) {
#if !WIDE_CODES
    (void)small;
    _Pragma("GCC unroll 8") for (int k = 0; k < count; k++) {
        bits weight[4];
        EACH_SIDE {
            memcpy(&weight[v], codes + k * LINE + v * sizeof(bits), sizeof(bits));
            if (large) __builtin_prefetch(codes + k * LINE + v * sizeof(bits) + ahead, 0,
                    SECOND_CACHE);
            if (large) weight[v] = AS_SIGNED(weight[v]);
        }
        EACH_ROW EACH_SIDE dot[r][v] = dotted(dot[r][v], weight[v], x[r].codes[word + k]);
    }
#else
    const int together = large ? 1 : small ? count : 2;
    const __m256i units = _mm256_set1_epi16(1);
    _Pragma("GCC unroll 8") for (int k = 0; k < count; k += together) {
        __m256i sum[BLOCK_ROWS][4];
        _Pragma("GCC unroll 8") for (int j = 0; j < together; j++) {
            __m256i weight[4], size[4];
            EACH_SIDE {
                memcpy(&weight[v], codes + (k + j) * LINE + v * sizeof(bits), sizeof(bits));
                if (!large) continue;
                weight[v] = _mm256_xor_si256(weight[v], _mm256_set1_epi8(-128));
                size[v] = _mm256_abs_epi8(weight[v]);
                if (v % 2 == 0) __builtin_prefetch(codes + k * LINE + v * sizeof(bits) + ahead, 0,
                    SECOND_CACHE);
            }
            EACH_ROW {
                __m256i code = _mm256_set1_epi32(x[r].codes[word + k + j]);
                EACH_SIDE {
                    __m256i two = large
                            ? _mm256_maddubs_epi16(size[v], _mm256_sign_epi8(code, weight[v]))
                            : _mm256_maddubs_epi16(weight[v], code);
                    sum[r][v] = j ? _mm256_add_epi16(sum[r][v], two) : two;
                }
            }
        }
        EACH_ROW EACH_SIDE dot[r][v] += (bits)_mm256_madd_epi16(sum[r][v], units);
    }
#endif
}

#if LANES == 16
/* A word of a record that memory was asked for by prefetch_part. */
ALWAYS bits cached_word(const char *record, int64_t word, int64_t side) {
    bits w;
    memcpy(&w, record + (word * STRIP + side * LANES) * 4, sizeof w);
    return w;
}

/* Ask memory for the part number `step` of `steps` of what follows a record, so that it is one
 * stream, however the words are read: first to the second cache, later to the first. */
ALWAYS void prefetch_part(const int format, const char *record, int64_t step, const int steps) {
    const int lines = (int)formats[format].bytes * STRIP / 64;
    record += step * lines / steps * 64;
    _Pragma("GCC unroll 8") for (int i = 0; i <= lines / steps; i++) {
        __builtin_prefetch(record + i * 64 + FAR, 0, SECOND_CACHE);
        __builtin_prefetch(record + i * 64 + NEAR, 0, FIRST_CACHE);
    }
}

/* Codes of Q4_K or Q6_K, unpacked: word `w` of group `g` of the groups whose codes share words,
 * which are the 2 or 4 from `first` on. */
ALWAYS bits code_word(const int format, const char *record, int64_t first, const int g, const int w,
        int64_t side) {
    if (format == Q4_K) {
        bits both = cached_word(record, 4 + 4 * first + w, side);
        return (g ? shifted(both, 4) : both) & LOW_4;
    }
    int64_t at = 6 * first + 3 * w;
    bits both = cached_word(record, at + g % 2, side), high = cached_word(record, at + 2, side);
    bits low = (g < 2 ? both : shifted(both, 4)) & LOW_4;
    if (!g) return low | (high & LOW_2) << 4;
    return low | ((g == 1 ? high << 2 : g == 2 ? high : shifted(high, 2)) & 0x30303030);
}

/* As add_words, for codes of Q4_K or Q6_K that are unpacked on the way, so that no memory is
 * written: words `begin` to `begin + count` of a group. */
ALWAYS void add_packed(const int format, const int R, const int V, const int count,
        const char *record, int64_t first, const int g, const int begin, int64_t side,
        const Activations *x, bits (*dot)[4]) {
    _Pragma("GCC unroll 8") for (int k = begin; k < begin + count; k++) {
        bits weight[4];
        EACH_SIDE weight[v] = code_word(format, record, first, g, k, side + v);
        EACH_ROW EACH_SIDE
            dot[r][v] = dotted(dot[r][v], weight[v], x[r].codes[8 * (first + g) + k]);
    }
}
#endif

/* Add `groups` groups of a span to the sums of R rows, V vectors of outputs at a time. */
ALWAYS void add_span(const int kernel, const int R, const int V, const Weights *weights,
        const Activations *x, int64_t groups, int shift, lanes (*to)[SIDES]) {
    const int small = kernel == SMALL_OFFSET || kernel == SMALL_MINIMUM;
    const int large = kernel == LARGE_OFFSET;
    const int packed = kernel == Q4_K_IN_PLACE ? Q4_K : kernel == Q6_K_IN_PLACE ? Q6_K : NO_BLOCKS;
    const int halves = kernel == HALVES_OFFSET || kernel == HALVES_MINIMUM || packed == Q6_K;
    const int minimum = kernel == SMALL_MINIMUM || kernel == MEDIUM_MINIMUM
            || kernel == HALVES_MINIMUM || packed == Q4_K;
    const int parts = 1 + halves, start = halves ? 0 : HALVES;
    const int shared = packed == Q4_K ? 2 : packed == Q6_K ? 4 : 1;    /* groups whose words are */
    for (int side = 0; side < SIDES; side += V) {
        const char *codes = weights->codes + side * sizeof(bits);
        lanes sum[BLOCK_ROWS][4];
        EACH_ROW EACH_SIDE sum[r][v] = to[r][side + v];
        for (int64_t first = 0; first < groups; first += shared, codes += weights->stride)
            _Pragma("GCC unroll 8") for (int p = 0; p < shared * parts; p++) {
                const int g = p / parts, half = p % parts;
                const int64_t part = first * parts + p, at = start + part;
                bits dot[BLOCK_ROWS][4];
                EACH_ROW EACH_SIDE dot[r][v] = minimum || (large && (WIDE_CODES || SIGNED_WEIGHTS)) ? (bits){}
                        : (bits){} + (x[r].offset[at] << shift);
#if LANES == 16
                if (packed) {
                    prefetch_part(packed, weights->record, (side / V) * GROUPS * parts + part,
                            (SIDES / V) * GROUPS * parts);
                    add_packed(packed, R, V, 8 / parts, weights->record, first, g, 4 * half, side,
                            x, dot);
                } else
#endif
                add_words(large, small, R, V, 8 / parts, codes + half * 4 * LINE,
                        weights->ahead, x, 8 * first + 4 * half, dot);
                EACH_SIDE {
                    lanes scale = loaded(weights->scale[part] + (side + v) * LANES), least = {};
                    if (minimum) least = loaded(weights->minimum[part] + (side + v) * LANES);
                    EACH_ROW {
                        sum[r][v] = fused(scale * x[r].scale[first + g], number(dot[r][v]),
                                sum[r][v]);
                        if (minimum) sum[r][v] = fused(least, (lanes){} + x[r].sum[at], sum[r][v]);
                    }
                }
            }
        EACH_ROW EACH_SIDE to[r][side + v] = sum[r][v];
    }
}

/* Vectors of outputs that are summed together, for R rows. */
#if LANES == 16
#define BLOCK_SIDES(KERNEL, R) ((KERNEL) < Q4_K_IN_PLACE ? 2 : 1)
#else
#define BLOCK_SIDES(KERNEL, R) SIDES_OF(R)
#endif
#define EACH_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
#define COUNTS(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, \
    NAME##_8}
#define SUMMATION(NAME, KERNEL, R) \
    static void NAME##_##R(const Weights *weights, const Activations *x, int64_t groups, \
            int shift, lanes (*to)[SIDES]) { \
        add_span(KERNEL, R, BLOCK_SIDES(KERNEL, R), weights, x, groups, shift, to); \
    }
#if WIDE_CODES
#define SUMMATIONS_OF(R) SUMMATION(small_offset, SMALL_OFFSET, R) \
    SUMMATION(small_minimum, SMALL_MINIMUM, R) SUMMATION(medium_offset, MEDIUM_OFFSET, R) \
    SUMMATION(medium_minimum, MEDIUM_MINIMUM, R) SUMMATION(halves_offset, HALVES_OFFSET, R) \
    SUMMATION(halves_minimum, HALVES_MINIMUM, R) SUMMATION(large_offset, LARGE_OFFSET, R)
EACH_COUNT(SUMMATIONS_OF)
static void (*const summations[SUMMATIONS][BLOCK_ROWS])(const Weights *, const Activations *, int64_t,
        int, lanes (*)[SIDES]) = {
    [SMALL_OFFSET] = COUNTS(small_offset), [SMALL_MINIMUM] = COUNTS(small_minimum),
    [MEDIUM_OFFSET] = COUNTS(medium_offset), [MEDIUM_MINIMUM] = COUNTS(medium_minimum),
    [HALVES_OFFSET] = COUNTS(halves_offset), [HALVES_MINIMUM] = COUNTS(halves_minimum),
    [LARGE_OFFSET] = COUNTS(large_offset)
};
#else                                           /* with VNNI codes of all sizes are alike,
                                                 * but large ones are read where they are */
#define SUMMATIONS_OF(R) SUMMATION(offset, SMALL_OFFSET, R) SUMMATION(large, LARGE_OFFSET, R) \
    SUMMATION(minimum, SMALL_MINIMUM, R) SUMMATION(halves_offset, HALVES_OFFSET, R) \
    SUMMATION(halves_minimum, HALVES_MINIMUM, R) IN_PLACE_OF(R)
#if LANES == 16
#define IN_PLACE_OF(R) SUMMATION(packed_4, Q4_K_IN_PLACE, R) SUMMATION(packed_6, Q6_K_IN_PLACE, R)
#else
#define IN_PLACE_OF(R)
#endif
EACH_COUNT(SUMMATIONS_OF)
static void (*const summations[SUMMATIONS][BLOCK_ROWS])(const Weights *, const Activations *, int64_t,
        int, lanes (*)[SIDES]) = {
    [SMALL_OFFSET] = COUNTS(offset), [SMALL_MINIMUM] = COUNTS(minimum),
    [MEDIUM_OFFSET] = COUNTS(offset), [MEDIUM_MINIMUM] = COUNTS(minimum),
    [HALVES_OFFSET] = COUNTS(halves_offset), [HALVES_MINIMUM] = COUNTS(halves_minimum),
    [LARGE_OFFSET] = COUNTS(large),
#if LANES == 16
    [Q4_K_IN_PLACE] = COUNTS(packed_4), [Q6_K_IN_PLACE] = COUNTS(packed_6)
#endif
};
#endif

/* The record of a strip that a span begins with. */
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

/* Sums of a strip become outputs of rows `row` to `end`. */
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
    int64_t rows = of->rows, chunks = of->chunks, format = of->layer->format;
    int64_t row = rows * top / chunks, end = rows * bottom / chunks, kernel = of->format->kernel;
    /* with codes that are used once, and 32 registers */
    int packed = LANES == 16 && bottom - top == 1 && (format == Q4_K || format == Q6_K);
    if (packed) kernel = format == Q4_K ? Q4_K_IN_PLACE : Q6_K_IN_PLACE;
    lanes sums[STRIPS][ROWS][SIDES];
    Weights weights __attribute__((aligned(64)));     /* no store crosses a line */
    for (int64_t s = first; s < last; s++)
        memset(sums[s - first], 0, (size_t)(end - row) * sizeof *sums[0]);
    for (int64_t span = 0; span < of->spans; span++)
        for (int64_t s = first; s < last; s++) {
            int64_t groups = groups_of(of->layer, span);
            const char *record = record_at(of->layer, s, span);
            if (packed) unpack_scales_of(format, record, &weights);
            else unpack_span(format, record, groups, &weights);
            for (int64_t c = top; c < bottom; c++) {
                int64_t from = rows * c / chunks, count = rows * (c + 1) / chunks - from;
                const Activations *x = of->activations + from * of->spans + span * count;
                summations[kernel][count - 1](&weights, x, groups,
                        (int)of->format->shift, sums[s - first] + (from - row));
            }
        }
    for (int64_t s = first; s < last; s++) finish_blocks(of, s, row, end, sums[s - first]);
}
