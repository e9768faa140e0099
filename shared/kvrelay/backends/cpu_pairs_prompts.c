/* Prompts by pairs of bfloat16: some query tokens of a row and one KV head. Included by cpu_attention_pairs.c. */
/* Keys of a tile as panels [head_dim / 2][PANEL][2]: a transpose of pairs. */
INLINE void pack_keys(const Attention *a, const PairScratch *s, const int64_t *offsets, int64_t head, const int64_t dim) {
    const char *keys = a->pool + head * a->stride.head * 2;
    for (int first = 0; first < KEY_TILE; first += LANES)
        for (int64_t d = 0; d < dim; d += 32) {
            const __mmask32 mask = dim - d >= 32 ? 0xffffffff : 0xffff;
            vfloat v[LANES];
            UNROLL for (int k = 0; k < LANES; k++)
                v[k] = (vfloat)_mm512_maskz_loadu_epi16(mask, keys + (offsets[first + k] + d) * 2);
            transpose(v);
            char *to = s->keys + first / PANEL * panel_bytes(padded_dim(dim), BFLOAT16) +
                       (d / 2 * PANEL + first % PANEL) * 4;
            UNROLL for (int k = 0; k < LANES; k++) memcpy(to + k * PANEL * 4, &v[k], sizeof v[k]);
        }
}

/* Values of a tile in panels [KEY_TILE / 2][PANEL][2], one for each PANEL of the head. */
INLINE void pack_values(const Attention *a, const PairScratch *s, const int64_t *offsets, int64_t head, const int64_t dim) {
    const char *values = a->pool + (head * a->stride.head + a->stride.key_to_value) * 2;
    for (int k = 0; k < KEY_TILE; k += 2)
        for (int64_t d = 0; d < dim; d += PANEL) {
            const __mmask32 mask = dim - d >= 32 ? 0xffffffff : 0xffff;
            __m512i pairs[2];
            interleave(_mm512_maskz_loadu_epi16(mask, values + (offsets[k] + d) * 2),
                       _mm512_maskz_loadu_epi16(mask, values + (offsets[k + 1] + d) * 2), &pairs[0], &pairs[1]);
            memcpy(s->values + d / PANEL * panel_bytes(KEY_TILE, BFLOAT16) + k / 2 * PANEL * 4, pairs, sizeof pairs);
        }
}

/* Rows of a prompt whose scores with LANES keys are computed together: few enough for all sums to stay in registers. */
enum { CHAIN_ROWS = 4 };
typedef struct {
    vfloat of[CHAIN_ROWS];
} Scores;

/* The pairs of the head that lie `lane` behind multiples of LANES, one after the other. */
INLINE Scores lane_chain(const uint16_t *query, const char *panel, const int64_t dim, const int lane) {
    Scores sums = {};
    UNROLL for (int64_t pair = lane; pair < dim / 2; pair += LANES) {
        vuint keys;
        memcpy(&keys, panel + pair * PANEL * 4, sizeof keys);
        UNROLL for (int r = 0; r < CHAIN_ROWS; r++) {
            uint32_t q;
            memcpy(&q, query + r * dim + pair * 2, sizeof q);
            sums.of[r] = add_pair(sums.of[r], q, keys);
        }
    }
    return sums;
}

INLINE Scores plus(Scores a, Scores b) {
    UNROLL for (int r = 0; r < CHAIN_ROWS; r++) a.of[r] += b.of[r];
    return a;
}

/* Chains are added as `sum_each` does it: those that are 8 lanes apart first, then 4, 2 and 1. */
#define LANE_SUM(name, part, apart)                                                                          \
    INLINE Scores name(const uint16_t *query, const char *panel, const int64_t dim, const int lane) {        \
        const Scores first = part(query, panel, dim, lane);                                                  \
        return plus(first, part(query, panel, dim, lane + apart));                                           \
    }
LANE_SUM(two_lanes, lane_chain, 8)
LANE_SUM(four_lanes, two_lanes, 4)
LANE_SUM(eight_lanes, four_lanes, 2)
LANE_SUM(all_lanes, eight_lanes, 1)

/* Scores of up to PROMPT_ROWS rows, which are padded, and a panel of keys. */
INLINE void panel_scores(const uint16_t *query, int64_t rows, const char *panel, float *score, const int64_t dim) {
    if (takes_tiles(rows, dim)) {
        add_block((const char *)query, dim * 2, rows, panel, dim, score, 0, NULL, dim, BFLOAT16, 1);
        return;
    }
    for (int64_t first = 0; first < rows; first += CHAIN_ROWS)
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const Scores sums = all_lanes(query + first * dim, panel + v * LANES * 4, dim, 0);
            UNROLL for (int r = 0; r < CHAIN_ROWS; r++)
                memcpy(score + (first + r) * PANEL + v * LANES, &sums.of[r], sizeof sums.of[r]);
        }
}

/* Scores of one row as `seen_score` has them. */
INLINE vfloat prompt_score(const Attention *a, const float *score, int64_t key, int64_t visible_begin, int64_t visible_end,
                           const int partly, const int scaled) {
    const vfloat x = load((const char *)score, key / PANEL * PROMPT_ROWS * PANEL + key % PANEL, FLOAT32);
    return seen_score(a, x, key, visible_begin, visible_end, partly, scaled);
}

/* Lane e of the result is the maximum of the lanes of v[e]. */
INLINE vfloat max_each(vfloat v[LANES]) {
    transpose(v);
    UNROLL for (int s = LANES / 2; s; s /= 2)
        UNROLL for (int i = 0; i < s; i++) v[i] = (vfloat)_mm512_max_ps((__m512)v[i], (__m512)v[i + s]);
    return v[0];
}

/* Turns scores of LANES rows from row `first` of an item on into weights, and stores by how much earlier results of each
 * row shrink. Returns whether any does. `begin` is the position of the first of `num_keys` keys. */
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
            vfloat x[2];
            UNROLL for (int i = 0; i < 2; i++) x[i] = prompt_score(a, score + r * PANEL, key + i * LANES, start, end, partly, scaled);
            _mm512_storeu_si512(weight + r * KEY_TILE + key, weights_of(x, splat(to_log2), splat(bases[r]), &total));
        }
        store((char *)s->sum, (first + r) * LANES, total, FLOAT32);
    }
    return _mm512_cmp_ps_mask((__m512)shrinks, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ) != 0;
}

/* As `soften_rows`, compiled for each kind of scores. */
static int soften_prompt(const Attention *a, const PairScratch *s, int64_t first, const float *score, uint16_t *weight,
                         int64_t position, int64_t begin, int64_t num_keys, float *shrink, int partly) {
    if (!is_scaled_later(a)) return soften_rows(a, s, first, score, weight, position, begin, num_keys, shrink, 1, 1);
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
        panel_scores(s->query + first * dim, rows, s->keys + key / PANEL * key_panel, s->score + key * PROMPT_ROWS, dim);
    for (int64_t r = 0; r < rows; r += LANES) {
        const float *score = s->score + r * PANEL;
        uint16_t *weight = s->weight + r * KEY_TILE;
        shrinks |= soften_prompt(a, s, first + r, score, weight, position, begin, wide, shrink + r, partly);
    }
    for (int64_t d = 0; d < dim; d += PANEL) {
        float *output = s->output + d * stored + first * PANEL;
        for (int64_t r = 0; shrinks && r < rows; r++)
            UNROLL for (int c = 0; c < PANEL; c += LANES)
                store((char *)output, r * PANEL + c, load((const char *)output, r * PANEL + c, FLOAT32) * shrink[r], FLOAT32);
        add_block((const char *)s->weight, KEY_TILE * 2, rows, s->values + d / PANEL * panel_bytes(KEY_TILE, BFLOAT16),
                  wide, output, 1, NULL, wide, BFLOAT16, 1);
    }
}

INLINE void begin_prompt_states(const PairScratch *s, int64_t stored, const int64_t dim) {
    for (int64_t m = 0; m < stored; m++) s->max[m] = -INFINITY;
    memset(s->output, 0, stored * padded_dim(dim) * sizeof *s->output);
    memset(s->sum, 0, stored * LANES * sizeof *s->sum);
}

/* A row's results, of which panels lie apart. */
INLINE void prompt_output(const PairScratch *s, int64_t stored, int64_t m, float *output, const int64_t dim) {
    for (int64_t d = 0; d < dim; d += PANEL) memcpy(output + d, s->output + d * stored + m * PANEL, PANEL * sizeof *output);
}

/* Ends a piece of keys of a prompt's item, or its last one. */
INLINE void join_prompt_states(const PairScratch *s, int64_t rows, int64_t stored, const int64_t dim) {
    float output[padded_dim(dim)];
    for (int64_t m = 0; m < rows; m++) {
        prompt_output(s, stored, m, output, dim);
        join_piece(s->joined.output + m * padded_dim(dim), s->joined.max + m, s->joined.sum + m, output, s->max[m],
                   lane_sum(s->sum + m * LANES), dim);
    }
}

/* Some query tokens of one row, one KV head, all keys that they see. */
static void prompt_item(const Attention *a, const PairScratch *s, const Item *item, const int64_t dim) {
    const int64_t rows = (item->query_end - item->query_begin) * a->group, stored = rounded_up(rows, PROMPT_ROWS);
    const int64_t first_token = a->query_starts[item->row] + item->query_begin, head = item->head_begin;
    const int64_t position = a->positions[item->row] + item->query_begin;
    const int64_t end = at_most(item->key_end, a->positions[item->row] + item->query_end);
    int64_t begin = a->window ? at_least(0, position + 1 - a->window) / KEY_TILE * KEY_TILE : 0;
    int is_joined = 0;
    for (int64_t m = 0; m < rows; m++) {
        const int64_t token = first_token + m / a->group, query_head = head * a->group + m % a->group;
        memcpy(s->query + m * dim, a->query + (token * a->query_token + query_head * a->query_head) * 2, dim * 2);
    }
    begin_prompt_states(s, stored, dim);
    for (; begin < end; begin += KEY_TILE) {
        const int64_t count = at_most(KEY_TILE, end - begin);
        int64_t offsets[KEY_TILE];
        if (begin && begin % SPLIT_KEYS == 0) {
            if (!is_joined) begin_joined(s, rows, padded_dim(dim));
            join_prompt_states(s, rows, stored, dim);
            begin_prompt_states(s, stored, dim);
            is_joined = 1;
        }
        find_tile(a, item->row, begin, count, offsets);
        pack_keys(a, s, offsets, head, dim);
        pack_values(a, s, offsets, head, dim);
        for (int64_t first = 0; first < rows; first += PROMPT_ROWS) {
            const int64_t some = at_most(PROMPT_ROWS, rows - first);
            /* Keys from here on lie behind the last of these rows. */
            const int64_t seen = at_most(count, position + (first + some - 1) / a->group + 1 - begin);
            if (seen > 0) prompt_rows(a, s, stored, first, some, position, begin, seen, dim);
        }
    }
    if (is_joined) join_prompt_states(s, rows, stored, dim);
    for (int64_t m = 0; m < rows; m++) {
        const int64_t token = first_token + m / a->group, query_head = head * a->group + m % a->group;
        float output[padded_dim(dim)];
        if (is_joined) {
            finish(a, s->joined.output + m * padded_dim(dim), s->joined.max[m], s->joined.sum[m], token, query_head, dim, BFLOAT16);
            continue;
        }
        prompt_output(s, stored, m, output, dim);
        finish(a, output, s->max[m], lane_sum(s->sum + m * LANES), token, query_head, dim, BFLOAT16);
    }
}
