/* The structures by which Python describes a model and a read of it (native/structures.py), and
 * their readers. */
#pragma once
#include "lanes.h"

/* How the heads of some layers attend: how many positions back, or all if 0; and how many of a
 * head's first numbers rotate with its position, by cosines and sines [context, head_dim]. */
typedef struct {
    int64_t window, rotary_dim;
    const bf16 *cosines, *sines;
} AttentionKind;

/* One read of a model: what all its layers share. Stores of a layer: keys and values in bfloat16,
 * or 4: keys and values in 8 bits, and their scales. */
typedef struct {
    int64_t rows, nodes, first, heads, key_heads, head_dim, capacity, context, threads, stores;
    const int64_t *lengths /* [rows] */;        /* committed tokens */
    const int64_t *parents /* [rows, nodes] */; /* before their children; -1 at the root */
    const int64_t *starts /* [rows + 1] or null */;                             /* see below */
    const int64_t *which /* [last(starts)] or null */;
    const AttentionKind *attention_kinds;
    float scale;
} Read;

/* The nodes of each row in a read, row by row: all nodes from `first` on, or, with starts, the
 * nodes which[starts[row]] up to which[starts[row + 1]], ascending, so that a row with fewer nodes
 * costs less. */
static inline int64_t start_of(const Read *read, int64_t row) {
    return read->starts ? read->starts[row] : row * (read->nodes - read->first);
}

static inline int64_t node_at(const Read *read, int64_t row, int64_t place) {
    return read->starts ? read->which[read->starts[row] + place] : read->first + place;
}

/* A linear layer. Its weights lie as [outputs / 32, padded / fold, 32, fold], the outputs rounded
 * up to a multiple of 32; padded, the inputs rounded up, is a multiple of 16 * fold. With a scale
 * per output they have 8 bits and 128 added to them, and fold is 4; without, they are bfloat16 and
 * fold is 2. Scale and bias are as long as the outputs rounded up; the bias may be null.
 *
 * With a format, weights are blocks as linear_blocks.h describes them. With parts, layers of any
 * kind that read the same inputs are computed one after another, and their outputs stand side by
 * side; such a layer has no weights itself. */
typedef struct {
    const void *weights /* [weight_bytes(scale, outputs, padded, format)] or null */;
    const float *scale /* [(outputs + 31) // 32 * 32] or null */;
    const bf16 *bias /* [(outputs + 31) // 32 * 32] or null */;
    int64_t size, padded, outputs;
    int64_t format, count;
    const void *parts /* [count] or null */;    /* Linear */
} Linear;

/* Parameters of norms and sums: a layer's contribution is multiplied by `share`. */
typedef struct {
    float epsilon, share;
} Norm;

/* One layer of a model: queries, keys and values as one, gate and up projections as one. Its heads
 * attend by the `kind`-th of several attention kinds. */
typedef struct {
    Linear inner, output, gate_up, down;
    /* weights of norms: in front of attention and of the gates; of the heads of queries and keys,
     * and of what attention and gates add, which may be null */
    const float *before /* [inner.size] */, *after /* [gate_up.size] */;
    const float *query /* or null */, *key /* or null */;
    const float *mixed /* [output.outputs] or null */, *fed /* [down.outputs] or null */;
    int64_t kind;
} Layer;

/* Token embeddings [vocab, size]: bfloat16, or with a format rows of blocks as a GGUF file stores
 * them; linear_blocks.h has the formats. */
typedef struct {
    const void *rows /* [table_bytes(vocab, size, format)] */;
    int64_t vocab, size, format;
} Embeddings;

/* A model: its layers, the weight of the final norm, the embeddings and their factor, and the head,
 * or null. */
typedef struct {
    const Layer *layers /* [count] */;
    int64_t count, gelu;                        /* gates are GELU by tanh, or SiLU */
    const float *last;
    Embeddings table;
    const Linear *head;
    Norm norm;
    float loud;
} Model;

void draftproof_attention(const Read *read, const Layer *layer, const bf16 *inner, const Norm *norm,
        void *const *stores, bf16 *out);
void draftproof_linear(const Linear *layer, const bf16 *inputs, bf16 *out, int64_t rows,
        int64_t threads);
void draftproof_embed(const Embeddings *table, const int64_t *tokens, int64_t count, bf16 *out);
void draftproof_residual(const Linear *layer, bf16 *inputs, bf16 *beside, int64_t rows,
        int64_t threads);
void draftproof_forward(const Read *read, const Model *model, void *const *stores,
        const int64_t *tokens, bf16 *last, bf16 *logits, bf16 *const *kept, bf16 *work);
