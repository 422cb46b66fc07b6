/* States of fixed size: gated delta nets, and the short convolutions before them. A token has the
 * same bits however many are read with it, and in whatever chain or tree.
 *
 * Tokens are the nodes of a tree: each goes on from its parent, which comes before it, and the first
 * from the state before all of them. Without parents they are a chain. */
#include "lanes.h"

enum { SLAB = 2 * LANES };                      /* columns of a state that are kept close together */

typedef struct {
    const float *query, *key, *value, *decay, *rate, *before;
    float *after, *out;
    const int64_t *parents;
    int64_t tokens, groups, heads, inner, depth, slabs;
} Delta;

/* The parent of a node other than the first: one of the nodes before it, whatever was passed. */
static inline int64_t parent_of(const int64_t *parents, int64_t node) {
    return parents && parents[node] >= 0 && parents[node] < node ? parents[node] : node - 1;
}

/* Whether node t goes on from the node before it, and is the last that does. */
static int handed_on(const int64_t *parents, int64_t t, int64_t tokens) {
    if (t == 0 || !parents) return 1;
    for (int64_t later = t + 1; later < tokens; later++)
        if (parent_of(parents, later) == t - 1) return 0;
    return parent_of(parents, t) == t - 1;
}

/* a . b in a fixed order. */
static inline float dot(const float *a, const float *b, int64_t size) {
    lanes sum = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sum += loaded(a + i) * loaded(b + i);
    float all = total(sum);
    for (; i < size; i++) all += a[i] * b[i];
    return all;
}

/* The next token of a slab [inner, SLAB]: the state decays, its value under the key is partly
 * replaced, and the query reads it. */
static inline void advance(float *slab, const float *key, const float *query, const float *value,
        float decay, float rate, int64_t inner, float *out) {
    lanes held[2][4] = {}, sums[2][4] = {}, fresh[2];
    for (int64_t k = 0; k < inner; k += 4)
        for (int64_t j = 0; j < 4; j++)
            for (int64_t c = 0; c < 2; c++)
                held[c][j] += loaded(slab + (k + j) * SLAB + c * LANES) * key[k + j];
    for (int64_t c = 0; c < 2; c++) {
        lanes all = (held[c][0] + held[c][1]) + (held[c][2] + held[c][3]);
        fresh[c] = (loaded(value + c * LANES) - decay * all) * rate;
    }
    for (int64_t k = 0; k < inner; k += 4)
        for (int64_t j = 0; j < 4; j++)
            for (int64_t c = 0; c < 2; c++) {
                float *at = slab + (k + j) * SLAB + c * LANES;
                lanes new = loaded(at) * decay + key[k + j] * fresh[c];
                memcpy(at, &new, sizeof new);
                sums[c][j] += new * query[k + j];
            }
    for (int64_t c = 0; c < 2; c++) {
        lanes all = (sums[c][0] + sums[c][1]) + (sums[c][2] + sums[c][3]);
        memcpy(out + c * LANES, &all, sizeof all);
    }
}

static void delta_slabs(const void *work, int64_t first, int64_t last) {
    const Delta *of = work;
    int64_t inner = of->inner, depth = of->depth, heads = of->heads, wide = (inner + 3) / 4 * 4;
    /* the state after each node of a tree, since others may go on from it; one for a chain */
    int64_t kept = of->parents ? of->tokens : 1, size = wide * SLAB;
    float *key = scratch(kept * (size + 2) + 2 * wide), *query = key + wide, *slabs = query + wide;
    float **states = (float **)(slabs + kept * size);
    for (int64_t i = first; i < last; i++) {
        int64_t place = i / of->slabs, row = place / heads, head = place % heads,
                start = i % of->slabs * SLAB, columns = depth - start;
        if (columns > SLAB) columns = SLAB;
        size_t line = (size_t)columns * sizeof(float);
        const float *before = of->before + place * inner * depth + start;
        const int64_t *parents = of->parents ? of->parents + row * of->tokens : NULL;
        float *slab = slabs;
        memset(key, 0, (size_t)(2 * wide + size) * sizeof(float));
        for (int64_t k = 0; k < inner; k++) memcpy(slab + k * SLAB, before + k * depth, line);
        for (int64_t t = 0; t < of->tokens; t++) {
            if (!handed_on(parents, t, of->tokens)) {
                slab = slabs + t * size;
                memcpy(slab, states[parent_of(parents, t)], (size_t)size * sizeof *slab);
            }
            states[parents ? t : 0] = slab;
            int64_t token = row * of->tokens + t, at = token * heads + head,
                    shared = token * of->groups + head * of->groups / heads;
            const float *k = of->key + shared * inner, *q = of->query + shared * inner;
            float value[SLAB] = {}, out[SLAB], sized = 1 / sqrtf(dot(k, k, inner) + 1e-6f),
                  asked = 1 / (sqrtf(dot(q, q, inner) + 1e-6f) * sqrtf((float)inner));
            for (int64_t n = 0; n < inner; n++) key[n] = k[n] * sized, query[n] = q[n] * asked;
            memcpy(value, of->value + at * depth + start, line);
            lanes fading = expo(spread(of->decay[at]));
            advance(slab, key, query, value, fading[0], of->rate[at], wide, out);
            if (of->out) memcpy(of->out + at * depth + start, out, line);
        }
        float *after = of->after + place * inner * depth + start;
        for (int64_t k = 0; k < inner; k++) memcpy(after + k * depth, slab + k * SLAB, line);
    }
}

/* A gated delta rule over tokens, from the states `before` them to those `after`, which may be the
 * same memory, as in transformers' torch_recurrent_gated_delta_rule: keys and queries are
 * normalised. decay: logarithms, 0 or less. rate: factors with which values are written. Groups of
 * heads share keys and queries. `after` is the state after the last token. */
void draftproof_delta_rule(const float *query /* [rows, tokens, groups, inner] */,
        const float *key /* [rows, tokens, groups, inner] */,
        const float *value /* [rows, tokens, heads, depth] */,
        const float *decay /* [rows, tokens, heads] */,
        const float *rate /* [rows, tokens, heads] */,
        const float *before /* [rows, heads, inner, depth] */,
        float *after /* [rows, heads, inner, depth] */,
        float *out /* [rows, tokens, heads, depth] or null */,
        const int64_t *parents /* [rows, tokens] or null */,
        int64_t rows, int64_t tokens, int64_t groups, int64_t heads, int64_t inner, int64_t depth,
        int64_t threads) {
    int64_t slabs = (depth + SLAB - 1) / SLAB;
    Delta of = {query, key, value, decay, rate, before, after, out, parents, tokens, groups, heads,
            inner, depth, slabs};
    share_out(delta_slabs, &of, rows * heads * slabs, 4, threads);
}

typedef struct {
    const bf16 *inputs, *weights, *bias;
    bf16 *out;
    const int64_t *parents;
    int64_t channels, length, taps, tokens, silu, parts;
} Convolution;

/* The places of the inputs of a node, the last of the `taps` its own; below 0 there are none. */
static void places_of(const int64_t *parents, int64_t skipped, int64_t place, int64_t taps,
        int64_t *at) {
    for (int64_t tap = taps - 1; tap >= 0; tap--) {
        at[tap] = place;
        if (place > skipped) place = skipped + parent_of(parents, place - skipped);
        else place--;
    }
}

static void convolve(const void *work, int64_t first, int64_t last) {
    const Convolution *of = work;
    for (int64_t i = first; i < last; i++) {
        int64_t row = i / of->parts, start = i % of->parts * LANES, some = of->channels - start,
                taps = of->taps, length = of->length, skipped = length - of->tokens;
        if (some > LANES) some = LANES;
        const bf16 *inputs = of->inputs + (row * of->channels + start) * length;
        const int64_t *parents = of->parents ? of->parents + row * of->tokens : NULL;
        bf16 *out = of->out + (row * of->channels + start) * length;
        lanes weights[taps], seen[taps], bias = {};         /* seen[t % taps]: the inputs at t */
        memset(weights, 0, sizeof weights), memset(seen, 0, sizeof seen);
        for (int64_t c = 0; c < some; c++)
            for (int64_t tap = 0; tap < taps; tap++)
                weights[tap][c] = widen(of->weights[(start + c) * taps + tap]);
        if (of->bias) bias = partly(of->bias + start, some);
        for (int64_t t = skipped < taps ? 0 : skipped - taps + 1; t < length; t++) {
            for (int64_t c = 0; c < some; c++) seen[t % taps][c] = widen(inputs[c * length + t]);
            if (t < skipped) continue;
            int64_t at[taps];
            if (parents) places_of(parents, skipped, t, taps, at);
            lanes sum = {};
            for (int64_t tap = 0; tap < taps; tap++) {
                lanes x = seen[(t + 1 + tap) % taps];
                if (parents) {
                    x = (lanes){};
                    for (int64_t c = 0; at[tap] >= 0 && c < some; c++)
                        x[c] = widen(inputs[c * length + at[tap]]);
                }
                sum += weights[tap] * x;
            }
            sum += bias;
            bf16 made[LANES];
            narrowed(made, of->silu ? silu(rounded(sum)) : sum);
            for (int64_t c = 0; c < some; c++) out[c * length + t] = made[c];
        }
    }
}

/* A causal convolution of each channel, `taps` wide, with optional silu, for the last `tokens`
 * alone; other outputs are not changed. */
void draftproof_causal_conv(const bf16 *inputs /* [rows, channels, length] */,
        const bf16 *weights /* [channels, taps] */, const bf16 *bias /* [channels] or null */,
        bf16 *out /* [rows, channels, length] */,
        const int64_t *parents /* [rows, tokens] or null */, int64_t rows, int64_t channels,
        int64_t length, int64_t taps, int64_t tokens, int64_t silu, int64_t threads) {
    int64_t parts = (channels + LANES - 1) / LANES;
    Convolution of = {inputs, weights, bias, out, parents, channels, length, taps, tokens, silu,
            parts};
    share_out(convolve, &of, rows * parts, 1 + SMALL / 8 / LANES / (1 + tokens), threads);
}

/* For each head of a token, the logarithm of the decay of its state, and the rate at which values
 * are written: -e^fall * log(1 + e^(time + bias)), and the sigmoid of `much`. */
void draftproof_delta_gates(const bf16 *time /* [tokens, heads] */,
        const bf16 *much /* [tokens, heads] */, const float *fall /* [heads] */,
        const float *bias /* [heads] */, float *decay /* [tokens, heads] */,
        float *rate /* [tokens, heads] */, int64_t tokens, int64_t heads) {
    for (int64_t i = 0; i < tokens * heads; i++) {
        float x = widen(time[i]) + bias[i % heads];
        decay[i] = -expf(fall[i % heads]) * (x > 20 ? x : log1pf(expf(x)));
        rate[i] = widen(narrow(1 / (1 + expf(-widen(much[i])))));
    }
}
