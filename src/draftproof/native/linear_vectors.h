/* Products of a few rows with strips of weights, by vectors. Every sum runs along its row, so its
 * bits depend neither on other rows nor, in 8 and 4 bits, on the level. */
#pragma once
#include "linear.h"

#define ALWAYS static inline __attribute__((always_inline))

/* Words of LANES outputs: bfloat16 numbers one and two; codes of 8 bits as they are or, where wide,
 * first and third, second and fourth; those of 4 bits in the lower and the upper half of bytes. */
typedef struct {
    bits even, odd;
} Weight;

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
#elif AVX2
    __m256i two = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(codes));
    return (bits)_mm256_add_epi16((__m256i)sum, two);
#else
    return sum + weights * codes;                                               /* never called */
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

/* The sum of a group in 4 bits as a number. */
ALWAYS lanes group_sum(lanes sum) {
#if AVX2 && !defined(__AVXVNNI__)
    sum = (lanes)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#endif
    return number((bits)sum);
}

/* Words `word` to `word + count` of a strip times those of a chunk, which begins at row `from`.
 * Memory is asked for the weights at `ahead`, `step` bytes a word. */
typedef struct {
    int64_t from, strip, word, count, step;
    const char *ahead;
} Stretch;

/* For R rows, V vectors of outputs at a time, so that all sums stay in registers: on from `to`. */
ALWAYS void stretch_of(const int kind, const int R, const int V, const Product *of,
        const Stretch *at, lanes (*to)[SIDES]) {
    const int width = kind == INT8 ? 1 + WIDE_CODES : 2, together = kind == INT4 ? GROUP_WORDS : 1;
    int64_t groups = of->count / GROUP_WORDS, step = at->step;
    const char *ahead = at->ahead;
    for (int side = 0; side < SIDES; side += V) {
        const int32_t *inputs = inputs_at(of, at->from, R, at->word);
        const char *weights = weights_at(of, at->strip, at->word) + side * sizeof(bits);
        lanes sum[MOST][4];
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
                sum[r][v] = kind == INT4 ? (lanes){} : to[r][side + v];
        for (int64_t done = 0; done < at->count; done += together) {
            _Pragma("GCC unroll 4") for (int word = 0; word < together; word++) {
                Weight weight[4];
                _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
                    weight[v] = weight_of(kind, weights + v * sizeof(bits));
                __builtin_prefetch(ahead);
                if (step > 64) __builtin_prefetch(ahead + 64);
                _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
                    _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
                        sum[r][v] = added(kind, sum[r][v], weight[v], inputs + r * BLOCK * width);
                inputs += width, weights += LINE, ahead += step;
            }
            if (kind != INT4) continue;
            int64_t group = (at->word + done) / GROUP_WORDS;
            const float *units = of->scales + (at->from * groups + group) * 2;
            const uint16_t *scales = of->layer->groups + (at->strip * groups + group) * 2 * STRIP;
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
                int64_t start = (side + v) * LANES;
                lanes scale = from_half(scales + start), least = from_half(scales + STRIP + start);
                _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
                    const float *unit = units + 2 * r * groups;
                    lanes y = fused(scale * unit[0], group_sum(sum[r][v]), to[r][side + v]);
                    to[r][side + v] = fused(least, (lanes){} + unit[1], y);
                    sum[r][v] = (lanes){};
                }
            }
        }
        if (kind == INT4) continue;
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) to[r][side + v] = sum[r][v];
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
#define KERNELS(R) KERNEL(bfloat16, BFLOAT16, R) KERNEL(int8, INT8, R) KERNEL(int4, INT4, R)
EACH(KERNELS)
#define BFLOAT16_OF(R) bfloat16_##R,
#define INT8_OF(R) int8_##R,
#define INT4_OF(R) int4_##R,
static void (*const kernels[KINDS][MOST])(const Product *, const Stretch *, lanes (*)[SIDES]) = {
    {EACH(BFLOAT16_OF)}, {EACH(INT8_OF)}, {EACH(INT4_OF)},
};

/* The outputs of strips `first` to `last`, at most STRIPS, for chunks `top` to `bottom`, at most
 * CHUNKS. Each pass over a block of weights asks memory for as much of the next block. */
static void panel(const Product *of, int64_t first, int64_t last, int64_t top, int64_t bottom) {
    int64_t row = first_row(of, top), end = first_row(of, bottom), passes = 0;
    lanes sums[STRIPS][ROWS][SIDES];
    for (int64_t s = first; s < last; s++)
        memset(sums[s - first], 0, (size_t)(end - row) * sizeof *sums[0]);
    for (int64_t c = top; c < bottom; c++)
        passes += SIDES / SIDES_OF(first_row(of, c + 1) - first_row(of, c));
    for (int64_t b = 0; b < of->count; b += BLOCK)
        for (int64_t s = first; s < last; s++) {
            int64_t some = of->count - b < BLOCK ? of->count - b : BLOCK;
            const char *next = s + 1 < last ? weights_at(of, s + 1, b)
                    : weights_at(of, first, b + BLOCK);
            Stretch at = {.strip = s, .word = b, .count = some, .step = LINE / passes,
                    .ahead = next};
            for (int64_t c = top; c < bottom; c++) {
                int64_t beside = first_row(of, c + 1) - first_row(of, c);
                at.from = first_row(of, c);
                kernels[of->kind][beside - 1](of, &at, sums[s - first] + (at.from - row));
                at.ahead += SIDES / SIDES_OF(beside) * some * at.step;
            }
        }
    finish(of, first, last, row, end, sums);
}
