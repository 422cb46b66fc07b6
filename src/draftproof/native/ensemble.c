/* Drafting by earlier successors, and by several members, weighted by their accuracy. */
#include "searches.h"

/* The trees of pools. */
void draftproof_likeliest(const int64_t *pool /* [rows, size] */,
        const int64_t *above /* [rows, size] */, const float *probs /* [rows, size] */,
        int64_t rows, int64_t size, TreeOutput *out /* [rows] */) {
    for (int64_t r = 0; r < rows; r++)
        grow_tree(pool + r * size, above + r * size, probs + r * size, size, APART, out, r);
}

/* The slot and the tag of a token in an owner's text, after another token or alone. */
static inline int64_t placed(const Table *table, int64_t before, int64_t token, int64_t owner,
        int alone, int32_t *tag) {
    uint32_t key = ((uint32_t)token + 2) * (uint32_t)table->token + (uint32_t)owner;
    if (!alone) key += ((uint32_t)before + 2) * (uint32_t)table->before;
    *tag = (int32_t)(key | 1);
    return (((int32_t)key >> table->shift) & (table->slots - 1)) + (alone ? table->slots : 0);
}

/* Learn the `count` best tokens after each node of trees, and their logits; the table keeps as many
 * as it has room for. last: the tokens before the roots, which become the last of `lengths` committed
 * tokens. */
void draftproof_recycle(const Table *table, int64_t *last /* [rows] */,
        const int64_t *owners /* [rows] */, int64_t rows,
        const int64_t *tokens /* [rows, nodes] or null */,
        const int64_t *parents /* [rows, nodes] or null */,
        const int64_t *best /* [rows, nodes, count] or null */,
        const float *logits /* [rows, nodes, count] or null */, int64_t nodes, int64_t count,
        const int64_t *committed /* [rows, width] */, const int64_t *lengths /* [rows] */,
        int64_t width) {
    if (!tokens || !parents || !best || !logits) nodes = 0;
    for (int64_t i = 0; i < rows * nodes; i++) {
        int64_t r = i / nodes, token = tokens[i],
                before = parents[i] < 0 || parents[i] >= nodes ? last[r]
                : tokens[r * nodes + parents[i]];
        const float *scores = logits + i * count;
        float most = -INFINITY, probs[count], sum = 0;
        for (int64_t k = 0; k < count; k++) most = scores[k] > most ? scores[k] : most;
        for (int64_t k = 0; k < count; k++) sum += probs[k] = expf(scores[k] - most);
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
    for (int64_t r = 0; r < rows; r++)
        if (lengths[r] > 0 && lengths[r] <= width) last[r] = committed[r * width + lengths[r] - 1];
}

/* Trees of the known successors of each root, at most `steps` levels deep. */
void draftproof_likely_successors(const TableSearch *search /* [texts->rows] */,
        const Texts *texts, int64_t steps, TreeOutput *out /* [texts->rows] */) {
    const Table *table = search->table;
    const int64_t *last = search->last, *owners = search->owners;
    int64_t width = search->width, fan = search->fan,
            depth = steps < search->depth ? steps : search->depth,
            most = 1 + table->best + width * fan * depth, pool[most], above[most];
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
static void judge(float *counts, int64_t count, float fade, const int64_t *pool,
        const int64_t *above, const int64_t *kinds, const int64_t *asked, int64_t size,
        const Texts *texts, int64_t absent) {
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

/* A member: its trees, or a search that makes them. */
typedef struct {
    const int64_t *tokens /* [rows, nodes] or null */, *parents /* [rows, nodes] or null */;
    const float *probs /* [rows, nodes] or null */;
    int64_t nodes, rows;
    const PromptSearch *prompt /* or null */;
    const IndexSearch *index /* [rows] or null */;
    const TableSearch *table /* [rows] or null */;
} Member;

/* The trees of a member, of `steps` tokens after the root if it is a search; `out` has room for them. */
static Member searched(const Member *member, const Texts *texts, int64_t steps, TreeOutput *out) {
    if (member->prompt) draftproof_match_prompt(member->prompt, texts, steps, out);
    else if (member->index) draftproof_continue_text(member->index, texts, steps, out);
    else if (member->table) draftproof_likely_successors(member->table, texts, steps, out);
    else return *member;
    return (Member){.tokens = out->tokens, .parents = out->parents, .probs = out->probs,
        .nodes = out->nodes, .rows = out->rows};
}

/* Trees of the likeliest nodes of all members' trees. Probabilities are rates from the counts of
 * `judge`, where each member has `levels` kinds, with the member's own probability, or `unknown`, as a
 * prior of `trust` comparisons. Also returned: the pools, with `nodes` for all members side by side (1 +
 * `steps` for one that searches), and the kinds of their nodes. First, those of the last round are
 * judged. */
void draftproof_merge_trees(float *counts /* [count, levels, 2] */, int64_t levels, float trust,
        float unknown, float fade, const int64_t *last_pools /* [texts->rows, last_nodes] or null */,
        const int64_t *last_parents /* [texts->rows, last_nodes] or null */,
        const int64_t *last_kinds /* [texts->rows, last_nodes] or null */,
        const int64_t *asked /* [texts->rows] or null */, int64_t last_nodes,
        const Member *members /* [count] */, int64_t count, const Texts *texts, int64_t steps,
        int64_t nodes, int64_t *pools /* [texts->rows, nodes] */,
        int64_t *parents /* [texts->rows, nodes] */, int64_t *kinds /* [texts->rows, nodes] */,
        TreeOutput *out /* [texts->rows] */) {
    if (last_pools && last_parents && last_kinds && asked) judge(counts, count * levels, fade,
            last_pools, last_parents, last_kinds, asked, last_nodes, texts, out->absent);
    int64_t rows = texts->rows, each = 1 + steps, start = 0;
    int64_t *drafted = (int64_t *)scratch(rows * (5 * each + nodes));
    float *confidence = (float *)(drafted + 2 * rows * each), *chances = confidence + rows * each;
    for (int64_t m = 0; m < count; m++) {
        TreeOutput room = {.tokens = drafted, .parents = drafted + rows * each, .probs = confidence,
            .nodes = each, .absent = out->absent, .widest = 1, .rows = rows};
        if (members[m].rows < rows) break;
        const Member member = searched(members + m, texts, steps, &room);
        if (start + member.nodes > nodes) break;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t n = 0; n < member.nodes; n++) {
                int64_t i = r * nodes + start + n, at = r * member.nodes,
                        up = n ? member.parents[at + n] : 0;
                if (up < 0 || up >= n) up = 0;
                float given = n ? unknown : 1;
                if (member.probs) {
                    float before = member.probs[at + up];
                    given = n ? member.probs[at + n] / (before > 1e-9f ? before : 1e-9f) : 1;
                }
                int64_t level = (int64_t)(given * (float)levels);
                level = level < levels - 1 ? level : levels - 1;
                pools[i] = member.tokens[at + n], parents[i] = n ? start + up : -1;
                kinds[i] = m * levels + (level > 0 ? level : 0);      /* NaN becomes 0 */
                const float *seen = counts + 2 * kinds[i];
                float step = (seen[0] + trust * given) / (seen[1] + trust);
                chances[i] = !n ? 1 : pools[i] == out->absent ? 0
                        : chances[r * nodes + parents[i]] * step;
            }
        start += member.nodes;
    }
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t i = r * nodes + start; i < (r + 1) * nodes; i++)
            pools[i] = out->absent, parents[i] = kinds[i] = 0, chances[i] = 0;
        grow_tree(pools + r * nodes, parents + r * nodes, chances + r * nodes, nodes, LIKELIEST, out, r);
    }
}
