/* Sets the logits of tokens that a mask does not allow to minus infinity, for some rows of a step.
 *
 * `rows[i]` is a row of `logits`, whose rows are `stride` floats apart. `masks[i]` has a bit per token, the lowest first.
 */
INLINE void forbid_of_word(float *logits, uint32_t allowed, int64_t count) {
    if (allowed == UINT32_MAX) return;
    for (int64_t bit = 0; bit < count; bit++) logits[bit] = allowed >> bit & 1 ? logits[bit] : -INFINITY;
}

void kvrelay_forbid_tokens(float *logits, int64_t stride, const int64_t *rows, const uint32_t *const *masks,
                           int64_t num_rows, int64_t vocab_size) {
    const int64_t num_words = vocab_size / 32;
    for (int64_t i = 0; i < num_rows; i++) {
        float *row = logits + rows[i] * stride;
        for (int64_t word = 0; word < num_words; word++) forbid_of_word(row + word * 32, masks[i][word], 32);
        if (vocab_size % 32) forbid_of_word(row + num_words * 32, masks[i][num_words], vocab_size % 32);
    }
}
