/* Choosing tokens, and drafting with them: races, chains, beams. */
#include "lanes.h"

/* Scores of one row of logits: over its heat, plus noise where there is some, rounded as torch rounds. Past the end -inf. */
static inline lanes heated(const bf16 *logits, const float *noise, float heat, int64_t i, int64_t vocab) {
    int64_t some = vocab - i < LANES ? vocab - i : LANES;
    lanes score = some < LANES ? partly(logits + i, some) : wide(logits + i);
    if (heat != 1) score /= heat;
    if (noise && some == LANES) score += loaded(noise + i);
    else for (int64_t l = 0; noise && l < some; l++) score[l] += noise[i + l];
    for (int64_t l = some; l < LANES; l++) score[l] = -INFINITY;
    return score;
}

/* The first token of the highest score in each row of logits [rows, vocab]; `nothing` if all are -inf or one is NaN. Each heat is
 * that of `each` rows; places say which of noise [., vocab] is whose. */
void draftproof_pick(const bf16 *logits, const float *noise, const int64_t *places, const float *heats, int64_t each, int64_t rows,
                     int64_t vocab, int64_t nothing, int64_t *tokens, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * vocab > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        const float *own = noise ? noise + places[r] * vocab : NULL;
        lanes most = (lanes){} - INFINITY;
        bits broken = {}, first = {};
        for (int64_t i = 0; i < vocab; i += LANES) {
            lanes score = heated(logits + r * vocab, own, heats[r / each], i, vocab);
            bits above = score > most;
            broken |= score != score;
            most = larger(score, most);
            first = (first & ~above) | (above & (int32_t)i);
        }
        float top = -INFINITY;
        int64_t token = nothing;
        for (int l = 0; l < LANES; l++)
            if (most[l] > top || (most[l] == top && top > -INFINITY && first[l] + l < token)) top = most[l], token = first[l] + l;
        tokens[r] = some_of(broken) ? nothing : token;
    }
}

/* Whether trees [rows, nodes] are well formed: tokens are below `vocab` or `absent`, parents come before their children, and no path
 * is deeper than `deep`. */
int64_t draftproof_well_formed(const int64_t *tokens, const int64_t *parents, int64_t rows, int64_t nodes, int64_t deep, int64_t vocab,
                               int64_t absent) {
    int64_t depths[nodes];
    for (int64_t r = 0; r < rows; r++, tokens += nodes, parents += nodes)
        for (int64_t node = 0; node < nodes; node++) {
            int64_t token = tokens[node], above = parents[node];
            if (token != absent && (token < 0 || token >= vocab)) return 0;
            if (node ? above < 0 || above >= node : above != -1) return 0;
            depths[node] = node ? depths[above] + 1 : 0;
            if (depths[node] > deep && token != absent) return 0;
        }
    return 1;
}

/* The nodes of trees [rows, nodes] that stand: those picked at their parents, whose ancestors stand too. Of the path to the
 * first of the deepest: its nodes, root first, [rows, deep], places beyond it hold their own index. told [4, rows]: how many they
 * are, what was picked behind them, how many nodes behind the root are not absent, and how deep these go. */
void draftproof_settle(const int64_t *tokens, const int64_t *parents, const int64_t *picks, int64_t rows, int64_t nodes, int64_t deep,
                       int64_t absent, int64_t *path, int64_t *told) {
    int64_t depths[nodes], levels[nodes];
    for (int64_t r = 0; r < rows; r++, tokens += nodes, parents += nodes, picks += nodes, path += deep) {
        int64_t last = depths[0] = levels[0] = 0, there = 0, reach = 0;
        for (int64_t node = 1; node < nodes; node++) {
            int64_t above = parents[node], stands = depths[above] >= 0 && tokens[node] == picks[above];
            depths[node] = stands ? depths[above] + 1 : -1;
            last = depths[node] > depths[last] ? node : last;
            levels[node] = levels[above] + 1;
            if (tokens[node] == absent) continue;
            there++;
            reach = levels[node] > reach ? levels[node] : reach;
        }
        told[r] = depths[last] + 1, told[rows + r] = picks[last], told[2 * rows + r] = there, told[3 * rows + r] = reach;
        for (int64_t d = deep - 1; d > depths[last]; d--) path[d] = d;
        for (int64_t node = last; node >= 0; node = parents[node]) path[depths[node]] = node;
    }
}

/* A number that the `count` best scores are not below: the best of each lane are all different ones. */
static inline float bar(lanes most, int64_t count) {
    float sorted[LANES];
    for (int l = 0; l < LANES; l++) {
        int at = l;
        for (; at > 0 && sorted[at - 1] < most[l]; at--) sorted[at] = sorted[at - 1];
        sorted[at] = most[l];
    }
    return count <= LANES ? sorted[count - 1] : -INFINITY;
}

/* Put those of the scores of tokens from i on that are not below the bar into the `count` best; of equals the earlier. */
static inline void chosen(lanes score, float bar, int64_t i, Scored *best, int64_t count) {
    if (!some_of(score >= bar)) return;
    float each[LANES];
    memcpy(each, &score, sizeof each);
    for (int l = 0; l < LANES; l++)
        if (each[l] >= bar && each[l] > best[count - 1].score) ranked(best, count, each[l], i + l);
}

/* The scores [vocab, and LANES more] of one row of logits, the `count` best of them, of equals the earlier, and the logarithm of
 * the sum of all, each by trust times its score less the best. INFINITY where there is nothing to choose, or a logit is NaN. */
static float weighed(const bf16 *logits, const float *noise, float heat, float trust, int64_t vocab, float *scores, Scored *best,
                     int64_t count) {
    for (int64_t k = 0; k < count; k++) best[k] = (Scored){-INFINITY, 0};
    bits broken = {};
    lanes most = (lanes){} - INFINITY, sum = {};
    for (int64_t i = 0; i < vocab; i += LANES) {
        lanes score = heated(logits, noise, heat, i, vocab);
        memcpy(scores + i, &score, sizeof score);
        broken |= score != score;
        most = larger(score, most);
    }
    float least = bar(most, count), top = bar(most, 1);
    for (int64_t i = 0; i < vocab; i += LANES) {
        lanes score = loaded(scores + i);
        chosen(score, least, i, best, count);
        sum += expo((score - top) * trust);
    }
    return some_of(broken) || top == -INFINITY ? INFINITY : logf(total(sum));
}

/* The `count` best tokens of each row of logits and their logits, of equals the earlier; NaN is none of them. The rows lie in `parts`
 * matrices [rows, nodes, vocab]; tokens and best are [rows, parts * nodes, count]. */
void draftproof_top(const bf16 *const *logits, int64_t parts, int64_t rows, int64_t nodes, int64_t vocab, int64_t count,
                    int64_t *tokens, float *best, int64_t threads) {
    int64_t each = parts * nodes;
#pragma omp parallel for num_threads(threads) if (rows * each > 1 && rows * each * vocab > SMALL)
    for (int64_t i = 0; i < rows * each; i++) {
        const bf16 *own = logits[i % each / nodes] + (i / each * nodes + i % nodes) * vocab;
        Scored found[count];
        for (int64_t k = 0; k < count; k++) found[k] = (Scored){-INFINITY, 0};
        lanes most = (lanes){} - INFINITY;
        for (int64_t t = 0; t < vocab; t += LANES) most = larger(heated(own, NULL, 1, t, vocab), most);
        float least = bar(most, count);
        for (int64_t t = 0; t < vocab; t += LANES) chosen(heated(own, NULL, 1, t, vocab), least, t, found, count);
        for (int64_t k = 0; k < count; k++) tokens[i * count + k] = found[k].token, best[i * count + k] = found[k].score;
    }
}

/* The `count` best tokens of each row, of equals the earlier, and the logarithm of the chance of each: chances are the softmax of
 * trust times the scores. Where a logit is NaN nothing has a chance. */
void draftproof_best(const bf16 *logits, const float *noise, const int64_t *places, const float *heats, const float *trusts,
                     int64_t rows, int64_t vocab, int64_t count, float *odds, int64_t *tokens, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * vocab > SMALL)
    for (int64_t r = 0; r < rows; r++) {
        Scored best[count];
        const float *own = noise ? noise + places[r] * vocab : NULL;
        float whole = weighed(logits + r * vocab, own, heats[r], trusts[r], vocab, scratch(vocab + LANES), best, count);
        for (int64_t k = 0; k < count; k++) {
            int there = whole < INFINITY && best[k].score > -INFINITY;
            odds[r * count + k] = there ? (best[k].score - best->score) * trusts[r] - whole : -INFINITY;
            tokens[r * count + k] = best[k].token;
        }
    }
}

/* Pairs of tokens, as in drafters/medusa_pairs.py. */
typedef struct {
    const int32_t *starts, *tokens;
    const float *gains, *rest;
} Pairs;

/* The `count` likeliest children of a parent and the logarithms of their chances, falling: its pairs, each of whose chances
 * [vocab] gains, and the head's own best choices. weight: what gains are multiplied with. */
static void behind(const Pairs *pairs, int64_t parent, const float *chances, const Scored *own, float weight, Scored *best, int64_t count) {
    int64_t first = pairs->starts[parent], named = pairs->starts[parent + 1] - first;
    const int32_t *tokens = pairs->tokens + first;
    const float *gains = pairs->gains + first;
    float lifted[named + LANES], rest = weight * pairs->rest[parent];
    lanes sum = {}, taken = {};
    for (int64_t i = 0; i < named; i += LANES) {
        lanes before = (lanes){} - INFINITY, gain = {};
        for (int64_t l = 0; l < LANES && i + l < named; l++) before[l] = chances[tokens[i + l]], gain[l] = gains[i + l];
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
    for (int64_t k = 0; k < count; k++) best[k].score = best[k].score - whole < 0 ? best[k].score - whole : 0;
}

/* Each row's tree of the `nodes` likeliest nodes behind its root by logits [rows, heads, vocab] and pairs, in falling order of their
 * chances, of which at most `children` have one parent: tokens, parents and chances [rows, nodes + 1], `absent` and 0 where there
 * are no more. With a shape [2, nodes + 1], the tree of this shape instead: each node's parent, and which of its
 * children it is. Noise, places, heats and trusts as for a chain. work: rows * heads * (vocab + LANES) numbers. */
void draftproof_paired(const Pairs *pairs, float weight, const int64_t *shape, const bf16 *logits, const int64_t *roots,
                       int64_t rows, int64_t heads, int64_t vocab, int64_t nodes, int64_t children, const float *noise,
                       const int64_t *places, const float *heats, const float *trusts, int64_t absent, int64_t *tokens,
                       int64_t *parents, float *odds, float *work, int64_t threads) {
    int64_t wide = vocab + LANES, most = children < vocab ? children : vocab;
    Scored *own = malloc((size_t)(rows * heads * most) * sizeof(Scored));
    if (!own) abort();
#pragma omp parallel for num_threads(threads) if (rows * heads * vocab > SMALL)
    for (int64_t i = 0; i < rows * heads; i++) {
        int64_t r = i / heads;
        float *chances = work + i * wide;
        Scored *best = own + i * most;
        const float *heard = noise ? noise + (places[r] + i % heads) * vocab : NULL;
        float whole = weighed(logits + i * vocab, heard, heats[r], trusts[r], vocab, chances, best, most), top = best->score;
        for (int64_t k = 0; k < most; k++) best[k].score = whole < INFINITY ? (best[k].score - top) * trusts[r] - whole : -INFINITY;
        for (int64_t t = 0; t < vocab; t += LANES) {
            lanes chance = whole < INFINITY ? (loaded(chances + t) - top) * trusts[r] - whole : (lanes){} - INFINITY;
            memcpy(chances + t, &chance, sizeof chance);
        }
    }
#pragma omp parallel for num_threads(threads) if (rows > 2)
    for (int64_t r = 0; r < rows; r++) {
        int64_t *token = tokens + r * (nodes + 1), *above = parents + r * (nodes + 1), rank[nodes + 1], depth[nodes + 1];
        float *chance = odds + r * (nodes + 1), next[nodes + 1], push = weight * trusts[r] / heats[r];
        Scored *lists = (Scored *)scratch((nodes + 1) * most * (int64_t)(sizeof(Scored) / sizeof(float)));
        rank[0] = 0;
        for (int64_t n = 0; n <= nodes; n++) {                  /* next: the chance of the next child that a node has not got */
            int64_t from = n && shape ? shape[n] : 0;
            for (int64_t m = 1; m < n && !shape; m++)
                if (next[m] > next[from]) from = m;
            const Scored *child = lists + from * most + (n && shape ? shape[nodes + 1 + n] : rank[from]);
            token[n] = roots[r], above[n] = -1, chance[n] = 0, depth[n] = 0;
            if (n) {
                int there = next[from] > -INFINITY && child->score > -INFINITY;
                token[n] = there ? child->token : absent;
                above[n] = there || shape ? from : 0;
                chance[n] = there ? chance[from] + child->score : -INFINITY;
                depth[n] = depth[from] + 1;
                if (!shape) next[from] = ++rank[from] < most ? chance[from] + child[1].score : -INFINITY;
            }
            rank[n] = 0, next[n] = -INFINITY;
            if (token[n] == absent || depth[n] == heads) continue;
            int64_t at = r * heads + depth[n];
            behind(pairs, token[n], work + at * wide, own + at * most, push, lists + n * most, most);
            next[n] = chance[n] + lists[n * most].score;
        }
        for (int64_t n = 0; n <= nodes; n++) chance[n] = expf(chance[n]);
    }
    free(own);
}

/* Medusa heads of `layers` blocks each, those of the first head first; what projects the states of all; and pairs, and what their
 * gains are multiplied with. */
typedef struct {
    const Linear *blocks;
    Linear projection;
    Pairs pairs;
    int64_t layers;
    float weight;
} Heads;

/* As draftproof_paired, by what the first `heads` heads say of hidden states [rows, size]. room: rows * heads * (2 size + vocab)
 * numbers. */
void draftproof_medusa(const Heads *of, const bf16 *hidden, const int64_t *shape, const int64_t *roots, int64_t rows, int64_t heads,
                       int64_t nodes, int64_t children, const float *noise, const int64_t *places, const float *heats,
                       const float *trusts, int64_t absent, int64_t *tokens, int64_t *parents, float *odds, bf16 *room, float *work,
                       int64_t threads) {
    int64_t size = of->blocks->size, vocab = of->projection.outputs, all = rows * heads;
    bf16 *states = room, *beside = states + all * size, *logits = beside + all * size;
    draftproof_heads(of->blocks, hidden, states, beside, heads, of->layers, rows, threads);
    for (int64_t i = 0; i < all; i++)                               /* row by row */
        memcpy(beside + i * size, states + (i % heads * rows + i / heads) * size, (size_t)size * sizeof(bf16));
    draftproof_linear(&of->projection, beside, logits, all, threads);
    draftproof_paired(&of->pairs, of->weight, shape, logits, roots, rows, heads, vocab, nodes, children, noise, places, heats, trusts,
                      absent, tokens, parents, odds, work, threads);
}

/* Draft a chain per row. Each row reads what it lacks of its text [rows, room], up to its root at positions[row], and has
 * lengths[row] = positions[row] then; behind the root, token after token the best of each, each read in turn as the next node of the
 * scratch. places [rows] name the noise of the root. A row ends after `steps` tokens, where the logarithm of the chance that its
 * chain stands is below `floor`, where nothing may be chosen; and of all rows together only the likeliest `nodes` tokens are kept.
 * tokens [rows, 1 + steps], the root first, `absent` behind the end. turns, likewise, with how many nodes per row each would be
 * kept. reads [rows]: how many tokens of a row lie in the scratch. Returns how many the longest chain has. width: no row lacks more,
 * the root included; no more is read than one lacks. work: as for a forward of rows * width tokens, and rows * width * size + rows *
 * vocab more. */
int64_t draftproof_chain(Read *ways, const Model *model, bf16 *const *stores, const int64_t *text, int64_t room, const int64_t *positions,
                         int64_t *lengths, int64_t width, int64_t steps, int64_t nodes, const float *noise, const int64_t *places,
                         const float *heats, const float *trusts, float floor, int64_t absent, int64_t *tokens, int64_t *turns,
                         int64_t *reads, bf16 *work) {
    const Linear *head = model->head;
    const Read *read = ways;
    int64_t rows = read->rows, vocab = head->outputs, size = head->size, most = width > steps ? width : steps, lack = 1;
    bf16 *last = work, *own = last + rows * width * size, *rest = own + rows * vocab;
    for (int64_t r = 0; r < rows; r++) lack = 1 + positions[r] - lengths[r] > lack ? 1 + positions[r] - lengths[r] : lack;
    width = lack < width ? lack : width;
    nodes = nodes < rows * steps ? nodes : rows * steps;
    int64_t parents[rows * most], asked[rows * width], where[rows], found[rows], starts[rows + 1], which[rows], live[rows], going = rows;
    asked[0] = 0;
    float chance[rows], heat[rows], trust[rows], sums[rows];
    Scored likely[nodes];
    for (int64_t n = 0; n < nodes; n++) likely[n] = (Scored){-INFINITY, -1};
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t node = 0; node < width; node++) {
            int64_t place = lengths[r] + node;
            asked[r * width + node] = place <= positions[r] ? text[r * room + place] : 0;
            parents[r * width + node] = node - 1;
        }
        for (int64_t d = 0; d <= steps; d++) tokens[r * (1 + steps) + d] = absent, turns[r * (1 + steps) + d] = 0;
        tokens[r * (1 + steps)] = text[r * room + positions[r]], sums[r] = 0;
    }
    for (int64_t way = 0; way < model->ways; way++)
        ways[way].lengths = lengths, ways[way].parents = parents, ways[way].first = 0, ways[way].nodes = width;
    draftproof_forward(ways, model, stores, asked, last, NULL, NULL, rest);
    for (int64_t r = 0; r < rows; r++) {
        bf16 *root = last + (r * width + positions[r] - lengths[r]) * size;
        memmove(last + r * size, root, (size_t)size * sizeof(bf16));
        lengths[r] = positions[r], live[r] = r, reads[r] = 1;
    }
    for (int64_t d = 0;;) {
        for (int64_t i = 0; i < going; i++)
            where[i] = places ? places[live[i]] + d : 0, heat[i] = heats[live[i]], trust[i] = trusts[live[i]];
        if (!d) draftproof_linear(head, last, own, going, read->threads);
        draftproof_best(own, noise, where, heat, trust, going, vocab, 1, chance, found, read->threads);
        for (int64_t i = 0; i < going; i++) {
            int64_t r = live[i], at = r * (1 + steps) + d + 1;
            sums[r] += chance[i];
            if (chance[i] > -INFINITY) tokens[at] = found[i];
            if (sums[r] > likely[nodes - 1].score) ranked(likely, nodes, sums[r], at);
        }
        int64_t on = 0;
        d++;
        for (int64_t i = 0; i < going && d < steps; i++) {
            float sum = sums[live[i]];
            if (sum > -INFINITY && sum >= floor && sum >= likely[nodes - 1].score) live[on++] = live[i];
        }
        if (!on) break;
        going = on;
        memset(starts, 0, sizeof starts);
        for (int64_t i = 0; i < going; i++) {
            int64_t r = live[i];
            asked[i] = tokens[r * (1 + steps) + d];
            which[i] = d, reads[r] = d + 1, starts[r + 1] = 1;
        }
        for (int64_t r = 0; r < rows; r++) {
            starts[r + 1] += starts[r];
            for (int64_t node = 0; node <= d; node++) parents[r * (d + 1) + node] = node - 1;
        }
        for (int64_t way = 0; way < model->ways; way++)
            ways[way].first = d, ways[way].nodes = d + 1, ways[way].starts = starts, ways[way].which = which;
        draftproof_forward(ways, model, stores, asked, last, own, NULL, rest);
    }
    int64_t longest = 0;
    for (int64_t n = 0; n < nodes && likely[n].score > -INFINITY; n++) turns[likely[n].token] = n / rows + 1;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 1; d <= steps; d++) {
            int64_t at = r * (1 + steps) + d;
            if (!turns[at]) tokens[at] = absent;
            else if (d > longest) longest = d;
        }
    return longest;
}

/* Which nodes of trees [rows, nodes] are there: `which`, row by row, ascending, and where each row's start [rows + 1]; their
 * tokens; and back [rows, nodes], which of them each node is, or, if it is not there, some other. */
void draftproof_some(int64_t rows, int64_t nodes, int64_t absent, const int64_t *tokens, int64_t *starts, int64_t *which,
                     int64_t *some, int64_t *back) {
    int64_t count = starts[0] = 0;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t node = 0; node < nodes; node++) {
            if (tokens[r * nodes + node] != absent) which[count] = node, some[count++] = tokens[r * nodes + node];
            back[r * nodes + node] = count - 1;
        }
        starts[r + 1] = count;
    }
}

/* A recurrent draft head. Without `fed` the state is the sum of embeddings; `smooth`: through SiLU; `first`: the bias of `back`
 * counts where there is no state yet. narrow: in front of the blocks, if its size is not 0. table: [vocab, hidden]. */
typedef struct {
    Linear fed, back, narrow, projection;
    const Linear *blocks;
    const bf16 *table;
    int64_t hidden, layers, recurs, smooth, first;
} Recurrence;

/* x [rows, hidden] embeddings of the next tokens and, behind the first, `back` the states before them, become states. */
static void advanced(const Recurrence *head, bf16 *x, const bf16 *before, bf16 *beside, int64_t rows, int64_t threads) {
    int64_t size = head->hidden, all = rows * size;
    bf16 *more = beside + all;
    if (head->recurs) {
        draftproof_linear(&head->fed, x, beside, rows, threads);
        memcpy(x, beside, (size_t)all * sizeof(bf16));
        if (before) draftproof_linear(&head->back, before, more, rows, threads);
        else if (head->first && head->back.bias)
            for (int64_t r = 0; r < rows; r++) memcpy(more + r * size, head->back.bias, (size_t)size * sizeof(bf16));
        else memset(more, 0, (size_t)all * sizeof(bf16));
    } else if (before) memcpy(more, before, (size_t)all * sizeof(bf16));
    else memset(more, 0, (size_t)all * sizeof(bf16));
    for (int64_t i = 0; i < all; i += LANES) {
        lanes v = rounded(wide(x + i) + wide(more + i));
        narrowed(x + i, head->recurs && head->smooth ? silu(v) : v);
    }
}

/* Beam search: `length` steps of `width` beams and as many children of each, behind context [rows, hidden] and roots [rows]. All
 * that is weighed goes into pools [rows, .]: tokens, parents (places in the pool), logarithms of the chance of the path; the root
 * is in place 0. A search may end early below `floor`, as a chain does. Returns the size of a pool. work: room for
 * rows * width * (8 hidden + 2 wide + vocab) numbers, where wide is the projection's size. */
int64_t draftproof_search(const Recurrence *head, const bf16 *context, const int64_t *roots, int64_t rows, int64_t width, int64_t length,
                          const float *noise, const int64_t *places, const float *heats, const float *trusts, float floor,
                          int64_t *tokens, int64_t *parents, float *chances, int64_t room, bf16 *work, int64_t threads) {
    int64_t hidden = head->hidden, wider = head->projection.size, vocab = head->projection.outputs, most = rows * width;
    bf16 *states[2] = {work, work + most * hidden}, *before = states[1] + most * hidden, *beside = before + most * hidden;
    bf16 *pairs = beside + 2 * most * hidden, *x = pairs + 2 * most * hidden, *room_beside = x + most * wider;
    bf16 *logits = room_beside + most * wider;
    int64_t ends[most], above[most], where[most], found[most * width], size = 1, beams = 1;
    float sums[most], odds[most * width], heat[most], trust[most];
    for (int64_t r = 0; r < rows; r++) {
        tokens[r * room] = roots[r], parents[r * room] = 0, chances[r * room] = 0;
        ends[r * width] = 0, sums[r * width] = 0;
    }
    for (int64_t d = 0; d < length; d++) {
        bf16 *state = states[d % 2], *last = states[(d + 1) % 2];
        int64_t count = rows * beams;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t b = 0; b < beams; b++) {
                int64_t at = r * beams + b, token = tokens[r * room + ends[r * width + b]];
                memcpy(state + at * hidden, head->table + token * hidden, (size_t)hidden * sizeof(bf16));
                if (d) memcpy(before + at * hidden, last + above[r * width + b] * hidden, (size_t)hidden * sizeof(bf16));
                where[at] = places ? places[r] + d : 0, heat[at] = heats[r], trust[at] = trusts[r];
            }
        advanced(head, state, d ? before : NULL, beside, count, threads);
        for (int64_t at = 0; at < count; at++) {
            memcpy(pairs + 2 * at * hidden, context + at / beams * hidden, (size_t)hidden * sizeof(bf16));
            memcpy(pairs + (2 * at + 1) * hidden, state + at * hidden, (size_t)hidden * sizeof(bf16));
        }
        if (head->narrow.size) draftproof_linear(&head->narrow, pairs, x, count, threads);
        else memcpy(x, pairs, (size_t)(2 * count * hidden) * sizeof(bf16));
        for (int64_t l = 0; l < head->layers; l++) draftproof_residual(head->blocks + l, x, room_beside, count, threads);
        draftproof_linear(&head->projection, x, logits, count, threads);
        draftproof_best(logits, noise, where, heat, trust, count, vocab, width, odds, found, threads);
        float top = -INFINITY;
        for (int64_t r = 0; r < rows; r++) {
            Scored best[width];
            for (int64_t b = 0; b < width; b++) best[b] = (Scored){-INFINITY, size};
            for (int64_t b = 0; b < beams; b++)
                for (int64_t k = 0; k < width; k++) {
                    int64_t at = (r * beams + b) * width + k, place = size + b * width + k;
                    tokens[r * room + place] = found[at], parents[r * room + place] = ends[r * width + b];
                    float chance = chances[r * room + place] = sums[r * width + b] + odds[at];
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
