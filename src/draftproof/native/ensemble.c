/* Drafting by earlier successors, and by several members, weighted by their accuracy. */
#include "pools.h"

/* The trees of pools. */
void draftproof_likeliest(const int64_t *pool /* [rows, size] */,
        const int64_t *above /* [rows, size] */, const float *probs /* [rows, size] */,
        int64_t rows, int64_t size, TreeOutput *out /* [rows] */) {
    for (int64_t r = 0; r < rows; r++)
        grow_tree(pool + r * size, above + r * size, probs + r * size, size, APART, out, r);
}

/* The `best` likeliest successors of pairs of tokens and of single tokens, each from the text of an
 * owner. As in drafters/token_recycling.py. */
typedef struct {
    int32_t *tags /* [2 * slots] */, *tokens /* [2 * slots, best] */;
    int64_t *owners /* [2 * slots] */;
    float *probs /* [2 * slots, best] */;
    int64_t best, slots, shift, token, before, absent;
} Table;

/* The slot and the tag of a token in an owner's text, after another token or alone. */
static inline int64_t placed(const Table *table, int64_t before, int64_t token, int64_t owner,
        int alone, int32_t *tag) {
    uint32_t key = ((uint32_t)token + 2) * (uint32_t)table->token + (uint32_t)owner;
    if (!alone) key += ((uint32_t)before + 2) * (uint32_t)table->before;
    *tag = (int32_t)(key | 1);
    return (((int32_t)key >> table->shift) & (table->slots - 1)) + (alone ? table->slots : 0);
}

/* Learn the `count` best tokens after each node of trees, and their logits; the table keeps as many
 * as it has room for. last: the tokens before the roots. */
void draftproof_recycle(const Table *table, const int64_t *tokens /* [rows, nodes] */,
        const int64_t *parents /* [rows, nodes] */, const int64_t *last /* [rows] */,
        const int64_t *owners /* [rows] */, const int64_t *best /* [rows, nodes, count] */,
        const float *logits /* [rows, nodes, count] */, int64_t rows, int64_t nodes,
        int64_t count) {
    for (int64_t i = 0; i < rows * nodes; i++) {
        int64_t r = i / nodes, token = tokens[i],
                before = parents[i] < 0 || parents[i] >= nodes ? last[r]
                : tokens[r * nodes + parents[i]];
        const float *said = logits + i * count;
        float most = -INFINITY, probs[count], sum = 0;
        for (int64_t k = 0; k < count; k++) most = said[k] > most ? said[k] : most;
        for (int64_t k = 0; k < count; k++) sum += probs[k] = expf(said[k] - most);
        for (int alone = before == table->absent; alone < 2 && token != table->absent; alone++) {
            int32_t tag;
            int64_t place = placed(table, before, token, owners[r], alone, &tag);
            table->tags[place] = tag, table->owners[place] = owners[r];
            for (int64_t k = 0; k < count && k < table->best; k++) {
                table->tokens[place * table->best + k] = (int32_t)best[i * count + k];
                /* not for NaN */
                table->probs[place * table->best + k] = sum > 0 ? probs[k] / sum : 0;
            }
        }
    }
}

/* Trees of the known successors of each root. On each level the `width` likeliest nodes are expanded,
 * the root by all its successors, others by `fan`, down to `depth`. */
void draftproof_likely_successors(const Table *table, const Texts *texts,
        const int64_t *last /* [texts->rows] */, const int64_t *owners /* [texts->rows] */,
        int64_t width, int64_t fan, int64_t depth, TreeOutput *out /* [texts->rows] */) {
    int64_t most = 1 + table->best + width * fan * depth, pool[most], above[most];
    float probs[most];
    Scored best[width];
    for (int64_t r = 0; r < texts->rows; r++) {
        int64_t from = 0, to = 1;
        pool[0] = texts->tokens[r * texts->room + root_at(texts, r)], above[0] = -1, probs[0] = 1;
        for (int64_t d = 0; d < depth; d++) {
            for (int64_t w = 0; w < width; w++) best[w] = (Scored){0, -1};
            for (int64_t i = from; i < to; i++)
                if (probs[i] > best[width - 1].score) ranked(best, width, probs[i], i);
            from = to;
            for (int64_t w = 0; w < width && best[w].token >= 0; w++) {
                int64_t node = best[w].token, before
                        = above[node] < 0 ? last[r] : pool[above[node]];
                for (int alone = 0; alone < 2; alone++) {
                    int32_t tag;
                    int64_t place = placed(table, before, pool[node], owners[r], alone, &tag);
                    if (table->tags[place] != tag || table->owners[place] != owners[r]) continue;
                    for (int64_t k = 0; k < (d ? fan : table->best); k++) {
                        pool[to] = table->tokens[place * table->best + k], above[to] = node;
                        probs[to++] = best[w].score * table->probs[place * table->best + k];
                    }
                    break;
                }
            }
        }
        grow_tree(pool, above, probs, to, APART, out, r);
    }
}

/* Compare pools that were proposed after roots at `asked` with the texts. Adds to counts, by kind of
 * node: right, and compared. As in drafters/portfolio.py. */
void draftproof_judge(float *counts /* [count, 2] */, int64_t count, float fade,
        const int64_t *pool /* [texts->rows, size] */,
        const int64_t *above /* [texts->rows, size] */,
        const int64_t *kinds /* [texts->rows, size] */, const int64_t *asked /* [texts->rows] */,
        int64_t size, const Texts *texts, int64_t absent) {
    for (int64_t k = 0; k < 2 * count; k++) counts[k] *= fade;
    for (int64_t r = 0; r < texts->rows; r++, pool += size, above += size, kinds += size) {
        int64_t depth[size];
        int stands[size];
        for (int64_t i = 0; i < size; i++) {
            int root = above[i] < 0 || above[i] >= i;
            depth[i] = root ? 0 : depth[above[i]] + 1, stands[i] = root;
            int64_t place = asked[r] + depth[i];
            if (root || !stands[above[i]] || pool[i] == absent || place < 0
                    || place > root_at(texts, r) || kinds[i] < 0 || kinds[i] >= count) continue;
            stands[i] = texts->tokens[r * texts->room + place] == pool[i];
            counts[2 * kinds[i]] += (float)stands[i], counts[2 * kinds[i] + 1]++;
        }
    }
}

/* A member's trees. */
typedef struct {
    const int64_t *tokens /* [rows, nodes] */, *parents /* [rows, nodes] */;
    const float *probs /* [rows, nodes] or null */;
    int64_t nodes, rows;
} Member;

/* Trees of the likeliest nodes of all members' trees. Probabilities are rates from the counts of
 * `judge`, where each member has `levels` kinds, with the member's own probability, or `untold`, as a
 * prior of `trust` comparisons. Also returned: the pools, with `nodes` for all members side by side,
 * and the kinds of their nodes. */
void draftproof_merge_trees(const float *counts /* [count, levels, 2] */, int64_t levels,
        float trust, float untold, const Member *members /* [count] */, int64_t count, int64_t rows,
        int64_t nodes, int64_t *pools /* [rows, nodes] */, int64_t *parents /* [rows, nodes] */,
        int64_t *classes /* [rows, nodes] */, TreeOutput *out /* [rows] */) {
    int64_t size = 0;
    for (int64_t m = 0; m < count; m++) size += members[m].nodes;
    if (size > nodes) return;
    float probs[size];
    for (int64_t r = 0; r < rows; r++) {
        int64_t *pool = pools + r * size, *above = parents + r * size, *kinds = classes + r * size,
                start = 0;
        for (int64_t m = 0; m < count; start += members[m++].nodes)
            for (int64_t n = 0; n < members[m].nodes; n++) {
                const Member *member = members + m;
                int64_t i = start + n, at = r * member->nodes, up = n ? member->parents[at + n] : 0;
                if (up < 0 || up >= n) up = 0;
                float given = n ? untold : 1;
                pool[i] = member->tokens[at + n], above[i] = n ? start + up : -1;
                if (member->probs) {
                    float before = member->probs[at + up];
                    given = n ? member->probs[at + n] / (before > 1e-9f ? before : 1e-9f) : 1;
                }
                int64_t level = (int64_t)(given * (float)levels);
                level = level < levels - 1 ? level : levels - 1;
                kinds[i] = m * levels + (level > 0 ? level : 0);        /* NaN becomes 0 */
                const float *seen = counts + 2 * kinds[i];
                float step = (seen[0] + trust * given) / (seen[1] + trust);
                probs[i] = !n ? 1 : pool[i] == out->absent ? 0 : probs[above[i]] * step;
            }
        grow_tree(pool, above, probs, size, LIKELIEST, out, r);
    }
}
