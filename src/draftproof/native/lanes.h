/* What all kernels share: vectors of LANES numbers, and bfloat16.
 *
 * The sources are compiled once for each level of the processor (native/build.py): a vector is one
 * register of that level. Every sum runs in an order fixed by a token's place in its own text:
 * never by how many queries are read together, by the slot a node of a tree lies in, or by the
 * number of threads. So a position has the same bits read alone, in a chain, or in a tree. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"
#include "pool.h"

#if defined(__aarch64__)
#define LANES 4
#elif defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#define ALWAYS static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

/* smaller work, in numbers, is faster on one thread */
enum { SMALL = 1 << 14 };

static inline float widen(bf16 x) {
    union { uint32_t i; float f; } u = {(uint32_t)x << 16};
    return u.f;
}

static inline bf16 narrow(float x) {            /* round to nearest, ties to even */
    union { float f; uint32_t i; } u = {x};
    return x != x ? 0x7fc0 : (bf16)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}

/* As `narrow`, with integers. */
static inline halves lower_halves(bits x);
static inline halves shortened_bits(lanes x) {
    bits i = (bits)x, out = (bits)((words)(i + 0x7fff + ((i >> 16) & 1)) >> 16), nan = x != x;
    return lower_halves(((out & ~nan) | (nan & 0x7fc0)) & 0xffff);
}

#ifdef __aarch64__
#include "lanes_neon.h"
#else
#include "lanes_x86.h"
#endif
#ifndef MATRICES
#define MATRICES 0
#endif
#ifndef PAIRS
#define PAIRS 0
#endif

static inline lanes wide(const bf16 *from) {
    halves h;
    memcpy(&h, from, sizeof h);
    return widened(h);
}

static inline lanes rounded(lanes x) { return widened(shortened(x)); }

static inline void narrowed(bf16 *to, lanes x) {
    halves h = shortened(x);
    memcpy(to, &h, sizeof h);
}

static inline lanes from_half(const uint16_t *from) {
    halves h;
    memcpy(&h, from, sizeof h);
    return from_halves(h);
}

/* x in all places; x plus zeros would be another number where x is -0. */
static inline lanes spread(float x) { return x - (lanes){}; }

static inline lanes loaded(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

#if LANES == 16
static const bits places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
static const bits places = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const bits places = {0, 1, 2, 3};
#endif

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
    bits power = (nearest_integers(n) + 127) << 23;
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

/* Memory that grows on demand. */
typedef struct {
    float *held;
    int64_t size;
} Scratch;

static inline float *enlarged(Scratch *room, int64_t numbers) {
    if (numbers > room->size) {
        free_lines(room->held);
        room->size = numbers + numbers / 2;
        room->held = allocate_lines((size_t)room->size * sizeof(float));
        if (!room->held) abort();
    }
    return room->held;
}

/* Memory for so many numbers, this thread's own, valid until its next call. */
static inline float *scratch(int64_t numbers) {
    static _Thread_local Scratch room;
    return enlarged(&room, numbers);
}

typedef struct {
    float score;
    int64_t token;
} Scored;

/* Inserts a score into the `count` best, in descending order; of equals the earlier token comes
 * first. */
static inline void ranked(Scored *best, int64_t count, float score, int64_t token) {
    int64_t at = count - 1;
    for (; at > 0 && best[at - 1].score < score; at--) best[at] = best[at - 1];
    best[at] = (Scored){score, token};
}

/* The reciprocal of a row's root mean square. */
static inline float factor_of(const bf16 *x, float epsilon, int64_t size) {
    lanes squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares += wide(x + i) * wide(x + i);
    return 1.0f / sqrtf(total(squares) / (float)size + epsilon);
}
