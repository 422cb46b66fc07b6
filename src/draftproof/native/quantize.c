/* Quantising to the block formats of GGUF files: the scales, and minimums, of groups are searched
 * for the least weighted squared error, as llama.cpp searches them without an importance matrix
 * (ggml-quants.c, make_qkx2_quants and make_qx_quants). A lane is a group, so results do not depend
 * on the instruction set. */
#include "lanes.h"

enum { MOST_OF_A_GROUP = 32 };
enum { TO_Q8_0, TO_Q5_0, TO_Q4_K, TO_Q6_K };

static inline lanes smaller(lanes a, lanes b) { return -larger(-a, -b); }

/* To the nearest whole number, ties to even; of numbers below 2^22. */
static inline lanes nearest(lanes x) { return (x + 12582912.0f) - 12582912.0f; }

static inline lanes chosen(bits where, lanes a, lanes b) {
    return (lanes)((where & (bits)a) | (~where & (bits)b));
}

/* Transpose LANES consecutive groups of `size` numbers. */
static void gather(const float *from, int64_t groups, int size, lanes *to) {
    for (int i = 0; i < size; i++)
        for (int l = 0; l < LANES; l++) to[i][l] = l < groups ? from[l * size + i] : 0;
}

/* The weighted squared error of scale * code + offset, of sums of weights, of these times numbers,
 * their squares, codes, squares of codes, and numbers times codes. */
static lanes error_of(lanes scale, lanes offset, const lanes *sums) {
    lanes w = sums[0], x = sums[1], xx = sums[2], l = sums[3], ll = sums[4], xl = sums[5];
    return scale * scale * ll + 2.0f * scale * (offset * l - xl) + offset * (offset * w - 2.0f * x)
            + xx;
}

/* Scale and minimum of codes 0 to `most`, for groups of 32: x = scale * code - minimum, both not
 * negative. Weights of errors are the size of a number plus the root mean square. */
static void search_minimum(const lanes *x, float most, lanes *scale_out, lanes *minimum_out) {
    const int size = MOST_OF_A_GROUP;
    lanes low = {}, high = x[0], squares = {};
    for (int i = 0; i < size; i++)
        low = smaller(low, x[i]), high = larger(high, x[i]), squares += x[i] * x[i];
    lanes mean = {}, weight[MOST_OF_A_GROUP], sum_w = {}, sum_x = {}, sum_xx = {};
    for (int l = 0; l < LANES; l++) mean[l] = sqrtf(squares[l] / (float)size);
    for (int i = 0; i < size; i++) {
        weight[i] = mean + absolute(x[i]);
        sum_w += weight[i], sum_x += weight[i] * x[i], sum_xx += weight[i] * x[i] * x[i];
    }
    bits varied = high > low;
    lanes range = chosen(varied, high - low, (lanes){} + 1.0f);
    lanes least = {}, best_scale = {}, best_low = low, from = low;
    for (int step = -1; step <= 20; step++) {
        /* the first step covers the range; the others vary it */
        lanes factor = (most + (step < 0 ? 0 : -1.0f + 0.1f * (float)step)) / range;
        lanes sum_l = {}, sum_ll = {}, sum_xl = {};
        for (int i = 0; i < size; i++) {
            lanes code = nearest((x[i] - from) * factor);
            code = smaller(larger(code, (lanes){}), (lanes){} + most);
            lanes weighted = weight[i] * code;
            sum_l += weighted, sum_ll += weighted * code, sum_xl += weighted * x[i];
        }
        lanes divisor = sum_w * sum_ll - sum_l * sum_l;
        bits solved = divisor > 0.0f;
        divisor = chosen(solved, divisor, (lanes){} + 1.0f);
        lanes scale = (sum_w * sum_xl - sum_x * sum_l) / divisor;
        lanes offset = (sum_ll * sum_x - sum_l * sum_xl) / divisor;
        bits above = offset > 0.0f, any = sum_ll > 0.0f;
        scale = chosen(above, sum_xl / chosen(any, sum_ll, (lanes){} + 1.0f), scale);
        offset = chosen(above, (lanes){}, offset);
        lanes sums[] = {sum_w, sum_x, sum_xx, sum_l, sum_ll, sum_xl};
        if (step < 0) best_scale = range / most, least = error_of(best_scale, low, sums);
        lanes error = error_of(scale, offset, sums);
        bits better = solved & any & (error < least) & (scale > 0.0f);
        least = chosen(better, error, least);
        best_scale = chosen(better, scale, best_scale);
        best_low = chosen(better, offset, best_low);
        from = best_low;
        range = chosen(varied, larger(high - from, (high - low) * 0.5f), range);
    }
    *scale_out = chosen(varied, best_scale, (lanes){});
    *minimum_out = -chosen(varied, best_low, low);
}

/* The scale of codes -most to most - 1, for groups of `size`. Weights of errors are squares. */
static lanes search_scale(const lanes *x, int size, float most) {
    lanes top = {};                             /* the number of the largest size, with its sign */
    for (int i = 0; i < size; i++) top = chosen(absolute(x[i]) > absolute(top), x[i], top);
    bits there = absolute(top) > 1e-15f;
    lanes divisor = chosen(there, top, (lanes){} + 1.0f), best = {}, best_scale = {};
    for (int step = -9; step <= 9; step++) {
        lanes factor = -(most + 0.1f * (float)step) / divisor, sum_xl = {}, sum_ll = {};
        for (int i = 0; i < size; i++) {
            lanes code = nearest(x[i] * factor), weight = x[i] * x[i];
            code = smaller(larger(code, (lanes){} - most), (lanes){} + (most - 1.0f));
            sum_xl += weight * x[i] * code, sum_ll += weight * code * code;
        }
        bits any = sum_ll > 0.0f;
        lanes scale = sum_xl / chosen(any, sum_ll, (lanes){} + 1.0f), gain = scale * sum_xl;
        bits better = any & (gain > best);
        best = chosen(better, gain, best), best_scale = chosen(better, scale, best_scale);
    }
    return chosen(there, best_scale, (lanes){});
}

/* The code of x in units of `unit`, from `low` to `high`. */
static inline int code_of(float x, float unit, int low, int high) {
    if (unit == 0) return low < 0 ? 0 : low;
    float code = rintf(x / unit);
    if (code != code) return low < 0 ? 0 : low;
    return code < (float)low ? low : code > (float)high ? high : (int)code;
}

static void block_8(const float *x, uint8_t *to) {
    lanes sizes = {};
    for (int i = 0; i < 32; i += LANES) sizes = larger(absolute(loaded(x + i)), sizes);
    uint16_t scale = half(largest(sizes) / 127.0f);
    float unit = single(scale);
    memcpy(to, &scale, sizeof scale);
    for (int i = 0; i < 32; i += LANES) {
        lanes code = nearest(loaded(x + i) / (unit == 0 ? 1.0f : unit));
        code = chosen((code == code) & ((bits){} - (unit != 0)), code, (lanes){});
        code = smaller(larger(code, (lanes){} - 127.0f), (lanes){} + 127.0f);
        bytes narrow = lower_bytes(__builtin_convertvector(code, bits));
        memcpy(to + 2 + i, &narrow, LANES);
    }
}

static void block_5(const float *x, float found, uint8_t *to) {
    uint16_t scale = half(found);
    uint32_t fifth = 0;
    uint8_t codes[32];
    for (int i = 0; i < 32; i++) {
        codes[i] = (uint8_t)(code_of(x[i], single(scale), -16, 15) + 16);
        fifth |= (uint32_t)(codes[i] >> 4) << i;
    }
    memcpy(to, &scale, sizeof scale), memcpy(to + 2, &fifth, sizeof fifth);
    for (int i = 0; i < 16; i++)
        to[6 + i] = (uint8_t)((codes[i] & 15) | (codes[16 + i] & 15) << 4);
}

static void block_4(const float *x, const float *scales, const float *minimums, uint8_t *to) {
    float top = 0, deep = 0;
    for (int g = 0; g < 8; g++) {
        top = scales[g] > top ? scales[g] : top;
        deep = minimums[g] > deep ? minimums[g] : deep;
    }
    uint16_t head[2] = {half(top / 63.0f), half(deep / 63.0f)};
    memcpy(to, head, sizeof head);
    memset(to + 4, 0, 12);
    uint8_t codes[256];
    for (int g = 0; g < 8; g++) {
        int scale = code_of(scales[g], single(head[0]), 0, 63);
        int minimum = code_of(minimums[g], single(head[1]), 0, 63);
        uint8_t *packed = to + 4;
        if (g < 4) packed[g] |= (uint8_t)scale, packed[g + 4] |= (uint8_t)minimum;
        else {
            packed[g + 4] |= (uint8_t)((scale & 15) | (minimum & 15) << 4);
            packed[g - 4] |= (uint8_t)(scale >> 4 << 6), packed[g] |= (uint8_t)(minimum >> 4 << 6);
        }
        float unit = single(head[0]) * (float)scale, least = single(head[1]) * (float)minimum;
        for (int i = 0; i < 32; i++)
            codes[g * 32 + i] = (uint8_t)code_of(x[g * 32 + i] + least, unit, 0, 15);
    }
    for (int pair = 0; pair < 4; pair++)
        for (int i = 0; i < 32; i++)
            to[16 + pair * 32 + i] = (uint8_t)(codes[pair * 64 + i]
                                               | codes[pair * 64 + 32 + i] << 4);
}

static void block_6(const float *x, const float *scales, uint8_t *to) {
    float top = 0;
    for (int g = 0; g < 16; g++) top = fabsf(scales[g]) > fabsf(top) ? scales[g] : top;
    uint16_t unit = half(top / -128.0f);
    uint8_t codes[256];
    memset(to, 0, 192);
    for (int g = 0; g < 16; g++) {
        int scale = code_of(scales[g], single(unit), -128, 127);
        to[192 + g] = (uint8_t)scale;
        for (int i = 0; i < 16; i++)
            codes[g * 16 + i] = (uint8_t)(code_of(x[g * 16 + i], single(unit) * (float)scale, -32,
                                                  31) + 32);
    }
    memcpy(to + 208, &unit, sizeof unit);
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 32; i++) {
            const uint8_t *c = codes + n * 128 + i;
            to[n * 64 + i] = (uint8_t)((c[0] & 15) | (c[64] & 15) << 4);
            to[n * 64 + 32 + i] = (uint8_t)((c[32] & 15) | (c[96] & 15) << 4);
            to[128 + n * 32 + i] = (uint8_t)(c[0] >> 4 | c[32] >> 4 << 2 | c[64] >> 4 << 4
                                             | c[96] >> 4 << 6);
        }
}

/* Properties of a format: inputs and bytes per block, and inputs per scale. */
static const int inputs_of[] = {32, 32, 256, 256}, bytes_of[] = {34, 22, 144, 210};
static const int group_of[] = {32, 32, 32, 16};

/* A row of weights, `size` a multiple of the format's block, to blocks as in a GGUF file. */
static void quantize_row(int64_t format, const float *row, int64_t size, uint8_t *to) {
    int64_t inputs = inputs_of[format], group = group_of[format], groups = inputs / group;
    int64_t all = size / group;
    float scales[all + LANES], minimums[all + LANES];
    for (int64_t g = 0; format != TO_Q8_0 && g < all; g += LANES) {
        lanes x[MOST_OF_A_GROUP], scale = {}, minimum = {};
        gather(row + g * group, all - g, (int)group, x);
        if (format == TO_Q4_K) search_minimum(x, 15.0f, &scale, &minimum);
        else scale = search_scale(x, (int)group, format == TO_Q6_K ? 32.0f : 16.0f);
        memcpy(scales + g, &scale, sizeof scale);
        memcpy(minimums + g, &minimum, sizeof minimum);
    }
    for (int64_t b = 0; b < size / inputs; b++, to += bytes_of[format]) {
        const float *x = row + b * inputs, *scale = scales + b * groups;
        if (format == TO_Q8_0) block_8(x, to);
        else if (format == TO_Q5_0) block_5(x, *scale, to);
        else if (format == TO_Q4_K) block_4(x, scale, minimums + b * groups, to);
        else block_6(x, scale, to);
    }
}

/* Rows of weights [., size], in single precision or in bfloat16, and their blocks. */
typedef struct {
    const float *weights;
    const bf16 *halves;
    uint8_t *blocks;
    int64_t format, size, stride;
} Rows;

/* Only one row of bfloat16 weights at a time is in single precision. */
static void quantize_rows(const void *work, int64_t first, int64_t last) {
    const Rows *of = work;
    for (int64_t r = first; r < last; r++) {
        const float *row = of->weights + r * of->size;
        if (of->halves) {
            float *wider = scratch(of->size);
            for (int64_t i = 0; i < of->size; i++) wider[i] = widen(of->halves[r * of->size + i]);
            row = wider;
        }
        quantize_row(of->format, row, of->size, of->blocks + r * of->stride);
    }
}

/* Rows of weights, `size` a multiple of the format's block, to blocks as in a GGUF file. */
void draftproof_quantize(int64_t format, const float *weights /* [rows, size] */, int64_t rows,
        int64_t size, uint8_t *blocks /* [rows, quantized_bytes(format, size)] */,
        int64_t threads) {
    Rows of = {.weights = weights, .blocks = blocks, .format = format, .size = size,
        .stride = size / inputs_of[format] * bytes_of[format]};
    share_out(quantize_rows, &of, rows, 1, threads);
}

/* The same, of weights in bfloat16. */
void draftproof_quantize_bf16(int64_t format, const bf16 *weights /* [rows, size] */, int64_t rows,
        int64_t size, uint8_t *blocks /* [rows, quantized_bytes(format, size)] */,
        int64_t threads) {
    Rows of = {.halves = weights, .blocks = blocks, .format = format, .size = size,
        .stride = size / inputs_of[format] * bytes_of[format]};
    share_out(quantize_rows, &of, rows, 1, threads);
}
