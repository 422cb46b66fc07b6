/* Products of a few rows with strips of weights, by vectors. Every sum runs along its row, so its
 * bits depend neither on other rows nor, in 8 and 4 bits, on the level. */
#pragma once
#include "linear.h"

/* Words of LANES outputs: bfloat16 numbers one and two; codes of 8 bits as they are or, where wide,
 * first and third, second and fourth. */
typedef struct { bits even, odd; } Weight;

ALWAYS Weight weight_of(const int kind, const char *from) {
    bits w;
    memcpy(&w, from, sizeof w);
    if (kind == BFLOAT16 && !PAIRS) return (Weight){w << 16, w & ~0xffff};
#if WIDE_CODES
    return (Weight){w & 0x00ff00ff, (bits)_mm256_srli_epi16((__m256i)w, 8)};
#else
    if (kind == INT8) w = AS_SIGNED(w);
    return (Weight){w, w};
#endif
}

/* Continues a sum over one word of weights and its inputs. */
ALWAYS lanes added(const int kind, lanes sum, Weight weight, const int32_t *inputs) {
    if (kind == BFLOAT16) {
#if PAIRS
        return dotted_pairs(sum, weight.even, inputs[0]);
#endif
        sum = fused((lanes)weight.even, (lanes)((bits){} + inputs[0]), sum);
        return fused((lanes)weight.odd, (lanes)((bits){} + inputs[1]), sum);
    }
#if WIDE_CODES
    bits one = (bits)_mm256_madd_epi16((__m256i)weight.even, _mm256_set1_epi32(inputs[0]));
    bits two = (bits)_mm256_madd_epi16((__m256i)weight.odd, _mm256_set1_epi32(inputs[1]));
    return (lanes)((bits)sum + one + two);
#else
    return (lanes)dotted((bits)sum, weight.even, inputs[0]);
#endif
}

/* Words `word` to `word + count` of a strip, which lie at `weights`, times those of a chunk, which
 * begins at row `from`. Memory is asked for the weights at `ahead`, `step` bytes a word. */
typedef struct {
    int64_t from, word, count, step;
    const char *weights, *ahead;
} Stretch;

#define EACH_SUM \
    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) \
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)

#if MATRICES
/* For R rows, two of them and two outputs at a time, and two words. */
ALWAYS void stretch_of_pairs(const int kind, const int R, const int V, const Product *of,
        const Stretch *at, lanes (*to)[SIDES]) {
#define EACH_PAIR \
    _Pragma("GCC unroll 6") for (int p = 0; p < (R + 1) / 2; p++) \
        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
    const char *ahead = at->ahead;
    for (int side = 0; side < SIDES; side += V) {
        const char *weights = at->weights + side * sizeof(bits);
        const int32_t *inputs = inputs_at(of, at->from, R, at->word);
        bits sum[(MOST + 1) / 2][4][2];
        EACH_PAIR {
            bits first = (bits)to[2 * p][side + v], second = {};
            if (2 * p + 1 < R) second = (bits)to[2 * p + 1][side + v];
            sum[p][v][0] = first_in_turn(first, second);
            sum[p][v][1] = last_in_turn(first, second);
        }
        for (int64_t word = 0; word < at->count; word += 2) {
            bits weight[4][2], rows[(MOST + 1) / 2];
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
                bits first, second;
                memcpy(&first, weights + v * sizeof first, sizeof first);
                memcpy(&second, weights + LINE + v * sizeof second, sizeof second);
                weight[v][0] = first_in_turn(first, second);
                weight[v][1] = last_in_turn(first, second);
            }
            __builtin_prefetch(ahead), __builtin_prefetch(ahead + at->step);
            _Pragma("GCC unroll 6") for (int p = 0; p < (R + 1) / 2; p++)
                rows[p] = side_by_side(inputs + 2 * p * BLOCK,
                        2 * p + 1 < R ? inputs + (2 * p + 1) * BLOCK : NULL);
            EACH_PAIR _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++)
                sum[p][v][j] = kind == INT8
                        ? multiplied_codes(sum[p][v][j], weight[v][j], rows[p])
                        : multiplied_pairs(sum[p][v][j], weight[v][j], rows[p]);
            inputs += 2, weights += 2 * LINE, ahead += 2 * at->step;
        }
        EACH_PAIR {
            to[2 * p][side + v] = (lanes)even_of(sum[p][v][0], sum[p][v][1]);
            if (2 * p + 1 < R)
                to[2 * p + 1][side + v] = (lanes)odd_of(sum[p][v][0], sum[p][v][1]);
        }
    }
}
#endif

/* For R rows, V vectors of outputs at a time, so that all sums stay in registers: on from `to`. */
ALWAYS void stretch_of(const int kind, const int R, const int V, const Product *of,
        const Stretch *at, lanes (*to)[SIDES]) {
    const int width = WIDTH_OF(kind);
    int64_t across = BLOCK * width, step = at->step, more = step > 64 ? 64 : 0;
    const char *ahead = at->ahead;
    for (int side = 0; side < SIDES; side += V) {
        const char *weights = at->weights + side * sizeof(bits);
        const int32_t *inputs = inputs_at(of, at->from, R, at->word);
        lanes sum[MOST][4];
        EACH_SUM sum[r][v] = to[r][side + v];
        for (int64_t word = 0; word < at->count; word++) {
            Weight weight[4];
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)
                weight[v] = weight_of(kind, weights + v * sizeof(bits));
            __builtin_prefetch(ahead), __builtin_prefetch(ahead + more);
            EACH_SUM sum[r][v] = added(kind, sum[r][v], weight[v], inputs + r * across);
            inputs += width, weights += LINE, ahead += step;
        }
        EACH_SUM to[r][side + v] = sum[r][v];
    }
}

#if LANES == 16
#define SIDES_OF(R) 2
#elif LANES == 4                                /* with 32 registers */
#define SIDES_OF(R) ((R) < 5 ? 4 : 2)
#else
#define SIDES_OF(R) ((R) < 3 ? 4 : (R) < 6 ? 2 : 1)
#endif
#if MATRICES
#define STRETCH_OF(R) ((R) > 1 ? stretch_of_pairs : stretch_of)
#else
#define STRETCH_OF(R) stretch_of
#endif
#define EACH(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#define KERNEL(NAME, KIND, R)                                                                   \
    static void NAME##_##R(const Product *of, const Stretch *at, lanes (*to)[SIDES]) {          \
        STRETCH_OF(R)(KIND, R, SIDES_OF(R), of, at, to);                                        \
    }
#define KERNELS(R) KERNEL(bfloat16, BFLOAT16, R) KERNEL(int8, INT8, R)
EACH(KERNELS)
#define ALL(NAME) {NAME##_1, NAME##_2, NAME##_3, NAME##_4, NAME##_5, NAME##_6, NAME##_7, NAME##_8, \
    NAME##_9, NAME##_10, NAME##_11, NAME##_12}
static void (*const kernels[KINDS][MOST])(const Product *, const Stretch *, lanes (*)[SIDES]) = {
    ALL(bfloat16), ALL(int8)
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
            int64_t left = of->count - b;
            Stretch at = {.word = b, .count = left < BLOCK ? left : BLOCK, .step = LINE / passes,
                    .weights = weights_at(of, s, b), .ahead = s + 1 < last
                            ? weights_at(of, s + 1, b) : weights_at(of, first, b + BLOCK)};
            for (int64_t c = top; c < bottom; c++) {
                int64_t rows = first_row(of, c + 1) - first_row(of, c);
                at.from = first_row(of, c);
                kernels[of->kind][rows - 1](of, &at, sums[s - first] + (at.from - row));
                at.ahead += SIDES / SIDES_OF(rows) * at.count * at.step;
            }
        }
    finish(of, first, last, row, end, sums);
}
