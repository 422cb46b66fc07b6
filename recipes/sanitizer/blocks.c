/* The kernels of block formats under the address sanitizer, on random blocks of random sizes, in
 * memory that ends where the tensors end:
 *
 *     N=src/draftproof/native
 *     gcc -std=gnu11 -O1 -g -pthread -fsanitize=address -Wno-psabi -march=x86-64-v3 -I$N \
 *         recipes/sanitizer/blocks.c $N/linear.c $N/quantize.c $N/pool.c -lm -o blocks && ./blocks
 */
#include "model.h"
#include <stdio.h>
void draftproof_pack(int64_t, const uint8_t *, int64_t, int64_t, uint8_t *, int64_t);
void draftproof_block_rows(const Linear *, const int64_t *, int64_t, float *, int64_t);
void draftproof_quantize(int64_t, const float *, int64_t, int64_t, uint8_t *, int64_t);
void draftproof_quantize_bf16(int64_t, const bf16 *, int64_t, int64_t, uint8_t *, int64_t);

/* Inputs and bytes of a block, by the numbers of linear_blocks.h. */
static const int ninputs[] = {0, 32, 32, 32, 32, 32, 256, 256, 256, 256, 256, 32, 256, 32};
static const int nbytes[] = {0, 34, 18, 20, 22, 24, 84, 110, 144, 176, 210, 18, 136, 17};
static uint32_t seed = 7;

static uint32_t next(void) { return (seed = seed * 1664525 + 1013904223) >> 8; }

static void *filled(int64_t n) {
    uint8_t *p = malloc((size_t)n);
    for (int64_t i = 0; i < n; i++) p[i] = (uint8_t)next();
    return p;
}

static void multiply(int f) {
    int64_t outputs = 1 + next() % 100, blocks = 1 + next() % (ninputs[f] == 32 ? 20 : 4);
    int64_t padded = blocks * ninputs[f], size = padded - next() % 2 * (next() % 16);
    int64_t strips = (outputs + 31) / 32, rows = 1 + next() % 70, threads = 1 + next() % 3;
    uint8_t *file = filled(outputs * blocks * nbytes[f]);
    uint8_t *records = malloc((size_t)(strips * 32 * blocks * nbytes[f]));
    draftproof_pack(f, file, outputs, blocks, records, threads);
    bf16 *x = filled(rows * size * 2), *out = malloc((size_t)(rows * outputs * 2));
    bf16 *bias = filled(strips * 32 * 2), *embeddings = malloc((size_t)(3 * padded * 2));
    float *values = malloc((size_t)(3 * size * 4));
    Linear layer = {.weights = records, .bias = next() % 2 ? bias : NULL, .size = size,
            .padded = padded, .outputs = outputs, .format = f};
    draftproof_linear(&layer, x, out, rows, threads);
    int64_t numbers[3] = {0, outputs - 1, next() % outputs};
    draftproof_block_rows(&layer, numbers, 3, values, threads);
    Embeddings table = {.rows = file, .vocab = outputs, .size = padded, .format = f};
    draftproof_embed(&table, numbers, 3, embeddings);
    free(file), free(records), free(x), free(out), free(bias), free(values), free(embeddings);
}

static void quantize(int f) {
    static const int in[] = {32, 32, 256, 256}, by[] = {34, 22, 144, 210};
    int64_t rows = 1 + next() % 9, n = (1 + next() % 5) * in[f];
    float *w = filled(rows * n * 4);
    bf16 *b = filled(rows * n * 2);
    uint8_t *to = malloc((size_t)(rows * n / in[f] * by[f]));
    draftproof_quantize(f, w, rows, n, to, 2), draftproof_quantize_bf16(f, b, rows, n, to, 2);
    free(w), free(b), free(to);
}
int main(void) {
    for (int turn = 0; turn < 25; turn++) {
        for (int f = 1; f < 14; f++) multiply(f);
        for (int f = 0; f < 4; f++) quantize(f);
    }
    puts("nothing was read or written outside");
}
