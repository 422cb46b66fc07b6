/* Linear layers in 4 bits: weights in groups of 32 with a scale and a minimum, activations in 8 bits with a scale for each token and
 * group. Sums within a group are of integers, and groups follow each other in order, so a row has the same bits whatever rows lie
 * beside it, on every level. */
#include "tiles.h"

/* Up to MOST rows at once, STEP groups of up to STRIPS strips: what stays in the first cache. */
#if LANES == 16
enum { MOST = 12 };
#else
enum { MOST = 4 };
#endif
enum { GROUP = 32, SUPER = 8, STRIP = 32, SIDES = STRIP / LANES, STRIPS = 4, STEP = 16, LINE = STRIP * 4, BYTES = 4 * LINE, ROWS = 64 };

typedef struct {
    const Linear *layer;
    const bf16 *inputs;
    int8_t *codes;                              /* of `beside` rows, group by group [groups, beside, GROUP] */
    float *units;                               /* likewise [groups, beside, 2]: what codes are multiplied with, and that times their sum */
    bf16 *out;
    int64_t rows, chunks, groups;
} Product;

static inline int64_t begin(const Product *of, int64_t chunk) { return of->rows * chunk / of->chunks; }

/* A row of activations in codes, the largest of each group 127. */
static void coded(const Product *of, int64_t row) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    int64_t chunk = ((row + 1) * of->chunks - 1) / of->rows, from = begin(of, chunk), beside = begin(of, chunk + 1) - from;
    int64_t size = of->layer->size;
    const bf16 *x = of->inputs + row * size;
    for (int64_t g = 0; g < of->groups; g++) {
        int64_t place = from * of->groups + g * beside + row - from;
        lanes v[SIDES], top = {};
        bits broken = {}, sum = {};
        for (int h = 0; h < SIDES; h++) {
            int64_t i = g * GROUP + h * LANES;
            v[h] = i + LANES <= size ? wide(x + i) : partly(x + i, i < size ? size - i : 0);
            top = larger(absolute(v[h]), top);
            broken |= v[h] != v[h];
        }
        float most = some_of(broken) ? NAN : largest(top), factor = most > 0 ? 127.0f / most : 0;
        for (int h = 0; h < SIDES; h++) {
            bits code = __builtin_convertvector(v[h] * factor + 128.5f, bits) - 128;        /* to the nearest, by cutting off */
            bytes narrow = __builtin_convertvector(code, bytes);
            memcpy(of->codes + place * GROUP + h * LANES, &narrow, sizeof narrow);
            sum += code;
        }
        int32_t all = 0;
        for (int l = 0; l < LANES; l++) all += sum[l];
        of->units[2 * place] = most / 127.0f, of->units[2 * place + 1] = of->units[2 * place] * (float)all;
    }
}

/* Sums of products of four weights of 0 to 15 with four codes, and these as numbers: on AVX2 two of 16 bits until a group is full, which
 * holds 32 * 15 * 127 / 2. */
static inline bits dotted(bits sum, bits weights, const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, sizeof four);
#if LANES == 16 && defined(__AVX512VNNI__)
    return (bits)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
#elif AVX2 && defined(__AVXVNNI__)
    return (bits)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(four));
#elif AVX2
    return (bits)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(four)));
#else
    return sum + weights * four;                                                            /* never called */
#endif
}

static inline lanes number(bits sum) {
#if AVX2 && !defined(__AVXVNNI__)
    sum = (bits)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
#endif
    return __builtin_convertvector(sum, lanes);
}

static inline lanes fused(lanes a, lanes b, lanes c) {
#if LANES == 16
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif AVX2
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

static inline lanes from_half(const uint16_t *from) {
#if LANES == 16
    return (lanes)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif AVX2
    return (lanes)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    return (lanes){} + (float)*from;                                                        /* never called */
#endif
}

/* Scales, or minima, of LANES outputs from the `at`-th on of strip `s` in group `g`: in half precision, or, with those of supergroups,
 * whole numbers times them. */
static inline lanes scales(const Linear *layer, int64_t groups, int64_t s, int64_t g, int64_t at) {
    int64_t place = (s * groups + g) * 2 * STRIP + at;
    if (!layer->supers) return from_half((const uint16_t *)layer->groups + place);
    typedef uint8_t bytes __attribute__((vector_size(LANES)));
    bytes some;
    memcpy(&some, (const uint8_t *)layer->groups + place, sizeof some);
    lanes super = from_half(layer->supers + (s * ((groups + SUPER - 1) / SUPER) + g / SUPER) * 2 * STRIP + at);
    return super * __builtin_convertvector(some, lanes);
}

/* Groups `g` to `end` of R rows of one chunk times a strip, V vectors of outputs at a time: sums go on from `to`. Meanwhile memory is
 * asked for the weights at `ahead`, `step` bytes for each word of these. */
static inline __attribute__((always_inline)) void strip_of(const Product *of, const int R, const int V, int64_t from, int64_t s, int64_t g,
                                                           int64_t end, const char *ahead, int64_t step, lanes (*to)[SIDES]) {
    const Linear *layer = of->layer;
    for (int side = 0; side < SIDES; side += V)
        for (int64_t i = g; i < end; i++) {
            const char *weights = (const char *)layer->weights + (s * of->groups + i) * BYTES + side * sizeof(bits);
            const int8_t *codes = of->codes + (from * of->groups + i * R) * GROUP;
            const float *units = of->units + (from * of->groups + i * R) * 2;
            bits sum[MOST][4];
            _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
                _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) sum[r][v] = (bits){};
            _Pragma("GCC unroll 4") for (int word = 0; word < 4; word++, ahead += step) {
                bits low[4], high[4];
                _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
                    bits w;
                    memcpy(&w, weights + word * LINE + v * sizeof(bits), sizeof w);
                    low[v] = w & 0x0f0f0f0f, high[v] = (w >> 4) & 0x0f0f0f0f;
                }
                __builtin_prefetch(ahead);
                if (step > 64) __builtin_prefetch(ahead + 64);
                _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
                    _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
                        sum[r][v] = dotted(sum[r][v], low[v], codes + r * GROUP + word * 8);
                        sum[r][v] = dotted(sum[r][v], high[v], codes + r * GROUP + word * 8 + 4);
                    }
            }
            _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) {
                int64_t at = (side + v) * LANES;
                lanes scale = scales(layer, of->groups, s, i, at), least = scales(layer, of->groups, s, i, STRIP + at);
                _Pragma("GCC unroll 12") for (int r = 0; r < R; r++) {
                    lanes y = fused(scale * units[2 * r], number(sum[r][v]), to[r][side + v]);
                    to[r][side + v] = fused(least, (lanes){} + units[2 * r + 1], y);
                }
            }
        }
}

#define ROWS_OF(R, V) \
    static void strip_of_##R(const Product *of, int64_t from, int64_t s, int64_t g, int64_t end, const char *ahead, int64_t step, \
                             lanes (*to)[SIDES]) { \
        strip_of(of, R, V, from, s, g, end, ahead, step, to); \
    }
ROWS_OF(1, (SIDES > 4 ? 4 : SIDES)) ROWS_OF(2, (SIDES > 4 ? 4 : SIDES)) ROWS_OF(3, 2) ROWS_OF(4, 2)
typedef void (*Rows)(const Product *, int64_t, int64_t, int64_t, int64_t, const char *, int64_t, lanes (*)[SIDES]);
#if LANES == 16
ROWS_OF(5, 2) ROWS_OF(6, 2) ROWS_OF(7, 2) ROWS_OF(8, 2) ROWS_OF(9, 2) ROWS_OF(10, 2) ROWS_OF(11, 2) ROWS_OF(12, 2)
static const Rows strips_of[MOST] = {strip_of_1, strip_of_2, strip_of_3, strip_of_4, strip_of_5, strip_of_6,
                                     strip_of_7, strip_of_8, strip_of_9, strip_of_10, strip_of_11, strip_of_12};
#else
static const Rows strips_of[MOST] = {strip_of_1, strip_of_2, strip_of_3, strip_of_4};
#endif

static inline int64_t passes_of(int64_t rows) { return rows < 3 || SIDES < 4 ? 1 : SIDES / 2; }

/* The outputs of strips `first` to `last`, at most STRIPS, for chunks `top` to `bottom`, at most ROWS rows. */
static void panel(const Product *of, int64_t first, int64_t last, int64_t top, int64_t bottom) {
    const Linear *layer = of->layer;
    int64_t row = begin(of, top), end = begin(of, bottom), passes = 0;
    lanes sums[STRIPS][ROWS][SIDES];
    for (int64_t s = first; s < last; s++) memset(sums[s - first], 0, (size_t)(end - row) * sizeof **sums);
    for (int64_t c = top; c < bottom; c++) passes += passes_of(begin(of, c + 1) - begin(of, c));
    for (int64_t g = 0; g < of->groups; g += STEP)
        for (int64_t s = first; s < last; s++) {
            int64_t stop = g + STEP < of->groups ? g + STEP : of->groups, step = LINE / passes;
            int64_t next = s + 1 < last ? (s + 1) * of->groups + g : first * of->groups + g + STEP;
            const char *ahead = (const char *)layer->weights + next * BYTES;
            for (int64_t c = top; c < bottom; c++) {
                int64_t from = begin(of, c), beside = begin(of, c + 1) - from;
                strips_of[beside - 1](of, from, s, g, stop, ahead, step, sums[s - first] + (from - row));
                ahead += passes_of(beside) * (stop - g) * 4 * step;
            }
        }
    for (int64_t s = first; s < last; s++)
        for (int64_t r = row; r < end; r++) {
            int64_t start = s * STRIP, some = layer->outputs - start;
            bf16 rest[STRIP];
            for (int h = 0; h < SIDES; h++) {
                lanes y = sums[s - first][r - row][h];
                narrowed(rest + h * LANES, layer->bias ? y + wide(layer->bias + start + h * LANES) : y);
            }
            memcpy(of->out + r * layer->outputs + start, rest, (size_t)(some < STRIP ? some : STRIP) * sizeof(bf16));
        }
}

/* As draftproof_multiply, of a layer with groups. */
void draftproof_multiply_groups(const Linear *layer, const bf16 *inputs, bf16 *out, int64_t rows, int64_t threads) {
    int64_t strips = (layer->outputs + STRIP - 1) / STRIP, chunks = (rows + MOST - 1) / MOST, groups = (layer->size + GROUP - 1) / GROUP;
    int64_t parts = threads * ((strips + threads * STRIPS - 1) / (threads * STRIPS));
    Product of = {layer, inputs, NULL, NULL, out, rows, chunks, groups};
#pragma omp single copyprivate(of)
    {
        of.units = scratch(rows * groups * (2 + GROUP / 4));
        of.codes = (int8_t *)(of.units + 2 * rows * groups);
    }
#pragma omp for
    for (int64_t r = 0; r < rows; r++) coded(&of, r);
#pragma omp for nowait
    for (int64_t p = 0; p < parts; p++)
        for (int64_t c = 0; c < chunks; c += ROWS / MOST) {
            int64_t first = strips * p / parts, last = strips * (p + 1) / parts;
            if (first < last) panel(&of, first, last, c, c + ROWS / MOST < chunks ? c + ROWS / MOST : chunks);
        }
}
