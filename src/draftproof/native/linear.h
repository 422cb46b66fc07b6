/* Linear layers: the description of a product for the kernels that compute it, by vectors or by
 * tiles. */
#pragma once
#include "model.h"

/* Weights lie in strips of 32 outputs, and in words of 32 bits: two inputs of an output in
 * bfloat16, four in 8 bits. A line is one word of each output of a strip. */
enum { STRIP = 32, SIDES = STRIP / LANES, LINE = STRIP * (int)sizeof(int32_t) };
enum { BFLOAT16, INT8, KINDS };
/* Up to MOST rows are multiplied together, a chunk, and up to ROWS rows with weights in the cache.
 */
enum { MOST = 12, CHUNKS = 8, ROWS = 128 };
/* The number of weights that is worth a separate piece of work. */
enum { PIECE = 1 << 16 };
/* Kernels run over BLOCK words of up to STRIPS strips, which stay in the L1 cache. */
enum { BLOCK = 64, STRIPS = 4 };

/* AVX2 without VNNI multiplies 8-bit codes in 16 bits: first and third, then second and fourth. */
#if LANES == 8 && !defined(__AVXVNNI__)
#define WIDE_CODES 1
#else
#define WIDE_CODES 0
#endif

/* Words of inputs per word of weights: bfloat16 is read as float, except by instructions that take
 * pairs of bfloat16. */
#define WIDTH_OF(kind) ((kind) == BFLOAT16 ? 2 - PAIRS : 1 + WIDE_CODES)

/* NEON multiplies signed numbers: 8-bit weights less 128. */
#if LANES == 4 && !MATRICES
#define SIGNED_WEIGHTS 1
#define AS_SIGNED(weights) ((weights) ^ (int32_t)0x80808080)
#else
#define SIGNED_WEIGHTS 0
#define AS_SIGNED(weights) (weights)
#endif

/* A product to compute. The rows of inputs lie chunk by chunk; those of a chunk block by block, one
 * row's block after another's. */
typedef struct {
    const Linear *layer;
    const bf16 *inputs;
    bf16 *out;
    int64_t stride;                     /* numbers of `out` between rows */
    int64_t kind, rows, chunks;
    int64_t count, stretch;             /* words of a row of weights; rounded up to whole blocks */
    int64_t block, width;               /* words of a block; of inputs for one of weights */
    int32_t *words;                     /* inputs: as float, codes, or wide codes */
    float *scales;                      /* of a row */
    int32_t *offset;                    /* times -128, the sum of its codes; or 0 */
} Product;

static inline int64_t first_row(const Product *of, int64_t chunk) {
    return of->rows * chunk / of->chunks;
}

/* Weights of a strip from a word on. */
static inline const char *weights_at(const Product *of, int64_t strip, int64_t word) {
    return (const char *)of->layer->weights + (strip * of->count + word) * LINE;
}

/* Inputs of a chunk of `some` rows, which begins at row `from`, from a whole block of words on. */
static inline int32_t *inputs_at(const Product *of, int64_t from, int64_t some, int64_t word) {
    return of->words + (from * of->stretch + word * some) * of->width;
}

/* In 8 bits, an output is the sum times the row's scale times the output's. */
static inline lanes output_of(const Product *of, lanes sum, int64_t row, int64_t start) {
    const Linear *layer = of->layer;
    if (of->kind == INT8)
        sum = number((bits)sum + of->offset[row]) * loaded(layer->scale + start) * of->scales[row];
    return layer->bias ? sum + wide(layer->bias + start) : sum;
}

/* Turns sums of strips `first` to `last` and rows `row` to `end` into outputs. */
static void finish(const Product *of, int64_t first, int64_t last, int64_t row, int64_t end,
                   lanes (*sums)[ROWS][SIDES]) {
    int64_t outputs = of->layer->outputs;
    for (int64_t s = first; s < last; s++)
        for (int64_t r = row; r < end; r++) {
            int64_t start = s * STRIP, some = outputs - start;
            bf16 rest[STRIP], *to = of->out + r * of->stride + start, *done = some < STRIP ? rest : to;
            for (int h = 0; h < SIDES; h++) {
                lanes sum = sums[s - first][r - row][h];
                narrowed(done + h * LANES, output_of(of, sum, r, start + h * LANES));
            }
            if (done == rest) memcpy(to, rest, (size_t)some * sizeof(bf16));
        }
}
