/* Products of many rows with strips of weights, by tiles (AMX), in bfloat16 and in 8 bits. */
#pragma once
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "linear.h"
#include "tiles.h"

/* A chunk has up to TILE_ROWS rows, and a block is one tile. Weights are prefetched EARLY steps
 * ahead; a step is TILE_BLOCK words of a strip, and STEPS of them are made at a time. */
enum { TILE_ROWS = 16, TILE_BLOCK = 16, TILE_STRIPS = 2 };
enum { STEP = TILE_BLOCK * LINE, STEPS = 64, EARLY = 4 };

/* Whether the system saves the tiles of threads, which Linux does on request. */
static int tiles_allowed(void) {
#ifdef __linux__
    enum { ASK = 0x1023, TILE_DATA = 18 };
    return !syscall(SYS_arch_prctl, ASK, TILE_DATA);
#else
    enum { TILES_KEPT = 3 << 17 };
    uint32_t kept, upper;
    __asm__ volatile("xgetbv" : "=a"(kept), "=d"(upper) : "c"(0));
    return (kept & TILES_KEPT) == TILES_KEPT;
#endif
}

/* Configures tiles for chunks of so many rows, of which the lower may have none, and for so many
 * words of weights: sums 0 to 3, rows 4 and 5, weights 6, 7. */
static void tiled(int64_t upper, int64_t lower, int64_t words) {
    int64_t wanted = (upper * (TILE_ROWS + 1) + lower) * (TILE_BLOCK + 1) + words;
    uint8_t first = (uint8_t)upper, second = (uint8_t)(lower ? lower : upper);
    uint8_t weights = (uint8_t)words;
    Tiles tiles = {.palette = 1,
        .rows = {first, first, second, second, first, second, weights, weights}};
    for (int tile = 0; tile < 8; tile++)
        tiles.bytes[tile] = tile == 4 || tile == 5 ? (uint16_t)(4 * words) : 64;
    configured(&tiles, wanted);
}

/* Prefetches the weights EARLY steps after those of step `i`. */
static inline void ahead(int64_t i, int64_t steps, const char *here, const char *next) {
    const char *from = i + EARLY < steps ? here + EARLY * STEP : next + (i + EARLY - steps) * STEP;
    _Pragma("GCC unroll 32") for (int line = 0; line < STEP; line += 64)
        __builtin_prefetch(from + line);
}

/* Starts sums of two chunks at zero, or continues stored ones. */
#define BEGIN(SUMS, OTHER) \
    if (fresh) { \
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3); \
    } else { \
        _tile_loadd(0, SUMS, 128); _tile_loadd(1, &(SUMS)[0][1], 128); \
        _tile_loadd(2, OTHER, 128); _tile_loadd(3, &(OTHER)[0][1], 128); \
    }

/* So many steps of one chunk times two strips, or of two chunks times one strip, with sums [2
 * LANES] of each row, each along its row, `fresh` or on from those that are there. Memory is asked
 * for weights ahead of time, at the end for those at `next`. */
#define TILED(NAME, TIMES) \
    static void NAME##_strips(const int32_t *words, int64_t beside, const char *one, \
                              const char *two, const char *next, const char *after, \
                              int64_t steps, int fresh, lanes (*sums)[2], lanes (*other)[2]) { \
        BEGIN(sums, other) \
        for (int64_t i = 0; i < steps; i++, words += beside * TILE_BLOCK, one += STEP, \
                two += STEP) { \
            _tile_loadd(4, words, 64); \
            _tile_loadd(6, one, 128); \
            TIMES(0, 4, 6); \
            _tile_loadd(7, one + 64, 128); \
            TIMES(1, 4, 7); \
            _tile_loadd(6, two, 128); \
            TIMES(2, 4, 6); \
            _tile_loadd(7, two + 64, 128); \
            TIMES(3, 4, 7); \
            ahead(i, steps, one, next), ahead(i, steps, two, after); \
        } \
        _tile_stored(0, sums, 128); _tile_stored(1, &sums[0][1], 128); \
        _tile_stored(2, other, 128); _tile_stored(3, &other[0][1], 128); \
    } \
    static void NAME##_chunks(const int32_t *upper, int64_t above, const int32_t *lower, \
                              int64_t below, const char *weights, const char *next, \
                              int64_t steps, int fresh, lanes (*sums)[2]) { \
        BEGIN(sums, sums + above) \
        for (int64_t i = 0; i < steps; \
             i++, upper += above * TILE_BLOCK, lower += below * TILE_BLOCK, weights += STEP) { \
            _tile_loadd(6, weights, 128); \
            _tile_loadd(4, upper, 64); \
            TIMES(0, 4, 6); \
            _tile_loadd(5, lower, 64); \
            TIMES(2, 5, 6); \
            _tile_loadd(7, weights + 64, 128); \
            TIMES(1, 4, 7); \
            TIMES(3, 5, 7); \
            ahead(i, steps, weights, next); \
        } \
        _tile_stored(0, sums, 128); _tile_stored(1, &sums[0][1], 128); \
        _tile_stored(2, sums + above, 128); _tile_stored(3, &sums[above][1], 128); \
    }
TILED(codes, _tile_dpbsud)
TILED(pairs, _tile_dpbf16ps)

/* The outputs of strips `first` to `last`, at most TILE_STRIPS, for chunks `top` to `bottom`, at
 * most CHUNKS. */
static void tile_panel(const Product *of, int64_t first, int64_t last, int64_t top,
        int64_t bottom) {
    int64_t row = first_row(of, top), end = first_row(of, bottom), steps = of->count / TILE_BLOCK;
    int small = of->kind == INT8;
    lanes sums[TILE_STRIPS][ROWS][SIDES];
    for (int64_t b = 0; b < steps; b += STEPS) {
        int64_t some = steps - b < STEPS ? steps - b : STEPS, done = b + some;
        for (int64_t c = top; c < bottom; c += 2) {
            int64_t from = first_row(of, c), middle = first_row(of, c + 1);
            int64_t to = c + 1 < bottom ? first_row(of, c + 2) : middle;
            int64_t above = middle - from, below = to - middle;
            const int32_t *upper = inputs_at(of, from, above, b * TILE_BLOCK);
            const int32_t *lower = inputs_at(of, middle, below, b * TILE_BLOCK);
            tiled(above, below, TILE_BLOCK);
            WRITTEN;
            const char *one = weights_at(of, first, b * TILE_BLOCK);
            const char *two = weights_at(of, last - 1, b * TILE_BLOCK);
            const char *next = weights_at(of, first, done * TILE_BLOCK);
            const char *after = weights_at(of, last - 1, done * TILE_BLOCK);
            if (done == steps) next = weights_at(of, last, 0), after = weights_at(of, last + 1, 0);
            lanes (*held)[2] = sums[0] + (from - row), (*other)[2] = sums[1] + (from - row);
            if (!below) {
                (small ? codes_strips : pairs_strips)(upper, above, one, two, next, after, some, !b,
                                                      held, other);
                continue;
            }
            (small ? codes_chunks : pairs_chunks)(upper, above, lower, below, one, two, some, !b,
                    held);
            if (last > first + 1)
                (small ? codes_chunks : pairs_chunks)(upper, above, lower, below, two, next, some,
                        !b, other);
        }
    }
    finish(of, first, last, row, end, sums);
}
