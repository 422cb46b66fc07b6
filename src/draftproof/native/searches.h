/* Drafters that the library asks itself: what they search, and how. */
#pragma once
#include "pools.h"

/* A search of a text for earlier occurrences of its last tokens. The longest and the shortest match,
 * occurrences that are compared, and those that are drafted from. */
typedef struct { int64_t longest, shortest, near, places; } PromptSearch;

/* Text, and a hash table of the successors of each context of `sizes` tokens (at most CONTEXT), with
 * `ways` entries each: a tag, the last place, and the count. weights hash contexts to slots and tags.
 * Each token of the text has an owner, and is drafted only for texts of this owner. The last token
 * and the last entry are dummies. As in drafters/suffix.py. */
typedef struct {
    int64_t *text /* [room] */, *places /* [slots, ways] */, *owners /* [room] */;
    int32_t *tags /* [slots, ways] */;
    float *counts /* [slots, ways] */;
    const int32_t *weights /* [2, count, 16] */;
    const int64_t *sizes /* [count] */;
    int64_t room, count, ways, slots, shift, follow, scatter, absent;
} Index;

/* A search of the index for what may follow texts. tails: the tokens before the roots. begins, ends: the
 * text's part of the memory; an occurrence there has an extra weight of `own`. paths: continuations that are
 * merged. */
typedef struct {
    const Index *index;
    const int64_t *tails /* [rows, 16] */, *begins /* [rows] */, *ends /* [rows] */,
            *owners /* [rows] */;
    float own;
    int64_t paths, rows;
} IndexSearch;

/* The `best` likeliest successors of pairs of tokens and of single tokens, each from the text of an
 * owner. As in drafters/token_recycling.py. */
typedef struct {
    int32_t *tags /* [2 * slots] */, *tokens /* [2 * slots, best] */;
    int64_t *owners /* [2 * slots] */;
    float *probs /* [2 * slots, best] */;
    int64_t best, slots, shift, token, before, absent;
} Table;

/* A search of the table for what may follow roots. last: the tokens before the roots. On each level the
 * `width` likeliest nodes are expanded, the root by all its successors, others by `fan`, down to `depth`. */
typedef struct {
    const Table *table;
    const int64_t *last /* [rows] */, *owners /* [rows] */;
    int64_t width, fan, depth, rows;
} TableSearch;

void draftproof_match_prompt(const PromptSearch *, const Texts *, int64_t steps, TreeOutput *);
void draftproof_continue_text(const IndexSearch *, const Texts *, int64_t steps, TreeOutput *);
void draftproof_likely_successors(const TableSearch *, const Texts *, int64_t steps, TreeOutput *);
