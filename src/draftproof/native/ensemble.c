/* Drafting by successors that were likely before, and by several members, each as far as it was
 * right. */
#include "pools.h"

/* Of pools [rows, size] the trees. */
void draftproof_likeliest(const int64_t *pool, const int64_t *above, const float *odds,
        int64_t rows, int64_t size, TreeOutput *out) {
    for (int64_t r = 0; r < rows; r++)
        grow_tree(pool + r * size, above + r * size, odds + r * size, size, APART, out, r);
}

/* Of pairs of tokens, and of tokens alone, the `best` likeliest successors, [2 slots, best] both.
 * As in drafters/recycling.py. */
typedef struct {
    int32_t *tags, *tokens;
    float *odds;
    int64_t best, slots, shift, token, before, absent;
} Table;

/* Where a token belongs, behind another or alone, and its tag. */
static inline int64_t placed(const Table *table, int64_t before, int64_t token, int alone,
        int32_t *tag) {
    uint32_t key = ((uint32_t)token + 2) * (uint32_t)table->token;
    if (!alone) key += ((uint32_t)before + 2) * (uint32_t)table->before;
    *tag = (int32_t)(key | 1);
    return (((int32_t)key >> table->shift) & (table->slots - 1)) + (alone ? table->slots : 0);
}

/* Learn what came out behind each node of trees [rows, nodes]: the `count` best tokens and their
 * logits [rows, nodes, count]. The token before a root is the last of tails [rows, 2]. */
void draftproof_recycle(const Table *table, const int64_t *tokens, const int64_t *parents,
        const int64_t *tails, const int64_t *best, const float *logits, int64_t rows, int64_t nodes,
        int64_t count) {
    for (int64_t i = 0; i < rows * nodes; i++) {
        int64_t r = i / nodes, token = tokens[i],
                before = parents[i] < 0 || parents[i] >= nodes ? tails[2 * r + 1]
                : tokens[r * nodes + parents[i]];
        const float *said = logits + i * count;
        float most = -INFINITY, odds[count], sum = 0;
        for (int64_t k = 0; k < count; k++) most = said[k] > most ? said[k] : most;
        for (int64_t k = 0; k < count; k++) sum += odds[k] = expf(said[k] - most);
        for (int alone = before == table->absent; alone < 2 && token != table->absent; alone++) {
            int32_t tag;
            int64_t place = placed(table, before, token, alone, &tag);
            table->tags[place] = tag;
            for (int64_t k = 0; k < count; k++) {
                table->tokens[place * table->best + k] = (int32_t)best[i * count + k];
                /* NaN is not */
                table->odds[place * table->best + k] = sum > 0 ? odds[k] / sum : 0;
            }
        }
    }
}

/* Learn that successors [count] were read behind tokens, and these behind others, absent ones
 * nowhere: a successor goes to the front with odds `told`, what was known of the pair, or else of
 * the token alone, moves back. All is looked up before any is written. */
void draftproof_learn_pairs(const Table *table, const int64_t *before, const int64_t *tokens,
        const int64_t *successors, int64_t count, float told) {
    int64_t best = table->best, places[count][2];
    int32_t tags[count][2];
    Scored *known = (Scored *)scratch(count * 2 * best * (int64_t)(sizeof(Scored) / sizeof(float)));
    for (int64_t i = 0; i < count; i++) {
        for (int alone = 0; alone < 2; alone++)
            places[i][alone] = placed(table, before[i], tokens[i], alone, &tags[i][alone]);
        for (int alone = 0; alone < 2; alone++) {
            Scored *found = known + (2 * i + alone) * best, was[best];
            int64_t place = table->tags[places[i][alone]] == tags[i][alone] ? places[i][alone]
                          : table->tags[places[i][1]] == tags[i][1] ? places[i][1] : -1;
            for (int64_t k = 0; k < best; k++) {
                int64_t token = place < 0 ? table->absent : table->tokens[place * best + k];
                float odds = place < 0 || token == successors[i] ? 0 : (1 - told)
                        * table->odds[place * best + k];
                int64_t at = k;
                for (; at > 0 && was[at - 1].score < odds; at--) was[at] = was[at - 1];
                was[at] = (Scored){odds, token};
            }
            found[0] = (Scored){told, successors[i]};
            for (int64_t k = 1; k < best; k++) found[k] = was[k - 1];
        }
    }
    for (int64_t i = 0; i < count; i++)
        for (int alone = before[i] == table->absent; alone < 2 && tokens[i] != table->absent;
                alone++) {
            int64_t place = places[i][alone];
            table->tags[place] = tags[i][alone];
            for (int64_t k = 0; k < best; k++) {
                const Scored *one = known + (2 * i + alone) * best + k;
                table->tokens[place * best + k] = (int32_t)one->token,
                        table->odds[place * best + k] = one->score;
            }
        }
}

/* Trees of what is known to follow each root: of each level the `width` likeliest nodes are
 * followed, the root by all that is known, others by `fan` tokens, down to `depth`. */
void draftproof_likely_successors(const Table *table, const Texts *texts, const int64_t *tails,
        int64_t width, int64_t fan, int64_t depth, TreeOutput *out) {
    int64_t most = 1 + table->best + width * fan * depth, pool[most], above[most];
    float odds[most];
    Scored best[width];
    for (int64_t r = 0; r < texts->rows; r++) {
        int64_t from = 0, to = 1;
        pool[0] = texts->tokens[r * texts->room + root_at(texts, r)], above[0] = -1, odds[0] = 1;
        for (int64_t d = 0; d < depth; d++) {
            for (int64_t w = 0; w < width; w++) best[w] = (Scored){0, -1};
            for (int64_t i = from; i < to; i++)
                if (odds[i] > best[width - 1].score) ranked(best, width, odds[i], i);
            from = to;
            for (int64_t w = 0; w < width && best[w].token >= 0; w++) {
                int64_t node = best[w].token, before
                        = above[node] < 0 ? tails[2 * r + 1] : pool[above[node]];
                for (int alone = 0; alone < 2; alone++) {
                    int32_t tag;
                    int64_t place = placed(table, before, pool[node], alone, &tag);
                    if (table->tags[place] != tag) continue;
                    for (int64_t k = 0; k < (d ? fan : table->best); k++) {
                        pool[to] = table->tokens[place * table->best + k], above[to] = node;
                        odds[to++] = best[w].score * table->odds[place * table->best + k];
                    }
                    break;
                }
            }
        }
        grow_tree(pool, above, odds, to, APART, out, r);
    }
}

/* How far the word of each member is good: of `kinds` of node, `levels` by the odds given and all
 * by the place in the tree, `classes` for each member, how many stood of how many judged, [rows,
 * kinds, 2] and, of all rows, [kinds, 2]; how they fade, how much is known without them, and the
 * odds of a node of which a member says nothing. As in drafters/portfolio.py. */
typedef struct {
    float *own, *all;
    int64_t kinds, classes, levels;
    float fade, fade_all, trust, trust_all, untold;
} Counts;

/* Judge pools [rows, size] that were proposed behind roots at `asked` [rows] by the texts that
 * came. */
void draftproof_judge(const Counts *counts, const int64_t *pool, const int64_t *above,
        const int64_t *kinds, const int64_t *asked, int64_t size, const Texts *texts,
        int64_t absent) {
    for (int64_t k = 0; k < 2 * counts->kinds; k++) counts->all[k] *= counts->fade_all;
    for (int64_t r = 0; r < texts->rows; r++, pool += size, above += size, kinds += size) {
        float *own = counts->own + r * 2 * counts->kinds;
        int64_t depth[size];
        int stands[size];
        for (int64_t k = 0; k < 2 * counts->kinds; k++) own[k] *= counts->fade;
        for (int64_t i = 0; i < size; i++) {
            depth[i] = above[i] < 0 ? 0 : depth[above[i]] + 1, stands[i] = above[i] < 0;
            int64_t place = asked[r] + depth[i];
            if (above[i] < 0 || !stands[above[i]] || pool[i] == absent
                    || place > root_at(texts, r)) continue;
            stands[i] = texts->tokens[r * texts->room + place] == pool[i];
            own[2 * kinds[i]] += (float)stands[i], counts->all[2 * kinds[i]] += (float)stands[i];
            own[2 * kinds[i] + 1]++, counts->all[2 * kinds[i] + 1]++;
        }
    }
}

/* A member's trees [rows, nodes]; their odds may be null. */
typedef struct {
    const int64_t *tokens, *parents;
    const float *odds;
    int64_t nodes;
} Member;

/* Trees of the likeliest nodes of all members' trees, by odds that are corrected by what a row has
 * shown, before that `everyone` [kinds, 2], before that what members gave. The pools, members side
 * by side, and the kinds of their nodes are [rows, .] too. */
void draftproof_merge_trees(const Counts *counts, const float *everyone, const Member *members,
        int64_t count, int64_t rows, int64_t *pools, int64_t *parents, int64_t *classes,
        TreeOutput *out) {
    int64_t size = 0;
    for (int64_t m = 0; m < count; m++) size += members[m].nodes;
    float odds[size];
    for (int64_t r = 0; r < rows; r++) {
        int64_t *pool = pools + r * size, *above = parents + r * size, *kinds = classes + r * size,
                start = 0;
        for (int64_t m = 0; m < count; start += members[m++].nodes)
            for (int64_t n = 0; n < members[m].nodes; n++) {
                const Member *member = members + m;
                int64_t i = start + n, at = r * member->nodes, up = n ? member->parents[at + n] : 0,
                        kind = n;
                if (up < 0 || up >= n) up = 0;
                float given = counts->untold;
                pool[i] = member->tokens[at + n], above[i] = n ? start + up : -1;
                if (member->odds) {
                    float before = member->odds[at + up];
                    given = n ? member->odds[at + n] / (before > 1e-9f ? before : 1e-9f) : 1;
                    kind = (int64_t)(given * (float)counts->levels);
                }
                int64_t last = (member->odds ? counts->levels : counts->classes) - 1;
                kinds[i] = m * counts->classes + (kind < last ? kind : last);
                const float *seen = everyone + 2 * kinds[i],
                        *own = counts->own + 2 * (r * counts->kinds + kinds[i]);
                float prior = (seen[0] + counts->trust_all * given) / (seen[1] + counts->trust_all);
                float step = (own[0] + counts->trust * prior) / (own[1] + counts->trust);
                odds[i] = !n ? 1 : pool[i] == out->absent ? 0 : odds[above[i]] * step;
            }
        grow_tree(pool, above, odds, size, LIKELIEST, out, r);
    }
}
