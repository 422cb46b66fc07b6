/* Vectors of x86-64: one register of AVX2, or of AVX-512. Included by lanes.h. */
#pragma once
#include <immintrin.h>

/* WIDE(add_ps) is the intrinsic of whole vectors; `narrows` are as many numbers of 16 bits. */
#ifdef __AVX512F__
#define WIDE(name) _mm512_##name
typedef __m512 floats;
typedef __m512i integers;
typedef __m256i narrows;
#else
#define WIDE(name) _mm256_##name
typedef __m256 floats;
typedef __m256i integers;
typedef __m128i narrows;
#endif

static inline lanes widened(halves h) {         /* compilers convert half at a time */
    return (lanes)WIDE(slli_epi32)(WIDE(cvtepu16_epi32)((narrows)h), 16);
}

/* The lower 16 bits of numbers below 2^16. */
static inline halves lower_halves(bits x) {
#ifdef __AVX512F__
    return (halves)_mm512_cvtepi32_epi16((__m512i)x);
#else
    return (halves)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x),
                                    _mm256_extracti128_si256((__m256i)x, 1));
#endif
}

/* To bfloat16, as `narrow`; processors that have an instruction for it treat subnormal numbers as
 * zero. */
static inline halves shortened(lanes x) {
#ifdef __AVX512BF16__
    return (halves)_mm512_cvtneps_pbh((floats)x);
#else
    return shortened_bits(x);
#endif
}

static inline lanes number(bits x) { return (lanes)WIDE(cvtepi32_ps)((integers)x); }

/* The nearest integers, ties to even. */
static inline bits nearest_integers(lanes x) { return (bits)WIDE(cvtps_epi32)((floats)x); }

/* a * b + c, rounded once. */
static inline lanes fused(lanes a, lanes b, lanes c) {
    return (lanes)WIDE(fmadd_ps)((floats)a, (floats)b, (floats)c);
}

static inline lanes from_halves(halves h) { return (lanes)WIDE(cvtph_ps)((narrows)h); }

static inline uint16_t half(float x) {
    return (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), 0));
}

static inline float single(uint16_t x) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(x))); }

static inline bits from_unsigned_bytes(const void *from) {
    __m128i codes = {};
    memcpy(&codes, from, LANES);
    return (bits)WIDE(cvtepu8_epi32)(codes);
}

static inline lanes larger(lanes a, lanes b) {           /* the second where either is NaN */
    return (lanes)WIDE(max_ps)((floats)a, (floats)b);
}

#ifndef __AVX512F__
/* Swaps numbers whose places differ by `HALF`, a power of two. */
#define SWAPPED(x, HALF) ((HALF) == 4 ? (lanes)_mm256_permute2f128_ps((floats)(x), (floats)(x), 1) \
    : (HALF) == 2 ? (lanes)_mm256_permute_ps((floats)(x), 0x4e) \
    : (lanes)_mm256_permute_ps((floats)(x), 0xb1))
#endif

static inline float total(lanes x) {            /* halves to halves */
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((floats)x);
#else
    x += SWAPPED(x, 4), x += SWAPPED(x, 2), x += SWAPPED(x, 1);
    return x[0];
#endif
}

static inline float largest(lanes x) {          /* halves to halves */
#ifdef __AVX512F__
    x = larger((lanes)_mm512_shuffle_f32x4((floats)x, (floats)x, 0xee), x);
    x = larger((lanes)_mm512_shuffle_f32x4((floats)x, (floats)x, 0x55), x);
    x = larger((lanes)_mm512_permute_ps((floats)x, 0xee), x);
    return larger((lanes)_mm512_permute_ps((floats)x, 0x55), x)[0];
#else
    x = larger(SWAPPED(x, 4), x), x = larger(SWAPPED(x, 2), x);
    return larger(SWAPPED(x, 1), x)[0];
#endif
}

static inline int some_of(bits x) {             /* of a comparison */
#ifdef __AVX512F__
    return _mm512_movepi32_mask((integers)x);
#else
    return _mm256_movemask_ps((floats)x);
#endif
}

/* Entries of a table of 16 bytes for codes of 4 bits, in each byte. */
ALWAYS bits looked_up(const uint8_t *table, bits codes) {
    __m128i all;
    memcpy(&all, table, sizeof all);
#ifdef __AVX512F__
    return (bits)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), (__m512i)codes);
#else
    return (bits)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(all), (__m256i)codes);
#endif
}

/* The lower 8 bits of each number. */
static inline bytes lower_bytes(bits x) { return __builtin_convertvector(x, bytes); }

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
/* Sums of products of the four weights of each lane, unsigned, with the same four codes, signed. */
ALWAYS bits dotted(bits sum, bits weights, int32_t codes) {
#ifdef __AVX512VNNI__
    return (bits)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(codes));
#else
    return (bits)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(codes));
#endif
}
#endif

/* Sums of products of the four codes of each lane, -127 to 127, with the same four digits, 0 to
 * 127. */
ALWAYS bits dotted_digits(bits sum, bits codes, int32_t digits) {
    integers all = WIDE(set1_epi32)(digits);
#if defined(__AVX512VNNI__)
    return (bits)_mm512_dpbusd_epi32((__m512i)sum, all, (__m512i)codes);
#elif defined(__AVXVNNI__)
    return (bits)_mm256_dpbusd_avx_epi32((__m256i)sum, all, (__m256i)codes);
#else                                           /* two products fit in 16 bits */
    __m256i pairs = _mm256_maddubs_epi16(all, (__m256i)codes);
    return sum + (bits)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

/* Bytes of four rows side by side: lane 4 l + j of vector k has those at 16 l + 4 k + j. */
ALWAYS void interleaved(const bits *rows, bits *to) {
    integers one = WIDE(unpacklo_epi8)((integers)rows[0], (integers)rows[1]),
            two = WIDE(unpackhi_epi8)((integers)rows[0], (integers)rows[1]),
            other = WIDE(unpacklo_epi8)((integers)rows[2], (integers)rows[3]),
            last = WIDE(unpackhi_epi8)((integers)rows[2], (integers)rows[3]);
    to[0] = (bits)WIDE(unpacklo_epi16)(one, other), to[1] = (bits)WIDE(unpackhi_epi16)(one, other);
    to[2] = (bits)WIDE(unpacklo_epi16)(two, last), to[3] = (bits)WIDE(unpackhi_epi16)(two, last);
}

#ifdef __AVX512BF16__
/* Sums of products of the two weights of each lane, in bfloat16, with the same two numbers. */
#define PAIRS 1
ALWAYS lanes dotted_pairs(lanes sum, bits weights, int32_t numbers) {
    return (lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights,
                                   (__m512bh)_mm512_set1_epi32(numbers));
}
#endif

/* Transposes a square: in halves of halves, off-diagonal parts are swapped. */
static inline void transposed(lanes *square) {
    integers one[LANES], two[LANES];
    for (int i = 0; i < LANES; i += 2) {
        integers a = (integers)square[i], b = (integers)square[i + 1];
        one[i] = WIDE(unpacklo_epi32)(a, b), one[i + 1] = WIDE(unpackhi_epi32)(a, b);
    }
    /* part l of two[i + k]: column 4 l + k of rows i to i + 3 */
    for (int i = 0; i < LANES; i += 4)
        for (int k = 0; k < 2; k++) {
            two[i + 2 * k] = WIDE(unpacklo_epi64)(one[i + k], one[i + 2 + k]);
            two[i + 2 * k + 1] = WIDE(unpackhi_epi64)(one[i + k], one[i + 2 + k]);
        }
    for (int k = 0; k < 4; k++) {
#ifdef __AVX512F__
        __m512i even = _mm512_shuffle_i32x4(two[k], two[4 + k], 0x88),
                more = _mm512_shuffle_i32x4(two[8 + k], two[12 + k], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(two[k], two[4 + k], 0xdd),
                rest = _mm512_shuffle_i32x4(two[8 + k], two[12 + k], 0xdd);
        square[k] = (lanes)_mm512_shuffle_i32x4(even, more, 0x88),
                square[8 + k] = (lanes)_mm512_shuffle_i32x4(even, more, 0xdd);
        square[4 + k] = (lanes)_mm512_shuffle_i32x4(odd, rest, 0x88),
                square[12 + k] = (lanes)_mm512_shuffle_i32x4(odd, rest, 0xdd);
#else
        square[k] = (lanes)_mm256_permute2x128_si256(two[k], two[4 + k], 0x20);
        square[4 + k] = (lanes)_mm256_permute2x128_si256(two[k], two[4 + k], 0x31);
#endif
    }
}
