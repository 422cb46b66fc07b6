/* Pools of nodes, trees of the likeliest nodes, and the texts that they continue. */
#pragma once
#include "lanes.h"

/* nodes of a pool with equal text: none exist; the best counts; they are summed */
enum { APART, LIKELIEST, SUMMED };

/* Output of trees: tokens, parents and probabilities in descending order; `absent`, 0 and 0 after the
 * last node of a row. widest, deepest: nodes and edges of the largest tree and the longest path so far. */
typedef struct {
    int64_t *tokens /* [rows, nodes] */, *parents /* [rows, nodes] */;
    float *probs /* [rows, nodes] */;
    int64_t nodes, absent, widest, rows, deepest;
} TreeOutput;

/* The tree of row r: the likeliest nodes of a pool, with its root; among equals, the earlier first.
 * Parents come before their children; nodes without a parent are copies of the root. No node is
 * likelier than its parent; nodes of probability 0 are absent. */
static inline void grow_tree(const int64_t *pool, const int64_t *above, const float *probs, int64_t size,
        int same, TreeOutput *out, int64_t r) {
    int64_t first[size], up[size], known[size], place[size], count = 0, most = out->nodes - 1,
            depths[most + 1];
    float best[size];
    Scored likely[most + 1];
    for (int64_t n = 0; n < most; n++) likely[n] = (Scored){0, -1};
    for (int64_t i = 0; i < size; i++) {
        int root = i == 0 || above[i] < 0 || above[i] >= i;
        first[i] = root ? 0 : -1, best[i] = root;
        if (root || !(probs[i] > 0) || first[above[i]] < 0) continue;
        first[i] = i, up[i] = first[above[i]];
        for (int64_t k = 0; same != APART && k < count; k++)
            if (up[known[k]] == up[i] && pool[known[k]] == pool[i]) {
                first[i] = known[k];
                break;
            }
        if (first[i] == i) known[count++] = i;
        float *held = best + first[i];
        *held = same == SUMMED ? *held + probs[i] : probs[i] > *held ? probs[i] : *held;
    }
    for (int64_t k = 0; k < count && most; k++) {
        int64_t i = known[k];
        if (best[i] > best[up[i]]) best[i] = best[up[i]];
        if (best[i] > likely[most - 1].score) ranked(likely, most, best[i], i);
    }
    int64_t *tokens = out->tokens + r * out->nodes, *parents = out->parents + r * out->nodes;
    float *chances = out->probs + r * out->nodes;
    tokens[0] = pool[0], parents[0] = -1, chances[0] = 1, place[0] = depths[0] = 0;
    for (int64_t n = 0; n < most; n++) {
        int64_t i = likely[n].token;
        tokens[n + 1] = i < 0 ? out->absent : pool[i], parents[n + 1] = i < 0 ? 0 : place[up[i]],
                chances[n + 1] = likely[n].score;
        if (i < 0) continue;
        place[i] = n + 1, depths[n + 1] = depths[parents[n + 1]] + 1;
        if (out->deepest < depths[n + 1]) out->deepest = depths[n + 1];
        if (out->widest < n + 2) out->widest = n + 2;
    }
}

/* Texts, and the position of each root. */
typedef struct {
    const int64_t *tokens /* [rows, room] */, *positions /* [rows] */;
    int64_t rows, room;
} Texts;

/* The position of row r's root, clamped to its text. */
static inline int64_t root_at(const Texts *texts, int64_t r) {
    int64_t at = texts->positions[r];
    return at < 0 ? 0 : at < texts->room ? at : texts->room - 1;
}
