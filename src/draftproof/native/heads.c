/* Trees of draft heads: Medusa, with pairs of tokens, and beams of a recurrent head. */
#include "pools.h"
#include "scores.h"

/* Pairs of tokens, as in drafters/bigram.py. */
typedef struct {
    const int32_t *starts /* [vocab + 1] */, *tokens /* [count] */;
    const float *gains /* [count] */, *rest /* [vocab] */;
    int64_t vocab, count;
} Pairs;

/* The `count` likeliest children of a parent and their log-probabilities, descending, from its pairs,
 * whose probabilities [vocab] have gains, and the head's own best choices. weight: factor of gains. */
static void chances_after(const Pairs *pairs, int64_t parent, const float *chances, const Scored *own,
        float weight, Scored *best, int64_t count) {
    int64_t first = pairs->starts[parent], named = pairs->starts[parent + 1] - first;
    const int32_t *tokens = pairs->tokens + first;
    const float *gains = pairs->gains + first;
    float lifted[named + LANES], rest = weight * pairs->rest[parent];
    lanes sum = {}, taken = {};
    for (int64_t i = 0; i < named; i += LANES) {
        lanes before = (lanes){} - INFINITY, gain = {};
        for (int64_t l = 0; l < LANES && i + l < named; l++)
            before[l] = chances[tokens[i + l]], gain[l] = gains[i + l];
        lanes after = before + weight * gain;
        taken += expo(before), sum += expo(after);
        memcpy(lifted + i, &after, sizeof after);
    }
    float left = 1 - total(taken), whole = logf(total(sum) + (left > 0 ? left : 0) * expf(rest));
    for (int64_t k = 0; k < count; k++) best[k] = (Scored){-INFINITY, 0};
    for (int64_t i = 0; i < named; i++)
        if (lifted[i] > best[count - 1].score) ranked(best, count, lifted[i], tokens[i]);
    for (int64_t k = 0; k < count && own[k].score + rest > best[count - 1].score; k++) {
        int twice = 0;
        for (int64_t i = 0; i < named; i++) twice |= tokens[i] == own[k].token;
        if (!twice) ranked(best, count, own[k].score + rest, own[k].token);
    }
    for (int64_t k = 0; k < count; k++)
        best[k].score = best[k].score - whole < 0 ? best[k].score - whole : 0;
}

/* The residual blocks of heads, applied to hidden states: work [heads, rows, size]. */
typedef struct {
    const Linear *blocks;
    const bf16 *hidden;
    bf16 *work, *beside;
    int64_t rows, size, layers, threads;
} Blocks;

static void through_blocks(const void *work, int64_t first, int64_t last) {
    const Blocks *of = work;
    int64_t numbers = of->rows * of->size;
    for (int64_t h = first; h < last; h++) {
        bf16 *own = of->work + h * numbers, *beside = of->beside + h * numbers;
        memcpy(own, of->hidden, (size_t)numbers * sizeof *own);
        for (int64_t l = 0; l < of->layers; l++)
            draftproof_residual(of->blocks + h * of->layers + l, own, beside, of->rows,
                    of->threads);
    }
}

/* Logits of heads with `layers` residual blocks each and a projection, for hidden states; -inf for
 * tokens that the projection lacks. map: the tokens of the projection, or null for all. Heads are
 * independent, so threads take whole heads if there are enough. */
void draftproof_heads(const Linear *blocks /* [heads, layers] */, const Linear *projection,
        const int64_t *map /* [projection->outputs] or null */,
        const bf16 *hidden /* [rows, projection->size] */, bf16 *logits /* [rows, heads, vocab] */,
        bf16 *work /* [rows, heads, 2 * projection->size + projection->outputs] */, int64_t rows,
        int64_t heads, int64_t layers, int64_t vocab, int64_t threads) {
    int64_t size = projection->size, known = projection->outputs, all = rows * heads;
    bf16 *states = work + all * size, *said = states + all * size, lowest = narrow(-INFINITY);
    int64_t whole = heads >= threads && layers * all * size * size > 8 * SMALL;
    Blocks of = {blocks, hidden, work, states, rows, size, layers, whole ? 1 : threads};
    share_out(through_blocks, &of, heads, 1, whole ? threads : 1);
    for (int64_t i = 0; i < all; i++)                               /* row by row */
        memcpy(states + i * size, work + (i % heads * rows + i / heads) * size,
                (size_t)size * sizeof *states);
    int64_t same = !map && known == vocab;
    draftproof_linear(projection, states, same ? logits : said, all, threads);
    for (int64_t i = 0; i < all && !same; i++) {
        for (int64_t t = 0; t < vocab; t++) logits[i * vocab + t] = lowest;
        for (int64_t k = 0; k < known; k++) {
            int64_t token = map ? map[k] : k;
            if (token >= 0 && token < vocab) logits[i * vocab + token] = said[i * known + k];
        }
    }
}

/* Logits of heads, and the trees made of them. The logits of a head are converted once, to
 * probabilities [rows, heads, vocab + LANES] and the `most` best of them. */
typedef struct {
    const Pairs *pairs;
    const int64_t *shape, *roots, *places;
    const bf16 *logits;
    const float *noise, *temperatures, *trusts;
    int64_t heads, vocab, most;
    float weight, *chances;
    Scored *own;
    const TreeOutput *out;
} Bigrams;

/* Heads, numbered across all rows. */
static void weigh_heads(const void *work, int64_t first, int64_t last) {
    const Bigrams *of = work;
    int64_t vocab = of->vocab, most = of->most;
    for (int64_t i = first; i < last; i++) {
        int64_t r = i / of->heads;
        float *chances = of->chances + i * (vocab + LANES), trust = of->trusts[r];
        Scored *best = of->own + i * most;
        const float *heard = of->noise ? of->noise + (of->places[r] + i % of->heads) * vocab : NULL;
        float whole = weighed(of->logits + i * vocab, heard, of->temperatures[r], trust, vocab, chances,
                best, most), top = best->score;
        int there = whole < INFINITY;
        for (int64_t k = 0; k < most; k++)
            best[k].score = there ? (best[k].score - top) * trust - whole : -INFINITY;
        for (int64_t t = 0; t < vocab; t += LANES) {
            lanes chance = (loaded(chances + t) - top) * trust - whole;
            if (!there) chance = (lanes){} - INFINITY;
            memcpy(chances + t, &chance, sizeof chance);
        }
    }
}

static void grow_rows(const void *work, int64_t first, int64_t last) {
    const Bigrams *of = work;
    const int64_t *shape = of->shape;
    int64_t most = of->most, nodes = of->out->nodes, heads = of->heads;
    for (int64_t r = first; r < last; r++) {
        int64_t *token = of->out->tokens + r * nodes, *above = of->out->parents + r * nodes;
        int64_t rank[nodes], depth[nodes];
        float *chance = of->out->probs + r * nodes;
        float push = of->weight * of->trusts[r] / of->temperatures[r];
        float next[nodes];                  /* the probability of a node's next child */
        Scored *lists = (Scored *)scratch(nodes * most * (int64_t)(sizeof(Scored) / sizeof(float)));
        for (int64_t n = 0; n < nodes; n++) {
            int64_t from = n && shape ? shape[n] : 0;
            for (int64_t m = 1; m < n && !shape; m++)
                if (next[m] > next[from]) from = m;
            token[n] = of->roots[r], above[n] = -1, chance[n] = 0, depth[n] = 0;
            if (n) {
                const Scored *child = lists + from * most + (shape ? shape[nodes + n] : rank[from]);
                int there = next[from] > -INFINITY && child->score > -INFINITY;
                token[n] = there ? child->token : of->out->absent;
                above[n] = there || shape ? from : 0;
                chance[n] = there ? chance[from] + child->score : -INFINITY;
                depth[n] = depth[from] + 1;
                if (!shape)
                    next[from] = ++rank[from] < most ? chance[from] + child[1].score : -INFINITY;
            }
            rank[n] = 0, next[n] = -INFINITY;
            if (token[n] < 0 || token[n] >= of->pairs->vocab || depth[n] == heads) continue;
            int64_t at = r * heads + depth[n];
            chances_after(of->pairs, token[n], of->chances + at * (of->vocab + LANES),
                    of->own + at * most, push, lists + n * most, most);
            next[n] = chance[n] + lists[n * most].score;
        }
        for (int64_t n = 0; n < nodes; n++) chance[n] = expf(chance[n]);
    }
}

/* For each row the tree of the likeliest nodes after its root, by logits and pairs, in descending
 * order of probability, with at most `children` per parent. With a shape (each node's parent, and
 * its rank among the children), the tree of this shape instead. Noise, places, temperatures and
 * scales are as for a chain. */
void draftproof_bigram_tree(const Pairs *pairs, float weight,
        const int64_t *shape /* [2, out->nodes] or null */,
        const bf16 *logits /* [rows, heads, vocab] */, const int64_t *roots /* [rows] */,
        int64_t rows, int64_t heads, int64_t vocab, int64_t children,
        const float *noise /* [reach(places, heads), vocab] or null */,
        const int64_t *places /* [rows] or null */, const float *temperatures /* [rows] */,
        const float *trusts /* [rows] */, TreeOutput *out /* [rows] */,
        float *work /* [rows, heads, vocab + 16] */, int64_t threads) {
    int64_t most = children < vocab ? children : vocab;
    Scored *own = malloc((size_t)(rows * heads * most) * sizeof(Scored));
    if (!own) abort();
    Bigrams of = {pairs, shape, roots, places, logits, noise, temperatures, trusts, heads, vocab, most,
        weight, work, own, out};
    share_out(weigh_heads, &of, rows * heads, 1 + SMALL / 2 / (vocab + 1), threads);
    out->widest = out->nodes;
    share_out(grow_rows, &of, rows, 2, threads);
    free(own);
}

/* A recurrent draft head. smooth: its state passes through SiLU. first: the bias of `back` is also
 * added where there is no state yet. narrow: a layer before the blocks, unless its size is 0. map:
 * the draft vocabulary of the projection, or null for all tokens. */
typedef struct {
    Linear fed, back, narrow, projection;
    const Linear *blocks /* [layers] */;
    Embeddings table;
    const int64_t *map /* [projection.outputs] or null */;
    int64_t hidden, layers, smooth, first;
} Recurrence;

/* Turn embeddings x [rows, hidden] of the next tokens and, after the first, the states `back` before
 * them into states. */
static void advanced(const Recurrence *head, bf16 *x, const bf16 *before, bf16 *beside,
        int64_t rows, int64_t threads) {
    int64_t size = head->hidden, all = rows * size;
    bf16 *more = beside + all;
    draftproof_linear(&head->fed, x, beside, rows, threads);
    memset(more, 0, (size_t)all * sizeof(bf16));
    if (before) draftproof_linear(&head->back, before, more, rows, threads);
    else if (head->first && head->back.bias)
        for (int64_t r = 0; r < rows; r++)
            memcpy(more + r * size, head->back.bias, (size_t)size * sizeof(bf16));
    for (int64_t i = 0; i < all; i += LANES) {
        lanes v = rounded(wide(beside + i) + wide(more + i));
        narrowed(x + i, head->smooth ? silu(v) : v);
    }
}

/* Beam search: `length` steps of `width` beams with as many children each, after context and roots.
 * All visited nodes go into pools [rows, .]: tokens, parents (indices in the pool), log-probabilities
 * of paths; the root has index 0. A search may end early below `floor`, as a chain does. Returns the
 * size of a pool. */
int64_t draftproof_beam_search(const Recurrence *head,
        const bf16 *context /* [rows, head->hidden] */, const int64_t *roots /* [rows] */, int64_t rows, int64_t width, int64_t length,
        const float *noise /* [reach(places, length), head->table.vocab] or null */,
        const int64_t *places /* [rows] or null */, const float *temperatures /* [rows] */,
        const float *trusts /* [rows] */, float floor, TreeOutput *out /* [rows] */,
        bf16 *work /* [rows, width, 8 * head->hidden + 2 * head->projection.size
        + 3 * head->projection.outputs] */, int64_t threads) {
    int64_t hidden = head->hidden, wider = head->projection.size, vocab = head->table.vocab;
    int64_t known = head->projection.outputs, most = rows * width, room = out->nodes;
    int64_t *tokens = out->tokens, *parents = out->parents;
    float *chances = out->probs;
    float *heard = noise && head->map ? (float *)work : NULL;   /* by the draft vocabulary */
    bf16 *first = work + 2 * most * known;
    bf16 *states[2] = {first, first + most * hidden}, *before = states[1] + most * hidden;
    bf16 *beside = before + most * hidden, *pairs = beside + 2 * most * hidden;
    bf16 *x = pairs + 2 * most * hidden, *room_beside = x + most * wider;
    bf16 *logits = room_beside + most * wider;
    int64_t ends[most], above[most], where[most], found[most * width], size = 1, beams = 1;
    float sums[most], probs[most * width], temperature[most], trust[most];
    for (int64_t r = 0; r < rows; r++) {
        tokens[r * room] = roots[r], parents[r * room] = 0, chances[r * room] = 0;
        ends[r * width] = 0, sums[r * width] = 0;
    }
    for (int64_t d = 0; d < length; d++) {
        bf16 *state = states[d % 2], *last = states[(d + 1) % 2];
        int64_t count = rows * beams;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t b = 0; b < beams; b++) {
                int64_t at = r * beams + b;
                draftproof_embed(&head->table, tokens + r * room + ends[r * width + b], 1,
                        state + at * hidden);
                if (d) memcpy(before + at * hidden, last + above[r * width + b] * hidden,
                        (size_t)hidden * sizeof(bf16));
                where[at] = places ? places[r] + d : 0, temperature[at] = temperatures[r], trust[at] = trusts[r];
            }
        advanced(head, state, d ? before : NULL, beside, count, threads);
        for (int64_t at = 0; at < count; at++) {
            memcpy(pairs + 2 * at * hidden, context + at / beams * hidden,
                    (size_t)hidden * sizeof(bf16));
            memcpy(pairs + (2 * at + 1) * hidden, state + at * hidden,
                    (size_t)hidden * sizeof(bf16));
        }
        if (head->narrow.size) draftproof_linear(&head->narrow, pairs, x, count, threads);
        else memcpy(x, pairs, (size_t)(2 * count * hidden) * sizeof(bf16));
        for (int64_t l = 0; l < head->layers; l++)
            draftproof_residual(head->blocks + l, x, room_beside, count, threads);
        draftproof_linear(&head->projection, x, logits, count, threads);
        for (int64_t at = 0; heard && at < count; at++, where[at - 1] = at - 1)
            for (int64_t i = 0; i < known; i++)
                heard[at * known + i] = noise[where[at] * vocab + head->map[i]];
        draftproof_best_tokens(logits, heard ? heard : noise, where, temperature, trust, count, known,
                width, probs, found, threads);
        for (int64_t n = 0; head->map && n < count * width; n++) found[n] = head->map[found[n]];
        float top = -INFINITY;
        for (int64_t r = 0; r < rows; r++) {
            Scored best[width];
            for (int64_t b = 0; b < width; b++) best[b] = (Scored){-INFINITY, size};
            for (int64_t b = 0; b < beams; b++)
                for (int64_t k = 0; k < width; k++) {
                    int64_t at = (r * beams + b) * width + k, place = size + b * width + k;
                    tokens[r * room + place] = found[at];
                    parents[r * room + place] = ends[r * width + b];
                    float chance = chances[r * room + place] = sums[r * width + b] + probs[at];
                    if (chance > best[width - 1].score) ranked(best, width, chance, place);
                }
            for (int64_t b = 0; b < width; b++) {
                ends[r * width + b] = best[b].token, sums[r * width + b] = best[b].score;
                above[r * width + b] = r * beams + (best[b].token - size) / width;
            }
            top = best->score > top ? best->score : top;
        }
        size += beams * width, beams = width;
        if (top < floor) break;
    }
    return size;
}
