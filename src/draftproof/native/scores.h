/* Scores of logits: divided by a temperature, with noise, and the best of them. */
#pragma once
#include "model.h"

/* Scores of one row of logits: divided by its temperature, plus noise if any, rounded as torch does.
 * -inf past the end. */
static inline lanes perturbed(const bf16 *logits, const float *noise, float temperature, int64_t i,
        int64_t vocab) {
    int64_t some = vocab - i < LANES ? vocab - i : LANES;
    lanes score = some < LANES ? partly(logits + i, some) : wide(logits + i);
    if (temperature != 1) score /= temperature;
    if (noise && some == LANES) score += loaded(noise + i);
    else for (int64_t l = 0; noise && l < some; l++) score[l] += noise[i + l];
    for (int64_t l = some; l < LANES; l++) score[l] = -INFINITY;
    return score;
}

/* Insert the scores of tokens from i on into the `count` best; among equals, the earlier first; never
 * NaN. */
static inline void chosen(lanes score, int64_t i, Scored *best, int64_t count) {
    if (!some_of(score > best[count - 1].score)) return;
    for (int l = 0; l < LANES; l++)
        if (score[l] > best[count - 1].score) ranked(best, count, score[l], i + l);
}

/* The scores [vocab, and LANES more] of one row of logits, and the `count` best of them, among equals
 * the earlier first. Returns the logarithm of the sum of exp(scale * (score - best)); INFINITY if
 * nothing can be chosen, or a logit is NaN. */
static float weighed(const bf16 *logits, const float *noise, float temperature, float trust, int64_t vocab,
        float *scores, Scored *best, int64_t count) {
    for (int64_t k = 0; k < count; k++) best[k] = (Scored){-INFINITY, 0};
    bits broken = {};
    lanes most = (lanes){} - INFINITY, sum = {};
    for (int64_t i = 0; i < vocab; i += LANES) {
        lanes score = perturbed(logits, noise, temperature, i, vocab);
        memcpy(scores + i, &score, sizeof score);
        broken |= score != score;
        most = larger(score, most);
    }
    float top = largest(most);
    for (int64_t i = 0; i < vocab; i += LANES) {
        lanes score = loaded(scores + i);
        chosen(score, i, best, count);
        sum += expo((score - top) * trust);
    }
    return some_of(broken) || top == -INFINITY ? INFINITY : logf(total(sum));
}

void draftproof_best_tokens(const bf16 *logits, const float *noise, const int64_t *places,
        const float *temperatures, const float *trusts, int64_t rows, int64_t vocab, int64_t count,
        float *probs, int64_t *tokens, int64_t threads);
