/* Attention over a bfloat16 pool with bfloat16 queries, by instructions that multiply pairs of bfloat16 (AVX512-BF16, and
 * AMX for prompts). Sums, the maximum and the softmax are float; weights are rounded to bfloat16 before they meet values,
 * as in the modules of transformers.
 *
 * Decoding reads keys and values once for all query heads of their KV head. Prompts pack a tile of keys and values into
 * panels (see cpu_panels.c) for all rows of an item.
 */
#define KEY_TILE 64
#define PROMPT_ROWS TILE_ROOM /* rows of a prompt's item that go through scores, softmax and values at a time */
#define PROMPT_KEYS 128 /* keys that they meet at a time */

/* What a thread keeps while it works on an item; rows are padded to a multiple of PROMPT_ROWS. */
typedef struct {
    uint16_t *query;  /* decoding: [heads of the item, group, head_dim]; prompts: [rows, head_dim] */
    float *output;    /* decoding: the same shape; prompts: [head_dim / PANEL, rows, PANEL] */
    float *max;       /* [rows] or [heads, group] */
    float *sum;       /* the same, LANES partial sums each */
    float *score;     /* [PROMPT_KEYS / PANEL, PROMPT_ROWS, PANEL], or [group padded to 4, KEY_TILE] */
    uint16_t *weight; /* [PROMPT_ROWS, PROMPT_KEYS], or [group, KEY_TILE] */
    char *keys;       /* [PROMPT_KEYS / PANEL] panels of head_dim rows */
    char *values;     /* [head_dim / PANEL] panels of PROMPT_KEYS rows */
} PairScratch;

INLINE int64_t padded_dim(int64_t dim) { return rounded_up(dim, PANEL); }

static int64_t pair_scratch_bytes(const Attention *a) {
    const int64_t states = rounded_up(a->max_states, PROMPT_ROWS), dim = padded_dim(a->head_dim);
    return states * (dim * 6 + (1 + LANES) * 4) + PROMPT_ROWS * PROMPT_KEYS * 6 + 2 * PROMPT_KEYS * dim * 2 + 8 * 64;
}

static char *take_bytes(char **free_space, int64_t count) {
    char *start = *free_space;
    *free_space += rounded_up(count, 64);
    return start;
}

static PairScratch lay_out_pairs(const Attention *a, char *space) {
    const int64_t states = rounded_up(a->max_states, PROMPT_ROWS), dim = padded_dim(a->head_dim);
    PairScratch s;
    s.query = (uint16_t *)take_bytes(&space, states * dim * 2);
    s.output = (float *)take_bytes(&space, states * dim * 4);
    s.max = (float *)take_bytes(&space, states * 4);
    s.sum = (float *)take_bytes(&space, states * LANES * 4);
    s.score = (float *)take_bytes(&space, PROMPT_ROWS * PROMPT_KEYS * 4);
    s.weight = (uint16_t *)take_bytes(&space, PROMPT_ROWS * PROMPT_KEYS * 2);
    s.keys = take_bytes(&space, PROMPT_KEYS * dim * 2);
    s.values = take_bytes(&space, PROMPT_KEYS * dim * 2);
    return s;
}

/* Offsets in the pool, in elements, of the keys of a tile; those past its end repeat the last one. */
INLINE void find_tile(const Attention *a, int row, int64_t begin, int64_t count, int64_t offsets[KEY_TILE]) {
    find_keys(a, row, begin, at_most(count, TILE), offsets);
    if (count > TILE) find_keys(a, row, begin + TILE, count - TILE, offsets + TILE);
    else for (int k = TILE; k < KEY_TILE; k++) offsets[k] = offsets[TILE - 1];
}

/* Turns one row's scores of a tile into weights, of which keys [visible_begin, visible_end) count, and returns by how much
 * earlier results shrink. */
INLINE float soften_pairs(const Attention *a, const float *score, int64_t visible_begin, int64_t visible_end,
                          uint16_t *weight, float *max, float *sum) {
    vfloat w[KEY_TILE / LANES], best = splat(-INFINITY);
    vint lane;
    UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
    UNROLL for (int i = 0; i < KEY_TILE / LANES; i++) {
        w[i] = load((const char *)score, i * LANES, FLOAT32) * (float)a->scaling;
        if (a->softcap != 0) w[i] = (float)a->softcap * vtanh(w[i] * (float)(1 / a->softcap));
        if (visible_begin > 0 || visible_end < KEY_TILE) {
            const vint key = lane + i * LANES;
            w[i] = choose((key >= (int32_t)visible_begin) & (key < (int32_t)visible_end), w[i], splat(-INFINITY));
        }
        best = larger(w[i], best);
    }
    float new_max = _mm512_reduce_max_ps((__m512)best);
    if (!(new_max > *max)) new_max = *max;
    const float base = new_max == -INFINITY ? 0.0f : new_max; /* nothing seen yet: weights are exp(-inf) */
    const float shrink = new_max == *max ? 1.0f : expf(*max - base);
    vfloat total = load((const char *)sum, 0, FLOAT32) * shrink;
    UNROLL for (int i = 0; i < KEY_TILE / LANES; i++) {
        w[i] = rough_exp(w[i] - base);
        total += w[i];
    }
    UNROLL for (int i = 0; i < KEY_TILE / LANES; i += 2)
        _mm512_storeu_si512(weight + i * LANES, (__m512i)_mm512_cvtne2ps_pbh((__m512)w[i + 1], (__m512)w[i]));
    memcpy(sum, &total, sizeof total);
    *max = new_max;
    return shrink;
}

/* ---- decoding ---- */

/* The tile that is read after the current one. Its lines are fetched a few at a time between computations, in the order in
 * which they lie in memory, over all heads of the item: that is twice as fast as in the order of their use, head by head,
 * and more at once than the CPU can wait for would hold up everything behind them. */
typedef struct {
    const char *keys; /* of the item's first head, in block 0 */
    int64_t heads, head_bytes, value_bytes, token_bytes; /* of the item; strides, from keys to values */
    int64_t offsets[KEY_TILE], count, block_size;
    /* The next line: `first` and `tokens` are the tile's keys in a block, whose runs are each head's keys, then values. */
    int64_t first, tokens, run, byte;
} Ahead;

INLINE int nothing_ahead(const Ahead *ahead) { return ahead->first >= ahead->count; }

INLINE void fetch_ahead(Ahead *ahead, int64_t bytes) {
    while (bytes > 0 && !nothing_ahead(ahead)) {
        const int64_t head = ahead->run < ahead->heads ? ahead->run : ahead->run - ahead->heads;
        const char *run = ahead->keys + ahead->offsets[ahead->first] * 2 + head * ahead->head_bytes +
                          (ahead->run < ahead->heads ? 0 : ahead->value_bytes);
        const int64_t run_bytes = ahead->tokens * ahead->token_bytes, some = at_most(bytes, run_bytes - ahead->byte);
        for (int64_t byte = 0; byte < some; byte += 64) __builtin_prefetch(run + ahead->byte + byte, 0, 2);
        bytes -= some, ahead->byte += some;
        if (ahead->byte < run_bytes) continue;
        ahead->byte = 0;
        if (++ahead->run < 2 * ahead->heads) continue;
        ahead->run = 0, ahead->first += ahead->tokens;
        ahead->tokens = at_most(ahead->block_size, ahead->count - ahead->first);
    }
}

/* score[m][0 .. KEY_TILE) = query[m] . key, for `together` rows of the group at a time. */
INLINE void pair_scores(const char *keys, const int64_t *offsets, Ahead *ahead, const uint16_t *query, float *score,
                        const int64_t dim, const int together) {
    const int at_once = LANES / together;
    for (int first = 0; first < KEY_TILE; first += at_once) {
        fetch_ahead(ahead, at_once * dim * 2);
        vfloat sums[LANES] = {};
        for (int64_t d = 0; d < dim; d += 32) {
            const __mmask32 mask = dim - d >= 32 ? 0xffffffff : 0xffff;
            __m512i q[4];
            UNROLL for (int r = 0; r < together; r++) q[r] = _mm512_maskz_loadu_epi16(mask, query + r * dim + d);
            UNROLL for (int k = 0; k < at_once; k++) {
                const __m512i key = _mm512_maskz_loadu_epi16(mask, keys + (offsets[first + k] + d) * 2);
                UNROLL for (int r = 0; r < together; r++)
                    sums[r * at_once + k] =
                        (vfloat)_mm512_dpbf16_ps((__m512)sums[r * at_once + k], (__m512bh)key, (__m512bh)q[r]);
            }
        }
        const vfloat dots = sum_each(sums);
        UNROLL for (int r = 0; r < together; r++)
            memcpy(score + r * KEY_TILE + first, (const char *)&dots + r * at_once * 4, at_once * 4);
    }
}

/* Words of two vectors in turn: of their first halves, and of their second halves. */
INLINE void interleave(__m512i a, __m512i b, __m512i *first, __m512i *second) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5,
                                         36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    *first = _mm512_permutex2var_epi16(a, low, b);
    *second = _mm512_permutex2var_epi16(a, high, b);
}

/* output[m][d ..) = shrink[m] * output[m][d ..) + weight[m] . values, for `rows` rows and `wide` vectors of the head. */
INLINE void add_pair_values(const char *values, const int64_t *offsets, Ahead *ahead, int64_t count,
                            const uint16_t *weight, const float *shrink, float *output, int64_t d, const int64_t dim,
                            const int rows, const int wide) {
    vfloat sums[4][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < wide; i++)
            sums[r][i] = load((const char *)(output + r * dim), d + i * LANES, FLOAT32) * shrink[r];
    for (int64_t k = 0; k < count; k += 2) {
        __m512i pairs[4];
        fetch_ahead(ahead, 2 * wide * LANES * 2);
        UNROLL for (int i = 0; i < wide; i += 2) {
            const __mmask32 mask = wide - i >= 2 ? 0xffffffff : 0xffff;
            const __m512i one = _mm512_maskz_loadu_epi16(mask, values + (offsets[k] + d + i * LANES) * 2);
            const __m512i other = _mm512_maskz_loadu_epi16(mask, values + (offsets[k + 1] + d + i * LANES) * 2);
            __m512i unused;
            interleave(one, other, &pairs[i], i + 1 < wide ? &pairs[i + 1] : &unused);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            uint32_t w;
            memcpy(&w, weight + r * KEY_TILE + k, sizeof w);
            UNROLL for (int i = 0; i < wide; i++) sums[r][i] = add_pair(sums[r][i], w, (vuint)pairs[i]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < wide; i++) memcpy(output + r * dim + d + i * LANES, &sums[r][i], sizeof(vfloat));
}

/* One tile of keys for one KV head and `rows` query heads of its group, 1 to 4. */
INLINE void decode_rows(const Attention *a, const PairScratch *s, int64_t state, int64_t head, int64_t start, int64_t count,
                        const int64_t *offsets, Ahead *ahead, const int64_t dim, const int rows) {
    const char *keys = a->pool + head * a->stride.head * 2, *values = keys + a->stride.key_to_value * 2;
    float shrink[4];
    pair_scores(keys, offsets, ahead, s->query + state * dim, s->score, dim, rows == 3 ? 4 : rows);
    for (int r = 0; r < rows; r++)
        shrink[r] = soften_pairs(a, s->score + r * KEY_TILE, start, count, s->weight + r * KEY_TILE,
                                 s->max + state + r, s->sum + (state + r) * LANES);
    float *output = s->output + state * dim;
    int64_t d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        add_pair_values(values, offsets, ahead, count, s->weight, shrink, output, d, dim, rows, 4);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        add_pair_values(values, offsets, ahead, count, s->weight, shrink, output, d, dim, rows, 2);
    if (d < dim) add_pair_values(values, offsets, ahead, count, s->weight, shrink, output, d, dim, rows, 1);
}

INLINE void decode_tile(const Attention *a, const PairScratch *s, int64_t state, int64_t head, int64_t start, int64_t count,
                        const int64_t *offsets, Ahead *ahead, const int64_t dim) {
    for (int64_t r = 0; r < a->group; r += 4) switch (a->group - r) {
        case 1: decode_rows(a, s, state + r, head, start, count, offsets, ahead, dim, 1); break;
        case 2: decode_rows(a, s, state + r, head, start, count, offsets, ahead, dim, 2); break;
        case 3: decode_rows(a, s, state + r, head, start, count, offsets, ahead, dim, 3); break;
        default: decode_rows(a, s, state + r, head, start, count, offsets, ahead, dim, 4);
    }
}

/* The first key that a decoding item reads, and the end of its keys. */
INLINE int64_t first_key(const Attention *a, const Item *item) {
    const int64_t position = a->positions[item->row] + item->query_begin;
    return at_least(item->key_begin, a->window ? at_least(0, position + 1 - a->window) / KEY_TILE * KEY_TILE : 0);
}

INLINE int64_t end_key(const Attention *a, const Item *item) {
    return at_most(item->key_end, a->positions[item->row] + item->query_begin + 1);
}

/* Looks ahead to the tile of an item that begins at a key, if there is one. */
INLINE void look_ahead(const Attention *a, const Item *item, int64_t begin, const int64_t dim, Ahead *ahead) {
    const int64_t end = end_key(a, item);
    ahead->first = ahead->run = ahead->byte = ahead->count = 0;
    if (begin >= end) return;
    ahead->count = at_most(KEY_TILE, end - begin);
    find_tile(a, item->row, begin, ahead->count, ahead->offsets);
    ahead->keys = a->pool + item->head_begin * a->stride.head * 2;
    ahead->heads = item->head_end - item->head_begin;
    ahead->head_bytes = a->stride.head * 2, ahead->value_bytes = a->stride.key_to_value * 2, ahead->token_bytes = dim * 2;
    ahead->block_size = a->block_size;
    ahead->tokens = at_most(ahead->count, a->block_size - begin % a->block_size);
}

/* One query token of one row: some heads, some keys. `following` is the item that this thread is likely to take next, or
 * null. */
INLINE void decode_item(const Attention *a, const PairScratch *s, const Item *item, const Item *following, const int64_t dim) {
    const int64_t token = a->query_starts[item->row] + item->query_begin, position = a->positions[item->row] + item->query_begin;
    const int64_t states = (item->head_end - item->head_begin) * a->group, end = end_key(a, item);
    const int64_t visible = a->window ? at_least(0, position + 1 - a->window) : 0;
    int64_t begin = first_key(a, item);
    for (int64_t state = 0; state < states; state++) {
        const int64_t query_head = item->head_begin * a->group + state;
        memcpy(s->query + state * dim, a->query + (token * a->query_token + query_head * a->query_head) * 2, dim * 2);
        s->max[state] = -INFINITY;
    }
    memset(s->output, 0, states * dim * sizeof *s->output);
    memset(s->sum, 0, states * LANES * sizeof *s->sum);
    int64_t offsets[KEY_TILE];
    if (begin < end) find_tile(a, item->row, begin, at_most(KEY_TILE, end - begin), offsets);
    for (; begin < end; begin += KEY_TILE) {
        const int64_t count = at_most(KEY_TILE, end - begin), start = at_least(0, visible - begin);
        Ahead ahead;
        look_ahead(a, item, begin + KEY_TILE, dim, &ahead);
        if (nothing_ahead(&ahead) && following) look_ahead(a, following, first_key(a, following), dim, &ahead);
        for (int64_t head = item->head_begin; head < item->head_end; head++)
            decode_tile(a, s, (head - item->head_begin) * a->group, head, start, count, offsets, &ahead, dim);
        if (begin + KEY_TILE < end) memcpy(offsets, ahead.offsets, sizeof offsets);
    }
    for (int64_t state = 0; state < states; state++) {
        const float sum = _mm512_reduce_add_ps(_mm512_loadu_ps(s->sum + state * LANES));
        if (item->partial < 0) {
            finish(a, s->output + state * dim, s->max[state], sum, token, item->head_begin * a->group + state, dim, BFLOAT16);
            continue;
        }
        float *partial = a->partials + (item->partial + state) * (dim + 2);
        memcpy(partial, s->output + state * dim, dim * sizeof *partial);
        partial[dim] = s->max[state];
        partial[dim + 1] = sum;
    }
}

/* ---- prompts ---- */

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

INLINE int is_decoding(const Item *item) { return item->query_end - item->query_begin == 1; }

INLINE void pair_item(const Attention *a, const PairScratch *s, int64_t index, const int64_t dim) {
    const Item *item = &a->items[index], *following = NULL;
    if (!is_decoding(item)) {
        prompt_item(a, s, item, dim);
        return;
    }
    /* Threads take items in turns, and items of a step are much alike. */
    if (index + a->num_threads < a->num_items) following = item + a->num_threads;
    decode_item(a, s, item, following && is_decoding(following) ? following : NULL, dim);
}
