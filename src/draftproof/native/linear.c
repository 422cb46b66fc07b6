/* Linear layers, in bfloat16 and in 8 bits. */
#include "lanes.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

enum { FOUR = 4 };

/* Linear layers in 8 bits. Sums are of integers, hence the same in any order. */
/* One row of activations to 8 bits around 0, the largest to 127, zeros up to `padded`; every four of them `stride` fours
 * apart. Returns the sum of the codes. */
static int32_t coded(const bf16 *x, int64_t size, int64_t padded, int32_t *fours, int64_t stride, float *most) {
    int64_t whole = size / LANES * LANES;
    lanes top = {};
    bits broken = {};
    for (int64_t i = 0; i < size; i += LANES) {
        lanes v = i < whole ? wide(x + i) : partly(x + i, size - i);
        top = larger(absolute(v), top);
        broken |= v != v;
    }
    float largest = 0;
    for (int l = 0; l < LANES; l++) largest = broken[l] ? NAN : top[l] > largest ? top[l] : largest;
    float factor = largest > 0 ? 127.0f / largest : 0;
    bits sum = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        lanes v = i < whole ? wide(x + i) : partly(x + i, i < size ? size - i : 0);
        bits code = __builtin_convertvector(v * factor + 128.5f, bits) - 128;              /* to the nearest, by cutting off */
        typedef int8_t bytes __attribute__((vector_size(16)));
        union { bytes codes; int32_t fours[LANES / FOUR]; } u = {__builtin_convertvector(code, bytes)};
        for (int f = 0; f < LANES / FOUR; f++) fours[(i / FOUR + f) * stride] = u.fours[f];
        sum += code;
    }
    int32_t all = 0;
    for (int l = 0; l < LANES; l++) all += sum[l];
    *most = largest;
    return all;
}

/* Activations [rows, size] to bytes around 128, with the largest of each row, for a product made elsewhere; size a multiple
 * of 16. */
void draftproof_codes(const bf16 *inputs, uint8_t *codes, float *most, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        coded(inputs + r * size, size, size, (int32_t *)(codes + r * size), 1, most + r);
        for (int64_t i = 0; i < size; i++) codes[r * size + i] ^= 0x80;
    }
}

/* That product [rows, size] times the largest of each row, plus a bias if there is one; size a multiple of 16. */
void draftproof_scaled(const float *products, const float *most, const bf16 *bias, bf16 *out, int64_t rows, int64_t size,
                       int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < size; i += LANES) {
            lanes y = loaded(products + r * size + i) * most[r];
            narrowed(out + r * size + i, bias ? y + wide(bias + i) : y);
        }
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define HAS_INT8 1
/* sum[l] += the product of weights 4 l to 4 l + 3, unsigned, with the same four activations, signed. */
static inline bits dotted(bits sum, bits weights, int32_t activations) {
#ifdef __AVX512VNNI__
    return (bits)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(activations));
#else
    union { bits whole; __m256i half[2]; } s = {sum}, w = {weights};
    __m256i a = _mm256_set1_epi32(activations);
    for (int h = 0; h < 2; h++) s.half[h] = _mm256_dpbusd_avx_epi32(s.half[h], w.half[h], a);
    return s.whole;
#endif
}
#else
#define HAS_INT8 0
static inline bits dotted(bits sum, bits weights, int32_t activations) { return sum + weights * activations; }     /* never called */
#endif

#ifdef __AVX512BF16__
#define HAS_BF16 1
/* sum[l] += the product of weights 2 l and 2 l + 1 with the same two activations. */
static inline lanes paired(lanes sum, bits weights, int32_t activations) {
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(activations));
}
#else
#define HAS_BF16 0
static inline lanes paired(lanes sum, bits weights, int32_t activations) { return sum + (lanes)(weights * activations); }
#endif

/* R rows times 2 LANES outputs; R is a number, so that all sums stay in registers. Activations lie as words of 32 bits, those of
 * all rows beside each other; every sum runs in their order. */
#define MULTIPLY(R, NAME, SUMS, ADDED)                                                                                 \
    static void NAME##_##R(const int32_t *words, const char *weights, int64_t count, void *to) {                        \
        SUMS held[R][2] = {}, *sums = to;                                                                              \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            bits weight[2];                                                                                            \
            memcpy(weight, weights, sizeof weight);                                                                    \
            _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {                                                     \
                held[r][0] = ADDED(held[r][0], weight[0], words[r]);                                                   \
                held[r][1] = ADDED(held[r][1], weight[1], words[r]);                                                   \
            }                                                                                                          \
            words += R;                                                                                                \
            weights += sizeof weight;                                                                                  \
        }                                                                                                              \
        _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) sums[2 * r] = held[r][0], sums[2 * r + 1] = held[r][1];    \
    }
enum { MOST = 12 };
typedef void (*Multiply)(const int32_t *, const char *, int64_t, void *);
#define UP_TO_MOST(...)                                                                                                \
    MULTIPLY(1, __VA_ARGS__) MULTIPLY(2, __VA_ARGS__) MULTIPLY(3, __VA_ARGS__) MULTIPLY(4, __VA_ARGS__)                 \
    MULTIPLY(5, __VA_ARGS__) MULTIPLY(6, __VA_ARGS__) MULTIPLY(7, __VA_ARGS__) MULTIPLY(8, __VA_ARGS__)                 \
    MULTIPLY(9, __VA_ARGS__) MULTIPLY(10, __VA_ARGS__) MULTIPLY(11, __VA_ARGS__) MULTIPLY(12, __VA_ARGS__)
UP_TO_MOST(fours, bits, dotted)
UP_TO_MOST(pairs, lanes, paired)
static const Multiply multiply[2][MOST] = {
    {pairs_1, pairs_2, pairs_3, pairs_4, pairs_5, pairs_6, pairs_7, pairs_8, pairs_9, pairs_10, pairs_11, pairs_12},
    {fours_1, fours_2, fours_3, fours_4, fours_5, fours_6, fours_7, fours_8, fours_9, fours_10, fours_11, fours_12},
};

/* Bit 0: linear layers of 8 bits can be read here; bit 1: those of bfloat16. */
int64_t draftproof_linears(void) { return HAS_INT8 | HAS_BF16 << 1; }

static void paired_up(const bf16 *x, int64_t size, int64_t padded, int32_t *words, int64_t stride) {
    for (int64_t i = 0; i < size / 2; i++) memcpy(words + i * stride, x + 2 * i, sizeof *words);
    for (int64_t i = size / 2; i < padded / 2; i++) words[i * stride] = 2 * i < size ? x[2 * i] : 0;
}

/* inputs [rows, size] to out [rows, outputs]. Of 8 bits, an output is the sum times the row's largest input times the scale. */
void draftproof_linear(const Linear *layer, const bf16 *inputs, bf16 *out, int64_t rows, int64_t threads) {
    int64_t size = layer->size, outputs = layer->outputs, small = layer->scale != NULL, words_each = layer->padded / (small ? 4 : 2);
    int64_t strips = (outputs + 2 * LANES - 1) / (2 * LANES), chunks = (rows + MOST - 1) / MOST;
    float *most = scratch(rows * (2 + words_each));
    int32_t *offset = (int32_t *)(most + rows), *held = offset + rows;
    const int32_t *words = !small && rows == 1 && size == layer->padded ? (const int32_t *)inputs : held;
#pragma omp parallel num_threads(threads) if (rows * size * outputs > PRODUCTS)
    {
        if (words == held) {
#pragma omp for
            for (int64_t r = 0; r < rows; r++) {
                int64_t c = ((r + 1) * chunks - 1) / rows, from = rows * c / chunks, beside = rows * (c + 1) / chunks - from;
                int32_t *own = held + from * words_each + r - from;
                if (small) offset[r] = 128 * coded(inputs + r * size, size, layer->padded, own, beside, most + r);
                else paired_up(inputs + r * size, size, layer->padded, own, beside);
            }
        }
#pragma omp for
        for (int64_t s = 0; s < strips; s++)
            for (int64_t c = 0; c < chunks; c++) {
                int64_t from = rows * c / chunks, to = rows * (c + 1) / chunks, start = s * 2 * LANES;
                int64_t some = outputs - start < 2 * LANES ? outputs - start : 2 * LANES;
                union { bits whole; lanes real; } sums[MOST][2];
                multiply[small][to - from - 1](words + from * words_each,
                                               (const char *)layer->weights + s * words_each * 2 * sizeof(bits), words_each, sums);
                for (int64_t r = from; r < to; r++) {
                    bf16 done[2 * LANES];
                    for (int h = 0; h < 2; h++) {
                        int64_t at = start + h * LANES;
                        lanes y = sums[r - from][h].real;
                        if (small) {
                            y = __builtin_convertvector(sums[r - from][h].whole - offset[r], lanes);
                            y = y * loaded(layer->scale + at) * most[r];
                        }
                        narrowed(done + h * LANES, layer->bias ? y + wide(layer->bias + at) : y);
                    }
                    memcpy(out + r * outputs + start, done, (size_t)some * sizeof(bf16));
                }
            }
    }
}

/* inputs += silu(layer(inputs)), rounded as operators would; [rows, size]. beside: room for as much. */
void draftproof_residual(const Linear *layer, bf16 *inputs, bf16 *beside, int64_t rows, int64_t threads) {
    draftproof_linear(layer, inputs, beside, rows, threads);
    for (int64_t i = 0; i < rows * layer->outputs; i += LANES) {
        lanes x = wide(beside + i);
        narrowed(beside + i, x / (1.0f + expo(-x)));
        narrowed(inputs + i, wide(inputs + i) + wide(beside + i));
    }
}
