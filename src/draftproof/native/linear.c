/* Linear layers, in bfloat16 and in 8 bits: by tiles where the processor has them (AMX), else by vectors. */
#define _GNU_SOURCE
#include "tiles.h"

#if TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* MOST rows at once, CHUNKS of them with the same weights; BLOCK words of a row: of a tile, or so many that they stay in the
 * first cache; STRIPS of outputs beside each other, of SIDES vectors each. Weights wanted AHEAD words later are asked for, and, where
 * MANY rows leave time, those wanted FAR later for the second cache; by vectors of 8, which pass over a block several times, those of
 * the next block, some in each pass. */
#if TILES
enum { FOUR = 4, MOST = 16, CHUNKS = 8, BLOCK = 16, STRIPS = 2, AHEAD = 64 };
#elif LANES == 16
enum { FOUR = 4, MOST = 12, CHUNKS = 8, BLOCK = 256, STRIPS = 4, AHEAD = 64, FAR = 192, MANY = 6 };
#else
enum { FOUR = 4, MOST = 5, CHUNKS = 16, BLOCK = 64, STRIPS = 4, AHEAD = BLOCK };
#endif
#if LANES < 16
enum { FAR = 0, MANY = MOST + 1 };
#endif
enum { STRIP = 32, SIDES = STRIP / LANES, LINE = STRIP * (int)sizeof(int32_t) };         /* bytes of one word of a strip's weights */

/* Activations are read in words, of two numbers or four codes: of 32 bits each, or, where vectors of 8 multiply them, of 64, as two
 * of float or four of 16 bits, first and third, second and fourth. */
enum { WIDE_PAIRS = LANES == 16 ? 1 : 2 };
#if AVX2 && !defined(__AVXVNNI__)
#define WIDE_CODES 1
#else
#define WIDE_CODES 0
#endif
typedef int8_t bytes __attribute__((vector_size(LANES)));

/* Words of `beside` rows lie block by block, a block of one row after that of another: where word `i` of a row lies, seen from its
 * first. */
static inline int64_t place(int64_t i, int64_t beside) { return i / BLOCK * BLOCK * beside + i % BLOCK; }

/* A row of activations laid out so, zeros up to `padded`. */
static void laid(const bf16 *x, int64_t size, int64_t padded, int32_t *words, int64_t beside) {
    if (WIDE_PAIRS == 2) {
        for (int64_t i = 0; i < padded; i += LANES) {
            lanes v = i + LANES <= size ? wide(x + i) : partly(x + i, i < size ? size - i : 0);
            memcpy(words + 2 * place(i / 2, beside), &v, sizeof v);
        }
        return;
    }
    for (int64_t i = 0; i < padded; i += 2 * BLOCK) {
        int64_t room = padded - i < 2 * BLOCK ? padded - i : 2 * BLOCK, some = size - i < room ? size - i : room;
        bf16 *to = (bf16 *)(words + place(i / 2, beside));
        if (some == 2 * BLOCK) {
            memcpy(to, x + i, 2 * BLOCK * sizeof *to);          /* of a size that the compiler knows */
            continue;
        }
        memcpy(to, x + i, (size_t)some * sizeof *to);
        memset(to + some, 0, (size_t)(room - some) * sizeof *to);
    }
}

/* Linear layers in 8 bits: sums are of integers, hence the same in any order. */

/* The largest of a row of activations, NaN if one is. */
static float loudest(const bf16 *x, int64_t size) {
    int64_t whole = size / LANES * LANES;
    lanes top = {};
    bits broken = {};
    for (int64_t i = 0; i < size; i += LANES) {
        lanes v = i < whole ? wide(x + i) : partly(x + i, size - i);
        top = larger(absolute(v), top);
        broken |= v != v;
    }
    float most = 0;
    for (int l = 0; l < LANES; l++) most = broken[l] ? NAN : top[l] > most ? top[l] : most;
    return most;
}

/* Numbers times 127 over the largest of them, to the nearest whole one, by cutting off. */
static inline bits whole_of(lanes x, float factor) { return __builtin_convertvector(x * factor + 128.5f, bits) - 128; }

/* A row of activations to 8 bits around 0, the largest to 127, laid out so, zeros up to `padded`. Returns the sum of the codes. */
static int32_t coded(const bf16 *x, int64_t size, int64_t padded, int32_t *words, int64_t beside, float *most) {
    *most = loudest(x, size);
    float factor = *most > 0 ? 127.0f / *most : 0;
    bits sum = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        bits code = whole_of(i + LANES <= size ? wide(x + i) : partly(x + i, i < size ? size - i : 0), factor);
#if WIDE_CODES
        __m128i narrow = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)code), _mm256_extracti128_si256((__m256i)code, 1));
        narrow = _mm_shuffle_epi8(narrow, _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
        memcpy(words + 2 * place(i / FOUR, beside), &narrow, sizeof narrow);
#else
        bytes narrow = __builtin_convertvector(code, bytes);
        memcpy(words + place(i / FOUR, beside), &narrow, sizeof narrow);
#endif
        sum += code;
    }
    int32_t all = 0;
    for (int l = 0; l < LANES; l++) all += sum[l];
    return all;
}

typedef union { bits whole; lanes real; } Sum;

int draftproof_tiles;

#if TILES
/* Whether a process may use tiles, for which the kernel of the system has to be asked. */
int64_t draftproof_usable(void) {
    enum { ASK = 0x1023, TILE_DATA = 18 };
    draftproof_tiles = !syscall(SYS_arch_prctl, ASK, TILE_DATA);
    return draftproof_tiles;
}

static _Thread_local int64_t form;                                                         /* of a thread's tiles; 0 if it has none */

/* Tiles for chunks of so many rows; the lower may have none: sums 0 to 3, rows 4 and 5, weights 6 and 7. */
static void tiled(int64_t upper, int64_t lower) {
    int64_t wanted = upper * (MOST + 1) + lower;
    if (form == wanted) return;
    form = wanted;
    uint8_t first = (uint8_t)upper, second = (uint8_t)(lower ? lower : upper);
    Tiles tiles = {.palette = 1, .rows = {first, first, second, second, first, second, 16, 16}};
    for (int tile = 0; tile < 8; tile++) tiles.bytes[tile] = 64;
    WRITTEN;
    _tile_loadconfig(&tiles);
}

/* The thread needs its tiles no more. */
static void released(void) {
    _tile_release();
    form = 0;
}

enum { STEP = BLOCK * LINE, STEPS = 64, EARLY = AHEAD / BLOCK };      /* bytes of a strip in a step; steps */

/* Ask memory for the weights EARLY steps behind those of step `i`. */
static inline void ahead(int64_t i, int64_t steps, const char *here, const char *next) {
    const char *from = i + EARLY < steps ? here + EARLY * STEP : next + (i + EARLY - steps) * STEP;
    _Pragma("GCC unroll 32") for (int line = 0; line < STEP; line += 64) __builtin_prefetch(from + line);
}

/* Sums of two chunks begin at zero, or go on from what was stored: to load what was just written would wait for it. */
#define BEGIN(SUMS, OTHER)                                                                                             \
    if (fresh) {                                                                                                       \
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);                                                    \
    } else {                                                                                                           \
        _tile_loadd(0, SUMS, 128); _tile_loadd(1, &(SUMS)[0][1], 128);                                                 \
        _tile_loadd(2, OTHER, 128); _tile_loadd(3, &(OTHER)[0][1], 128);                                               \
    }

/* So many steps of one chunk times two strips, or of two chunks times one strip, with sums [2 LANES] of each row, each along its
 * row, `fresh` or on from those that are there. Memory is asked for weights AHEAD of time, at the end for those at `next`. */
#define TILED(NAME, TIMES)                                                                                             \
    static void NAME##_strips(const int32_t *words, int64_t beside, const char *one, const char *two, const char *next, \
                              const char *after, int64_t steps, int fresh, Sum (*sums)[2], Sum (*other)[2]) {          \
        BEGIN(sums, other)                                                                                             \
        for (int64_t i = 0; i < steps; i++, words += beside * BLOCK, one += STEP, two += STEP) {                        \
            _tile_loadd(4, words, 64);                                                                                 \
            _tile_loadd(6, one, 128);                                                                                  \
            TIMES(0, 4, 6);                                                                                            \
            _tile_loadd(7, one + 64, 128);                                                                             \
            TIMES(1, 4, 7);                                                                                            \
            _tile_loadd(6, two, 128);                                                                                  \
            TIMES(2, 4, 6);                                                                                            \
            _tile_loadd(7, two + 64, 128);                                                                             \
            TIMES(3, 4, 7);                                                                                            \
            ahead(i, steps, one, next), ahead(i, steps, two, after);                                                   \
        }                                                                                                              \
        _tile_stored(0, sums, 128); _tile_stored(1, &sums[0][1], 128);                                                 \
        _tile_stored(2, other, 128); _tile_stored(3, &other[0][1], 128);                                               \
    }                                                                                                                  \
    static void NAME##_chunks(const int32_t *upper, int64_t above, const int32_t *lower, int64_t below,                \
                              const char *weights, const char *next, int64_t steps, int fresh, Sum (*sums)[2]) {       \
        BEGIN(sums, sums + above)                                                                                      \
        for (int64_t i = 0; i < steps; i++, upper += above * BLOCK, lower += below * BLOCK, weights += STEP) {         \
            _tile_loadd(6, weights, 128);                                                                              \
            _tile_loadd(4, upper, 64);                                                                                 \
            TIMES(0, 4, 6);                                                                                            \
            _tile_loadd(5, lower, 64);                                                                                 \
            TIMES(2, 5, 6);                                                                                            \
            _tile_loadd(7, weights + 64, 128);                                                                         \
            TIMES(1, 4, 7);                                                                                            \
            TIMES(3, 5, 7);                                                                                            \
            ahead(i, steps, weights, next);                                                                            \
        }                                                                                                              \
        _tile_stored(0, sums, 128); _tile_stored(1, &sums[0][1], 128);                                                 \
        _tile_stored(2, sums + above, 128); _tile_stored(3, &sums[above][1], 128);                                     \
    }
#define HAS_INT8 1
#define HAS_BF16 1
TILED(fours, _tile_dpbsud)
TILED(pairs, _tile_dpbf16ps)
#else
#if LANES == 16
typedef bits Weight;
static inline Weight weight_of(const char *from) {
    bits w;
    memcpy(&w, from, sizeof w);
    return w;
}
#define pair_of weight_of
#define four_of weight_of
static inline lanes pair_added(lanes sum, bits weight, const int32_t *word) { return paired(sum, weight, *word); }

/* sum[l] += the product of weights 4 l to 4 l + 3, unsigned, with the same four activations, signed. */
static inline bits four_added(bits sum, bits weight, const int32_t *word) {
#ifdef __AVX512VNNI__
    return (bits)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, _mm512_set1_epi32(*word));
#else
    return sum + weight * *word;                                                            /* never called */
#endif
}
#else
/* Two numbers of each output, or, of four codes, the first and third, and the second and fourth. */
typedef struct { bits even, odd; } Weight;
static inline Weight pair_of(const char *from) {
    bits w;
    memcpy(&w, from, sizeof w);
    return (Weight){w << 16, w & ~0xffff};
}

static inline lanes pair_added(lanes sum, Weight weight, const int32_t *word) {
    lanes first = (lanes)((bits){} + word[0]), second = (lanes)((bits){} + word[1]);
#if AVX2
    sum = (lanes)_mm256_fmadd_ps((__m256)weight.even, (__m256)first, (__m256)sum);
    return (lanes)_mm256_fmadd_ps((__m256)weight.odd, (__m256)second, (__m256)sum);
#else
    return sum + (lanes)weight.even * first + (lanes)weight.odd * second;
#endif
}

static inline Weight four_of(const char *from) {
    bits w;
    memcpy(&w, from, sizeof w);
#if WIDE_CODES
    return (Weight){w & 0x00ff00ff, (bits)((words)w >> 8) & 0x00ff00ff};
#else
    return (Weight){w, w};
#endif
}

/* Products of 8 by 8 bits as sums of two of 16, which do not saturate. */
static inline bits four_added(bits sum, Weight weight, const int32_t *word) {
#if AVX2 && WIDE_CODES
    sum += (bits)_mm256_madd_epi16((__m256i)weight.even, _mm256_set1_epi32(word[0]));
    return sum + (bits)_mm256_madd_epi16((__m256i)weight.odd, _mm256_set1_epi32(word[1]));
#elif AVX2
    return (bits)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weight.even, _mm256_set1_epi32(*word));
#else
    return sum + weight.even * *word;                                                       /* never called */
#endif
}
#endif
#if AVX2 || (defined(__AVX512VNNI__) && defined(__AVX512BF16__))
#define HAS_INT8 1
#define HAS_BF16 1
#else
#define HAS_INT8 0
#define HAS_BF16 0
#endif

#define BEYOND ((FAR - AHEAD) * LINE)

/* R rows times V vectors of outputs at a time; numbers, so that all sums stay in registers. `words` are those of one block; every sum
 * runs in their order, on from what `to` holds. Memory is asked for weights AHEAD of time, `step` bytes a word, at the end for those at
 * `after`. */
#define MULTIPLY(R, V, NAME, SUMS, WIDTH)                                                                              \
    static void NAME##s_##R(const int32_t *block, const char *strip, int64_t count, const char *after, int64_t step,    \
                            Sum (*to)[SIDES]) {                                                                        \
        for (int side = 0; side < SIDES; side += V) {                                                                  \
            SUMS held[R][V];                                                                                           \
            const int32_t *words = block;                                                                              \
            const char *weights = strip + side * sizeof(bits), *next = after + side / V * count * step;                \
            for (int r = 0; r < R; r++) memcpy(held[r], &to[r][side], sizeof held[r]);                                 \
            int64_t last = count < AHEAD ? count : AHEAD;                                                              \
            const char *ahead = weights + AHEAD * LINE;                                                                \
            for (int64_t left = count - last;; left = last, last = 0, ahead = next) {                                  \
                for (; left > 0; left--) {                                                                             \
                    Weight weight[V];                                                                                  \
                    _Pragma("GCC unroll 4") for (int v = 0; v < V; v++) weight[v] = NAME##_of(weights + v * sizeof(bits)); \
                    __builtin_prefetch(ahead);                                                                         \
                    if (LANES == 16 || step > 64) __builtin_prefetch(ahead + 64);                                      \
                    if (R >= MANY) __builtin_prefetch(ahead + BEYOND, 0, 2), __builtin_prefetch(ahead + BEYOND + 64, 0, 2); \
                    _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)                                               \
                        _Pragma("GCC unroll 4") for (int v = 0; v < V; v++)                                            \
                            held[r][v] = NAME##_added(held[r][v], weight[v], words + r * BLOCK * WIDTH);               \
                    words += WIDTH, weights += LINE, ahead += step;                                                    \
                }                                                                                                      \
                if (last == 0) break;                                                                                  \
            }                                                                                                          \
            for (int r = 0; r < R; r++) memcpy(&to[r][side], held[r], sizeof held[r]);                                 \
        }                                                                                                              \
    }
typedef void (*Multiply)(const int32_t *, const char *, int64_t, const char *, int64_t, Sum (*)[SIDES]);
static inline int64_t passes_of(int64_t rows) { return rows < 3 ? 1 : SIDES / 2; }
#define FEW(...) MULTIPLY(1, SIDES, __VA_ARGS__) MULTIPLY(2, SIDES, __VA_ARGS__)                                       \
    MULTIPLY(3, 2, __VA_ARGS__) MULTIPLY(4, 2, __VA_ARGS__) MULTIPLY(5, 2, __VA_ARGS__)
FEW(pair, lanes, WIDE_PAIRS)
FEW(four, bits, (1 + WIDE_CODES))
#if LANES == 16
#define MORE(...) MULTIPLY(6, 2, __VA_ARGS__) MULTIPLY(7, 2, __VA_ARGS__) MULTIPLY(8, 2, __VA_ARGS__)                  \
    MULTIPLY(9, 2, __VA_ARGS__) MULTIPLY(10, 2, __VA_ARGS__) MULTIPLY(11, 2, __VA_ARGS__) MULTIPLY(12, 2, __VA_ARGS__)
MORE(pair, lanes, WIDE_PAIRS)
MORE(four, bits, (1 + WIDE_CODES))
static const Multiply multiply[2][MOST] = {
    {pairs_1, pairs_2, pairs_3, pairs_4, pairs_5, pairs_6, pairs_7, pairs_8, pairs_9, pairs_10, pairs_11, pairs_12},
    {fours_1, fours_2, fours_3, fours_4, fours_5, fours_6, fours_7, fours_8, fours_9, fours_10, fours_11, fours_12},
};
#else
static const Multiply multiply[2][MOST] = {{pairs_1, pairs_2, pairs_3, pairs_4, pairs_5}, {fours_1, fours_2, fours_3, fours_4, fours_5}};
#endif

static void released(void) {}                                                               /* vectors leave nothing behind */

int64_t draftproof_usable(void) { return 1; }
#endif

/* Bit 0: linear layers of 8, and of 4, bits can be read here; bit 1: those of bfloat16; bit 2: by tiles. */
int64_t draftproof_linears(void) { return HAS_INT8 | HAS_BF16 << 1 | TILES << 2; }

/* A product in the making. Chunks are rows that lie beside each other. */
typedef struct {
    const Linear *layer;
    int64_t rows, chunks, count, stretch;       /* count: words of a row; stretch: with those its last block has room for, of */
    int64_t width;                              /* so many times 32 bits */
    const bf16 *inputs;
    int32_t *words;
    float *most;                                /* [rows] the largest input of each, and the sum of its codes, times 128 */
    int32_t *offset;
    bf16 *out;
} Product;

static inline int64_t begin(const Product *of, int64_t chunk) { return of->rows * chunk / of->chunks; }

/* Weights of a strip from a word on. */
static inline const char *weights(const Product *of, int64_t strip, int64_t word) {
    return (const char *)of->layer->weights + (strip * of->count + word) * LINE;
}

/* Of 8 bits, an output is the sum times the row's largest input times the scale. */
static inline lanes output(const Product *of, Sum sum, int64_t row, int64_t start) {
    const Linear *layer = of->layer;
    lanes y = sum.real;
    if (layer->scale) {
        y = __builtin_convertvector(sum.whole - of->offset[row], lanes) * loaded(layer->scale + start) * of->most[row];
    }
    return layer->bias ? y + wide(layer->bias + start) : y;
}

/* Sums of strips `first` to `last` and rows `row` to `end` become outputs. */
static void finish(const Product *of, int64_t first, int64_t last, int64_t row, int64_t end, Sum (*sums)[CHUNKS * MOST][SIDES]) {
    int64_t outputs = of->layer->outputs;
    for (int64_t s = first; s < last; s++)
        for (int64_t r = row; r < end; r++) {
            int64_t start = s * STRIP, some = outputs - start;
            bf16 rest[STRIP], *to = of->out + r * outputs + start, *done = some < STRIP ? rest : to;
            for (int h = 0; h < SIDES; h++)
                narrowed(done + h * LANES, output(of, sums[s - first][r - row][h], r, start + h * LANES));
            if (done == rest) memcpy(to, rest, (size_t)some * sizeof(bf16));
        }
}

#if TILES
/* The outputs of strips `first` to `last`, at most STRIPS, for chunks `top` to `bottom`, at most CHUNKS. */
static void panel(const Product *of, int64_t first, int64_t last, int64_t top, int64_t bottom) {
    int64_t row = begin(of, top), end = begin(of, bottom), small = of->layer->scale != NULL, steps = of->count / BLOCK;
    Sum sums[STRIPS][CHUNKS * MOST][SIDES];
    if (first == last) return;                                                              /* more threads than strips */
    for (int64_t b = 0; b < steps; b += STEPS) {
        int64_t some = steps - b < STEPS ? steps - b : STEPS;
        for (int64_t c = top; c < bottom; c += 2) {
            int64_t from = begin(of, c), middle = begin(of, c + 1), to = c + 1 < bottom ? begin(of, c + 2) : middle;
            int64_t above = middle - from, below = to - middle;
            const int32_t *words = of->words + from * of->stretch + b * BLOCK * above;
            const int32_t *lower = of->words + middle * of->stretch + b * BLOCK * below;
            tiled(above, below);
            WRITTEN;
            const char *one = weights(of, first, b * BLOCK), *two = weights(of, last - 1, b * BLOCK);
            const char *next = weights(of, first, (b + some) * BLOCK), *after = weights(of, last - 1, (b + some) * BLOCK);
            if (b + some == steps) next = weights(of, last, 0), after = weights(of, last + 1, 0);
            if (below) {
                (small ? fours_chunks : pairs_chunks)(words, above, lower, below, one, two, some, !b, sums[0] + (from - row));
                if (last > first + 1)
                    (small ? fours_chunks : pairs_chunks)(words, above, lower, below, two, next, some, !b, sums[1] + (from - row));
            } else {
                Sum (*held)[2] = sums[0] + (from - row), (*other)[2] = sums[1] + (from - row);
                (small ? fours_strips : pairs_strips)(words, above, one, two, next, after, some, !b, held, other);
            }
        }
    }
    finish(of, first, last, row, end, sums);
}
#else
/* The outputs of strips `first` to `last`, at most STRIPS, for chunks `top` to `bottom`, at most CHUNKS. */
static void panel(const Product *of, int64_t first, int64_t last, int64_t top, int64_t bottom) {
    int64_t row = begin(of, top), end = begin(of, bottom);
    Sum sums[STRIPS][CHUNKS * MOST][SIDES];
    for (int64_t s = first; s < last; s++) memset(sums[s - first], 0, (size_t)(end - row) * sizeof *sums[0]);
    for (int64_t b = 0; b < of->count; b += BLOCK) {
        int64_t some = of->count - b < BLOCK ? of->count - b : BLOCK;
        for (int64_t s = first; s < last; s++) {
            const char *next = s + 1 < last ? weights(of, s + 1, b) : weights(of, first, b + BLOCK);
            int64_t passes = 0, pass = 0;                       /* over this block, each of which asks for as much of the next */
            for (int64_t c = top; c < bottom; c++) passes += LANES == 16 ? c == top : passes_of(begin(of, c + 1) - begin(of, c));
            for (int64_t c = top; c < bottom; c++) {
                int64_t from = begin(of, c), beside = begin(of, c + 1) - from, step = LINE / passes;
                const int32_t *words = of->words + (from * of->stretch + place(b, beside)) * of->width;
                const char *wanted = next + pass * some * step;
                multiply[of->layer->scale != NULL][beside - 1](words, weights(of, s, b), some, wanted, step, sums[s - first] + (from - row));
                pass += LANES == 16 ? 0 : passes_of(beside);
            }
        }
    }
    finish(of, first, last, row, end, sums);
}
#endif

/* Room, this thread's own, to lay the inputs out in. */
static void room(Product *of) {
    of->most = scratch(of->rows * (2 + of->stretch * of->width));
    of->offset = (int32_t *)(of->most + of->rows), of->words = of->offset + of->rows;
}

/* Lay one row of the inputs out. */
static void prepared(const Product *of, int64_t row) {
    const Linear *layer = of->layer;
    int64_t chunk = ((row + 1) * of->chunks - 1) / of->rows, from = begin(of, chunk), beside = begin(of, chunk + 1) - from;
    int32_t *words = of->words + (from * of->stretch + (row - from) * BLOCK) * of->width;
    const bf16 *x = of->inputs + row * layer->size;
    if (layer->scale) of->offset[row] = 128 * coded(x, layer->size, layer->padded, words, beside, of->most + row);
    else laid(x, layer->size, layer->padded, words, beside);
}

/* inputs [rows, size] to out [rows, outputs], by all threads of a team together, which do not wait for each other in the end. Few
 * inputs are laid out by each thread for itself, which is sooner done than to wait for the others. */
void draftproof_multiply(const Linear *layer, const bf16 *inputs, bf16 *out, int64_t rows, int64_t threads) {
    if (layer->groups) {
        draftproof_multiply_groups(layer, inputs, out, rows, threads);
        return;
    }
    int64_t count = layer->padded / (layer->scale ? FOUR : 2), stretch = (count + BLOCK - 1) / BLOCK * BLOCK;
    int64_t strips = (layer->outputs + STRIP - 1) / STRIP, chunks = (rows + MOST - 1) / MOST;
    int64_t groups = threads * ((strips + threads * STRIPS - 1) / (threads * STRIPS));
    int64_t width = layer->scale ? 1 + WIDE_CODES : WIDE_PAIRS;
    int64_t as_is = !layer->scale && WIDE_PAIRS == 1 && rows == 1 && layer->size == layer->padded, few = rows * layer->size <= SMALL;
    Product of = {layer, rows, chunks, count, stretch, width, inputs, (int32_t *)inputs, NULL, NULL, out};
    if (!as_is && few) {
        room(&of);
        for (int64_t r = 0; r < rows; r++) prepared(&of, r);
    } else if (!as_is) {
#pragma omp single copyprivate(of)
        room(&of);
#pragma omp for
        for (int64_t r = 0; r < rows; r++) prepared(&of, r);
    }
#pragma omp for nowait
    for (int64_t g = 0; g < groups; g++)
        for (int64_t c = 0; c < chunks; c += CHUNKS)
            panel(&of, strips * g / groups, strips * (g + 1) / groups, c, c + CHUNKS < chunks ? c + CHUNKS : chunks);
    released();
}

/* The same, by threads of its own. */
void draftproof_linear(const Linear *layer, const bf16 *inputs, bf16 *out, int64_t rows, int64_t threads) {
#pragma omp parallel num_threads(threads) if (rows * layer->size * layer->outputs > PRODUCTS)
    draftproof_multiply(layer, inputs, out, rows, threads);
}

/* inputs += silu(layer(inputs)), rounded as operators would; [rows, size]. beside: room for as much. */
void draftproof_residual(const Linear *layer, bf16 *inputs, bf16 *beside, int64_t rows, int64_t threads) {
    draftproof_linear(layer, inputs, beside, rows, threads);
    for (int64_t i = 0; i < rows * layer->outputs; i += LANES) {
        narrowed(inputs + i, wide(inputs + i) + rounded(silu(wide(beside + i))));
    }
}

/* What heads with `layers` residual blocks each, blocks [heads, layers], make of hidden states [rows, size]: [heads, rows, size].
 * Heads know nothing of each other, so threads take whole ones, where there are enough of them. beside: as much room as states. */
void draftproof_heads(const Linear *blocks, const bf16 *hidden, bf16 *states, bf16 *beside, int64_t heads, int64_t layers, int64_t rows,
                      int64_t threads) {
    int64_t count = rows * blocks->size, each = heads < threads ? threads : 1;
#pragma omp parallel for num_threads(threads) if (each == 1 && heads * layers * count * blocks->size > PRODUCTS)
    for (int64_t h = 0; h < heads; h++) {
        bf16 *own = states + h * count;
        memcpy(own, hidden, (size_t)count * sizeof *own);
        for (int64_t l = 0; l < layers; l++) draftproof_residual(blocks + h * layers + l, own, beside + h * count, rows, each);
    }
}
