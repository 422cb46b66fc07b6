/* Drafting what followed earlier occurrences of the last tokens: in the text itself, or in an index. */
#include "searches.h"

enum { CONTEXT = 16 };                          /* the longest context of the index, in tokens */

/* The trees of a pool of paths of `each` nodes, all starting at the root. */
static void grow_paths(const int64_t *pool, const float *probs, int64_t paths, int64_t each,
        TreeOutput *out, int64_t r) {
    int64_t above[paths * each];
    for (int64_t i = 0; i < paths * each; i++) above[i] = i % each ? i - 1 : -1;
    grow_tree(pool, above, probs, paths * each, SUMMED, out, r);
}

/* The probability that the continuation of a match of this length holds for `ahead` more tokens, given
 * that it has held so far. */
static inline float lasting(float match, int64_t ahead) { return (match + (float)ahead) / (match
        + (float)ahead + 3); }

/* Trees of what followed earlier occurrences of the last tokens of each text. Candidates are the
 * `near` most recent occurrences of the last two tokens, then of the last one. The `places` with the
 * longest matches, from `shortest` to `longest`, are used, the most recent first among equals, with
 * `steps` tokens from each, repeated cyclically. As in drafters/prompt_lookup.py. */
void draftproof_match_prompt(const PromptSearch *search, const Texts *texts, int64_t steps,
        TreeOutput *out /* [texts->rows] */) {
    int64_t longest = search->longest, near = search->near, places = search->places, each = 1 + steps,
            pool[places * each], ends[near], others[near], best[places], lengths[places];
    float probs[places * each];
    for (int64_t r = 0; r < texts->rows; r++) {
        const int64_t *text = texts->tokens + r * texts->room;
        int64_t last = root_at(texts, r), before = text[longest > 1 && last ? last - 1 : last],
                pairs = 0, single = 0, found = 0;
        for (int64_t p = last - 1; p >= 0 && pairs < near; p--)
            if (text[p] == text[last]) {
                if (p && text[p - 1] == before) ends[pairs++] = p;
                else if (single < near) others[single++] = p;
            }
        for (int64_t s = 0; s < single && pairs < near; s++) ends[pairs++] = others[s];
        for (int64_t e = 0; e < pairs; e++) {
            int64_t length = 1, at;
            while (length < longest && length <= ends[e]
                    && text[ends[e] - length] == text[last - length]) length++;
            if (length < search->shortest) continue;
            for (at = found < places ? found++ : places; at > 0; at--) {
                if (lengths[at - 1] > length || (lengths[at - 1] == length
                        && best[at - 1] > ends[e])) break;
                if (at < places) lengths[at] = lengths[at - 1], best[at] = best[at - 1];
            }
            if (at < places) lengths[at] = length, best[at] = ends[e];
        }
        float left = 1;
        for (int64_t w = 0; w < places; w++) {
            int64_t at = w * each, start = w < found ? best[w] + 1 : last,
                    circle = last + 1 - start;
            float chance = left, length = w < found ? (float)lengths[w] : 0;
            pool[at] = text[last], probs[at] = 1;
            for (int64_t k = 0; k < steps; k++) {
                chance *= w < found ? lasting(length, k) : 0;
                pool[at + k + 1] = text[start + k % circle], probs[at + k + 1] = chance;
            }
            left *= 1 - lasting(length, 0);
        }
        grow_paths(pool, probs, places, each, out, r);
    }
}

/* The first entry of each context at the end of an owner's text, and the base of its successors' tags,
 * both [count]. */
static void hashed(const Index *index, const int64_t *context, int64_t owner, int64_t *entries,
        uint32_t *tags) {
    uint32_t tokens[CONTEXT];
    for (int l = 0; l < CONTEXT; l++) tokens[l] = (uint32_t)context[l] + 1;
    for (int64_t o = 0; o < 2 * index->count; o++) {
        const uint32_t *weights = (const uint32_t *)index->weights + o * CONTEXT;
        uint32_t key = (uint32_t)(o >= index->count ? owner >> 32 : owner);
        for (int l = 0; l < CONTEXT; l++) key += weights[l] * tokens[l];
        if (o >= index->count) tags[o - index->count] = key;
        else entries[o] = (((int32_t)key >> index->shift) & (index->slots - 1)) * index->ways;
    }
}

static inline int32_t tagged(const Index *index, uint32_t tag, int64_t token) {
    return (int32_t)(tag + ((uint32_t)token + 1) * (uint32_t)index->follow);
}

/* Write counts[row] tokens after `ends`, and index them under their contexts; tails are the tokens
 * before them. Updates ends and tails. */
void draftproof_learn_text(const Index *index, int64_t *tails /* [rows, 16] */,
        int64_t *ends /* [rows] */, const int64_t *owners /* [rows] */,
        const int64_t *tokens /* [rows, width] */, const int64_t *counts /* [rows] */,
        int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t *tail = tails + r * CONTEXT, entries[index->count];
        uint32_t tags[index->count];
        /* not in the index */
        if (ends[r] < 0 || counts[r] > width || ends[r] + counts[r] + 2 > index->room) continue;
        for (int64_t d = 0; d < counts[r]; d++) {
            int64_t token = tokens[r * width + d], place = ends[r]++;
            int64_t way = ((int32_t)(((uint32_t)token + 1)
                    * (uint32_t)index->scatter) >> 30) & (index->ways - 1);
            index->text[place] = token, index->owners[place] = owners[r];
            hashed(index, tail, owners[r], entries, tags);
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

/* Trees of the likeliest continuations of each text, `steps` tokens long. */
void draftproof_continue_text(const IndexSearch *search /* [texts->rows] */, const Texts *texts,
        int64_t steps, TreeOutput *out /* [texts->rows] */) {
    const Index *index = search->index;
    const int64_t *begins = search->begins, *ends = search->ends, *owners = search->owners;
    int64_t each = 1 + steps, paths = search->paths, pool[paths * each],
            places[index->count * index->ways], entries[index->count], context[CONTEXT];
    uint32_t tags[index->count];
    float probs[paths * each];
    Scored best[paths];
    for (int64_t r = 0; r < texts->rows; r++)
        if (ends[r] >= 0 && ends[r] < index->room) {
            index->text[ends[r]] = texts->tokens[r * texts->room + root_at(texts, r)];
            index->owners[ends[r]] = owners[r];
        }
    for (int64_t r = 0; r < texts->rows; r++) {
        int64_t root = texts->tokens[r * texts->room + root_at(texts, r)];
        memcpy(context, search->tails + r * CONTEXT + 1, (CONTEXT - 1) * sizeof *context);
        context[CONTEXT - 1] = root;
        hashed(index, context, owners[r], entries, tags);
        for (int64_t w = 0; w < paths; w++) best[w] = (Scored){0, -1};
        float left = 1;
        for (int64_t o = 0; o < index->count; o++) {
            if (context[CONTEXT - index->sizes[o]] == index->absent) continue;
            float seen[index->ways], kinds = 0, total = 0;
            for (int64_t w = 0; w < index->ways; w++) {
                int64_t entry = entries[o] + w,
                        place = places[o * index->ways + w] = index->places[entry],
                        /* another run may have enlarged the text since */
                        known = place >= 0 && place < index->room,
                        token = known ? index->text[place] : index->absent;
                int alive = token != index->absent && index->owners[place] == owners[r]
                        && index->tags[entry] == tagged(index, tags[o], token);
                seen[w] = alive ? index->counts[entry]
                        + (place >= begins[r] && place <= ends[r] ? search->own : 0) : 0;
                kinds += (float)alive, total += seen[w];
            }
            float among = kinds + total > 1 ? kinds + total : 1;
            for (int64_t w = 0; w < index->ways; w++)
                if (left / among * seen[w] > best[paths - 1].score) ranked(best, paths,
                        left / among * seen[w], o * index->ways + w);
            left *= kinds > 0 ? kinds / among : 1;
        }
        for (int64_t w = 0; w < paths; w++) {
            int64_t at = w * each, way = best[w].token,
                    start = way < 0 ? index->room - 1 : places[way];
            /* at the end, start again */
            int64_t circle = start >= begins[r] && start <= ends[r] ? ends[r] + 1 - start : 0;
            float chance = best[w].score, match
                    = way < 0 ? 0 : (float)index->sizes[way / index->ways];
            pool[at] = root, probs[at] = 1;
            for (int64_t k = 0; k < steps; k++) {
                int64_t place = start + (circle ? k % circle : k);
                place = place < index->room ? place : index->room - 1;
                pool[at + k + 1] = index->owners[place] == owners[r] ? index->text[place]
                        : index->absent;
                chance *= pool[at + k + 1] == index->absent ? 0 : k ? lasting(match, k) : 1;
                probs[at + k + 1] = chance;
            }
        }
        grow_paths(pool, probs, paths, each, out, r);
    }
}
