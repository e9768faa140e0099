/* What sampling does to logits. `stride`: floats from a row of `logits` to the next. `masks[i]` has a bit per token, the
 * lowest first: 1 if the token is allowed.
 */
#define WORD_LANES (32 / LANES)

/* All ones in the lanes of the allowed tokens among LANES that begin at bit `first`. */
INLINE vint lanes_of_bits(uint32_t allowed, int first) {
    vuint bits;
    UNROLL for (int lane = 0; lane < LANES; lane++) bits[lane] = (uint32_t)1 << lane;
    return (((vuint){} + (allowed >> first)) & bits) != 0;
}

INLINE void forbid_of_word(float *logits, uint32_t allowed) {
    if (allowed == UINT32_MAX) return;
    UNROLL for (int part = 0; part < WORD_LANES; part++) {
        const vfloat x = load((const char *)logits, part * LANES, FLOAT32);
        store((char *)logits, part * LANES, choose(lanes_of_bits(allowed, part * LANES), x, splat(-INFINITY)), FLOAT32);
    }
}

/* Sets the logits of tokens that a mask does not allow to minus infinity. `rows[i]`: the row of `masks[i]`. */
void kvrelay_forbid_tokens(float *logits, int64_t stride, const int64_t *rows, const uint32_t *const *masks,
                           int64_t num_rows, int64_t vocab_size) {
    const int64_t num_words = vocab_size / 32;
    for (int64_t i = 0; i < num_rows; i++) {
        float *row = logits + rows[i] * stride;
        for (int64_t word = 0; word < num_words; word++) forbid_of_word(row + word * 32, masks[i][word]);
        for (int64_t at = num_words * 32; at < vocab_size; at++)
            if (!(masks[i][num_words] >> at % 32 & 1)) row[at] = -INFINITY;
    }
}

#define SEGMENT_WORDS 16

typedef struct {
    vfloat peak, best; /* the greatest of all logits, and of those that are allowed */
    vint is_nan;
} Greatest;

INLINE void look_at_word(const float *logits, uint32_t allowed, Greatest *seen) {
    UNROLL for (int part = 0; part < WORD_LANES; part++) {
        const vfloat x = load((const char *)logits, part * LANES, FLOAT32);
        seen->is_nan |= x != x;
        seen->peak = larger(x, seen->peak);
        seen->best = larger(choose(lanes_of_bits(allowed, part * LANES), x, splat(-INFINITY)), seen->best);
    }
}

INLINE void look_at_words(const float *logits, const uint32_t *mask, int64_t count, Greatest *seen) {
    for (int64_t word = 0; word < count; word++) look_at_word(logits + word * 32, mask ? mask[word] : UINT32_MAX, seen);
}

INLINE int is_allowed(const uint32_t *mask, int64_t token) { return !mask || mask[token / 32] >> token % 32 & 1; }

/* The first allowed token from `begin` on whose logit is `best`; `end` if there is none. */
INLINE int64_t first_equal(const float *logits, const uint32_t *mask, int64_t begin, int64_t end, float best) {
    for (int64_t at = begin; at < end; at++)
        if (logits[at] == best && is_allowed(mask, at)) return at;
    return end;
}

INLINE void most_likely_of_row(const float *logits, const uint32_t *mask, int64_t vocab_size, int64_t *token_id, float *peak) {
    const int64_t num_words = vocab_size / 32;
    Greatest seen = {splat(-INFINITY), splat(-INFINITY), {}};
    float best = -INFINITY;
    int64_t begin = 0, end = vocab_size; /* the segment in which the best token was found */
    for (int64_t word = 0; word < num_words; word += SEGMENT_WORDS) {
        const int64_t count = at_most(SEGMENT_WORDS, num_words - word);
        if (mask) look_at_words(logits + word * 32, mask + word, count, &seen);
        else look_at_words(logits + word * 32, 0, count, &seen);
        const float found = horizontal_max(seen.best);
        if (found > best) best = found, begin = word * 32, end = (word + count) * 32;
    }
    int has_nan = 0;
    UNROLL for (int lane = 0; lane < LANES; lane++) has_nan |= seen.is_nan[lane] != 0;
    float greatest = horizontal_max(seen.peak);
    for (int64_t at = num_words * 32; at < vocab_size; at++) {
        has_nan |= logits[at] != logits[at];
        if (logits[at] > greatest) greatest = logits[at];
        if (logits[at] > best && is_allowed(mask, at)) best = logits[at], begin = at, end = at + 1;
    }
    *token_id = first_equal(logits, mask, begin, end, best) % vocab_size;
    *peak = has_nan ? NAN : greatest;
}

#define WORTH_THREADS (1 << 18) /* logits, which one thread looks at in about 0.1 ms */

/* For each row, the first of the allowed tokens with the greatest logit, and in `peaks` the greatest logit of all tokens,
 * NaN if one is. `masks[i]` may be null: all are allowed. If the logits of all allowed tokens are minus infinity or NaN, the
 * token is the first allowed one with minus infinity, or 0. Up to `threads` share the rows if these are worth waking them.
 */
void kvrelay_most_likely(const float *logits, int64_t stride, const uint32_t *const *masks, int64_t num_rows,
                         int64_t vocab_size, int64_t *token_ids, float *peaks, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (num_rows > 1 && num_rows * vocab_size > WORTH_THREADS)
    for (int64_t i = 0; i < num_rows; i++)
        most_likely_of_row(logits + i * stride, masks[i], vocab_size, token_ids + i, peaks + i);
}

INLINE vfloat weigh(vfloat logits, float greatest, float scale) { return vexp((logits - greatest) * scale); }

INLINE void weights_of_row(float *logits, float scale, int64_t vocab_size) {
    const int64_t whole = vocab_size - vocab_size % LANES;
    vfloat peak = splat(-INFINITY), rest = peak; /* the last logits, fewer than LANES */
    memcpy(&rest, logits + whole, (vocab_size - whole) * sizeof(float));
    for (int64_t at = 0; at < whole; at += LANES) peak = larger(load((const char *)logits, at, FLOAT32), peak);
    const float greatest = horizontal_max(larger(rest, peak));
    for (int64_t at = 0; at < whole; at += LANES)
        store((char *)logits, at, weigh(load((const char *)logits, at, FLOAT32), greatest, scale), FLOAT32);
    rest = weigh(rest, greatest, scale);
    memcpy(logits + whole, &rest, (vocab_size - whole) * sizeof(float));
}

/* Replaces logits by exp((logit - the row's greatest) * scale). Those of a token are the same bits wherever its row lies:
 * torch computes the numbers at the ends of its threads' parts by other instructions. `threads` as above.
 */
void kvrelay_weights(float *logits, int64_t stride, const float *scales, int64_t num_rows, int64_t vocab_size,
                     int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (num_rows > 1 && num_rows * vocab_size > WORTH_THREADS)
    for (int64_t i = 0; i < num_rows; i++) weights_of_row(logits + i * stride, scales[i], vocab_size);
}
