/* What all kernels share: vectors of LANES numbers, and bfloat16.
 *
 * The sources are compiled once for each level of the processor (native/build.py): a vector is one
 * register of that level. Every sum runs in an order fixed by a token's place in its own text:
 * never by how many queries are read together, by the slot a node of a tree lies in, or by the
 * number of threads. So a position has the same bits read alone, in a chain, or in a tree. */
#pragma once
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* WIDE(add_ps) is the intrinsic of whole vectors; `narrows` are as many numbers of 16 bits. */
#ifdef __AVX512F__
#define LANES 16
#define WIDE(name) _mm512_##name
typedef __m512 floats;
typedef __m512i integers;
typedef __m256i narrows;
#else
#define LANES 8
#define WIDE(name) _mm256_##name
typedef __m256 floats;
typedef __m256i integers;
typedef __m128i narrows;
#endif
#define ALWAYS static inline __attribute__((always_inline))

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

static inline lanes widened(halves h) {         /* compilers convert half at a time */
    return (lanes)WIDE(slli_epi32)(WIDE(cvtepu16_epi32)((narrows)h), 16);
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
    return (halves)_mm512_cvtneps_pbh((floats)x);
#else
    bits i = (bits)x, out = (i + 0x7fff + ((i >> 16) & 1)) >> 16, nan = x != x;
    out = ((out & ~nan) | (nan & 0x7fc0)) & 0xffff;
#ifdef __AVX512F__
    return (halves)_mm512_cvtepi32_epi16((__m512i)out);
#else
    return (halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)out),
                                    _mm256_extracti128_si256((__m256i)out, 1));
#endif
#endif
}

static inline lanes rounded(lanes x) { return widened(shortened(x)); }

static inline void narrowed(bf16 *to, lanes x) {
    halves h = shortened(x);
    memcpy(to, &h, sizeof h);
}

static inline lanes number(bits x) { return (lanes)WIDE(cvtepi32_ps)((integers)x); }

/* a * b + c, rounded once. */
static inline lanes fused(lanes a, lanes b, lanes c) {
    return (lanes)WIDE(fmadd_ps)((floats)a, (floats)b, (floats)c);
}

static inline lanes from_half(const uint16_t *from) {
    narrows h;
    memcpy(&h, from, sizeof h);
    return (lanes)WIDE(cvtph_ps)(h);
}

/* Codes of 8 bits times their scale, rounded. */
static inline lanes decoded(const int8_t *from, bf16 scale) {
    __m128i codes = {};
    memcpy(&codes, from, LANES);
    return rounded(number((bits)WIDE(cvtepi8_epi32)(codes)) * widen(scale));
}

static inline lanes loaded(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline lanes larger(lanes a, lanes b) {           /* the second where either is NaN */
    return (lanes)WIDE(max_ps)((floats)a, (floats)b);
}

#if LANES == 16
static const bits places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
static const bits places = {0, 1, 2, 3, 4, 5, 6, 7};
#endif

static inline float total(lanes x) {            /* halves to halves */
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((floats)x);
#else
    for (int half = LANES / 2; half; half /= 2) x += __builtin_shuffle(x, places ^ half);
    return x[0];
#endif
}

static inline float largest(lanes x) {
#ifdef __AVX512F__                              /* halves to halves */
    x = larger((lanes)_mm512_shuffle_f32x4((floats)x, (floats)x, 0xee), x);
    x = larger((lanes)_mm512_shuffle_f32x4((floats)x, (floats)x, 0x55), x);
    x = larger((lanes)_mm512_permute_ps((floats)x, 0xee), x);
    return larger((lanes)_mm512_permute_ps((floats)x, 0x55), x)[0];
#else
    for (int half = LANES / 2; half; half /= 2)
        x = larger(__builtin_shuffle(x, places ^ half), x);
    return x[0];
#endif
}

/* Cephes' expf, all lanes alike; 0 below -87, not for more than 88 */
static inline lanes expo(lanes x) {
#ifdef __AVX512F__
    __mmask16 kept = _mm512_cmp_ps_mask((floats)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
#else
    bits low = x < -87.0f;
    x = larger((lanes){} - 87.0f, x);
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
    return (lanes)_mm512_maskz_scalef_ps(kept, (floats)y, (floats)n);
#else
    bits power = ((bits)WIDE(cvtps_epi32)((floats)n) + 127) << 23;
    return (lanes)((bits)(y * (lanes)power) & ~low);
#endif
}

/* x / (1 + e^-by), by a reciprocal up to its last bits; by is -88 or more, or NaN. */
static inline lanes opened(lanes x, lanes by) {
    lanes below = 1.0f + expo(-by);
#ifdef __AVX512F__
    lanes part = (lanes)_mm512_rcp14_ps((floats)below);
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

static inline lanes absolute(lanes x) { return (lanes)((bits)x & 0x7fffffff); }

static inline lanes partly(const bf16 *from, int64_t some) {
    bf16 held[LANES] = {};
    memcpy(held, from, (size_t)some * sizeof(bf16));
    return wide(held);
}

static inline int some_of(bits x) {             /* of a comparison */
#ifdef __AVX512F__
    return _mm512_movepi32_mask((integers)x);
#else
    return _mm256_movemask_ps((floats)x);
#endif
}

/* Rows become columns of a square: in halves of halves, what is off the diagonal changes places. */
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
#else
    _Pragma("GCC unroll 4") for (int step = 1; step < LANES; step *= 2) {
        bits odd = (places & step) != 0, other = places ^ step;
        bits upper = (odd & (other + LANES)) | (~odd & places);
        bits lower = (odd & (places + LANES)) | (~odd & other);
        _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            lanes a = square[i], b = square[i + step];
            square[i] = __builtin_shuffle(a, b, upper);
            square[i + step] = __builtin_shuffle(a, b, lower);
        }
    }
#endif
}

/* Room for so many numbers, this thread's own, until it asks again. */
static inline float *scratch(int64_t numbers) {
    static _Thread_local float *held;
    static _Thread_local int64_t size;
    if (numbers > size) {
        free(held);
        size = numbers + numbers / 2;
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
