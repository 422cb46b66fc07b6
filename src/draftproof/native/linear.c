/* Linear layers in bfloat16, in 8 bits with a scale per output, and in the block formats of GGUF
 * files: the first two by tiles where the processor has them, otherwise by vectors. */
#define _GNU_SOURCE
#ifndef __clang__
#pragma GCC optimize("no-tree-pre")             /* which keeps sums in memory */
#endif
#include "linear_vectors.h"
#include "tiles.h"
#if TILES
#include "linear_tiles.h"
#endif
#include "linear_blocks.h"

/* Whether this build can be used; tiles need the system's permission. */
int draftproof_usable(void) {
#if TILES
    return tiles_allowed();
#else
    return 1;
#endif
}

/* The largest activation of a row, NaN if one is. */
static float largest_input(const bf16 *x, int64_t size) {
    int64_t whole = size / LANES * LANES;
    lanes top = {};
    bits broken = {};
    for (int64_t i = 0; i < size; i += LANES) {
        lanes v = i < whole ? wide(x + i) : partly(x + i, size - i);
        top = larger(absolute(v), top);
        broken |= v != v;
    }
    return some_of(broken) ? NAN : largest(top);
}

/* Activations times `factor`, rounded to the nearest integer, -127 to 127, with zeros up to
 * `padded`; each in a byte or, if wide, in 16 bits, each four in the order first, third, second,
 * fourth. Returns the sum of the codes. */
static int32_t coded(const bf16 *x, int64_t size, int64_t padded, float factor, int wide_codes,
                     int32_t *words) {
    bits sum = {};
    for (int64_t i = 0; i < padded; i += LANES) {
        lanes v = i + LANES <= size ? wide(x + i) : partly(x + i, i < size ? size - i : 0);
        bits code = __builtin_convertvector(v * factor + 128.5f, bits) - 128;   /* by truncation */
        sum += code;
#if WIDE_CODES
        if (wide_codes) {
            __m128i low = _mm256_castsi256_si128((__m256i)code);
            __m128i narrow = _mm_packs_epi32(low, _mm256_extracti128_si256((__m256i)code, 1));
            __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
            narrow = _mm_shuffle_epi8(narrow, order);
            memcpy(words + i / 2, &narrow, sizeof narrow);
            continue;
        }
#endif
        bytes narrow = lower_bytes(code);
        memcpy((char *)words + i, &narrow, sizeof narrow);
    }
    (void)wide_codes;
    int32_t all = 0;
    for (int l = 0; l < LANES; l++) all += sum[l];
    return all;
}

/* Numbers as floats, or unchanged for instructions that take pairs and for tiles, with zeros up to
 * `padded`. */
static void copied(const bf16 *x, int64_t size, int64_t padded, int32_t *words) {
    if (TILES || PAIRS) {
        memcpy(words, x, (size_t)size * sizeof *x);
        memset((bf16 *)words + size, 0, (size_t)(padded - size) * sizeof *x);
        return;
    }
    for (int64_t i = 0; i < padded; i += LANES) {
        lanes v = i + LANES <= size ? wide(x + i) : partly(x + i, i < size ? size - i : 0);
        memcpy(words + i, &v, sizeof v);
    }
}

/* Lays out one row of the inputs. */
static void prepare(const Product *of, int64_t row) {
    int64_t chunk = ((row + 1) * of->chunks - 1) / of->rows, from = first_row(of, chunk);
    int64_t beside = first_row(of, chunk + 1) - from, size = of->layer->size;
    int64_t inputs = of->kind == BFLOAT16 ? 2 : 4;                              /* in a word */
    const bf16 *x = of->inputs + row * size;
    float factor = 0, most = of->kind == INT8 ? largest_input(x, size) : 0;
    if (of->kind == INT8) of->scales[row] = most, of->offset[row] = 0;
    if (most > 0) factor = 127.0f / most;
    for (int64_t b = 0; b < of->count; b += of->block) {
        int64_t words = of->count - b < of->block ? of->count - b : of->block,
                padded = words * inputs;
        int64_t left = size - b * inputs, some = left < 0 ? 0 : left < padded ? left : padded;
        int32_t *to = inputs_at(of, from, beside, b) + (row - from) * of->block * of->width;
        const bf16 *here = x + b * inputs;
        if (of->kind == BFLOAT16) copied(here, some, padded, to);
        else {
            int32_t sum = coded(here, some, padded, factor, WIDE_CODES, to);
            if (!SIGNED_WEIGHTS) of->offset[row] -= 128 * sum;
        }
    }
}

/* The inputs of a row in 8 bits, with a scale per 32. */
static void prepare_blocks(const BlockProduct *of, int64_t row) {
    int64_t chunk = ((row + 1) * of->chunks - 1) / of->rows, size = of->layer->size;
    int64_t from = of->rows * chunk / of->chunks, next = of->rows * (chunk + 1) / of->chunks;
    const bf16 *inputs = of->inputs + row * size;
    const int shift = (int)formats[of->layer->format].shift;
    for (int64_t span = 0; span < of->spans; span++) {
        Activations *x = of->activations + from * of->spans + span * (next - from) + (row - from);
        for (int64_t g = 0; g < GROUPS; g++) {
            int64_t start = span * SPAN + g * 32, left = size - start;
            left = left < 0 ? 0 : left < 32 ? left : 32;
            float most = largest_input(inputs + start, left), factor = most > 0 ? 127.0f / most : 0;
            x->scale[g] = most / 127.0f;
            int32_t both = 0;
            for (int64_t half = 0; half < 2; half++) {
                int64_t done = half * 16;
                int32_t sum = coded(inputs + start + done, left - done, 16, factor, 0,
                                    x->codes + g * 8 + half * 4);
                both -= sum, x->offset[2 * g + half] = -sum * (1 << shift);
                x->sum[2 * g + half] = (float)-sum * x->scale[g];
            }
            x->offset[HALVES + g] = both * (1 << shift);
            x->sum[HALVES + g] = (float)both * x->scale[g];
        }
    }
}

/* A layer without parts, and the description of its product: all parts of a layer share out their
 * strips together. */
typedef struct {
    int64_t strips, together;                   /* strips multiplied at a time at most */
    Product plain;
    BlockProduct blocks;
} Part;

typedef struct {
    Part *parts;
    int64_t count;
} Parts;

/* Describes a part whose outputs are `stride` numbers apart; returns the count of numbers of its
 * laid-out inputs. */
static int64_t describe(Part *part, const Linear *layer, const bf16 *inputs, bf16 *out,
        int64_t stride, int64_t rows) {
    part->strips = (layer->outputs + STRIP - 1) / STRIP, part->together = STRIPS;
    if (layer->format) {
        part->blocks = (BlockProduct){.layer = layer, .inputs = inputs, .out = out,
            .stride = stride, .rows = rows, .chunks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS,
            .spans = (layer->padded + SPAN - 1) / SPAN};
        /* consecutive strips are one stream */
        if (part->blocks.chunks == 1) part->together = 1;
        return rows * part->blocks.spans * (int64_t)(sizeof(Activations) / sizeof(float));
    }
    Product *of = &part->plain;
    *of = (Product){.layer = layer, .inputs = inputs, .out = out, .stride = stride, .rows = rows,
        .block = BLOCK, .kind = layer->scale ? INT8 : BFLOAT16};
    of->count = layer->padded / (of->kind == BFLOAT16 ? 2 : 4), of->width = WIDTH_OF(of->kind);
    int64_t most = MOST;
#if TILES
    of->block = TILE_BLOCK, of->width = 1, most = TILE_ROWS, part->together = TILE_STRIPS;
#endif
    of->stretch = (of->count + of->block - 1) / of->block * of->block;
    of->chunks = (rows + most - 1) / most;
    if (!TILES && of->chunks == 1) part->together = 1;      /* as above */
    return (2 * rows + rows * of->stretch * of->width + LANES - 1) / LANES * LANES;
}

/* The layout of a part's inputs. */
static void place_inputs(Part *part, float *room) {
    Product *of = &part->plain;
    part->blocks.activations = (Activations *)room, of->scales = room;
    of->offset = (int32_t *)(of->scales + of->rows), of->words = of->offset + of->rows;
}

/* Rows of inputs of one part. */
static void prepare_rows(const void *work, int64_t first, int64_t last) {
    const Part *part = work;
    for (int64_t r = first; r < last; r++)
        if (part->blocks.layer) prepare_blocks(&part->blocks, r);
        else prepare(&part->plain, r);
}

/* The outputs of strips `first` to `last` of a part. */
static void multiply_strips(const Part *part, int64_t first, int64_t last) {
    const Product *of = &part->plain;
    int64_t chunks = part->blocks.layer ? part->blocks.chunks : of->chunks, next;
    int64_t each = part->blocks.layer ? BLOCK_CHUNKS : CHUNKS;
    for (; first < last; first = next) {
        next = first + part->together < last ? first + part->together : last;
        for (int64_t c = 0; c < chunks; c += each) {
            int64_t bottom = c + each < chunks ? c + each : chunks;
            if (part->blocks.layer) block_panel(&part->blocks, first, next, c, bottom);
#if TILES
            else tile_panel(of, first, next, c, bottom);
#else
            else panel(of, first, next, c, bottom);
#endif
        }
    }
}

/* Strips, counted over all parts. */
static void multiply_parts(const void *work, int64_t first, int64_t last) {
    const Parts *of = work;
    for (int64_t p = 0, start = 0; p < of->count; start += of->parts[p++].strips) {
        int64_t end = start + of->parts[p].strips, from = first > start ? first : start;
        multiply_strips(of->parts + p, from - start, (last < end ? last : end) - start);
    }
#if TILES
    tiles_released();
#endif
}

/* inputs [rows, size] to out [rows, outputs]. */
void draftproof_linear(const Linear *layer, const bf16 *inputs /* [rows, layer->size] */,
        bf16 *out /* [rows, layer->outputs] */, int64_t rows, int64_t threads) {
    const Linear *layers = layer->count ? layer->parts : layer;
    int64_t count = layer->count ? layer->count : 1, numbers = 0, strips = 0;
    Part parts[count];
    int64_t rooms[count];
    for (int64_t p = 0, start = 0; p < count; start += layers[p++].outputs) {
        parts[p] = (Part){};
        rooms[p] = numbers;
        numbers += describe(parts + p, layers + p, inputs, out + start, layer->outputs, rows);
        strips += parts[p].strips;
    }
    float *room = scratch(numbers);
    for (int64_t p = 0; p < count; p++) {
        place_inputs(parts + p, room + rooms[p]);
        share_out(prepare_rows, parts + p, rows, 1 + SMALL / 2 / (layer->size + 1), threads);
    }
    Parts of = {parts, count};
    share_out(multiply_parts, &of, strips, 1 + PIECE / (STRIP * (layer->size + 1)), threads);
}

/* inputs += silu(layer(inputs)), rounded like separate operators; [rows, size]. beside: memory of
 * the same size. */
void draftproof_residual(const Linear *layer, bf16 *inputs, bf16 *beside, int64_t rows,
        int64_t threads) {
    draftproof_linear(layer, inputs, beside, rows, threads);
    for (int64_t i = 0; i < rows * layer->outputs; i += LANES)
        narrowed(inputs + i, wide(inputs + i) + rounded(silu(wide(beside + i))));
}

/* Moves the bits 4 w + b of a word, which are the fifth bits of 32 codes, to places 8 b + w. */
static uint32_t reordered(uint32_t all) {
    uint32_t result = 0;
    for (int i = 0; i < 32; i++) result |= (all >> i & 1) << (i % 4 * 8 + i / 4);
    return result;
}

/* The place of a block's word in a record: the words of Q6_K are in the order of unpacking, two
 * words of codes and one of their upper bits, so that memory is read as one stream. */
static int64_t place_of(int64_t format, int64_t word) {
    if (format != Q6_K || word >= 48) return word;
    if (word >= 32) return (word - 32) / 8 * 24 + word % 8 * 3 + 2;
    return word / 16 * 24 + word % 8 * 3 + word / 8 % 2;
}

/* A word of codes in the form of records. Codes of Q8_0 become unsigned, and fifth bits are
 * reordered, so that a word of them is one shift away from the words of the codes. */
ALWAYS uint32_t record_word(int64_t format, int64_t word, uint32_t codes) {
    if (format == Q8_0) return codes ^ 0x80808080;
    return (format == Q5_0 && word == 0) || (format == Q5_1 && word == 1) ? reordered(codes) : codes;
}

/* Copies a block of a file to an output's place in a record. */
static void pack_block(int64_t format, const uint8_t *block, int64_t output, uint8_t *record) {
    const Format *form = formats + format;
    for (int64_t w = 0; w < form->words; w++) {
        uint32_t word;
        memcpy(&word, block + form->first + 4 * w, sizeof word);
        word = record_word(format, w, word);
        memcpy(record + (place_of(format, w) * STRIP + output) * 4, &word, sizeof word);
    }
    memcpy(record + form->words * 4 * STRIP + output * form->rest, block + form->last,
            (size_t)form->rest);
}

/* Copies LANES words of the blocks of STRIP rows, from word `first` on, to their places in a
 * record. */
static void pack_words(int64_t format, const uint8_t *const *blocks, int64_t first,
        uint8_t *record) {
    const Format *form = formats + format;
    for (int side = 0; side < SIDES; side++) {
        lanes square[LANES];
        for (int o = 0; o < LANES; o++)
            memcpy(square + o, blocks[side * LANES + o] + form->first + 4 * first, sizeof *square);
        transposed(square);
        for (int k = 0; k < LANES; k++) {
            bits word = (bits)square[k];
            if (format == Q8_0) word ^= (int32_t)0x80808080;
            memcpy(record + (place_of(format, first + k) * STRIP + side * LANES) * 4, &word,
                    sizeof word);
        }
    }
}

/* Makes a record from the blocks of STRIP rows, word by word, so that it is written in order. */
static void pack_record(int64_t format, const uint8_t *const *blocks, uint8_t *record) {
    const Format *form = formats + format;
    int64_t w = 0;
    for (; format != Q5_0 && format != Q5_1 && w + LANES <= form->words; w += LANES)
        pack_words(format, blocks, w, record);
    for (; w < form->words; w++) {
        uint32_t words[STRIP];
        for (int64_t o = 0; o < STRIP; o++) {
            memcpy(words + o, blocks[o] + form->first + 4 * w, sizeof *words);
            words[o] = record_word(format, w, words[o]);
        }
        memcpy(record + place_of(format, w) * (int64_t)sizeof words, words, sizeof words);
    }
    uint8_t *rest = record + form->words * 4 * STRIP;
    for (int64_t o = 0; o < STRIP; o++)
        memcpy(rest + o * form->rest, blocks[o] + form->last, (size_t)form->rest);
}

/* Bytes of rows after which their pages are dropped. */
enum { DROPPED = 1 << 25 };

typedef struct {
    const uint8_t *rows;
    uint8_t *records;
    int64_t format, outputs, blocks;
} Packing;

static void pack_strips(const void *work, int64_t first, int64_t last) {
    static const uint8_t zeros[256];
    const Packing *of = work;
    int64_t bytes = formats[of->format].bytes, blocks = of->blocks;
    for (int64_t s = first; s < last; s++)
        for (int64_t b = 0; b < blocks; b++) {
            const uint8_t *block[STRIP];
            for (int64_t o = 0; o < STRIP; o++) {
                int64_t row = s * STRIP + o;
                block[o] = row < of->outputs ? of->rows + (row * blocks + b) * bytes : zeros;
            }
            pack_record(of->format, block, of->records + (s * blocks + b) * bytes * STRIP);
        }
}

/* Packs rows of blocks from a file into records [outputs / 32, blocks], with outputs rounded up
 * with zeros. */
void draftproof_pack(int64_t format,
        const uint8_t *rows /* [outputs, blocks * block_bytes(format)] */, int64_t outputs,
        int64_t blocks, uint8_t *out /* [(outputs + 31) // 32 * 32, blocks * block_bytes(format)] */,
        int64_t threads) {
    Packing of = {rows, out, format, outputs, blocks};
    share_out(pack_strips, &of, (outputs + STRIP - 1) / STRIP, 1, threads);
}

/* Packs matrices on the calling thread, one after another, as long as any is left; several threads
 * may take part. `taken` counts the matrices that a thread has begun. The pages of their rows, which
 * lie in a mapped file, are dropped. */
void draftproof_pack_matrices(const Packing *matrices, int64_t count,
        int64_t *taken /* [1] */) {
    for (int64_t m; (m = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED)) < count;) {
        const Packing *of = matrices + m;
        int64_t strips = (of->outputs + STRIP - 1) / STRIP;
        int64_t bytes = of->blocks * formats[of->format].bytes, step = 1 + DROPPED / (STRIP * bytes);
        for (int64_t s = 0; s < strips; s += step) {
            int64_t end = s + step < strips ? s + step : strips;
            int64_t rows = (end < strips ? end * STRIP : of->outputs) - s * STRIP;
            pack_strips(of, s, end);
            drop_pages(of->rows + s * STRIP * bytes, rows * bytes);
        }
    }
}

/* The weights of an output of a layer with blocks, from input SPAN * span on: [SPAN], or fewer at
 * the end. */
static void span_of_row(const Linear *layer, int64_t row, int64_t span, float *out) {
    const Format *form = formats + layer->format;
    int64_t words = form->sums & HALF_GROUPS ? 4 : 8, minimum = form->sums & MINIMUM;
    int64_t left = layer->size - span * SPAN, o = row % STRIP;
    Weights weights __attribute__((aligned(64)));
    unpack_span[layer->format](record_at(layer, row / STRIP, span), groups_of(layer, span),
            &weights);
    for (int64_t i = 0; i < left && i < SPAN; i++) {
        int64_t part = i / 4 / words;
        uint32_t word = weights.codes.words[i / 4][o];
        int code = (uint8_t)(word >> i % 4 * 8) - (minimum ? 0 : 1 << form->shift);
        float value = (float)code * weights.scales.scale[part][o];
        out[i] = minimum ? value - weights.scales.minimum[part][o] : value;
    }
}

typedef struct {
    const Linear *layer;
    const int64_t *numbers;
    float *out;
} Unpacking;

static void unpack_rows(const void *work, int64_t first, int64_t last) {
    const Unpacking *of = work;
    const Linear *layer = of->layer;
    int64_t size = layer->size, spans = (layer->padded + SPAN - 1) / SPAN;
    for (int64_t n = first; n < last; n++) {
        int64_t row = of->numbers[n], most = layer->outputs - 1;
        row = row < 0 ? 0 : row < most ? row : most;
        for (int64_t span = 0; span < spans; span++)
            span_of_row(layer, row, span, of->out + n * size + span * SPAN);
    }
}

/* The weights of the outputs `numbers` [count] of a layer with blocks, as the format defines them:
 * [count, size]. Indices outside of the layer mean the nearest output. */
void draftproof_block_rows(const Linear *layer, const int64_t *numbers /* [count] */, int64_t count,
        float *out /* [count, layer->size] */, int64_t threads) {
    Unpacking of = {layer, numbers, out};
    share_out(unpack_rows, &of, count, 8, threads);
}

/* A row of blocks as bfloat16, with each number rounded once. It is packed span by span, as the
 * only output of a layer. */
static void embed_blocks(const Embeddings *table, const uint8_t *row, bf16 *out) {
    const Format *form = formats + table->format;
    char records[SPAN / 32 * STRIP * 40] __attribute__((aligned(64))) = {};
    float numbers[SPAN];
    for (int64_t first = 0; first < table->size; first += SPAN) {
        int64_t left = table->size - first, inputs = left < SPAN ? left : SPAN;
        for (int64_t i = 0; i < inputs; i += form->inputs)
            pack_block(table->format, row + (first + i) / form->inputs * form->bytes, 0,
                    (uint8_t *)records + i / form->inputs * form->bytes * STRIP);
        Linear layer = {.weights = records, .size = inputs, .padded = inputs, .outputs = 1,
            .format = table->format};
        span_of_row(&layer, 0, 0, numbers);
        for (int64_t i = 0; i < inputs; i++) out[first + i] = narrow(numbers[i]);
    }
}

/* Embeddings of tokens. A token outside of the table is read as the nearest one inside. */
void draftproof_embed(const Embeddings *table, const int64_t *tokens /* [count] */, int64_t count,
        bf16 *out /* [count, table->size] */) {
    int64_t size = table->size;
    const Format *form = formats + table->format;
    int64_t bytes = table->format ? size / form->inputs * form->bytes
            : size * (int64_t)sizeof(bf16);
    for (int64_t n = 0; n < count; n++) {
        int64_t token = tokens[n], most = table->vocab - 1;
        token = token < 0 ? 0 : token < most ? token : most;
        const uint8_t *row = (const uint8_t *)table->rows + token * bytes;
        if (table->format) embed_blocks(table, row, out + n * size);
        else memcpy(out + n * size, row, (size_t)bytes);
    }
}
