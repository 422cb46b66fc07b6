/* Random numbers, as in core/noise.py: the same bits on every processor.
 *
 * Each operation here is one of IEEE arithmetic, rounded by itself, in the order of the torch
 * version: no compiler may make one operation of a product and a sum. */
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

/* Keys of draws: of rows with these keys, for a role, at positions, told apart by origins. */
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

/* Standard Gumbel noise, one per token, of streams. The uniform has 31 bits near 0. */
void draftproof_gumbel(const int32_t *streams /* [rows, 2] */, float *out /* [rows, vocab] */,
        int64_t rows, int64_t vocab, int64_t threads) {
    int64_t blocks = (vocab + LANES - 1) / LANES;
    words steps;
    for (int l = 0; l < LANES; l++) steps[l] = (uint32_t)l * 0x9E3779B9u;
#pragma omp parallel for num_threads(threads) collapse(2) if (rows * vocab > SMALL)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < blocks; b++) {
            words x = (uint32_t)streams[2 * r] ^ (steps + (uint32_t)(b * LANES) * 0x9E3779B9u);
            x = all_mixed(all_mixed(x) + (uint32_t)streams[2 * r + 1]);
            lanes u = (__builtin_convertvector((bits)(x & 0x7FFFFFFFu), lanes) + 0.5f) * 0x1p-31f;
            u = -larger(-u, (lanes){} - (1 - 0x1p-24f));
            /* 1 - u is left + lost */
            lanes left = 1.0f - u, lost = (1.0f - left) - u;
            lanes wait = -(logarithm(left) + lost), noise = -logarithm(wait);
            int64_t at = b * LANES, some = vocab - at < LANES ? vocab - at : LANES;
            memcpy(out + r * vocab + at, &noise, (size_t)some * sizeof(float));
        }
}
