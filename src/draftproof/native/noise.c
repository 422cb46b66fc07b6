/* Random numbers, as in core/noise.py: the same bits on every processor.
 *
 * Each operation is a single IEEE operation, rounded separately, in the order of the torch version:
 * compilers must not fuse a product and a sum. */
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif
#include "lanes.h"

/* lowbias32, of a number or of a vector of them */
#define MIXED(TYPE, NAME) \
    static inline TYPE NAME(TYPE x) { \
        x = (x ^ x >> 16) * 0x7FEB352Du; \
        x = (x ^ x >> 15) * 0x846CA68Bu; \
        return x ^ x >> 16; \
    }
MIXED(uint32_t, mixed)
MIXED(words, all_mixed)

/* Keys of draws, from the keys of rows, a role, positions, and origins. */
void draftproof_streams(const int32_t *keys /* [rows, 2] */, int64_t role,
        const int64_t *positions /* [rows, count] */,
        const int64_t *origins /* [rows, count] or null */, int32_t *out /* [rows, count, 2] */,
        int64_t rows, int64_t count) {
    for (int64_t i = 0; i < rows * count; i++) {
        const uint32_t *key = (const uint32_t *)keys + 2 * (i / count);
        uint32_t low = mixed(key[0] ^ ((uint32_t)positions[i] * 0x9E3779B9u));
        low = mixed(low + 0x85EBCA6Bu * (uint32_t)(role + 1));
        uint32_t high = mixed(key[1] + low);
        high = mixed(high ^ ((uint32_t)(origins ? origins[i] : 0) * 0x85EBCA6Bu));
        out[2 * i] = (int32_t)mixed(low ^ (high * 0x9E3779B9u)), out[2 * i + 1] = (int32_t)high;
    }
}

/* log(x) of normal numbers, Cephes' polynomial: x = 2^power (1 + m), with m in [sqrt(1/2) - 1,
 * sqrt(2) - 1). */
static inline lanes logarithm(lanes x) {
    bits power = ((bits)x - 0x3f3504f3) >> 23;
    lanes m = (lanes)((bits)x - (power << 23)) - 1.0f, n = __builtin_convertvector(power, lanes);
    lanes z = m * m, y = m * 0x1.204376p-4f - 0x1.d7a37p-4f;
    y = y * m + 0x1.de4a34p-4f;
    y = y * m - 0x1.fcba9ep-4f;
    y = y * m + 0x1.23d37ep-3f;
    y = y * m - 0x1.555ca0p-3f;
    y = y * m + 0x1.999d58p-3f;
    y = y * m - 0x1.fffff8p-3f;
    y = y * m + 0x1.555554p-2f;
    y = y * m * z + n * -0x1.bd0106p-13f;
    y = y - z * 0.5f;
    return (m + y) + n * 0x1.63p-1f;
}

typedef struct {
    const int32_t *streams;
    float *out;
    int64_t vocab, blocks;                      /* of LANES tokens */
} Noise;

/* Blocks, numbered across all rows. */
static void noisy(const void *work, int64_t first, int64_t last) {
    const Noise *of = work;
    words steps;
    for (int l = 0; l < LANES; l++) steps[l] = (uint32_t)l * 0x9E3779B9u;
    for (int64_t i = first; i < last; i++) {
        int64_t r = i / of->blocks, at = i % of->blocks * LANES, left_over = of->vocab - at;
        const uint32_t *stream = (const uint32_t *)of->streams + 2 * r;
        words x = stream[0] ^ (steps + (uint32_t)at * 0x9E3779B9u);
        x = all_mixed(all_mixed(x) + stream[1]);
        lanes u = (__builtin_convertvector((bits)(x & 0x7FFFFFFFu), lanes) + 0.5f) * 0x1p-31f;
        u = -larger(-u, (lanes){} - (1 - 0x1p-24f));
        /* 1 - u is left + lost */
        lanes left = 1.0f - u, lost = (1.0f - left) - u;
        lanes wait = -(logarithm(left) + lost), noise = -logarithm(wait);
        int64_t some = left_over < LANES ? left_over : LANES;
        memcpy(of->out + r * of->vocab + at, &noise, (size_t)some * sizeof(float));
    }
}

/* Standard Gumbel noise, one per token, of streams. The uniform has 31 bits near 0. */
void draftproof_gumbel(const int32_t *streams /* [rows, 2] */, float *out /* [rows, vocab] */,
        int64_t rows, int64_t vocab, int64_t threads) {
    Noise of = {streams, out, vocab, (vocab + LANES - 1) / LANES};
    share_out(noisy, &of, rows * of.blocks, SMALL / LANES / 2, threads);
}
