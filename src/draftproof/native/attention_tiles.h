/* Attention by tiles (AMX). */
#pragma once
#include "attention.h"

/* By tiles: a sum of values is, of WHOLE places of the text after another, the sum of those at even
 * places and of those at odd ones, of chances in bfloat16. Where the last places have other slots
 * in a tree, vectors sum up in the same way. Denormal numbers count 0 in both. */

/* Sums in 0; chances or keys in 1, times pairs of values, or of numbers of queries, in 2; in 3 and
 * 4 half of both. Returns what `released` is to be told. */
static unsigned tiled(void) {
    static const Tiles tiles = {.palette = 1, .bytes = {64, 64, 64, 32, 64},
            .rows = {16, 16, 16, 16, 8}};
    unsigned mode = _mm_getcsr();
    _tile_loadconfig(&tiles);
    _mm_setcsr(mode | 0x8040);
    return mode;
}

static void released(unsigned mode) {
    _tile_release();
    _mm_setcsr(mode);
}

/* Where queries lie as tiles want them, from the `first` of BLOCK of them on: pairs of numbers,
 * beside those of the others. */
static inline uint32_t *woven(const Heard *of, int64_t first) {
    /* behind the heads */
    return (uint32_t *)(of->heads + (of->padded + first) * of->size);
}

static void all_woven(const Heard *of) {
    int64_t words = of->size / 2;
    for (int64_t q = 0; q < of->padded; q += BLOCK)
        for (int64_t i = 0; i < words; i += LANES) {
            lanes square[BLOCK];
            for (int64_t j = 0; j < BLOCK; j++)
                memcpy(square + j, of->heads + (q + j) * of->size + 2 * i, sizeof *square);
            transposed(square);
            memcpy(woven(of, q) + i * BLOCK, square,
                    (size_t)(words - i < LANES ? words - i : LANES) * sizeof *square);
        }
}

/* Scores of BLOCK queries from `first` on with the BLOCK slots from `slot` on, whose keys
 * [BLOCK][size] these are. */
static inline void squared(const Heard *of, int64_t first, int64_t slot, const bf16 *keys,
        float scale) {
    const uint32_t *pairs = woven(of, first);
    int64_t size = of->size, whole = size / WHOLE * WHOLE;
    lanes square[BLOCK];
    _tile_zero(0);
    for (int64_t i = 0; i < whole; i += WHOLE) {
        _tile_loadd(1, keys + i, size * 2);
        _tile_loadd(2, pairs + i / 2 * BLOCK, 64);
        _tile_dpbf16ps(0, 1, 2);
    }
    if (whole < size) {
        _tile_loadd(3, keys + whole, size * 2);
        _tile_loadd(4, pairs + whole / 2 * BLOCK, 64);
        _tile_dpbf16ps(0, 3, 4);
    }
    _tile_stored(0, square, 64);
    WRITTEN;
    transposed(square);
    for (int q = 0; q < BLOCK; q++) {
        lanes score = square[q] * scale;
        memcpy(of->scores + (first + q) * of->stride + slot, &score, sizeof score);
    }
}

static void all_squared(const Heard *of, float scale) {
    int64_t end = of->length + of->nodes;
    all_woven(of);
    for (int64_t s = of->earliest / BLOCK * BLOCK; s < end; s += BLOCK) {
        ahead(of, s);
        const bf16 *keys = keys_at(of, s, of->room);
        WRITTEN;
        for (int64_t q = 0; q < of->padded; q += BLOCK) squared(of, q, s, keys, scale);
    }
}

/* Sums of the values of the slots `from` to `to`, a multiple of WHOLE of them, by chances in
 * bfloat16. */
static void multiplied(const Heard *of, int64_t from, int64_t to) {
    int64_t size = of->size, coded = of->held.key_scales != NULL;
    /* [STRETCH / 2][size] */
    uint32_t *pairs = of->room;
    if (from == to) memset(of->sums, 0, (size_t)(of->padded * size) * sizeof(float));
    for (int64_t begin = from; begin < to; begin += STRETCH) {
        int64_t end = begin + STRETCH < to ? begin + STRETCH : to;
        for (int64_t s = begin; s < end; s += 2)
            for (int64_t i = 0; i < size; i += LANES) {
                words even = (words)value_at(of, coded, s, i),
                        odd = (words)value_at(of, coded, s + 1, i);
                odd |= even >> 16;
                memcpy(pairs + (s - begin) / 2 * size + i, &odd, sizeof odd);
            }
        WRITTEN;
        for (int64_t q = 0; q < of->padded; q += BLOCK)
            for (int64_t i = 0; i < size; i += LANES) {
                float *sums = of->sums + q * size + i;
                if (begin == from) _tile_zero(0);
                else _tile_loadd(0, sums, size * 4);
                for (int64_t s = begin; s < end; s += WHOLE) {
                    _tile_loadd(1, (const bf16 *)(of->scores + q * of->stride) + s, of->stride * 4);
                    _tile_loadd(2, pairs + (s - begin) / 2 * size + i, size * 4);
                    _tile_dpbf16ps(0, 1, 2);
                }
                _tile_stored(0, sums, size * 4);
            }
        WRITTEN;
    }
}

/* The sums of `some` queries from `first` on go on over `count` places of the text: slots of their
 * values, and of their chances. */
static inline __attribute__((always_inline)) void added(const Heard *of, int64_t first,
        const int some, const int64_t *slots, const int64_t *chances, int64_t count) {
    int64_t size = of->size, coded = of->held.key_scales != NULL;
    for (int64_t i = 0; i < size; i += LANES)
        for (int64_t p = 0; p < count; p += WHOLE) {
            __m512 half[2][4];
            for (int k = 0; k < some; k++) half[0][k] = half[1][k] = _mm512_setzero_ps();
            for (int64_t s = p; s < p + WHOLE && s < count; s += 2)
                for (int odd = 0; odd < 2; odd++) {
                    const float *chance = of->scores + first * of->stride + chances[s + odd];
                    __m512 value = (__m512)value_at(of, coded, slots[s + odd], i);
                    for (int k = 0; k < some; k++)
                        half[odd][k] = _mm512_fmadd_ps(_mm512_set1_ps(chance[k * of->stride]),
                                value, half[odd][k]);
                }
            for (int k = 0; k < some; k++) {
                float *sums = of->sums + (first + k) * size + i;
                lanes sum = loaded(sums) + (lanes)_mm512_add_ps(half[0][k], half[1][k]);
                memcpy(sums, &sum, sizeof sum);
            }
        }
}

static void all_multiplied(const Heard *of) {
    int64_t from = of->earliest / WHOLE * WHOLE, to = of->length / WHOLE * WHOLE,
            behind = of->length - to;
    for (int64_t q = 0; q < of->count; q++) {
        float *chances = of->scores + q * of->stride;
        /* never overtakes */
        for (int64_t s = from; s < to; s += LANES) narrowed((bf16 *)chances + s,
                loaded(chances + s));
        chances[of->stride - 1] = 0;
    }
    multiplied(of, from, to);
    for (int64_t q = 0, some; q < of->count; q += some) {
        const Query *first = of->queries + q;
        int64_t count = behind + first->deep, slots[count + 1], chances[count + 1];
        for (some = 1; some < 4 && q + some < of->count && first[some].place == first->place;)
            some++;
        for (int64_t p = 0; p < count; p++)
            slots[p] = chances[p] = p < behind ? to + p : of->length + first->path[p - behind];
        /* one more counts 0 */
        slots[count] = of->length, chances[count] = of->stride - 1;
        if (some == 1) added(of, q, 1, slots, chances, count);
        else if (some == 2) added(of, q, 2, slots, chances, count);
        else if (some == 3) added(of, q, 3, slots, chances, count);
        else added(of, q, 4, slots, chances, count);
    }
}

static const Way by_tiles = {BLOCK, WHOLE, all_squared, all_multiplied};
