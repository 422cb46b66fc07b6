/* What stands between the linear layers of a Llama-like model, for bfloat16 on a CPU: norms, rotation, attention, gates;
 * linear layers of their own, and whole models of such.
 *
 * Every sum runs in an order fixed by a token's place in its own text: never by how many queries are read together, by
 * the slot a node of a tree lies in, or by the number of threads. So a position has the same bits read alone, in a
 * chain, or in a tree. No function knows layers or models; the caller hands in pointers.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef float lanes __attribute__((vector_size(64)));
typedef int32_t bits __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

enum { LANES = 16, BLOCK = 16, TOGETHER = 4, WIDEST = 256, SMALL = 1 << 14, PRODUCTS = 1 << 17 };

typedef struct {
    int64_t rows, nodes, first, heads, key_heads, head_dim, capacity, window, context, threads;
    const int64_t *lengths;                     /* [rows] committed tokens */
    const int64_t *parents;                     /* [rows, nodes] a parent comes before its children; -1 at the root */
    const bf16 *cosines, *sines;                /* [context, head_dim] */
    float scale;
} Read;

static inline float widen(bf16 x) {
    union { uint32_t i; float f; } u = {(uint32_t)x << 16};
    return u.f;
}

static inline bf16 narrow(float x) {            /* to the nearest, ties to even */
    union { float f; uint32_t i; } u = {x};
    return x != x ? 0x7fc0 : (bf16)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}

static inline lanes wide(const bf16 *from) {
    halves h;
    memcpy(&h, from, sizeof h);
    return (lanes)(__builtin_convertvector(h, bits) << 16);
}

static inline void narrowed(bf16 *to, lanes x) {
    bits i = (bits)x, even = (i >> 16) & 1;
    bits out = (i + 0x7fff + even) >> 16, nan = x != x;
    out = (out & ~nan) | (nan & 0x7fc0);
    halves h = __builtin_convertvector(out, halves);
    memcpy(to, &h, sizeof h);
}

static inline lanes loaded(const float *from) {
    lanes x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline float total(lanes x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

static inline lanes expo(lanes x) {             /* Cephes' expf, all lanes alike; 0 below -87 */
    bits low = x < -87.0f;
    x = (lanes)(((bits)x & ~low) | ((bits)((lanes){} - 87.0f) & low));
    lanes n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    x = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = x * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * x + 8.3334519073e-3f;
    y = y * x + 4.1665795894e-2f;
    y = y * x + 1.6666665459e-1f;
    y = y * x + 5.0000001201e-1f;
    y = y * (x * x) + x + 1.0f;
    bits power = (__builtin_convertvector(n, bits) + 127) << 23;
    return (lanes)((bits)(y * (lanes)power) & ~low);
}

static inline lanes logarithm(lanes x) {        /* Cephes' logf, all lanes alike, for normal numbers */
    bits i = (bits)x, power = (i >> 23) - 126;
    lanes m = (lanes)((i & 0x007fffff) | 0x3f000000);                                       /* in [0.5, 1) */
    bits low = m < 0.707106781f;
    lanes n = __builtin_convertvector(power + low, lanes);                                  /* true is -1 */
    m = m + (lanes)((bits)m & low) - 1.0f;
    lanes z = m * m, y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z + n * -2.12194440e-4f - 0.5f * z;
    return m + y + n * 0.693359375f;
}

/* hidden += delta, if there is one; out = hidden / rms(hidden) * weight. [rows, size] each, size a multiple of 16. */
void draftproof_norm(bf16 *hidden, const bf16 *delta, const bf16 *weight, float epsilon, bf16 *out, int64_t rows, int64_t size,
                     int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        bf16 *x = hidden + r * size, *y = out + r * size;
        lanes squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            if (delta) narrowed(x + i, wide(x + i) + wide(delta + r * size + i));
            lanes v = wide(x + i);
            squares += v * v;
        }
        float factor = 1.0f / sqrtf(total(squares) / (float)size + epsilon);
        for (int64_t i = 0; i < size; i += LANES) {
            narrowed(y + i, wide(x + i) * factor);
            narrowed(y + i, wide(y + i) * wide(weight + i));
        }
    }
}

/* out = silu(gate) * up; gate and up lie behind each other: [rows, 2 * size] to [rows, size]. */
void draftproof_gate(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *gate = gate_up + 2 * r * size, *up = gate + size;
        bf16 *y = out + r * size;
        for (int64_t i = 0; i < size; i += LANES) {
            lanes g = wide(gate + i);
            narrowed(y + i, g / (1.0f + expo(-g)));
            narrowed(y + i, wide(y + i) * wide(up + i));
        }
    }
}

/* Move the `deep` nodes of each row, ascending, to the front of its scratch, in stores [rows, heads, capacity] of so many
 * bytes a slot. A node never lies before its destination, so nothing is overwritten that is still to be read. */
void draftproof_keep(char *const *stores, const int64_t *heads, const int64_t *bytes, int64_t count, int64_t capacity,
                     int64_t rows, const int64_t *lengths, const int64_t *nodes, int64_t deep) {
    for (int64_t s = 0; s < count; s++)
        for (int64_t line = 0; line < rows * heads[s]; line++) {
            int64_t row = line / heads[s], size = bytes[s];
            char *scratch = stores[s] + (line * capacity + lengths[row]) * size;
            for (int64_t d = 0; d < deep; d++)
                if (nodes[row * deep + d] != d)
                    memcpy(scratch + d * size, scratch + nodes[row * deep + d] * size, (size_t)size);
        }
}

static void normed(const bf16 *x, const bf16 *weight, float epsilon, float *out, int64_t size) {
    lanes squares = {};
    for (int64_t i = 0; i < size; i += LANES) squares += wide(x + i) * wide(x + i);
    float factor = 1.0f / sqrtf(total(squares) / (float)size + epsilon);
    for (int64_t i = 0; i < size; i++) out[i] = widen(narrow(widen(narrow(widen(x[i]) * factor)) * widen(weight[i])));
}

/* One head of one token, normed if there is a weight and turned to its position, in bfloat16's precision. */
static void turned(const Read *read, const bf16 *x, const bf16 *weight, float epsilon, int64_t position, float *out) {
    int64_t size = read->head_dim, half = size / 2;
    const bf16 *cosines = read->cosines + position * size, *sines = read->sines + position * size;
    float plain[WIDEST];
    if (weight) normed(x, weight, epsilon, plain, size);
    else for (int64_t i = 0; i < size; i++) plain[i] = widen(x[i]);
    for (int64_t i = 0; i < size; i++) {
        float other = i < half ? -plain[i + half] : plain[i - half];
        out[i] = widen(narrow(widen(narrow(plain[i] * widen(cosines[i]))) + other * widen(sines[i])));
    }
}

static int64_t depth_of(const int64_t *parents, int64_t node) {
    int64_t depth = 0;
    for (; (node = parents[node]) >= 0;) depth++;
    return depth;
}

static float *scratch(int64_t floats) {
    static _Thread_local float *held;
    static _Thread_local int64_t size;
    if (floats > size) {
        free(held);
        size = floats + floats / 2;
        if (posix_memalign((void **)&held, 64, (size_t)size * sizeof(float))) abort();
    }
    return held;
}

/* scores[q][slot] of TOGETHER queries with BLOCK slots; keys [head_dim][BLOCK]. Each a sum along head_dim. */
static inline void scored(const float *queries, const lanes *keys, int64_t size, float *scores, int64_t stride) {
    lanes sum[TOGETHER] = {};
    for (int64_t i = 0; i < size; i++)
        for (int q = 0; q < TOGETHER; q++) sum[q] += queries[q * size + i] * keys[i];
    for (int q = 0; q < TOGETHER; q++) memcpy(scores + q * stride, &sum[q], sizeof sum[q]);
}

static inline lanes larger(lanes a, lanes b) {
    bits more = a > b;
    return (lanes)(((bits)a & more) | ((bits)b & ~more));
}

/* Scores become chances, in the order of the text: slots `start` to `length`, then the nodes of the path. Those from
 * `earliest`, where other queries begin, to `start` become 0. Returns what the chances sum to. */
static float softened(float *scores, int64_t earliest, int64_t start, int64_t length, const int64_t *path, int64_t deep) {
    float on[deep];
    for (int64_t d = 0; d < deep; d++) on[d] = scores[length + path[d]];
    memcpy(scores + length, on, sizeof on);
    int64_t first = start / LANES * LANES, end = length + deep, whole = (end + LANES - 1) / LANES * LANES;
    for (int64_t s = end; s < whole; s++) scores[s] = -INFINITY;
    for (int64_t s = first; s < start; s++) scores[s] = -INFINITY;
    lanes most = loaded(scores + first), sum = {};
    for (int64_t s = first; s < whole; s += LANES) most = larger(loaded(scores + s), most);
    float top = most[0];
    for (int l = 1; l < LANES; l++) top = most[l] > top ? most[l] : top;
    for (int64_t s = first; s < whole; s += LANES) {
        lanes chance = expo(loaded(scores + s) - top);
        sum += chance;
        memcpy(scores + s, &chance, sizeof chance);
    }
    for (int64_t s = earliest; s < first; s++) scores[s] = 0;
    return total(sum);
}

/* Attention of queries `from` to `to` that share the keys of one head, in one row. A query is (node, head of the group). */
static void attended(const Read *read, int64_t row, int64_t key_head, const bf16 *keys, const bf16 *values, const bf16 *inner,
                     const bf16 *weight, float epsilon, bf16 *out, int64_t from, int64_t to) {
    int64_t size = read->head_dim, group = read->heads / read->key_heads, width = read->nodes - read->first;
    int64_t length = read->lengths[row], end = length + read->nodes, count = to - from;
    int64_t padded = (count + TOGETHER - 1) / TOGETHER * TOGETHER, stride = (end + BLOCK - 1) / BLOCK * BLOCK + LANES;
    const int64_t *parents = read->parents + row * read->nodes;
    float *scores = scratch(padded * (stride + size) + size * BLOCK), *queries = scores + padded * stride;
    lanes *tile = (lanes *)(queries + padded * size);
    int64_t path[count][read->nodes], deep[count], start[count], earliest = length;
    memset(queries + count * size, 0, (size_t)((padded - count) * size) * sizeof(float));
    for (int64_t q = 0; q < count; q++) {
        int64_t node = read->first + (from + q) / group, head = key_head * group + (from + q) % group;
        int64_t depth = depth_of(parents, node), position = length + depth;
        const bf16 *x = inner + ((row * width + node - read->first) * (read->heads + 2 * read->key_heads) + head) * size;
        turned(read, x, weight, epsilon, position < read->context ? position : read->context - 1, queries + q * size);
        for (int64_t i = 0; i < size; i++) queries[q * size + i] *= read->scale;
        deep[q] = depth + 1;
        for (int64_t d = depth, n = node; d >= 0; d--, n = parents[n]) path[q][d] = n;
        start[q] = read->window && position >= read->window ? position + 1 - read->window : 0;
        if (start[q] < earliest) earliest = start[q];
    }
    for (int64_t s = earliest / BLOCK * BLOCK; s < end; s += BLOCK) {
        int64_t some = end - s < BLOCK ? end - s : BLOCK;
        float *column = (float *)tile;
        if (some < BLOCK) memset(tile, 0, (size_t)(size * BLOCK) * sizeof(float));
        for (int64_t i = 0; i < size; i += LANES)
            for (int64_t j = 0; j < some; j++) {
                lanes k = wide(keys + (s + j) * size + i);
                for (int l = 0; l < LANES; l++) column[(i + l) * BLOCK + j] = k[l];
            }
        for (int64_t q = 0; q < padded; q += TOGETHER) scored(queries + q * size, tile, size, scores + q * stride + s, stride);
    }
    float sums[count];
    for (int64_t q = 0; q < count; q++)
        sums[q] = softened(scores + q * stride, earliest, start[q], length, path[q], deep[q]);
    for (int64_t q = count; q < padded; q++) memset(scores + q * stride, 0, (size_t)length * sizeof(float));
    for (int64_t q = 0; q < count; q += TOGETHER)
        for (int64_t i = 0; i < size; i += LANES) {
            lanes sum[TOGETHER] = {};
            for (int64_t s = earliest; s < length; s++) {
                lanes value = wide(values + s * size + i);
                for (int k = 0; k < TOGETHER; k++) sum[k] += scores[(q + k) * stride + s] * value;
            }
            for (int64_t k = 0; k < TOGETHER && q + k < count; k++) {
                int64_t node = read->first + (from + q + k) / group, head = key_head * group + (from + q + k) % group;
                for (int64_t d = 0; d < deep[q + k]; d++)
                    sum[k] += scores[(q + k) * stride + length + d] * wide(values + (length + path[q + k][d]) * size + i);
                narrowed(out + ((row * width + node - read->first) * read->heads + head) * size + i, sum[k] / sums[q + k]);
            }
        }
}

/* Queries, keys and values of the nodes `first:` of each row, [rows, nodes - first, heads + 2 key_heads, head_dim]: turn
 * them, write keys and values [rows, key_heads, capacity, head_dim] behind the committed tokens, attend to those and to
 * each node's own path; out [rows, nodes - first, heads, head_dim]. The weights of head norms may be null. */
void draftproof_attend(const Read *read, const bf16 *inner, const bf16 *query_weight, const bf16 *key_weight, float epsilon,
                       bf16 *keys, bf16 *values, bf16 *out) {
    int64_t size = read->head_dim, width = read->nodes - read->first, shared = read->rows * read->key_heads;
    int64_t queries = width * (read->heads / read->key_heads), lines = read->heads + 2 * read->key_heads;
    int64_t wanted = read->threads > shared ? (read->threads + shared - 1) / shared : 1, each = (queries + wanted - 1) / wanted;
    each = each > 32 ? 32 : (each + TOGETHER - 1) / TOGETHER * TOGETHER;
    int64_t parts = (queries + each - 1) / each, slots = 0;
    for (int64_t row = 0; row < read->rows; row++) slots += read->lengths[row] + read->nodes;
#pragma omp parallel num_threads(read->threads) if (slots * read->key_heads * queries * size > PRODUCTS)
    {
#pragma omp for
        for (int64_t one = 0; one < shared; one++) {
            int64_t row = one / read->key_heads, head = one % read->key_heads, length = read->lengths[row];
            for (int64_t w = 0; w < width; w++) {
                int64_t node = read->first + w, slot = (one * read->capacity + length + node) * size;
                int64_t position = length + depth_of(read->parents + row * read->nodes, node);
                const bf16 *x = inner + ((row * width + w) * lines + read->heads + head) * size;
                float key[WIDEST];
                turned(read, x, key_weight, epsilon, position < read->context ? position : read->context - 1, key);
                for (int64_t i = 0; i < size; i++) keys[slot + i] = narrow(key[i]);
                memcpy(values + slot, x + read->key_heads * size, (size_t)size * sizeof(bf16));
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t one = 0; one < shared * parts; one++) {
            int64_t which = one / parts, from = one % parts * each, to = from + each < queries ? from + each : queries;
            int64_t store = which * read->capacity * size;
            attended(read, which / read->key_heads, which % read->key_heads, keys + store, values + store, inner, query_weight,
                     epsilon, out, from, to);
        }
    }
}

/* Linear layers in 8 bits. Sums are of integers, hence the same in any order. */
enum { FOUR = 4 };

static inline lanes absolute(lanes x) { return (lanes)((bits)x & 0x7fffffff); }

static inline lanes partly(const bf16 *from, int64_t some) {
    bf16 held[LANES] = {};
    memcpy(held, from, (size_t)some * sizeof(bf16));
    return wide(held);
}

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

/* A linear layer. Its weights lie as [outputs / 32, padded / fold, 32, fold], the outputs rounded up to a multiple of 32; padded,
 * the inputs rounded up, is a multiple of 16. With a scale per output they have 8 bits and 128 added to them, and fold is 4;
 * without, they are bfloat16 and fold is 2. Scale and bias are as long as the outputs rounded up; the bias may be null. */
typedef struct {
    const void *weights;
    const float *scale;
    const bf16 *bias;
    int64_t size, padded, outputs;
} Linear;

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

/* One layer of a model: queries, keys and values as one, gates and what they let through as one. */
typedef struct {
    Linear inner, output, gate_up, down;
    const bf16 *before, *after, *query, *key;   /* weights of norms; those over heads may be null */
    float epsilon;
} Layer;

/* All layers of a model: hidden states [rows, nodes - first, size] become those behind the final norm, in `last`; the states
 * before layer n go to kept[n] where that is not null, nor kept. stores: keys and values of each layer in
 * turn. work: room for width * (size + the widest inner + heads * head_dim + 3 gates) numbers. */
void draftproof_forward(const Read *read, const Layer *layers, int64_t count, bf16 *const *stores, const bf16 *norm, bf16 *hidden,
                        bf16 *last, bf16 *const *kept, bf16 *work) {
    int64_t width = read->rows * (read->nodes - read->first), size = layers->inner.size, threads = read->threads;
    bf16 *delta = NULL;
    for (int64_t n = 0; n < count; n++) {
        const Layer *layer = layers + n;
        int64_t gates = layer->down.size;
        bf16 *normed = work, *states = normed + width * size, *mixed = states + width * layer->inner.outputs;
        bf16 *both = mixed + width * layer->output.size, *gate = both + width * 2 * gates;
        draftproof_norm(hidden, delta, layer->before, layer->epsilon, normed, width, size, threads);
        if (kept && kept[n]) memcpy(kept[n], hidden, (size_t)(width * size) * sizeof(bf16));
        draftproof_linear(&layer->inner, normed, states, width, threads);
        draftproof_attend(read, states, layer->query, layer->key, layer->epsilon, stores[2 * n], stores[2 * n + 1], mixed);
        delta = last;
        draftproof_linear(&layer->output, mixed, delta, width, threads);
        draftproof_norm(hidden, delta, layer->after, layer->epsilon, normed, width, size, threads);
        draftproof_linear(&layer->gate_up, normed, both, width, threads);
        draftproof_gate(both, gate, width, gates, threads);
        draftproof_linear(&layer->down, gate, delta, width, threads);
    }
    draftproof_norm(hidden, delta, norm, layers->epsilon, last, width, size, threads);
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

/* Scores of one row of logits: over its heat, plus noise where there is some, rounded as torch rounds. Past the end -inf. */
static inline lanes heated(const bf16 *logits, const float *noise, float heat, int64_t i, int64_t vocab) {
    int64_t some = vocab - i < LANES ? vocab - i : LANES;
    lanes score = some < LANES ? partly(logits + i, some) : wide(logits + i);
    if (heat != 1) score /= heat;
    if (noise && some == LANES) score += loaded(noise + i);
    else for (int64_t l = 0; noise && l < some; l++) score[l] += noise[i + l];
    for (int64_t l = some; l < LANES; l++) score[l] = -INFINITY;
    return score;
}

static inline int some_of(bits x) {
    int any = 0;
    for (int l = 0; l < LANES; l++) any |= x[l];
    return any;
}

/* The first token of the highest score in each row of logits [rows, vocab]; `nothing` if all are -inf or one is NaN. Heats are
 * of rows; places say which of noise [., vocab] is whose. */
void draftproof_pick(const bf16 *logits, const float *noise, const int64_t *places, const float *heats, int64_t rows, int64_t vocab,
                     int64_t nothing, int64_t *tokens, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * vocab > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const float *own = noise ? noise + places[r] * vocab : NULL;
        lanes most = (lanes){} - INFINITY;
        bits broken = {}, first = {};
        for (int64_t i = 0; i < vocab; i += LANES) {
            lanes score = heated(logits + r * vocab, own, heats[r], i, vocab);
            bits above = score > most;
            broken |= score != score;
            most = larger(score, most);
            first = (first & ~above) | (above & (int32_t)i);
        }
        float top = -INFINITY;
        int64_t token = nothing;
        for (int l = 0; l < LANES; l++)
            if (most[l] > top || (most[l] == top && top > -INFINITY && first[l] + l < token)) top = most[l], token = first[l] + l;
        tokens[r] = some_of(broken) ? nothing : token;
    }
}

/* The `count` best tokens of each row, of equals the earlier, and the logarithm of the chance of each: chances are the softmax of
 * trust times the scores. Where a logit is NaN nothing has a chance. */
void draftproof_best(const bf16 *logits, const float *noise, const int64_t *places, const float *heats, const float *trusts,
                     int64_t rows, int64_t vocab, int64_t count, float *odds, int64_t *tokens, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * vocab > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const float *own = noise ? noise + places[r] * vocab : NULL;
        float *scores = scratch(vocab + LANES), trust = trusts[r];
        Scored best[count];
        for (int64_t k = 0; k < count; k++) best[k] = (Scored){-INFINITY, 0};
        bits broken = {};
        for (int64_t i = 0; i < vocab; i += LANES) {
            lanes score = heated(logits + r * vocab, own, heats[r], i, vocab);
            memcpy(scores + i, &score, sizeof score);
            broken |= score != score;
            if (some_of(score > best[count - 1].score))
                for (int l = 0; l < LANES; l++)
                    if (score[l] > best[count - 1].score) ranked(best, count, score[l], i + l);
        }
        int there = !some_of(broken) && best->score > -INFINITY;
        lanes sum = {};
        for (int64_t i = 0; there && i < vocab; i += LANES) sum += expo((loaded(scores + i) - best->score) * trust);
        float whole = logf(total(sum));
        for (int64_t k = 0; k < count; k++) {
            odds[r * count + k] = there && best[k].score > -INFINITY ? (best[k].score - best->score) * trust - whole : -INFINITY;
            tokens[r * count + k] = best[k].token;
        }
    }
}

/* Draft a chain: behind the root, whose logits [rows, vocab] are given, token after token the best of each, each read in turn as
 * the next node of the scratch. places [rows] name the noise of the root. Ends after `steps` tokens, or where the logarithm of the
 * chance that a chain stands is below `floor` in every row. tokens [rows, steps], `absent` where nothing may be chosen. Returns
 * how many were drafted. table: embeddings [vocab, size]. work: as for a forward, and 2 rows * size + rows * vocab more. */
int64_t draftproof_chain(Read *read, const Layer *layers, int64_t count, bf16 *const *stores, const bf16 *norm, const Linear *head,
                         const bf16 *table, const bf16 *logits, int64_t steps, const float *noise, const int64_t *places,
                         const float *heats, const float *trusts, float floor, int64_t absent, int64_t *tokens, bf16 *work) {
    int64_t rows = read->rows, vocab = head->outputs, size = head->size;
    bf16 *hidden = work, *last = hidden + rows * size, *own = last + rows * size, *rest = own + rows * vocab;
    int64_t parents[rows * (steps + 1)], where[rows], found[rows];
    float odds[rows], sums[rows];
    memset(sums, 0, sizeof sums);
    for (int64_t d = 0;;) {
        for (int64_t r = 0; r < rows; r++) where[r] = places ? places[r] + d : 0;
        draftproof_best(d ? own : logits, noise, where, heats, trusts, rows, vocab, 1, odds, found, read->threads);
        float top = -INFINITY;
        for (int64_t r = 0; r < rows; r++) {
            int gone = d > 0 && tokens[r * steps + d - 1] == absent;
            tokens[r * steps + d] = gone || odds[r] == -INFINITY ? absent : found[r];
            sums[r] += odds[r];
            top = sums[r] > top ? sums[r] : top;
        }
        d++;
        if (d == steps || top < floor) return d;
        for (int64_t r = 0; r < rows; r++) {
            int64_t token = tokens[r * steps + d - 1];
            memcpy(hidden + r * size, table + (token == absent ? 0 : token) * size, (size_t)size * sizeof(bf16));
            for (int64_t node = 0; node <= d; node++) parents[r * (d + 1) + node] = node - 1;
        }
        read->parents = parents, read->first = d, read->nodes = d + 1;
        draftproof_forward(read, layers, count, stores, norm, hidden, last, NULL, rest);
        draftproof_linear(head, last, own, rows, read->threads);
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

/* A recurrent draft head. Without `fed` the state is the sum of embeddings; `smooth`: through SiLU; `first`: the bias of `back`
 * counts where there is no state yet. narrow: in front of the blocks, if its size is not 0. table: [vocab, hidden]. */
typedef struct {
    Linear fed, back, narrow, projection;
    const Linear *blocks;
    const bf16 *table;
    int64_t hidden, layers, recurs, smooth, first;
} Recurrence;

/* x [rows, hidden] embeddings of the next tokens and, behind the first, `back` the states before them, become states. */
static void advanced(const Recurrence *head, bf16 *x, const bf16 *before, bf16 *beside, int64_t rows, int64_t threads) {
    int64_t size = head->hidden, all = rows * size;
    bf16 *more = beside + all;
    if (head->recurs) {
        draftproof_linear(&head->fed, x, beside, rows, threads);
        memcpy(x, beside, (size_t)all * sizeof(bf16));
        if (before) draftproof_linear(&head->back, before, more, rows, threads);
        else if (head->first && head->back.bias)
            for (int64_t r = 0; r < rows; r++) memcpy(more + r * size, head->back.bias, (size_t)size * sizeof(bf16));
        else memset(more, 0, (size_t)all * sizeof(bf16));
    } else if (before) memcpy(more, before, (size_t)all * sizeof(bf16));
    else memset(more, 0, (size_t)all * sizeof(bf16));
    for (int64_t i = 0; i < all; i += LANES) {
        narrowed(x + i, wide(x + i) + wide(more + i));
        lanes v = wide(x + i);
        if (head->recurs && head->smooth) narrowed(x + i, v / (1.0f + expo(-v)));
    }
}

/* Beam search: `length` steps of `width` beams and as many children of each, behind context [rows, hidden] and roots [rows]. All
 * that is weighed goes into pools [rows, .]: tokens, parents (places in the pool), logarithms of the chance of the path; the root
 * is in place 0. A search may end early below `floor`, as a chain does. Returns the size of a pool. work: room for
 * rows * width * (8 hidden + 2 wide + vocab) numbers, where wide is the projection's size. */
int64_t draftproof_search(const Recurrence *head, const bf16 *context, const int64_t *roots, int64_t rows, int64_t width, int64_t length,
                          const float *noise, const int64_t *places, const float *heats, const float *trusts, float floor,
                          int64_t *tokens, int64_t *parents, float *chances, int64_t room, bf16 *work, int64_t threads) {
    int64_t hidden = head->hidden, wider = head->projection.size, vocab = head->projection.outputs, most = rows * width;
    bf16 *states[2] = {work, work + most * hidden}, *before = states[1] + most * hidden, *beside = before + most * hidden;
    bf16 *pairs = beside + 2 * most * hidden, *x = pairs + 2 * most * hidden, *room_beside = x + most * wider;
    bf16 *logits = room_beside + most * wider;
    int64_t ends[most], above[most], where[most], found[most * width], size = 1, beams = 1;
    float sums[most], odds[most * width], heat[most], trust[most];
    for (int64_t r = 0; r < rows; r++) {
        tokens[r * room] = roots[r], parents[r * room] = 0, chances[r * room] = 0;
        ends[r * width] = 0, sums[r * width] = 0;
    }
    for (int64_t d = 0; d < length; d++) {
        bf16 *state = states[d % 2], *last = states[(d + 1) % 2];
        int64_t count = rows * beams;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t b = 0; b < beams; b++) {
                int64_t at = r * beams + b, token = tokens[r * room + ends[r * width + b]];
                memcpy(state + at * hidden, head->table + token * hidden, (size_t)hidden * sizeof(bf16));
                if (d) memcpy(before + at * hidden, last + above[r * width + b] * hidden, (size_t)hidden * sizeof(bf16));
                where[at] = places ? places[r] + d : 0, heat[at] = heats[r], trust[at] = trusts[r];
            }
        advanced(head, state, d ? before : NULL, beside, count, threads);
        for (int64_t at = 0; at < count; at++) {
            memcpy(pairs + 2 * at * hidden, context + at / beams * hidden, (size_t)hidden * sizeof(bf16));
            memcpy(pairs + (2 * at + 1) * hidden, state + at * hidden, (size_t)hidden * sizeof(bf16));
        }
        if (head->narrow.size) draftproof_linear(&head->narrow, pairs, x, count, threads);
        else memcpy(x, pairs, (size_t)(2 * count * hidden) * sizeof(bf16));
        for (int64_t l = 0; l < head->layers; l++) draftproof_residual(head->blocks + l, x, room_beside, count, threads);
        draftproof_linear(&head->projection, x, logits, count, threads);
        draftproof_best(logits, noise, where, heat, trust, count, vocab, width, odds, found, threads);
        float top = -INFINITY;
        for (int64_t r = 0; r < rows; r++) {
            Scored best[width];
            for (int64_t b = 0; b < width; b++) best[b] = (Scored){-INFINITY, size};
            for (int64_t b = 0; b < beams; b++)
                for (int64_t k = 0; k < width; k++) {
                    int64_t at = (r * beams + b) * width + k, place = size + b * width + k;
                    tokens[r * room + place] = found[at], parents[r * room + place] = ends[r * width + b];
                    float chance = chances[r * room + place] = sums[r * width + b] + odds[at];
                    if (chance > best[width - 1].score) ranked(best, width, chance, place);
                }
            for (int64_t b = 0; b < width; b++) {
                ends[r * width + b] = best[b].token, sums[r * width + b] = best[b].score;
                above[r * width + b] = r * beams + (best[b].token - size) / width;
            }
            top = best->score > top ? best->score : top;
        }
        size += beams * width, beams = width;
        if (top < floor) break;
    }
    return size;
}

typedef uint32_t words __attribute__((vector_size(64)));

static inline words mixed(words x) {            /* lowbias32, as in core/noise.py */
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}

/* Standard Gumbel noise, one per token, of streams [rows, 2]: out [rows, vocab]. The uniform has 31 bits near 0. */
void draftproof_gumbel(const int32_t *streams, float *out, int64_t rows, int64_t vocab, int64_t threads) {
    int64_t blocks = (vocab + LANES - 1) / LANES;
    words steps;
    for (int l = 0; l < LANES; l++) steps[l] = (uint32_t)l * 0x9E3779B9u;
#pragma omp parallel for num_threads(threads) collapse(2) if (rows * vocab > SMALL)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < blocks; b++) {
            words x = (uint32_t)streams[2 * r] ^ (steps + (uint32_t)(b * LANES) * 0x9E3779B9u);
            x = mixed(mixed(x) + (uint32_t)streams[2 * r + 1]);
            lanes u = (__builtin_convertvector((bits)(x & 0x7FFFFFFFu), lanes) + 0.5f) * 0x1p-31f;
            u = -larger(-u, (lanes){} - (1 - 0x1p-24f));
            lanes left = 1.0f - u, wait = logarithm(left) * u / (left - 1.0f);              /* log1p, exact where u is small */
            bits tiny = left == 1.0f;
            wait = (lanes)(((bits)u & tiny) | ((bits)wait & ~tiny));
            lanes noise = -logarithm(wait);
            int64_t at = b * LANES, some = vocab - at < LANES ? vocab - at : LANES;
            memcpy(out + r * vocab + at, &noise, (size_t)some * sizeof(float));
        }
}
