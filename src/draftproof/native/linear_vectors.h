/* Products of a few rows with strips of weights, by vectors. Every sum runs along its row, so its
 * bits depend neither on other rows nor, in 8 and 4 bits, on the level. */
#pragma once
#include "linear.h"

/* Words of LANES outputs: bfloat16 numbers one and two; codes of 8 bits as they are or, where wide,
 * first and third, second and fourth; those of 4 bits in the lower and the upper half of bytes. */
typedef struct { bits even, odd; } Weight;

ALWAYS Weight weight_of(const int kind, const char *from) {
    bits w;
    memcpy(&w, from, sizeof w);
    if (kind == BFLOAT16) return (Weight){w << 16, w & ~0xffff};
    if (kind == INT4) return (Weight){w & 0x0f0f0f0f, (w >> 4) & 0x0f0f0f0f};
#if WIDE_CODES
    return (Weight){w & 0x00ff00ff, (bits)_mm256_srli_epi16((__m256i)w, 8)};
#else
    return (Weight){w, w};
#endif
}

/* Sums of products of four weights, unsigned, with the same four codes, signed. AVX2 without VNNI
 * has sums of 16 bits for weights of 4, which hold a group: 32 * 15 * 127 / 2. */
ALWAYS bits dotted(bits sum, bits weights, int32_t codes) {
#if defined(__AVX512VNNI__)
    return (bits)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(codes));
#elif defined(__AVXVNNI__)
    return (bits)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(codes));
#else
    __m256i two = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(codes));
    return (bits)_mm256_add_epi16((__m256i)sum, two);
#endif
}

/* A sum goes on over one word of weights and the inputs that these are of. */
ALWAYS lanes added(const int kind, lanes sum, Weight weight, const int32_t *inputs) {
    if (kind == BFLOAT16) {
        sum = fused((lanes)weight.even, (lanes)((bits){} + inputs[0]), sum);
        return fused((lanes)weight.odd, (lanes)((bits){} + inputs[1]), sum);
    }
    if (kind == INT4)
        return (lanes)dotted(dotted((bits)sum, weight.even, inputs[0]), weight.odd, inputs[1]);
#if WIDE_CODES
    bits one = (bits)_mm256_madd_epi16((__m256i)weight.even, _mm256_set1_epi32(inputs[0]));
    bits two = (bits)_mm256_madd_epi16((__m256i)weight.odd, _mm256_set1_epi32(inputs[1]));
    return (lanes)((bits)sum + one + two);
#else
    return (lanes)dotted((bits)sum, weight.even, inputs[0]);
#endif
}

/* What lies behind a group in 4 bits: steps, 17 at most, and bases of LANES outputs. Codes times
 * the step plus the base have 8 bits. */
typedef uint16_t shorts __attribute__((vector_size(4 * LANES)));
typedef uint8_t octets __attribute__((vector_size(4 * LANES)));
typedef struct { shorts step; octets base; } Group;

ALWAYS Group group_of(const char *behind) {
    words both = (words)wide((const bf16 *)behind), pair = both | both >> 16;
    words upper = (words)((shorts)pair >> 8);
    return (Group){(shorts)(pair & 0x00ff00ff), (octets)((pair & 0xff00ff00) | upper)};
}

ALWAYS Weight unpacked(Weight w, Group group) {
    return (Weight){(bits)((octets)((shorts)w.even * group.step) + group.base),
                    (bits)((octets)((shorts)w.odd * group.step) + group.base)};
}

/* A sum goes on over a group: a sum with its codes times its step, and that of the inputs' codes
 * times its base. */
ALWAYS lanes grouped(lanes sum, lanes small, Group group, int32_t codes) {
    bits base = (bits)group.base & 0xff;
#if WIDE_CODES
    small = (lanes)_mm256_madd_epi16((__m256i)small, (__m256i)group.step);
    bits more = (bits)_mm256_madd_epi16((__m256i)base, _mm256_set1_epi32(codes));
    return (lanes)((bits)sum + (bits)small + more);
#else
    return (lanes)((bits)sum + (bits)small * ((bits)group.step & 0xff) + base * codes);
#endif
}

/* Words `word` to `word + count` of a strip, which lie at `weights`, times those of a chunk, which
 * begins at row `from`. Memory is asked for the weights at `ahead`, `step` bytes a word. */
typedef struct {
    int64_t from, strip, word, count, step;
    const char *weights, *ahead;
} Stretch;

/* Words in 4 bits become words in 8 bits. */
static void unpack(Stretch *at, const char *from, char *to) {
    for (int64_t done = 0; done < at->count; done += GROUP_WORDS, from += GROUP_BYTES - LINE) {
        for (int64_t i = 0; i < GROUP_WORDS * at->step; i += 64) __builtin_prefetch(at->ahead + i);
        at->ahead += GROUP_WORDS * at->step;
        for (int side = 0; side < SIDES; side++, from += sizeof(bits), to += sizeof(bits)) {
            Group group = group_of(from + BEHIND - side * LANES * 2);
            _Pragma("GCC unroll 4") for (int word = 0; word < GROUP_WORDS / 2; word++) {
                Weight w = unpacked(weight_of(INT4, from + word * LINE), group);
                memcpy(to + 2 * word * LINE, &w.even, sizeof w.even);
                memcpy(to + (2 * word + 1) * LINE, &w.odd, sizeof w.odd);
            }
        }
        to += (GROUP_WORDS - 1) * LINE;
    }
}

#define EACH_SUM \
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) \
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)

/* For R rows, V vectors of outputs at a time, so that all sums stay in registers: on from `to`. In
 * 4 bits a part of the inputs is summed as whole numbers: of words in 8 bits that were unpacked
 * before, or here, or for very few rows of those in 4 bits, group by group. */
ALWAYS void stretch_of(const int kind, const int R, const int V, const Product *of,
        const Stretch *at, lanes (*to)[SIDES]) {
    const int packed = kind == INT4, parted = packed || kind == UNPACKED;
    const int late = packed && (WIDE_CODES || R < 4), groups = PART / GROUP_WORDS;
    const int width = packed || kind == BFLOAT16 ? 2 : kind == INT8 ? 1 + WIDE_CODES : 1;
    int64_t run = packed ? GROUP_WORDS / 2 : at->count, across = parted ? PART : BLOCK * width;
    int64_t step = at->step * (1 + packed), more = step > 64 ? 64 : 0;
    int64_t parts = of->stretch / PART, blocks = (of->count + BLOCK - 1) / BLOCK;
    const uint16_t *scales = of->layer->blocks + (at->strip * blocks + at->word / BLOCK) * STRIP;
    const char *ahead = at->ahead;
    for (int side = 0; side < SIDES; side += V) {
        const char *weights = at->weights + side * sizeof(bits);
        int64_t done = 0;
        do {                                            /* loops would keep sums in memory */
            const int32_t *inputs = inputs_at(of, at->from, R, at->word + done);
            int64_t part = at->from * parts + (at->word + done) / PART, g = 0;
            lanes sum[MOST][4];
            EACH_SUM sum[r][v] = parted ? (lanes)((bits){} + of->offset[part + r * parts])
                    : to[r][side + v];
            do {
                Group group[4];
                lanes small[MOST][4];
                EACH_SUM small[r][v] = (lanes){};
                _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
                    if (packed) group[v] = group_of(weights + BEHIND + (v - side) * LANES * 2);
                for (int64_t word = 0; word < run; word++) {
                    Weight weight[4];
                    _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
                        weight[v] = weight_of(kind, weights + v * sizeof(bits));
                        if (packed && !late) weight[v] = unpacked(weight[v], group[v]);
                    }
                    __builtin_prefetch(ahead), __builtin_prefetch(ahead + more);
                    EACH_SUM if (late)
                        small[r][v] = added(kind, small[r][v], weight[v], inputs + r * across);
                    else sum[r][v] = added(kind, sum[r][v], weight[v], inputs + r * across);
                    inputs += width, weights += LINE, ahead += step;
                }
                if (!packed) continue;
                __builtin_prefetch(ahead - 64), weights += 2 * STRIP;
                EACH_SUM if (late) sum[r][v] = grouped(sum[r][v], small[r][v], group[v],
                        of->sums[(part + r * parts) * groups + g]);
            } while (packed && ++g < groups);
            EACH_SUM to[r][side + v] = parted ? fused(from_half(scales + (side + v) * LANES)
                    * of->scales[part + r * parts], number((bits)sum[r][v]), to[r][side + v])
                    : sum[r][v];
        } while (packed && (done += PART) < at->count);
    }
}

#if LANES == 16
#define SIDES_OF(R) 2
#else
#define SIDES_OF(R) ((R) < 3 ? 4 : (R) < 6 ? 2 : 1)
#endif
#define EACH(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#define KERNEL(NAME, KIND, R)                                                                   \
    static void NAME##_##R(const Product *of, const Stretch *at, lanes (*to)[SIDES]) {          \
        stretch_of(KIND, R, SIDES_OF(R), of, at, to);                                           \
    }
#define KERNELS(R) KERNEL(bfloat16, BFLOAT16, R) KERNEL(int8, INT8, R) KERNEL(int4, INT4, R) \
    KERNEL(eight, UNPACKED, R)
EACH(KERNELS)
#define ALL(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8, \
    NAME##_9, NAME##_10, NAME##_11, NAME##_12}
static void (*const kernels[KINDS][MOST])(const Product *, const Stretch *, lanes (*)[SIDES]) = {
    ALL(bfloat16), ALL(int8), ALL(int4), ALL(eight)
};

/* The outputs of strips `first` to `last`, at most STRIPS, for chunks `top` to `bottom`, at most
 * CHUNKS. Each pass over a block of weights asks memory for as much of the next block. */
static void panel(const Product *of, int64_t first, int64_t last, int64_t top, int64_t bottom) {
    int64_t row = first_row(of, top), end = first_row(of, bottom);
    int64_t wider = of->kind == INT4 && !WIDE_CODES && end - row > FEW, passes = wider;
    lanes sums[STRIPS][ROWS][SIDES];
    char held[BLOCK * LINE] __attribute__((aligned(64)));
    for (int64_t s = first; s < last; s++)
        memset(sums[s - first], 0, (size_t)(end - row) * sizeof *sums[0]);
    for (int64_t c = top; c < bottom; c++)
        passes += SIDES / SIDES_OF(first_row(of, c + 1) - first_row(of, c));
    for (int64_t b = 0; b < of->count; b += BLOCK)
        for (int64_t s = first; s < last; s++) {
            int64_t some = of->count - b < BLOCK ? of->count - b : BLOCK;
            Stretch at = {.strip = s, .word = b, .count = some, .step = of->line / passes,
                    .weights = weights_at(of, s, b), .ahead = s + 1 < last
                            ? weights_at(of, s + 1, b) : weights_at(of, first, b + BLOCK)};
            const char *from = wider ? held : at.weights;
            if (wider) unpack(&at, at.weights, held);
            for (int64_t c = top; c < bottom; c++) {
                int64_t beside = first_row(of, c + 1) - first_row(of, c);
                at.from = first_row(of, c);
                for (int64_t w = 0; w < some; w += at.count) {
                    lanes (*to)[SIDES] = sums[s - first] + (at.from - row);
                    at.word = b + w, at.count = wider ? PART : some, at.weights = from + w * LINE;
                    kernels[of->kind + wider][beside - 1](of, &at, to);
                    at.ahead += SIDES / SIDES_OF(beside) * at.count * at.step;
                }
            }
        }
    finish(of, first, last, row, end, sums);
}
