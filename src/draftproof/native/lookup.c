/* Drafting from what was read before: pools of nodes, the trees that grow from them, and whose word was good. */
#include "lanes.h"

enum { CONTEXT = 16 };                          /* tokens before a place that the index looks at */
enum { APART, LIKELIEST, SUMMED };              /* nodes of a pool with the same text: there are none; the best counts; they add up */

/* Where trees go, [rows, nodes] each: tokens, parents and odds in falling order, `absent`, 0 and 0 where a row has no more. widest:
 * nodes of the largest so far. */
typedef struct {
    int64_t *tokens, *parents;
    float *odds;
    int64_t nodes, absent, widest;
} Grown;

/* The tree of row r: the likeliest nodes of a pool, its root among them, of equals the earlier. Parents come before their children;
 * what has none is the root once more. Nobody is likelier than its parent; what has odds of 0 is not there. */
static void grown(const int64_t *pool, const int64_t *above, const float *odds, int64_t size, int twins, Grown *out, int64_t r) {
    int64_t first[size], up[size], known[size], place[size], count = 0, most = out->nodes - 1;
    float best[size];
    Scored likely[most + 1];
    for (int64_t n = 0; n < most; n++) likely[n] = (Scored){0, -1};
    for (int64_t i = 0; i < size; i++) {
        int root = i == 0 || above[i] < 0 || above[i] >= i;
        first[i] = root ? 0 : -1, best[i] = root;
        if (root || !(odds[i] > 0) || first[above[i]] < 0) continue;
        first[i] = i, up[i] = first[above[i]];
        for (int64_t k = 0; twins != APART && k < count; k++)
            if (up[known[k]] == up[i] && pool[known[k]] == pool[i]) {
                first[i] = known[k];
                break;
            }
        if (first[i] == i) known[count++] = i;
        float *held = best + first[i];
        *held = twins == SUMMED ? *held + odds[i] : odds[i] > *held ? odds[i] : *held;
    }
    for (int64_t k = 0; k < count && most; k++) {
        int64_t i = known[k];
        if (best[i] > best[up[i]]) best[i] = best[up[i]];
        if (best[i] > likely[most - 1].score) ranked(likely, most, best[i], i);
    }
    int64_t *tokens = out->tokens + r * out->nodes, *parents = out->parents + r * out->nodes;
    float *chances = out->odds + r * out->nodes;
    tokens[0] = pool[0], parents[0] = -1, chances[0] = 1, place[0] = 0;
    for (int64_t n = 0; n < most; n++) {
        int64_t i = likely[n].token;
        tokens[n + 1] = i < 0 ? out->absent : pool[i], parents[n + 1] = i < 0 ? 0 : place[up[i]], chances[n + 1] = likely[n].score;
        if (i < 0) continue;
        place[i] = n + 1;
        if (out->widest < n + 2) out->widest = n + 2;
    }
}

/* The same of a pool of paths of `each` nodes, every one from the root on. */
static void grown_of_paths(const int64_t *pool, const float *odds, int64_t paths, int64_t each, Grown *out, int64_t r) {
    int64_t above[paths * each];
    for (int64_t i = 0; i < paths * each; i++) above[i] = i % each ? i - 1 : -1;
    grown(pool, above, odds, paths * each, SUMMED, out, r);
}

/* Of pools [rows, size] the trees. */
void draftproof_grow(const int64_t *pool, const int64_t *above, const float *odds, int64_t rows, int64_t size, int64_t twins, Grown *out) {
    for (int64_t r = 0; r < rows; r++) grown(pool + r * size, above + r * size, odds + r * size, size, (int)twins, out, r);
}

/* Texts [rows, room], and where the root of each stands. */
typedef struct {
    const int64_t *tokens, *positions;
    int64_t rows, room;
} Texts;

/* Where the root of row r stands: never beyond its text. */
static inline int64_t root_at(const Texts *texts, int64_t r) {
    int64_t at = texts->positions[r];
    return at < 0 ? 0 : at < texts->room ? at : texts->room - 1;
}

/* The chance that what followed a match of so many tokens before follows it again, `ahead` tokens further, if it did until there. */
static inline float lasting(float match, int64_t ahead) { return (match + (float)ahead) / (match + (float)ahead + 3); }

/* Trees of what followed the last tokens of each text where they stood before: of the `near` most recent places where the last two
 * did, or then the last one, the `places` where most did, from `shortest` to `longest`, the most recent of equals; `steps` tokens from
 * each, round and round. As in drafters/prompt_lookup.py. */
void draftproof_match(const Texts *texts, int64_t longest, int64_t shortest, int64_t near, int64_t places, int64_t steps, Grown *out) {
    int64_t each = 1 + steps, pool[places * each], ends[near], others[near], best[places], lengths[places];
    float odds[places * each];
    for (int64_t r = 0; r < texts->rows; r++) {
        const int64_t *text = texts->tokens + r * texts->room;
        int64_t last = root_at(texts, r), before = text[longest > 1 && last ? last - 1 : last], pairs = 0, single = 0, found = 0;
        for (int64_t p = last - 1; p >= 0 && pairs < near; p--)
            if (text[p] == text[last]) {
                if (p && text[p - 1] == before) ends[pairs++] = p;
                else if (single < near) others[single++] = p;
            }
        for (int64_t s = 0; s < single && pairs < near; s++) ends[pairs++] = others[s];
        for (int64_t e = 0; e < pairs; e++) {
            int64_t length = 1, at;
            while (length < longest && length <= ends[e] && text[ends[e] - length] == text[last - length]) length++;
            if (length < shortest) continue;
            for (at = found < places ? found++ : places; at > 0; at--) {
                if (lengths[at - 1] > length || (lengths[at - 1] == length && best[at - 1] > ends[e])) break;
                if (at < places) lengths[at] = lengths[at - 1], best[at] = best[at - 1];
            }
            if (at < places) lengths[at] = length, best[at] = ends[e];
        }
        float left = 1;
        for (int64_t w = 0; w < places; w++) {
            int64_t at = w * each, start = w < found ? best[w] + 1 : last, circle = last + 1 - start;
            float chance = left, length = w < found ? (float)lengths[w] : 0;
            pool[at] = text[last], odds[at] = 1;
            for (int64_t k = 0; k < steps; k++) {
                chance *= w < found ? lasting(length, k) : 0;
                pool[at + k + 1] = text[start + k % circle], odds[at + k + 1] = chance;
            }
            left *= 1 - lasting(length, 0);
        }
        grown_of_paths(pool, odds, places, each, out, r);
    }
}

/* Text, and by a hash of each context of `sizes` [count] tokens, CONTEXT at most, the successors seen, on `ways` each: a tag, the last
 * place, how often. weights [2, count, CONTEXT] make slots and tags of contexts. The last token of the text, and the last entry, are
 * for nothing. As in drafters/suffix.py. */
typedef struct {
    int64_t *text, *places;
    int32_t *tags;
    float *counts;
    const int32_t *weights;
    const int64_t *sizes;
    int64_t room, count, ways, slots, shift, follow, scatter, absent;
} Index;

/* The first entry of each context that ends a text, and what the tag of a successor is counted from, [count] both. */
static void hashed(const Index *index, const int64_t *context, int64_t *entries, uint32_t *tags) {
    uint32_t tokens[CONTEXT];
    for (int l = 0; l < CONTEXT; l++) tokens[l] = (uint32_t)context[l] + 1;
    for (int64_t o = 0; o < 2 * index->count; o++) {
        const uint32_t *weights = (const uint32_t *)index->weights + o * CONTEXT;
        uint32_t key = 0;
        for (int l = 0; l < CONTEXT; l++) key += weights[l] * tokens[l];
        if (o >= index->count) tags[o - index->count] = key;
        else entries[o] = (((int32_t)key >> index->shift) & (index->slots - 1)) * index->ways;
    }
}

static inline int32_t tagged(const Index *index, uint32_t tag, int64_t token) {
    return (int32_t)(tag + ((uint32_t)token + 1) * (uint32_t)index->follow);
}

/* Write counts[row] of tokens [rows, width] behind `ends` [rows], each behind its contexts; tails [rows, CONTEXT] are the text before
 * them. Ends and tails move on. */
void draftproof_index(const Index *index, int64_t *tails, int64_t *ends, const int64_t *tokens, const int64_t *counts, int64_t rows,
                      int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t *tail = tails + r * CONTEXT, entries[index->count];
        uint32_t tags[index->count];
        if (ends[r] < 0 || counts[r] > width || ends[r] + counts[r] + 2 > index->room) continue;        /* not its memory */
        for (int64_t d = 0; d < counts[r]; d++) {
            int64_t token = tokens[r * width + d], place = ends[r]++;
            int64_t way = ((int32_t)(((uint32_t)token + 1) * (uint32_t)index->scatter) >> 30) & (index->ways - 1);
            index->text[place] = token;
            hashed(index, tail, entries, tags);
            for (int64_t o = 0; o < index->count; o++) {
                if (tail[CONTEXT - index->sizes[o]] == index->absent) continue;
                int64_t entry = entries[o] + way;
                int32_t tag = tagged(index, tags[o], token);
                index->counts[entry] = (index->tags[entry] == tag ? index->counts[entry] : 0) + 1;
                index->tags[entry] = tag, index->places[entry] = place;
            }
            memmove(tail, tail + 1, (CONTEXT - 1) * sizeof *tail);
            tail[CONTEXT - 1] = token;
        }
        index->text[ends[r]] = index->text[ends[r] + 1] = index->absent;
    }
}

/* Trees of the `paths` likeliest continuations of each text, `steps` tokens long, whose lane begins and ends there. An occurrence in
 * its own lane counts for `own` more. */
void draftproof_continue(const Index *index, const Texts *texts, const int64_t *tails, const int64_t *begins, const int64_t *ends,
                         float own, int64_t paths, int64_t steps, Grown *out) {
    int64_t each = 1 + steps, pool[paths * each], places[index->count * index->ways], entries[index->count], context[CONTEXT];
    uint32_t tags[index->count];
    float odds[paths * each];
    Scored best[paths];
    for (int64_t r = 0; r < texts->rows; r++)
        if (ends[r] >= 0 && ends[r] < index->room) index->text[ends[r]] = texts->tokens[r * texts->room + root_at(texts, r)];
    for (int64_t r = 0; r < texts->rows; r++) {
        int64_t root = texts->tokens[r * texts->room + root_at(texts, r)];
        memcpy(context, tails + r * CONTEXT + 1, (CONTEXT - 1) * sizeof *context);
        context[CONTEXT - 1] = root;
        hashed(index, context, entries, tags);
        for (int64_t w = 0; w < paths; w++) best[w] = (Scored){0, -1};
        float left = 1;
        for (int64_t o = 0; o < index->count; o++) {
            if (context[CONTEXT - index->sizes[o]] == index->absent) continue;
            float seen[index->ways], kinds = 0, total = 0;
            for (int64_t w = 0; w < index->ways; w++) {
                int64_t entry = entries[o] + w, place = places[o * index->ways + w] = index->places[entry], token = index->text[place];
                int alive = token != index->absent && index->tags[entry] == tagged(index, tags[o], token);
                seen[w] = alive ? index->counts[entry] + (place >= begins[r] && place <= ends[r] ? own : 0) : 0;
                kinds += (float)alive, total += seen[w];
            }
            float among = kinds + total > 1 ? kinds + total : 1;
            for (int64_t w = 0; w < index->ways; w++)
                if (left / among * seen[w] > best[paths - 1].score) ranked(best, paths, left / among * seen[w], o * index->ways + w);
            left *= kinds > 0 ? kinds / among : 1;
        }
        for (int64_t w = 0; w < paths; w++) {
            int64_t at = w * each, way = best[w].token, start = way < 0 ? index->room - 1 : places[way];
            int64_t circle = start >= begins[r] && start <= ends[r] ? ends[r] + 1 - start : 0;          /* its own end is its beginning */
            float chance = best[w].score, match = way < 0 ? 0 : (float)index->sizes[way / index->ways];
            pool[at] = root, odds[at] = 1;
            for (int64_t k = 0; k < steps; k++) {
                int64_t place = start + (circle ? k % circle : k);
                pool[at + k + 1] = index->text[place < index->room ? place : index->room - 1];
                chance *= pool[at + k + 1] == index->absent ? 0 : k ? lasting(match, k) : 1;
                odds[at + k + 1] = chance;
            }
        }
        grown_of_paths(pool, odds, paths, each, out, r);
    }
}

/* Of pairs of tokens, and of tokens alone, the `best` likeliest successors, [2 slots, best] both. As in drafters/recycling.py. */
typedef struct {
    int32_t *tags, *tokens;
    float *odds;
    int64_t best, slots, shift, token, before, absent;
} Table;

/* Where a token belongs, behind another or alone, and its tag. */
static inline int64_t placed(const Table *table, int64_t before, int64_t token, int alone, int32_t *tag) {
    uint32_t key = ((uint32_t)token + 2) * (uint32_t)table->token;
    if (!alone) key += ((uint32_t)before + 2) * (uint32_t)table->before;
    *tag = (int32_t)(key | 1);
    return (((int32_t)key >> table->shift) & (table->slots - 1)) + (alone ? table->slots : 0);
}

/* Learn what came out behind each node of trees [rows, nodes]: the `count` best tokens and their logits [rows, nodes, count]. The
 * token before a root is the last of tails [rows, 2]. */
void draftproof_recycle(const Table *table, const int64_t *tokens, const int64_t *parents, const int64_t *tails, const int64_t *best,
                        const float *logits, int64_t rows, int64_t nodes, int64_t count) {
    for (int64_t i = 0; i < rows * nodes; i++) {
        int64_t r = i / nodes, token = tokens[i], before = parents[i] < 0 || parents[i] >= nodes ? tails[2 * r + 1] : tokens[r * nodes + parents[i]];
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
                table->odds[place * table->best + k] = sum > 0 ? odds[k] / sum : 0;                     /* NaN is not */
            }
        }
    }
}

/* Learn that successors [count] were read behind tokens, and these behind others, absent ones nowhere: a successor goes to the front
 * with odds `told`, what was known of the pair, or else of the token alone, moves back. All is looked up before any is written. */
void draftproof_told(const Table *table, const int64_t *before, const int64_t *tokens, const int64_t *successors, int64_t count,
                     float told) {
    int64_t best = table->best, places[count][2];
    int32_t tags[count][2];
    Scored *known = (Scored *)scratch(count * 2 * best * (int64_t)(sizeof(Scored) / sizeof(float)));
    for (int64_t i = 0; i < count; i++) {
        for (int alone = 0; alone < 2; alone++) places[i][alone] = placed(table, before[i], tokens[i], alone, &tags[i][alone]);
        for (int alone = 0; alone < 2; alone++) {
            Scored *found = known + (2 * i + alone) * best, was[best];
            int64_t place = table->tags[places[i][alone]] == tags[i][alone] ? places[i][alone]
                          : table->tags[places[i][1]] == tags[i][1] ? places[i][1] : -1;
            for (int64_t k = 0; k < best; k++) {
                int64_t token = place < 0 ? table->absent : table->tokens[place * best + k];
                float odds = place < 0 || token == successors[i] ? 0 : (1 - told) * table->odds[place * best + k];
                int64_t at = k;
                for (; at > 0 && was[at - 1].score < odds; at--) was[at] = was[at - 1];
                was[at] = (Scored){odds, token};
            }
            found[0] = (Scored){told, successors[i]};
            for (int64_t k = 1; k < best; k++) found[k] = was[k - 1];
        }
    }
    for (int64_t i = 0; i < count; i++)
        for (int alone = before[i] == table->absent; alone < 2 && tokens[i] != table->absent; alone++) {
            int64_t place = places[i][alone];
            table->tags[place] = tags[i][alone];
            for (int64_t k = 0; k < best; k++) {
                const Scored *one = known + (2 * i + alone) * best + k;
                table->tokens[place * best + k] = (int32_t)one->token, table->odds[place * best + k] = one->score;
            }
        }
}

/* Trees of what is known to follow each root: of each level the `width` likeliest nodes are followed, the root by all that is known,
 * others by `fan` tokens, down to `depth`. */
void draftproof_remember(const Table *table, const Texts *texts, const int64_t *tails, int64_t width, int64_t fan, int64_t depth,
                         Grown *out) {
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
                int64_t node = best[w].token, before = above[node] < 0 ? tails[2 * r + 1] : pool[above[node]];
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
        grown(pool, above, odds, to, APART, out, r);
    }
}

/* How far the word of each member is good: of `kinds` of node, `levels` by the odds given and all by the place in the tree, `classes`
 * for each member, how many stood of how many judged, [rows, kinds, 2] and, of all rows, [kinds, 2]; how they fade, how much is known
 * without them, and the odds of a node of which a member says nothing. As in drafters/portfolio.py. */
typedef struct {
    float *own, *all;
    int64_t kinds, classes, levels;
    float fade, fade_all, trust, trust_all, untold;
} Counts;

/* Judge pools [rows, size] that were proposed behind roots at `asked` [rows] by the texts that came. */
void draftproof_judge(const Counts *counts, const int64_t *pool, const int64_t *above, const int64_t *kinds, const int64_t *asked,
                      int64_t size, const Texts *texts, int64_t absent) {
    for (int64_t k = 0; k < 2 * counts->kinds; k++) counts->all[k] *= counts->fade_all;
    for (int64_t r = 0; r < texts->rows; r++, pool += size, above += size, kinds += size) {
        float *own = counts->own + r * 2 * counts->kinds;
        int64_t depth[size];
        int stands[size];
        for (int64_t k = 0; k < 2 * counts->kinds; k++) own[k] *= counts->fade;
        for (int64_t i = 0; i < size; i++) {
            depth[i] = above[i] < 0 ? 0 : depth[above[i]] + 1, stands[i] = above[i] < 0;
            int64_t place = asked[r] + depth[i];
            if (above[i] < 0 || !stands[above[i]] || pool[i] == absent || place > root_at(texts, r)) continue;
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

/* Trees of the likeliest nodes of all members' trees, by odds that are corrected by what a row has shown, before that `everyone`
 * [kinds, 2], before that what members gave. The pools, members side by side, and the kinds of their nodes are [rows, .] too. */
void draftproof_merge(const Counts *counts, const float *everyone, const Member *members, int64_t count, int64_t rows, int64_t *pools,
                      int64_t *parents, int64_t *classes, Grown *out) {
    int64_t size = 0;
    for (int64_t m = 0; m < count; m++) size += members[m].nodes;
    float odds[size];
    for (int64_t r = 0; r < rows; r++) {
        int64_t *pool = pools + r * size, *above = parents + r * size, *kinds = classes + r * size, start = 0;
        for (int64_t m = 0; m < count; start += members[m++].nodes)
            for (int64_t n = 0; n < members[m].nodes; n++) {
                const Member *member = members + m;
                int64_t i = start + n, at = r * member->nodes, up = n ? member->parents[at + n] : 0, kind = n;
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
                const float *seen = everyone + 2 * kinds[i], *own = counts->own + 2 * (r * counts->kinds + kinds[i]);
                float prior = (seen[0] + counts->trust_all * given) / (seen[1] + counts->trust_all);
                float step = (own[0] + counts->trust * prior) / (own[1] + counts->trust);
                odds[i] = !n ? 1 : pool[i] == out->absent ? 0 : odds[above[i]] * step;
            }
        grown(pool, above, odds, size, LIKELIEST, out, r);
    }
}
