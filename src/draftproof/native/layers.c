/* The parts of a Llama-like model between linear layers, apart from attention: norms and gates; and
 * the loop over all layers. */
#include "model.h"

enum { PART = 1024 };

typedef struct {
    bf16 *hidden;
    const bf16 *delta;
    const float *added, *weight;
    const Norm *norm;
    bf16 *out;
    int64_t size;
} Norming;

static void norm_rows(const void *work, int64_t first, int64_t last) {
    const Norming *of = work;
    const Norm *norm = of->norm;
    const float *added = of->added, *weight = of->weight;
    int64_t size = of->size;
    for (int64_t r = first; r < last; r++) {
        bf16 *x = of->hidden + r * size, *y = of->out + r * size;
        const bf16 *d = of->delta ? of->delta + r * size : NULL;
        lanes squares = {};
        float within = added && d ? factor_of(d, norm->epsilon, size) : 0;
        for (int64_t i = 0; i < size; i += LANES) {
            lanes v = wide(x + i);
            if (d) {
                lanes more = added ? rounded(wide(d + i) * within) * loaded(added + i)
                        : wide(d + i) * norm->share;
                v = rounded(v + rounded(more));
                narrowed(x + i, v);
            }
            squares += v * v;
        }
        float factor = 1.0f / sqrtf(total(squares) / (float)size + norm->epsilon);
        for (int64_t i = 0; i < size; i += LANES)
            narrowed(y + i, rounded(wide(x + i) * factor) * loaded(weight + i));
    }
}

/* hidden += delta, if any, scaled by its share or normed with the weight `added`;
 * out = hidden / rms(hidden) * weight. [rows, size] each, size a multiple of 16. */
void draftproof_norm(bf16 *hidden, const bf16 *delta, const float *added, const float *weight,
        const Norm *norm, bf16 *out, int64_t rows, int64_t size, int64_t threads) {
    Norming of = {hidden, delta, added, weight, norm, out, size};
    share_out(norm_rows, &of, rows, 1 + SMALL / 2 / (size + 1), threads);
}

typedef struct {
    const bf16 *gate_up;
    bf16 *out;
    int64_t gelu, size, parts;                  /* of PART numbers each, per row */
} Gating;

/* Parts of rows, numbered across all rows. */
static void gate_parts(const void *work, int64_t first, int64_t last) {
    const Gating *of = work;
    int64_t size = of->size;
    for (int64_t one = first; one < last; one++) {
        int64_t r = one / of->parts, part = one % of->parts * PART;
        const bf16 *gate = of->gate_up + 2 * r * size;
        for (int64_t i = part; i < part + PART && i < size; i += LANES) {
            lanes x = wide(gate + i);
            lanes open = rounded(of->gelu ? tanh_gelu(x) : silu(x));
            narrowed(of->out + r * size + i, open * wide(gate + size + i));
        }
    }
}

/* out = silu(gate) * up, or with GELU; gate and up are stored one after the other: [rows, 2 * size] to [rows,
 * size]. */
void draftproof_gate(const bf16 *gate_up /* [rows, 2, (size + 15) // 16 * 16] */,
        bf16 *out /* [rows, (size + 15) // 16 * 16] */, int64_t gelu, int64_t rows, int64_t size,
        int64_t threads) {
    Gating of = {gate_up, out, gelu, size, (size + PART - 1) / PART};
    share_out(gate_parts, &of, rows * of.parts, SMALL / 4 / PART, threads);
}

/* Whether the slot `place` after a row's text, and the slot that fills it, are inside a store. */
static int inside(int64_t length, int64_t node, int64_t place, int64_t capacity) {
    int64_t last = node > place ? node : place;
    return length >= 0 && node >= 0 && length + last < capacity;
}

/* Move the `deep` nodes of each row, ascending, to the front of its scratch, in stores [rows,
 * heads, capacity] of so many bytes a slot. A node is never before its destination, so no unread
 * node is overwritten. Padding beyond the capacity stays where it is. */
void draftproof_keep(char *const *stores /* [count] */, const int64_t *heads /* [count] */,
        const int64_t *bytes /* [count] */, int64_t count, int64_t capacity, int64_t rows,
        const int64_t *lengths /* [rows] */, const int64_t *nodes /* [rows, deep] */,
        int64_t deep) {
    for (int64_t s = 0; s < count; s++)
        for (int64_t line = 0; line < rows * heads[s]; line++) {
            int64_t row = line / heads[s], size = bytes[s];
            char *scratch = stores[s] + (line * capacity + lengths[row]) * size;
            for (int64_t d = 0; d < deep; d++) {
                int64_t node = nodes[row * deep + d];
                if (node != d && inside(lengths[row], node, d, capacity))
                    memcpy(scratch + d * size, scratch + node * size, (size_t)size);
            }
        }
}

typedef struct {
    const Model *model;
    const int64_t *tokens;
    bf16 *hidden;
} Embedding;

static void embed_rows(const void *work, int64_t first, int64_t last) {
    const Embedding *of = work;
    int64_t size = of->model->table.size;
    for (int64_t r = first; r < last; r++) {
        bf16 *embedding = of->hidden + r * size;
        draftproof_embed(&of->model->table, of->tokens + r, 1, embedding);
        for (int64_t i = 0; i < size; i += LANES)
            narrowed(embedding + i, wide(embedding + i) * of->model->loud);
    }
}

/* Read a model: tokens [start_of(rows)] become hidden states after the final norm, in `last`, and
 * logits of these, if wanted; the states before layer n go to kept[n] if kept and this are not null.
 * Unknown tokens are read as known ones. stores: those of each layer in turn.
 * work: room for start_of(rows) * (2 size + the widest inner + heads * head_dim + 3 gates)
 * numbers. */
void draftproof_forward(const Read *read, const Model *model,
        void *const *stores /* [read->stores, model->count] */,
        const int64_t *tokens /* [width(read)] */, bf16 *last /* [width(read), hidden(model)] */,
        bf16 *logits /* [width(read), vocab_of(model)] or null */,
        bf16 *const *kept /* [model->count] or null */,
        bf16 *work /* [width(read), work_of(model)] */) {
    const Layer *layers = model->layers;
    const Norm *norm = &model->norm;
    int64_t width = start_of(read, read->rows), size = layers->inner.size, threads = read->threads;
    bf16 *hidden = work, *normed = hidden + width * size;
    bf16 *delta = NULL;
    Embedding embedding = {model, tokens, hidden};
    share_out(embed_rows, &embedding, width, 4, threads);
    for (int64_t n = 0; n < model->count; n++) {
        const Layer *layer = layers + n;
        int64_t gates = layer->down.size;
        bf16 *states = normed + width * size, *mixed = states + width * layer->inner.outputs;
        bf16 *both = mixed + width * layer->output.size, *gate = both + width * 2 * gates;
        draftproof_norm(hidden, delta, n ? layer[-1].fed : NULL, layer->before, norm, normed, width,
                size, threads);
        if (kept && kept[n]) memcpy(kept[n], hidden, (size_t)(width * size) * sizeof(bf16));
        draftproof_linear(&layer->inner, normed, states, width, threads);
        draftproof_attention(read, layer, states, norm, stores + read->stores * n, mixed);
        delta = last;
        draftproof_linear(&layer->output, mixed, delta, width, threads);
        draftproof_norm(hidden, delta, layer->mixed, layer->after, norm, normed, width, size,
                threads);
        draftproof_linear(&layer->gate_up, normed, both, width, threads);
        draftproof_gate(both, gate, model->gelu, width, gates, threads);
        draftproof_linear(&layer->down, gate, delta, width, threads);
    }
    draftproof_norm(hidden, delta, layers[model->count - 1].fed, model->last, norm, last, width,
            size, threads);
    if (logits) draftproof_linear(model->head, last, logits, width, threads);
}
