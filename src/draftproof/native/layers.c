/* What stands between the linear layers of a Llama-like model: norms, rotation, attention, gates; and all of its layers. */
#include "lanes.h"

enum { BLOCK = 16, TOGETHER = 8, WIDEST = 256, PART = 1024 };

/* hidden += delta, if there is one; out = hidden / rms(hidden) * weight. [rows, size] each, size a multiple of 16. */
void draftproof_norm(bf16 *hidden, const bf16 *delta, const bf16 *weight, float epsilon, bf16 *out, int64_t rows, int64_t size,
                     int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > SMALL / 2)
    for (int64_t r = 0; r < rows; r++) {
        bf16 *x = hidden + r * size, *y = out + r * size;
        lanes squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            lanes v = wide(x + i);
            if (delta) {
                v = rounded(v + wide(delta + r * size + i));
                narrowed(x + i, v);
            }
            squares += v * v;
        }
        float factor = 1.0f / sqrtf(total(squares) / (float)size + epsilon);
        for (int64_t i = 0; i < size; i += LANES) {
            narrowed(y + i, rounded(wide(x + i) * factor) * wide(weight + i));
        }
    }
}

/* out = silu(gate) * up; gate and up lie behind each other: [rows, 2 * size] to [rows, size]. */
void draftproof_gate(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for collapse(2) num_threads(threads) if (rows * size > SMALL / 4)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t part = 0; part < size; part += PART) {
            const bf16 *gate = gate_up + 2 * r * size, *up = gate + size;
            bf16 *y = out + r * size;
            for (int64_t i = part; i < part + PART && i < size; i += LANES) {
                lanes g = wide(gate + i);
                narrowed(y + i, rounded(g / (1.0f + expo(-g))) * wide(up + i));
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

static inline float rotated(float x, bf16 cosine, float other, bf16 sine) {
    return widen(narrow(widen(narrow(x * widen(cosine))) + other * widen(sine)));
}

/* One head of one token, normed if there is a weight and turned to its position, in bfloat16's precision. */
static void turned(const Read *read, const bf16 *x, const bf16 *weight, float epsilon, int64_t position, float *out) {
    int64_t size = read->head_dim, half = size / 2;
    const bf16 *cosines = read->cosines + position * size, *sines = read->sines + position * size;
    float plain[WIDEST];
    if (weight) normed(x, weight, epsilon, plain, size);
    else for (int64_t i = 0; i < size; i++) plain[i] = widen(x[i]);
    for (int64_t i = 0; i < half; i++) out[i] = rotated(plain[i], cosines[i], -plain[i + half], sines[i]);
    for (int64_t i = half; i < size; i++) out[i] = rotated(plain[i], cosines[i], plain[i - half], sines[i]);
}

static int64_t depth_of(const int64_t *parents, int64_t node) {
    int64_t depth = 0;
    for (; (node = parents[node]) >= 0;) depth++;
    return depth;
}

/* scores[q][slot] of TOGETHER queries with BLOCK slots; keys [head_dim][BLOCK]. Each a sum along head_dim. */
static inline void scored(const float *queries, const lanes *keys, int64_t size, float *scores, int64_t stride) {
    lanes sum[TOGETHER] = {};
    for (int64_t i = 0; i < size; i++)
        for (int q = 0; q < TOGETHER; q++) sum[q] += queries[q * size + i] * keys[i];
    for (int q = 0; q < TOGETHER; q++) memcpy(scores + q * stride, &sum[q], sizeof sum[q]);
}

/* Scores become chances, summed up in the order of the text: slots `start` to `length`, then the nodes of the path. Those of the
 * other nodes, and from `earliest`, where other queries begin, to `start` become 0. Returns one divided by that sum. */
static float softened(float *scores, int64_t earliest, int64_t start, int64_t length, const int64_t *path, int64_t deep,
                      int64_t nodes) {
    float on[deep];
    for (int64_t d = 0; d < deep; d++) on[d] = scores[length + path[d]];
    memcpy(scores + length, on, sizeof on);
    int64_t first = start / LANES * LANES, end = length + deep, whole = (end + LANES - 1) / LANES * LANES;
    for (int64_t s = end; s < whole; s++) scores[s] = -INFINITY;
    for (int64_t s = first; s < start; s++) scores[s] = -INFINITY;
    lanes most = loaded(scores + first), sum = {};
    for (int64_t s = first; s < whole; s += LANES) most = larger(loaded(scores + s), most);
    float top = largest(most);
    for (int64_t s = first; s < whole; s += LANES) {
        lanes chance = expo(loaded(scores + s) - top);
        sum += chance;
        memcpy(scores + s, &chance, sizeof chance);
    }
    for (int64_t s = earliest; s < first; s++) scores[s] = 0;
    memcpy(on, scores + length, sizeof on);
    memset(scores + length, 0, (size_t)nodes * sizeof *scores);
    for (int64_t d = 0; d < deep; d++) scores[length + path[d]] = on[d];
    return 1.0f / total(sum);
}

/* Attention of queries `from` to `to` that share the keys of one head, in one row. A query is (node, head of the group). */
static void attended(const Read *read, int64_t row, int64_t key_head, const bf16 *keys, const bf16 *values, const bf16 *inner,
                     const bf16 *weight, float epsilon, bf16 *out, int64_t from, int64_t to) {
    int64_t size = read->head_dim, group = read->heads / read->key_heads, begin = start_of(read, row);
    int64_t length = read->lengths[row], end = length + read->nodes, count = to - from;
    int64_t padded = (count + TOGETHER - 1) / TOGETHER * TOGETHER, stride = (end + BLOCK - 1) / BLOCK * BLOCK + LANES;
    const int64_t *parents = read->parents + row * read->nodes;
    float *scores = scratch(padded * (stride + size) + size * BLOCK), *queries = scores + padded * stride;
    lanes *tile = (lanes *)(queries + padded * size);
    int64_t path[count][read->nodes], deep[count], start[count], earliest = length;
    int64_t wanted[read->nodes], slots[read->nodes], some = 0;
    memset(wanted, 0, sizeof wanted);
    memset(queries + count * size, 0, (size_t)((padded - count) * size) * sizeof(float));
    for (int64_t q = 0; q < count; q++) {
        int64_t place = (from + q) / group, node = node_at(read, row, place), head = key_head * group + (from + q) % group;
        int64_t depth = depth_of(parents, node), position = length + depth;
        const bf16 *x = inner + ((begin + place) * (read->heads + 2 * read->key_heads) + head) * size;
        turned(read, x, weight, epsilon, position < read->context ? position : read->context - 1, queries + q * size);
        for (int64_t i = 0; i < size; i++) queries[q * size + i] *= read->scale;
        deep[q] = depth + 1;
        for (int64_t d = depth, n = node; d >= 0; d--, n = parents[n]) path[q][d] = n, wanted[n] = 1;
        start[q] = read->window && position >= read->window ? position + 1 - read->window : 0;
        if (start[q] < earliest) earliest = start[q];
    }
    for (int64_t s = earliest / BLOCK * BLOCK; s < end; s += BLOCK) {
        int64_t left = end - s < BLOCK ? end - s : BLOCK;
        for (int64_t i = 0; i < size; i += LANES) {
            for (int64_t j = 0; j < BLOCK; j++) tile[i + j] = j < left ? wide(keys + (s + j) * size + i) : (lanes){};
            transposed(tile + i);
        }
        for (int64_t q = 0; q < padded; q += TOGETHER) scored(queries + q * size, tile, size, scores + q * stride + s, stride);
    }
    float shares[count];
    for (int64_t q = 0; q < count; q++)
        shares[q] = softened(scores + q * stride, earliest, start[q], length, path[q], deep[q], read->nodes);
    for (int64_t q = count; q < padded; q++) memset(scores + q * stride, 0, (size_t)end * sizeof(float));
    for (int64_t n = 0; n < read->nodes; n++)                   /* what is on no path may never have been written */
        if (wanted[n]) slots[some++] = length + n;
    for (int64_t q = 0; q < count; q += TOGETHER)
        for (int64_t i = 0; i < size; i += LANES) {
            lanes sum[TOGETHER] = {};
            for (int64_t s = earliest; s < length; s++) {
                lanes value = wide(values + s * size + i);
                for (int k = 0; k < TOGETHER; k++) sum[k] += scores[(q + k) * stride + s] * value;
            }
            for (int64_t n = 0; n < some; n++) {
                lanes value = wide(values + slots[n] * size + i);
                for (int k = 0; k < TOGETHER; k++) sum[k] += scores[(q + k) * stride + slots[n]] * value;
            }
            for (int64_t k = 0; k < TOGETHER && q + k < count; k++) {
                int64_t place = (from + q + k) / group, head = key_head * group + (from + q + k) % group;
                narrowed(out + ((begin + place) * read->heads + head) * size + i, sum[k] * shares[q + k]);
            }
        }
}

/* Queries, keys and values of the nodes that are read, [start_of(rows), heads + 2 key_heads, head_dim]: turn them, write keys
 * and values [rows, key_heads, capacity, head_dim] behind the committed tokens, attend to those and to each node's own path;
 * out [start_of(rows), heads, head_dim]. The weights of head norms may be null. */
void draftproof_attend(const Read *read, const bf16 *inner, const bf16 *query_weight, const bf16 *key_weight, float epsilon,
                       bf16 *keys, bf16 *values, bf16 *out) {
    int64_t size = read->head_dim, group = read->heads / read->key_heads, shared = read->rows * read->key_heads;
    int64_t queries = (read->nodes - read->first) * group, lines = read->heads + 2 * read->key_heads;
    int64_t wanted = read->threads > shared ? (read->threads + shared - 1) / shared : 1, each = (queries + wanted - 1) / wanted;
    each = each > 48 ? 48 : (each + TOGETHER - 1) / TOGETHER * TOGETHER;
    int64_t parts = (queries + each - 1) / each, slots = 0;
    for (int64_t row = 0; row < read->rows; row++) slots += read->lengths[row] + read->nodes;
#pragma omp parallel num_threads(read->threads) if (slots * read->key_heads * queries * size > PRODUCTS)
    {
#pragma omp for
        for (int64_t one = 0; one < shared; one++) {
            int64_t row = one / read->key_heads, head = one % read->key_heads, length = read->lengths[row];
            int64_t begin = start_of(read, row), some = start_of(read, row + 1) - begin;
            for (int64_t w = 0; w < some; w++) {
                int64_t node = node_at(read, row, w), slot = (one * read->capacity + length + node) * size;
                int64_t position = length + depth_of(read->parents + row * read->nodes, node);
                const bf16 *x = inner + ((begin + w) * lines + read->heads + head) * size;
                float key[WIDEST];
                turned(read, x, key_weight, epsilon, position < read->context ? position : read->context - 1, key);
                for (int64_t i = 0; i < size; i++) keys[slot + i] = narrow(key[i]);
                memcpy(values + slot, x + read->key_heads * size, (size_t)size * sizeof(bf16));
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t one = 0; one < shared * parts; one++) {
            int64_t which = one / parts, row = which / read->key_heads, store = which * read->capacity * size;
            int64_t own = (start_of(read, row + 1) - start_of(read, row)) * group, from = one % parts * each;
            if (from < own)
                attended(read, row, which % read->key_heads, keys + store, values + store, inner, query_weight, epsilon, out, from,
                         from + each < own ? from + each : own);
        }
    }
}

/* All layers of a model: hidden states [start_of(rows), size] become those behind the final norm, in `last`; the states before
 * layer n go to kept[n] where that is not null, nor kept. stores: keys and values of each layer in turn. work: room for
 * start_of(rows) * (size + the widest inner + heads * head_dim + 3 gates) numbers. */
void draftproof_forward(const Read *read, const Layer *layers, int64_t count, bf16 *const *stores, const bf16 *norm, bf16 *hidden,
                        bf16 *last, bf16 *const *kept, bf16 *work) {
    int64_t width = start_of(read, read->rows), size = layers->inner.size, threads = read->threads;
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
