/* Prompts by pairs of bfloat16: some query tokens of a row and one KV head. Included by cpu_attention_pairs.c. */
/* Keys of a tile as panels [head_dim / 2][PANEL][2], from the packed key `place` on: a transpose of pairs. */
INLINE void pack_keys(const Attention *a, const PairScratch *s, const int64_t *offsets, int64_t head, int64_t place,
                      const int64_t dim) {
    const char *keys = a->pool + head * a->stride.head * 2;
    for (int first = 0; first < KEY_TILE; first += LANES)
        for (int64_t d = 0; d < dim; d += 32) {
            const __mmask32 mask = dim - d >= 32 ? 0xffffffff : 0xffff;
            vfloat v[LANES];
            UNROLL for (int k = 0; k < LANES; k++)
                v[k] = (vfloat)_mm512_maskz_loadu_epi16(mask, keys + (offsets[first + k] + d) * 2);
            transpose(v);
            char *to = s->keys + (place + first) / PANEL * panel_bytes(padded_dim(dim), BFLOAT16) +
                       (d / 2 * PANEL + first % PANEL) * 4;
            UNROLL for (int k = 0; k < LANES; k++) memcpy(to + k * PANEL * 4, &v[k], sizeof v[k]);
        }
}

/* Values of a tile in panels [PROMPT_KEYS / 2][PANEL][2], one for each PANEL of the head. */
INLINE void pack_values(const Attention *a, const PairScratch *s, const int64_t *offsets, int64_t head, int64_t place,
                        const int64_t dim) {
    const char *values = a->pool + (head * a->stride.head + a->stride.key_to_value) * 2;
    for (int k = 0; k < KEY_TILE; k += 2)
        for (int64_t d = 0; d < dim; d += PANEL) {
            const __mmask32 mask = dim - d >= 32 ? 0xffffffff : 0xffff;
            __m512i pairs[2];
            interleave(_mm512_maskz_loadu_epi16(mask, values + (offsets[k] + d) * 2),
                       _mm512_maskz_loadu_epi16(mask, values + (offsets[k + 1] + d) * 2), &pairs[0], &pairs[1]);
            memcpy(s->values + d / PANEL * panel_bytes(PROMPT_KEYS, BFLOAT16) + (place + k) / 2 * PANEL * 4, pairs, sizeof pairs);
        }
}

/* Scores of one row, and -inf for keys that are out of [visible_begin, visible_end) if `partly`. They are scaled and
 * soft-capped if `scaled`. */
INLINE vfloat prompt_score(const Attention *a, const float *score, int64_t key, int64_t visible_begin, int64_t visible_end,
                           const int partly, const int scaled) {
    vfloat x = load((const char *)score, key / PANEL * PROMPT_ROWS * PANEL + key % PANEL, FLOAT32);
    if (scaled) x *= (float)a->scaling;
    if (scaled && a->softcap != 0) x = (float)a->softcap * vtanh(x * (float)(1 / a->softcap));
    if (partly) {
        vint at;
        UNROLL for (int i = 0; i < LANES; i++) at[i] = i;
        at += (int32_t)key;
        x = choose((at >= (int32_t)visible_begin) & (at < (int32_t)visible_end), x, splat(-INFINITY));
    }
    return x;
}

/* Lane e of the result is the maximum of the lanes of v[e]. */
INLINE vfloat max_each(vfloat v[LANES]) {
    transpose(v);
    UNROLL for (int s = LANES / 2; s; s /= 2)
        UNROLL for (int i = 0; i < s; i++) v[i] = (vfloat)_mm512_max_ps((__m512)v[i], (__m512)v[i + s]);
    return v[0];
}

/* Turns scores of LANES rows from row `first` of an item on into weights, and stores by how much earlier results of each
 * row shrink. Returns whether any does. `begin` is the position of the first of `num_keys` keys. Unless `scaled`, scores
 * are scaled together with their change of base to 2, which needs a positive scaling and no soft cap. */
INLINE int soften_rows(const Attention *a, const PairScratch *s, int64_t first, const float *score, uint16_t *weight,
                       int64_t position, int64_t begin, int64_t num_keys, float *shrink, const int partly, const int scaled) {
    const float scaling = scaled ? 1.0f : (float)a->scaling, to_log2 = scaling * LOG2_E;
    vfloat best[LANES];
    float bases[LANES];
    for (int r = 0; r < LANES; r++) {
        const int64_t end = position + (first + r) / a->group + 1 - begin, start = a->window ? end - a->window : 0;
        best[r] = splat(-INFINITY);
        for (int64_t key = 0; key < num_keys; key += LANES) {
            const vfloat x = prompt_score(a, score + r * PANEL, key, start, end, partly, scaled);
            best[r] = (vfloat)_mm512_max_ps((__m512)x, (__m512)best[r]);
        }
    }
    const vfloat old = load((const char *)s->max, first, FLOAT32), new = larger(max_each(best) * scaling, old);
    const vfloat base = choose(new == splat(-INFINITY), splat(0.0f), new); /* nothing seen yet: weights are exp(-inf) */
    const vfloat shrinks = choose(new == old, splat(1.0f), vexp(old - base));
    store((char *)s->max, first, new, FLOAT32);
    store((char *)shrink, 0, shrinks, FLOAT32);
    store((char *)bases, 0, base * LOG2_E, FLOAT32);
    for (int r = 0; r < LANES; r++) {
        const int64_t end = position + (first + r) / a->group + 1 - begin, start = a->window ? end - a->window : 0;
        vfloat total = load((const char *)s->sum, (first + r) * LANES, FLOAT32) * shrink[r];
        for (int64_t key = 0; key < num_keys; key += 2 * LANES) {
            vfloat w[2];
            UNROLL for (int i = 0; i < 2; i++) {
                const vfloat x = prompt_score(a, score + r * PANEL, key + i * LANES, start, end, partly, scaled);
                w[i] = rough_exp2(x * to_log2 - bases[r]);
            }
            total += w[0] + w[1];
            _mm512_storeu_si512(weight + r * PROMPT_KEYS + key, (__m512i)_mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]));
        }
        store((char *)s->sum, (first + r) * LANES, total, FLOAT32);
    }
    return _mm512_cmp_ps_mask((__m512)shrinks, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0;
}

/* As `soften_rows`, compiled for each kind of scores. */
static int soften_prompt(const Attention *a, const PairScratch *s, int64_t first, const float *score, uint16_t *weight,
                         int64_t position, int64_t begin, int64_t num_keys, float *shrink, int partly) {
    if (a->softcap != 0 || !(a->scaling > 0)) return soften_rows(a, s, first, score, weight, position, begin, num_keys, shrink, 1, 1);
    if (partly) return soften_rows(a, s, first, score, weight, position, begin, num_keys, shrink, 1, 0);
    return soften_rows(a, s, first, score, weight, position, begin, num_keys, shrink, 0, 0);
}

/* Packed keys and values from position `begin` on, for up to PROMPT_ROWS rows from row `first` of an item on, which see
 * `num_keys` of them at most. */
static void prompt_rows(const Attention *a, const PairScratch *s, int64_t stored, int64_t first, int64_t rows,
                        int64_t position, int64_t begin, int64_t num_keys, const int64_t dim) {
    const int64_t wide = rounded_up(num_keys, PANEL), key_panel = panel_bytes(padded_dim(dim), BFLOAT16);
    const int partly = a->window || begin + wide > position + first / a->group + 1;
    float shrink[PROMPT_ROWS];
    int shrinks = 0;
    for (int64_t key = 0; key < wide; key += PANEL)
        add_block((const char *)(s->query + first * dim), dim * 2, rows, s->keys + key / PANEL * key_panel, dim,
                  s->score + key * PROMPT_ROWS, 0, NULL, BFLOAT16, 1);
    for (int64_t r = 0; r < rows; r += LANES) {
        const float *score = s->score + r * PANEL;
        uint16_t *weight = s->weight + r * PROMPT_KEYS;
        shrinks |= soften_prompt(a, s, first + r, score, weight, position, begin, wide, shrink + r, partly);
    }
    for (int64_t d = 0; d < dim; d += PANEL) {
        float *output = s->output + d * stored + first * PANEL;
        for (int64_t r = 0; shrinks && r < rows; r++)
            UNROLL for (int c = 0; c < PANEL; c += LANES)
                store((char *)output, r * PANEL + c, load((const char *)output, r * PANEL + c, FLOAT32) * shrink[r], FLOAT32);
        add_block((const char *)s->weight, PROMPT_KEYS * 2, rows, s->values + d / PANEL * panel_bytes(PROMPT_KEYS, BFLOAT16),
                  wide, output, 1, NULL, BFLOAT16, 1);
    }
}

/* Some query tokens of one row, one KV head, all keys that they see. */
static void prompt_item(const Attention *a, const PairScratch *s, const Item *item, const int64_t dim) {
    const int64_t rows = (item->query_end - item->query_begin) * a->group, stored = rounded_up(rows, PROMPT_ROWS);
    const int64_t first_token = a->query_starts[item->row] + item->query_begin, head = item->head_begin;
    const int64_t position = a->positions[item->row] + item->query_begin;
    const int64_t end = at_most(item->key_end, a->positions[item->row] + item->query_end);
    int64_t begin = a->window ? at_least(0, position + 1 - a->window) / PROMPT_KEYS * PROMPT_KEYS : 0;
    for (int64_t m = 0; m < rows; m++) {
        const int64_t token = first_token + m / a->group, query_head = head * a->group + m % a->group;
        memcpy(s->query + m * dim, a->query + (token * a->query_token + query_head * a->query_head) * 2, dim * 2);
    }
    for (int64_t m = 0; m < stored; m++) s->max[m] = -INFINITY;
    memset(s->output, 0, stored * padded_dim(dim) * sizeof *s->output);
    memset(s->sum, 0, stored * LANES * sizeof *s->sum);
    for (; begin < end; begin += PROMPT_KEYS) {
        const int64_t count = at_most(PROMPT_KEYS, end - begin);
        for (int64_t place = 0; place < count; place += KEY_TILE) {
            int64_t offsets[KEY_TILE];
            find_tile(a, item->row, begin + place, at_most(KEY_TILE, count - place), offsets);
            pack_keys(a, s, offsets, head, place, dim);
            pack_values(a, s, offsets, head, place, dim);
        }
        for (int64_t first = 0; first < rows; first += PROMPT_ROWS) {
            const int64_t some = at_most(PROMPT_ROWS, rows - first);
            /* Keys from here on lie behind the last of these rows. */
            const int64_t seen = at_most(count, position + (first + some - 1) / a->group + 1 - begin);
            if (seen > 0) prompt_rows(a, s, stored, first, some, position, begin, seen, dim);
        }
    }
    float output[padded_dim(dim)];
    for (int64_t m = 0; m < rows; m++) {
        for (int64_t d = 0; d < dim; d += PANEL) memcpy(output + d, s->output + d * stored + m * PANEL, PANEL * sizeof *output);
        finish(a, output, s->max[m], _mm512_reduce_add_ps(_mm512_loadu_ps(s->sum + m * LANES)), first_token + m / a->group,
               head * a->group + m % a->group, dim, BFLOAT16);
    }
}
