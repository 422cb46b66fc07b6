/* Vectors of aarch64: one register of NEON. Included by lanes.h. */
#pragma once
#include <arm_neon.h>

/* Whether there are instructions for products of small matrices in 8 bits and in bfloat16. */
#if defined(__ARM_FEATURE_MATMUL_INT8) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define MATRICES 1
#define PAIRS 1
#endif

static inline lanes widened(halves h) { return (lanes)vshll_n_u16((uint16x4_t)h, 16); }

/* The lower 16 bits of numbers below 2^16. */
static inline halves lower_halves(bits x) { return (halves)vmovn_u32((uint32x4_t)x); }

/* To bfloat16, as `narrow`. */
static inline halves shortened(lanes x) { return shortened_bits(x); }

static inline lanes number(bits x) { return (lanes)vcvtq_f32_s32((int32x4_t)x); }

/* The nearest integers, ties to even. */
static inline bits nearest_integers(lanes x) { return (bits)vcvtnq_s32_f32((float32x4_t)x); }

/* a * b + c, rounded once. */
static inline lanes fused(lanes a, lanes b, lanes c) {
    return (lanes)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

static inline lanes from_halves(halves h) {
    return (lanes)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)h));
}

static inline uint16_t half(float x) {
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0);
}

static inline float single(uint16_t x) {
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0);
}

static inline bits from_unsigned_bytes(const void *from) {
    uint32_t codes;
    memcpy(&codes, from, sizeof codes);
    return (bits)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(codes))));
}

static inline lanes larger(lanes a, lanes b) {           /* the second where either is NaN */
    return (lanes)vbslq_f32(vcgtq_f32((float32x4_t)a, (float32x4_t)b), (float32x4_t)a,
                            (float32x4_t)b);
}

/* Swaps halves, or neighbours. */
static inline lanes halves_swapped(lanes x) {
    return (lanes)vextq_f32((float32x4_t)x, (float32x4_t)x, 2);
}

static inline lanes neighbours_swapped(lanes x) { return (lanes)vrev64q_f32((float32x4_t)x); }

static inline float total(lanes x) {            /* halves to halves */
    x += halves_swapped(x), x += neighbours_swapped(x);
    return x[0];
}

static inline float largest(lanes x) {          /* halves to halves */
    x = larger(halves_swapped(x), x);
    return larger(neighbours_swapped(x), x)[0];
}

static inline int some_of(bits x) {             /* of a comparison */
    return vmaxvq_u32((uint32x4_t)x) != 0;
}

/* Entries of a table of 16 bytes for codes of 4 bits, in each byte. */
ALWAYS bits looked_up(const uint8_t *table, bits codes) {
    return (bits)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
}

/* The lower 8 bits of each number. */
static inline bytes lower_bytes(bits x) {
    uint16x4_t halves_of_x = vmovn_u32((uint32x4_t)x);
    uint8x8_t all = vmovn_u16(vcombine_u16(halves_of_x, halves_of_x));
    bytes lower;
    memcpy(&lower, &all, sizeof lower);
    return lower;
}

/* Sums of products of the four weights of each lane with the same four codes, signed, -127 to 127.
 * Weights are unsigned where there are matrices, elsewhere signed. */
ALWAYS bits dotted(bits sum, bits weights, int32_t codes) {
#if MATRICES
    return (bits)vusdotq_s32((int32x4_t)sum, (uint8x16_t)weights, (int8x16_t)vdupq_n_s32(codes));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (bits)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)vdupq_n_s32(codes));
#else                                           /* two products fit in 16 bits */
    int8x16_t w = (int8x16_t)weights, x = (int8x16_t)vdupq_n_s32(codes);
    int16x8_t first = vmull_s8(vget_low_s8(w), vget_low_s8(x)), second = vmull_high_s8(w, x);
    return (bits)vpadalq_s16((int32x4_t)sum, vpaddq_s16(first, second));
#endif
}

/* Sums of products of the four codes of each lane, -127 to 127, with the same four digits, 0 to
 * 127. */
ALWAYS bits dotted_digits(bits sum, bits codes, int32_t digits) {
    int8x16_t x = (int8x16_t)vdupq_n_s32(digits), y = (int8x16_t)codes;
#ifdef __ARM_FEATURE_DOTPROD
    return (bits)vdotq_s32((int32x4_t)sum, x, y);
#else                                           /* two products fit in 16 bits */
    int16x8_t first = vmull_s8(vget_low_s8(x), vget_low_s8(y)), second = vmull_high_s8(x, y);
    return (bits)vpadalq_s16((int32x4_t)sum, vpaddq_s16(first, second));
#endif
}

/* Bytes of four rows side by side: lane j of vector k has those at 4 k + j. */
ALWAYS void interleaved(const bits *rows, bits *to) {
    int8x16_t a = (int8x16_t)rows[0], b = (int8x16_t)rows[1], c = (int8x16_t)rows[2],
            d = (int8x16_t)rows[3];
    int16x8_t one = (int16x8_t)vzip1q_s8(a, b), two = (int16x8_t)vzip2q_s8(a, b),
            other = (int16x8_t)vzip1q_s8(c, d), last = (int16x8_t)vzip2q_s8(c, d);
    to[0] = (bits)vzip1q_s16(one, other), to[1] = (bits)vzip2q_s16(one, other);
    to[2] = (bits)vzip1q_s16(two, last), to[3] = (bits)vzip2q_s16(two, last);
}

#if MATRICES
/* Sums of products of the two weights of each lane, in bfloat16, with the same two numbers. */
ALWAYS lanes dotted_pairs(lanes sum, bits weights, int32_t numbers) {
    return (lanes)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)weights,
                              (bfloat16x8_t)vdupq_n_s32(numbers));
}

/* Products of two outputs with two rows, over 8 bytes of each: outputs are the rows of the sums. */
ALWAYS bits multiplied_codes(bits sum, bits weights, bits codes) {
    return (bits)vusmmlaq_s32((int32x4_t)sum, (uint8x16_t)weights, (int8x16_t)codes);
}

/* Likewise in bfloat16, with the bits of two `dotted_pairs`. */
ALWAYS bits multiplied_pairs(bits sum, bits weights, bits numbers) {
    return (bits)vbfmmlaq_f32((float32x4_t)sum, (bfloat16x8_t)weights, (bfloat16x8_t)numbers);
}

/* The first numbers of two vectors in turn, and the last. */
ALWAYS bits first_in_turn(bits a, bits b) { return (bits)vzip1q_s32((int32x4_t)a, (int32x4_t)b); }
ALWAYS bits last_in_turn(bits a, bits b) { return (bits)vzip2q_s32((int32x4_t)a, (int32x4_t)b); }

/* The even and the odd numbers of two vectors. */
ALWAYS bits even_of(bits a, bits b) { return (bits)vuzp1q_s32((int32x4_t)a, (int32x4_t)b); }
ALWAYS bits odd_of(bits a, bits b) { return (bits)vuzp2q_s32((int32x4_t)a, (int32x4_t)b); }

/* 8 bytes from each of two places; zeros for the second if it is null. */
ALWAYS bits side_by_side(const int32_t *first, const int32_t *second) {
    return (bits)vcombine_s32(vld1_s32(first), second ? vld1_s32(second) : vdup_n_s32(0));
}
#endif

/* Transposes a square. */
static inline void transposed(lanes *square) {
    float32x4x2_t upper = vtrnq_f32((float32x4_t)square[0], (float32x4_t)square[1]);
    float32x4x2_t lower = vtrnq_f32((float32x4_t)square[2], (float32x4_t)square[3]);
    for (int k = 0; k < 2; k++) {
        square[k] = (lanes)vcombine_f32(vget_low_f32(upper.val[k]), vget_low_f32(lower.val[k]));
        square[2 + k] = (lanes)vcombine_f32(vget_high_f32(upper.val[k]),
                                            vget_high_f32(lower.val[k]));
    }
}
