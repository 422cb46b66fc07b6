/* What all kernels share: vectors of LANES numbers, and bfloat16.
 *
 * The sources are compiled once for each level of the processor (native/build.py): a vector is one
 * register of that level.  Every sum runs in an order fixed by a token's place in its own text:
 * never by how many queries are read together, by the slot a node of a tree lies in, or by the
 * number of threads. So a position has the same bits read alone, in a chain, or in a tree. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define AVX2 1
#define LANES 8
#else
#define LANES 4
#endif

typedef uint16_t bf16;
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

/* below so many numbers, or products, one thread */
enum { SMALL = 1 << 14, PRODUCTS = 1 << 17 };

static inline float widen(bf16 x) {
    union { uint32_t i; float f; } u = {(uint32_t)x << 16};
    return u.f;
}

static inline bf16 narrow(float x) {            /* to the nearest, ties to even */
    union { float f; uint32_t i; } u = {x};
    return x != x ? 0x7fc0 : (bf16)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}

static inline lanes widened(halves h) {
#ifdef __AVX512F__                              /* compilers convert half at a time */
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif AVX2
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
    return (lanes)(__builtin_convertvector(h, bits) << 16);
#endif
}

static inline lanes wide(const bf16 *from) {
    halves h;
    memcpy(&h, from, sizeof h);
    return widened(h);
}

/* As `narrow`; processors that do it themselves take what is smaller than any normal number for
 * zero. */
static inline halves shortened(lanes x) {
#ifdef __AVX512BF16__
    __m256bh short_ = _mm512_cvtneps_pbh((__m512)x);
    halves h;
    memcpy(&h, &short_, sizeof h);
    return h;
#else
    bits i = (bits)x, even = (i >> 16) & 1;
    bits out = (i + 0x7fff + even) >> 16, nan = x != x;
    out = (out & ~nan) | (nan & 0x7fc0);
#if AVX2
    out &= 0xffff;
    return (halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)out),
            _mm256_extracti128_si256((__m256i)out, 1));
#else
    return __builtin_convertvector(out, halves);
#endif
#endif
}

static inline lanes rounded(lanes x) { return widened(shortened(x)); }

static inline void narrowed(bf16 *to, lanes x) {
    halves h = shortened(x);
    memcpy(to, &h, sizeof h);
}

static inline lanes number(bits x) { return __builtin_convertvector(x, lanes); }

/* a * b + c, rounded once. */
static inline lanes fused(lanes a, lanes b, lanes c) {
#ifdef __AVX512F__
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif AVX2
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;                                                           /* never called */
#endif
}

static inline lanes from_half(const uint16_t *from) {
#ifdef __AVX512F__
    return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif AVX2
    return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    return (lanes){} + (float)*from;                                            /* never called */
#endif
}

/* Codes of 8 bits times their scale, rounded. */
static inline lanes decoded(const int8_t *from, bf16 scale) {
#ifdef __AVX512F__
    __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
    return rounded((lanes)_mm512_cvtepi32_ps(codes) * widen(scale));
#elif AVX2
    __m256i codes = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
    return rounded((lanes)_mm256_cvtepi32_ps(codes) * widen(scale));
#else
    bytes codes;
    memcpy(&codes, from, sizeof codes);
    return rounded(__builtin_convertvector(codes, lanes) * widen(scale));
#endif
}

static inline lanes loaded(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

/* Half of that, and zeros behind; of half as many bytes. */
static inline lanes half_loaded(const void *from) {
#ifdef __AVX512F__                              /* compilers write half, and wait for it */
    return (lanes)_mm512_zextsi256_si512(_mm256_loadu_si256(from));
#else
    lanes x = {};
    memcpy(&x, from, sizeof x / 2);
    return x;
#endif
}

static inline float total(lanes x) {            /* halves to halves */
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float each[LANES];
    memcpy(each, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) each[i] += each[i + half];
    return each[0];
#endif
}

static inline lanes larger(lanes a, lanes b) {           /* the second where either is NaN */
#ifdef __AVX512F__
    return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
#elif AVX2
    return (lanes)_mm256_max_ps((__m256)a, (__m256)b);
#else
    bits more = a > b;
    return (lanes)(((bits)a & more) | ((bits)b & ~more));
#endif
}

/* Cephes' expf, all lanes alike; 0 below -87, not for more than 88 */
static inline lanes expo(lanes x) {
#ifdef __AVX512F__
    __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
#else
    bits low = x < -87.0f;
    x = (lanes)(((bits)x & ~low) | ((bits)((lanes){} - 87.0f) & low));
#endif
    lanes n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = x * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * (x * x) + x + 1.0f;
#ifdef __AVX512F__
    return (lanes)_mm512_maskz_scalef_ps(kept, (__m512)y, (__m512)n);
#else
    bits power = (__builtin_convertvector(n, bits) + 127) << 23;
    return (lanes)((bits)(y * (lanes)power) & ~low);
#endif
}

/* x / (1 + e^-by), by a reciprocal up to its last bits; by is -88 or more, or NaN. */
static inline lanes opened(lanes x, lanes by) {
    lanes below = 1.0f + expo(-by);
#ifdef __AVX512F__
    lanes part = (lanes)_mm512_rcp14_ps((__m512)below);
    return x * (part * (2.0f - below * part));
#else
    return x / below;
#endif
}

/* x / (1 + e^-x); below -88 what it is there, next to nothing. NaN stays NaN. */
static inline lanes silu(lanes x) {
    x = larger((lanes){} - 88.0f, x);
    return opened(x, x);
}

/* GELU as it is approximated by a hyperbolic tangent: x / 2 * (1 + tanh(y / 2)) = x / (1 + e^-y).
 * Beyond 20 it is x or nothing. */
static inline lanes tanh_gelu(lanes x) {
    lanes least = (lanes){} - 20.0f, above = larger(least, x), near = -larger(least, -above);
    lanes y = 1.5957691216f * (near + 0.044715f * near * near * near);
    return opened(above, larger((lanes){} - 88.0f, y));
}

static inline float largest(lanes x) {
#ifdef __AVX512F__
    /* halves to halves */
    x = larger((lanes)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xee), x);
    x = larger((lanes)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x55), x);
    x = larger((lanes)_mm512_permute_ps((__m512)x, 0xee), x);
    return larger((lanes)_mm512_permute_ps((__m512)x, 0x55), x)[0];
#else
    float each[LANES];
    memcpy(each, &x, sizeof x);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            each[i] = each[i + half] > each[i] ? each[i + half] : each[i];
    return each[0];
#endif
}

static inline lanes absolute(lanes x) { return (lanes)((bits)x & 0x7fffffff); }

static inline lanes partly(const bf16 *from, int64_t some) {
    bf16 held[LANES] = {};
    memcpy(held, from, (size_t)some * sizeof(bf16));
    return wide(held);
}

static inline int some_of(bits x) {
#ifdef __AVX512F__
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#elif AVX2
    return !_mm256_testz_si256((__m256i)x, (__m256i)x);
#else
    int any = 0;
    for (int l = 0; l < LANES; l++) any |= x[l];
    return any;
#endif
}

#ifndef __AVX512F__
#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (bits){__VA_ARGS__})
#endif
#define BARE(...) __VA_ARGS__
#define SWAPPED(square, step, upper, lower) \
    for (int i = 0; i < LANES; i++) { \
        if (i & (step)) continue; \
        lanes a = (square)[i], b = (square)[i + (step)]; \
        (square)[i] = SHUFFLED(a, b, BARE upper), \
                (square)[i + (step)] = SHUFFLED(a, b, BARE lower); \
    }
#endif

/* Rows become columns of a square. */
static inline void transposed(lanes *square) {
#ifdef __AVX512F__
    __m512i one[LANES], two[LANES];
    for (int i = 0; i < LANES; i += 2) {
        __m512i a = (__m512i)square[i], b = (__m512i)square[i + 1];
        one[i] = _mm512_unpacklo_epi32(a, b), one[i + 1] = _mm512_unpackhi_epi32(a, b);
    }
    /* part l of two[i + k]: column 4 l + k of rows i to i + 3 */
    for (int i = 0; i < LANES; i += 4)
        for (int k = 0; k < 2; k++) {
            two[i + 2 * k] = _mm512_unpacklo_epi64(one[i + k], one[i + 2 + k]);
            two[i + 2 * k + 1] = _mm512_unpackhi_epi64(one[i + k], one[i + 2 + k]);
        }
    for (int k = 0; k < 4; k++) {
        __m512i even = _mm512_shuffle_i32x4(two[k], two[4 + k], 0x88),
                more = _mm512_shuffle_i32x4(two[8 + k], two[12 + k], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(two[k], two[4 + k], 0xdd),
                rest = _mm512_shuffle_i32x4(two[8 + k], two[12 + k], 0xdd);
        square[k] = (lanes)_mm512_shuffle_i32x4(even, more, 0x88),
                square[8 + k] = (lanes)_mm512_shuffle_i32x4(even, more, 0xdd);
        square[4 + k] = (lanes)_mm512_shuffle_i32x4(odd, rest, 0x88),
                square[12 + k] = (lanes)_mm512_shuffle_i32x4(odd, rest, 0xdd);
    }
/* in halves of halves: what is off the diagonal changes places */
#else
#if LANES == 8
    SWAPPED(square, 1, (0, 8, 2, 10, 4, 12, 6, 14), (1, 9, 3, 11, 5, 13, 7, 15))
    SWAPPED(square, 2, (0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
    SWAPPED(square, 4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
#else
    SWAPPED(square, 1, (0, 4, 2, 6), (1, 5, 3, 7))
    SWAPPED(square, 2, (0, 1, 4, 5), (2, 3, 6, 7))
#endif
#endif
}

/* Room for so many numbers, this thread's own, until it asks again. */
static inline float *scratch(int64_t floats) {
    static _Thread_local float *held;
    static _Thread_local int64_t size;
    if (floats > size) {
        free(held);
        size = floats + floats / 2;
        if (posix_memalign((void **)&held, 64, (size_t)size * sizeof(float))) abort();
    }
    return held;
}

typedef struct {
    float score;
    int64_t token;
} Scored;

/* Put a score into the `count` best, falling; of equals the earlier token stays in front. */
static inline void ranked(Scored *best, int64_t count, float score, int64_t token) {
    int64_t at = count - 1;
    for (; at > 0 && best[at - 1].score < score; at--) best[at] = best[at - 1];
    best[at] = (Scored){score, token};
}

/* What a row is divided by, the other way round. */
static inline float factor_of(const bf16 *x, float epsilon, int64_t size) {
    lanes squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares += wide(x + i) * wide(x + i);
    return 1.0f / sqrtf(total(squares) / (float)size + epsilon);
}
