/* Choosing tokens by scores, accepting trees, and chains of a draft model. */
#include "scores.h"

/* Rows of logits, and the tokens chosen by them. */
typedef struct {
    const bf16 *logits;
    const float *noise, *temperatures, *scales;
    const int64_t *places;
    int64_t each, vocab, no_token, count;
    int64_t *tokens;
    float *log_probs;
} Choice;

static const float *noise_of(const Choice *of, int64_t r) {
    return of->noise ? of->noise + of->places[r] * of->vocab : NULL;
}

static void sample_rows(const void *work, int64_t first_row, int64_t last_row) {
    const Choice *of = work;
    int64_t vocab = of->vocab;
    for (int64_t r = first_row; r < last_row; r++) {
        const float *own = noise_of(of, r);
        float temperature = of->temperatures[r / of->each];
        lanes most = (lanes){} - INFINITY;
        bits broken = {}, first = {};
        for (int64_t i = 0; i < vocab; i += LANES) {
            lanes score = perturbed(of->logits + r * vocab, own, temperature, i, vocab);
            bits above = score > most;
            broken |= score != score;
            most = larger(score, most);
            first = (first & ~above) | (above & (int32_t)i);
        }
        float top = -INFINITY;
        int64_t token = of->no_token;
        for (int l = 0; l < LANES; l++)
            if (most[l] > top || (most[l] == top && top > -INFINITY && first[l] + l < token))
                top = most[l], token = first[l] + l;
        of->tokens[r] = some_of(broken) ? of->no_token : token;
    }
}

/* The least rows per thread. */
static int64_t enough_rows(int64_t vocab) { return 1 + SMALL / 2 / (vocab > 0 ? vocab : 1); }

/* The first token of the highest score in each row of logits; `no_token` if all are -inf or one is
 * NaN. A temperature belongs to `each` rows; places are the rows' indices in noise [., vocab]. */
void draftproof_sample(const bf16 *logits /* [rows, vocab] */,
        const float *noise /* [reach(places), vocab] or null */,
        const int64_t *places /* [rows] or null */, const float *temperatures /* [rows / each] */,
        int64_t each, int64_t rows, int64_t vocab, int64_t no_token, int64_t *tokens /* [rows] */,
        int64_t threads) {
    Choice of = {.logits = logits, .noise = noise, .temperatures = temperatures, .places = places, .each = each,
        .vocab = vocab, .no_token = no_token, .tokens = tokens};
    share_out(sample_rows, &of, rows, enough_rows(vocab), threads);
}

/* Whether trees are well formed: tokens are below `vocab` or `absent`, parents come
 * before their children, and no path is deeper than `deep`. */
int64_t draftproof_well_formed(const int64_t *tokens /* [rows, nodes] */,
        const int64_t *parents /* [rows, nodes] */, int64_t rows, int64_t nodes, int64_t deep,
        int64_t vocab, int64_t absent) {
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

/* Accept nodes that were picked at their parents, if their ancestors are accepted too. path: the
 * nodes to the first of the deepest accepted ones, root first; places beyond hold their own index.
 * found: the length of the path, the token picked after it, the number of nodes present after the
 * root, and their greatest depth. A node whose parent does not come before it counts as a child of
 * the root. */
void draftproof_accept(const int64_t *tokens /* [rows, nodes] */,
        const int64_t *parents /* [rows, nodes] */, const int64_t *picks /* [rows, nodes] */,
        int64_t rows, int64_t nodes, int64_t deep, int64_t absent, int64_t *path /* [rows, deep] */,
        int64_t *found /* [4, rows] */) {
    int64_t depths[nodes], levels[nodes], up[nodes];
    for (int64_t r = 0; r < rows; r++, tokens += nodes, parents += nodes, picks += nodes,
            path += deep) {
        int64_t last = depths[0] = levels[0] = 0, there = 0, reach = 0;
        up[0] = -1;
        for (int64_t node = 1; node < nodes; node++) {
            int64_t above = parents[node] < 0 || parents[node] >= node ? 0 : parents[node];
            int64_t stands = depths[above] >= 0 && depths[above] + 1 < deep
                    && tokens[node] == picks[above];
            up[node] = above;
            depths[node] = stands ? depths[above] + 1 : -1;
            last = depths[node] > depths[last] ? node : last;
            levels[node] = levels[above] + 1;
            if (tokens[node] == absent) continue;
            there++;
            reach = levels[node] > reach ? levels[node] : reach;
        }
        found[r] = depths[last] + 1, found[rows + r] = picks[last], found[2 * rows + r] = there,
                found[3 * rows + r] = reach;
        for (int64_t d = deep - 1; d > depths[last]; d--) path[d] = d;
        for (int64_t node = last; node >= 0; node = up[node]) path[depths[node]] = node;
    }
}

static void top_rows(const void *work, int64_t first_row, int64_t last_row) {
    const Choice *of = work;
    int64_t vocab = of->vocab, count = of->count;
    for (int64_t r = first_row; r < last_row; r++) {
        Scored found[count];
        for (int64_t k = 0; k < count; k++) found[k] = (Scored){-INFINITY, 0};
        for (int64_t t = 0; t < vocab; t += LANES)
            chosen(perturbed(of->logits + r * vocab, NULL, 1, t, vocab), t, found, count);
        for (int64_t k = 0; k < count; k++)
            of->tokens[r * count + k] = found[k].token, of->log_probs[r * count + k] = found[k].score;
    }
}

/* The `count` best tokens of each row of logits, and their logits; among equals, the earlier first.
 * NaN is never among them. */
void draftproof_top_tokens(const bf16 *logits /* [rows, vocab] */, int64_t rows, int64_t vocab,
        int64_t count, int64_t *tokens /* [rows, count] */, float *best /* [rows, count] */,
        int64_t threads) {
    Choice of = {.logits = logits, .vocab = vocab, .count = count, .tokens = tokens, .log_probs = best};
    share_out(top_rows, &of, rows, enough_rows(vocab), threads);
}

static void best_rows(const void *work, int64_t first_row, int64_t last_row) {
    const Choice *of = work;
    int64_t vocab = of->vocab, count = of->count;
    for (int64_t r = first_row; r < last_row; r++) {
        Scored best[count];
        float trust = of->scales[r], whole = weighed(of->logits + r * vocab, noise_of(of, r),
                of->temperatures[r], trust, vocab, scratch(vocab + LANES), best, count);
        for (int64_t k = 0; k < count; k++) {
            int there = whole < INFINITY && best[k].score > -INFINITY;
            of->log_probs[r * count + k] = there ? (best[k].score - best->score) * trust - whole
                    : -INFINITY;
            of->tokens[r * count + k] = best[k].token;
        }
    }
}

/* The `count` best tokens of each row, among equals the earlier first, and their log-probabilities:
 * the softmax of scale times the scores. If a logit is NaN, all probabilities are 0. */
void draftproof_best_tokens(const bf16 *logits /* [rows, vocab] */,
        const float *noise /* [reach(places), vocab] or null */,
        const int64_t *places /* [rows] or null */, const float *temperatures /* [rows] */,
        const float *scales /* [rows] */, int64_t rows,
        int64_t vocab, int64_t count, float *log_probs /* [rows, count] */,
        int64_t *tokens /* [rows, count] */, int64_t threads) {
    Choice of = {.logits = logits, .noise = noise, .temperatures = temperatures, .scales = scales,
        .places = places, .vocab = vocab, .count = count, .tokens = tokens, .log_probs = log_probs};
    share_out(best_rows, &of, rows, enough_rows(vocab), threads);
}

/* Draft a chain per row. Each row first reads the missing tokens of its text, up to its root at
 * positions[row], and sets lengths[row] = positions[row]. Then it drafts the best token after the
 * last one, reads it as the next node of the scratch, and so on. places: the root's index in noise.
 * A row ends after `steps` tokens, where the log-probability of its chain is below `floor`, or where
 * no token can be chosen. Of all rows together only the likeliest `nodes` tokens are kept.
 * tokens: the root first, `absent` after the end. turns: with how many nodes per row each token
 * would be kept. reads: how many tokens of a row are in the scratch. Returns the length of the
 * longest chain. width: the most tokens that a row lacks, root included. work: as for a forward of
 * rows * width tokens, and rows * width * size + rows * vocab more. */
int64_t draftproof_chain(Read *read, const Model *model,
        void *const *stores /* [read->stores, model->count] */,
        const int64_t *text /* [read->rows, room] */, int64_t room,
        const int64_t *positions /* [read->rows] */, int64_t *lengths /* [read->rows] */,
        int64_t width, int64_t steps, int64_t nodes,
        const float *noise /* [reach(places, steps), vocab_of(model)] or null */,
        const int64_t *places /* [read->rows] or null */, const float *temperatures /* [read->rows] */,
        const float *scales /* [read->rows] */, float floor, int64_t absent,
        int64_t *tokens /* [read->rows, 1 + steps] */, int64_t *turns /* [read->rows, 1 + steps] */,
        int64_t *reads /* [read->rows] */,
        bf16 *work /* [read->rows, width * (hidden(model) + work_of(model)) + vocab_of(model)] */) {
    const Linear *head = model->head;
    int64_t rows = read->rows, vocab = head->outputs, size = head->size, lack = 1;
    int64_t most = width > steps ? width : steps;
    bf16 *last = work, *own = last + rows * width * size, *rest = own + rows * vocab;
    for (int64_t r = 0; r < rows; r++)
        lack = 1 + positions[r] - lengths[r] > lack ? 1 + positions[r] - lengths[r] : lack;
    width = lack < width ? lack : width;
    nodes = nodes < rows * steps ? nodes : rows * steps;
    int64_t parents[rows * most], asked[rows * width], where[rows], found[rows], starts[rows + 1],
            which[rows], live[rows], going = rows;
    asked[0] = 0;
    float chance[rows], temperature[rows], trust[rows], sums[rows];
    Scored likely[nodes];
    for (int64_t n = 0; n < nodes; n++) likely[n] = (Scored){-INFINITY, -1};
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t node = 0; node < width; node++) {
            int64_t place = lengths[r] + node;
            asked[r * width + node] = place <= positions[r] ? text[r * room + place] : 0;
            parents[r * width + node] = node - 1;
        }
        for (int64_t d = 0; d <= steps; d++)
            tokens[r * (1 + steps) + d] = absent, turns[r * (1 + steps) + d] = 0;
        tokens[r * (1 + steps)] = text[r * room + positions[r]], sums[r] = 0;
    }
    read->lengths = lengths, read->parents = parents, read->first = 0, read->nodes = width;
    draftproof_forward(read, model, stores, asked, last, NULL, NULL, rest);
    for (int64_t r = 0; r < rows; r++) {
        bf16 *root = last + (r * width + positions[r] - lengths[r]) * size;
        memmove(last + r * size, root, (size_t)size * sizeof(bf16));
        lengths[r] = positions[r], live[r] = r, reads[r] = 1;
    }
    for (int64_t d = 0;;) {
        for (int64_t i = 0; i < going; i++)
            where[i] = places ? places[live[i]] + d : 0, temperature[i] = temperatures[live[i]],
                    trust[i] = scales[live[i]];
        if (!d) draftproof_linear(head, last, own, going, read->threads);
        draftproof_best_tokens(own, noise, where, temperature, trust, going, vocab, 1, chance, found,
                read->threads);
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
            if (sum > -INFINITY && sum >= floor && sum >= likely[nodes - 1].score)
                live[on++] = live[i];
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
        read->first = d, read->nodes = d + 1, read->starts = starts, read->which = which;
        draftproof_forward(read, model, stores, asked, last, own, NULL, rest);
    }
    int64_t longest = 0;
    for (int64_t n = 0; n < nodes && likely[n].score > -INFINITY; n++)
        turns[likely[n].token] = n / rows + 1;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 1; d <= steps; d++) {
            int64_t at = r * (1 + steps) + d;
            if (!turns[at]) tokens[at] = absent;
            else if (d > longest) longest = d;
        }
    return longest;
}
