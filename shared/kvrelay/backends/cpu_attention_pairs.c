/* Attention over a bfloat16 pool with bfloat16 queries, by instructions that multiply pairs of bfloat16 (AVX512-BF16, and
 * AMX for prompts). Sums, the maximum and the softmax are float; weights are rounded to bfloat16 before they meet values,
 * as in the modules of transformers.
 *
 * Decoding reads keys and values once for all query heads of their KV head. Prompts pack a tile of keys and values into
 * panels (see cpu_panels.c) for all rows of an item. By AMX their sums are in its own order, so there the two differ.
 */
#define KEY_TILE 128
#define SCORE_ROW (KEY_TILE + LANES) /* scores are stored several at a time, also past a tile's end */
#define PROMPT_ROWS TILE_ROOM /* rows of a prompt's item that go through scores, softmax and values at a time */

/* What a thread keeps while it works on an item; rows are padded to a multiple of PROMPT_ROWS. */
typedef struct {
    uint16_t *query;  /* decoding: [heads of the item, group, head_dim]; prompts: [rows, head_dim] */
    float *output;    /* decoding: the same shape; prompts: [head_dim / PANEL, rows, PANEL] */
    float *added;     /* decoding: weights times values of a tile, of the same shape */
    Joined joined;    /* states are rows, whose output is as above, or [heads, group] */
    float *max;       /* [rows] or [heads, group] */
    float *sum;       /* the same, LANES partial sums each */
    float *shrink;    /* [heads, group]: by how much earlier results shrink */
    float *score;     /* [KEY_TILE / PANEL, PROMPT_ROWS, PANEL], or [heads, group, SCORE_ROW] */
    uint16_t *weight; /* [PROMPT_ROWS, KEY_TILE], or [heads, group, KEY_TILE] */
    char *keys;       /* [KEY_TILE / PANEL] panels of head_dim rows */
    char *values;     /* [head_dim / PANEL] panels of KEY_TILE rows */
} PairScratch;

INLINE int64_t padded_dim(int64_t dim) { return rounded_up(dim, PANEL); }

/* Scores of PROMPT_ROWS rows of a prompt, or of all rows of a decoding item, and as many weights. */
INLINE int64_t score_room(const Attention *a) {
    return rounded_up(at_least(a->max_states, PROMPT_ROWS), PROMPT_ROWS) * SCORE_ROW;
}

static int64_t pair_scratch_bytes(const Attention *a) {
    const int64_t states = rounded_up(a->max_states, PROMPT_ROWS), dim = padded_dim(a->head_dim);
    const int64_t scores = score_room(a);
    return states * (dim * 14 + (4 + LANES) * 4) + scores * 6 + 2 * KEY_TILE * dim * 2 + 13 * 64;
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
    s.added = (float *)take_bytes(&space, states * dim * 4);
    s.joined.output = (float *)take_bytes(&space, states * dim * 4);
    s.joined.max = (float *)take_bytes(&space, states * 4);
    s.joined.sum = (float *)take_bytes(&space, states * 4);
    s.max = (float *)take_bytes(&space, states * 4);
    s.sum = (float *)take_bytes(&space, states * LANES * 4);
    s.shrink = (float *)take_bytes(&space, states * 4);
    s.score = (float *)take_bytes(&space, score_room(a) * 4);
    s.weight = (uint16_t *)take_bytes(&space, score_room(a) * 2);
    s.keys = take_bytes(&space, KEY_TILE * dim * 2);
    s.values = take_bytes(&space, KEY_TILE * dim * 2);
    return s;
}

/* Offsets in the pool, in elements, of the keys of a tile; those past its end repeat the last one. */
INLINE void find_tile(const Attention *a, int row, int64_t begin, int64_t count, int64_t offsets[KEY_TILE]) {
    for (int first = 0; first < KEY_TILE; first += TILE) {
        if (first < count) find_keys(a, row, begin + first, at_most(TILE, count - first), offsets + first);
        else for (int k = first; k < first + TILE; k++) offsets[k] = offsets[first - 1];
    }
}

/* Scores are scaled together with their change of base to 2, which needs a positive scaling and no soft cap. */
INLINE int is_scaled_later(const Attention *a) { return a->softcap == 0 && a->scaling > 0; }

/* LANES scores, which are scaled and soft-capped if `scaled`; -inf for keys from `key` on that are out of
 * [visible_begin, visible_end) if `partly`. */
INLINE vfloat seen_score(const Attention *a, vfloat x, int64_t key, int64_t visible_begin, int64_t visible_end,
                         const int partly, const int scaled) {
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

/* The weights of two vectors of scores as bfloat16; their sum is added to `total` by lane. */
INLINE __m512i weights_of(const vfloat x[2], vfloat to_log2, vfloat base, vfloat *total) {
    vfloat w[2];
    UNROLL for (int i = 0; i < 2; i++) w[i] = rough_exp2(fused(x[i], to_log2, -base));
    *total += w[0] + w[1];
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)w[1], (__m512)w[0]);
}

/* Turns one row's scores of a tile into weights, of which keys [visible_begin, visible_end) count, and returns by how much
 * earlier results shrink. */
INLINE float soften_pairs(const Attention *a, const float *score, int64_t visible_begin, int64_t visible_end,
                          uint16_t *weight, float *max, float *sum, const int partly, const int scaled) {
    const float scaling = scaled ? 1.0f : (float)a->scaling;
    vfloat x[KEY_TILE / LANES], best = splat(-INFINITY);
    UNROLL for (int i = 0; i < KEY_TILE / LANES; i++) {
        const vfloat score_of = load((const char *)score, i * LANES, FLOAT32);
        x[i] = seen_score(a, score_of, i * LANES, visible_begin, visible_end, partly, scaled);
        best = (vfloat)_mm512_max_ps((__m512)x[i], (__m512)best);
    }
    const float found = _mm512_reduce_max_ps((__m512)best) * scaling, new_max = found > *max ? found : *max;
    const float base = new_max == -INFINITY ? 0.0f : new_max; /* nothing seen yet: weights are exp(-inf) */
    const float shrink = new_max == *max ? 1.0f : exp_one(*max - base);
    vfloat total = load((const char *)sum, 0, FLOAT32) * shrink;
    UNROLL for (int i = 0; i < KEY_TILE / LANES; i += 2)
        _mm512_storeu_si512(weight + i * LANES, weights_of(x + i, splat(scaling * LOG2_E), splat(base * LOG2_E), &total));
    memcpy(sum, &total, sizeof total);
    *max = new_max;
    return shrink;
}

/* As `soften_pairs`, compiled for each kind of scores. */
static float soften_decode(const Attention *a, const float *score, int64_t visible_begin, int64_t visible_end,
                           uint16_t *weight, float *max, float *sum) {
    if (!is_scaled_later(a)) return soften_pairs(a, score, visible_begin, visible_end, weight, max, sum, 1, 1);
    if (visible_begin > 0 || visible_end < KEY_TILE)
        return soften_pairs(a, score, visible_begin, visible_end, weight, max, sum, 1, 0);
    return soften_pairs(a, score, visible_begin, visible_end, weight, max, sum, 0, 0);
}

/* ---- decoding: one query token of a row, for all query heads of some KV heads ---- */

/* Keys of a tile that lie side by side in one block. Their values lie `key_to_value` behind them. */
typedef struct {
    const char *keys; /* of the item's first head */
    int64_t first, count; /* of the tile's keys */
} Run;

typedef struct {
    int64_t num_runs;
    Run runs[KEY_TILE];
} TileRuns;

/* The runs of a tile of an item's keys, in the order of the keys. */
INLINE void find_runs(const Attention *a, const Item *item, int64_t begin, int64_t count, TileRuns *tile) {
    const int32_t *table = a->block_tables + item->row * a->table_stride;
    const char *keys = a->pool + item->head_begin * a->stride.head * 2;
    int64_t block = begin / a->block_size, slot = begin % a->block_size;
    tile->num_runs = 0;
    for (int64_t first = 0, some; first < count; first += some, block++, slot = 0) {
        some = at_most(a->block_size - slot, count - first);
        tile->runs[tile->num_runs++] = (Run){keys + (table[block] * a->stride.block + slot * a->stride.token) * 2, first, some};
    }
}

/* How far behind a run of keys, or of values, the bytes lie that are read FETCHED_BYTES or more after it: keys of a tile
 * are followed by its values, and these by the next tile. Fetching them in the order in which they are read keeps the
 * hardware's own prefetcher going, which follows long runs alone. */
enum { FETCHED_BYTES = 32768 };

INLINE int64_t fetch_distance(const TileRuns *tile, const TileRuns *next, int64_t run, int are_values, int64_t value_bytes,
                              int64_t num_ahead) {
    const int64_t at = run + are_values * tile->num_runs + num_ahead - 2 * tile->num_runs;
    const char *from = tile->runs[run].keys + are_values * value_bytes;
    if (at < -tile->num_runs) return tile->runs[at + 2 * tile->num_runs].keys - from;
    if (at < 0) return tile->runs[at + tile->num_runs].keys + value_bytes - from;
    return at < next->num_runs ? next->runs[at].keys - from : 0;
}

INLINE void fetch(const char *from, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

/* score[m][0 .. at_once) = query[m] . key, for `together` rows of the group. Keys from `count` on repeat the last one. */
INLINE void scores_at_once(const char *keys, int64_t token_bytes, int64_t count, const uint16_t *query, float *score,
                           const int64_t dim, const int together, const int whole) {
    const int at_once = LANES / together;
    vfloat sums[LANES] = {};
    for (int64_t d = 0; d < dim; d += 32) {
        const __mmask32 mask = dim - d >= 32 ? 0xffffffff : 0xffff;
        __m512i q[4];
        UNROLL for (int r = 0; r < together; r++) q[r] = _mm512_maskz_loadu_epi16(mask, query + r * dim + d);
        UNROLL for (int k = 0; k < at_once; k++) {
            const int64_t place = whole ? k : at_most(k, count - 1);
            const __m512i key = _mm512_maskz_loadu_epi16(mask, keys + place * token_bytes + d * 2);
            UNROLL for (int r = 0; r < together; r++)
                sums[r * at_once + k] =
                    (vfloat)_mm512_dpbf16_ps((__m512)sums[r * at_once + k], (__m512bh)key, (__m512bh)q[r]);
        }
    }
    const vfloat dots = sum_each(sums);
    UNROLL for (int r = 0; r < together; r++)
        memcpy(score + r * SCORE_ROW, (const char *)&dots + r * at_once * 4, at_once * 4);
}

/* Scores of `together` rows and a run of `count` keys of one head, and some more that don't count. */
INLINE void run_scores(const char *keys, int64_t token_bytes, int64_t count, int64_t distance, const uint16_t *query,
                       float *score, const int64_t dim, const int together) {
    const int at_once = LANES / together;
    for (int64_t k = 0; k < count; k += at_once, keys += at_once * token_bytes) {
        if (distance) fetch(keys + distance, at_once * token_bytes);
        if (count - k >= at_once) scores_at_once(keys, token_bytes, at_once, query, score + k, dim, together, 1);
        else scores_at_once(keys, token_bytes, count - k, query, score + k, dim, together, 0);
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

/* output[m][d ..) += weight[m] . values, or that alone if the run is a tile's first, for `rows` rows, `wide` vectors of the
 * head and a run of `count` values. */
INLINE void add_run_values(const char *values, int64_t token_bytes, int64_t count, int64_t distance, const uint16_t *weight,
                           int is_first, float *output, int64_t d, const int64_t dim, const int rows, const int wide) {
    vfloat sums[4][8];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < wide; i++)
            sums[r][i] = is_first ? splat(0.0f) : load((const char *)(output + r * dim), d + i * LANES, FLOAT32);
    values += d * 2;
    for (int64_t k = 0; k < count; k += 2, values += 2 * token_bytes) {
        const int alone = k + 1 == count;
        const char *second = values + (alone ? 0 : token_bytes);
        if (distance) {
            fetch(values + distance, wide * LANES * 2);
            fetch(values + token_bytes + distance, wide * LANES * 2);
        }
        __m512i pairs[8];
        UNROLL for (int i = 0; i < wide; i += 2) {
            const __mmask32 mask = wide - i >= 2 ? 0xffffffff : 0xffff;
            const __m512i one = _mm512_maskz_loadu_epi16(mask, values + i * LANES * 2);
            const __m512i other = _mm512_maskz_loadu_epi16(mask, second + i * LANES * 2);
            __m512i unused;
            interleave(one, other, &pairs[i], i + 1 < wide ? &pairs[i + 1] : &unused);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            uint32_t w;
            memcpy(&w, weight + r * KEY_TILE + k, sizeof w);
            if (alone) w &= 0xffff;
            UNROLL for (int i = 0; i < wide; i++) sums[r][i] = add_pair(sums[r][i], w, (vuint)pairs[i]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < wide; i++) memcpy(output + r * dim + d + i * LANES, &sums[r][i], sizeof(vfloat));
}

INLINE void run_values(const char *values, int64_t token_bytes, int64_t count, int64_t distance, const uint16_t *weight,
                       int is_first, float *output, const int64_t dim, const int rows) {
    int64_t d = 0;
    if (rows <= 2)
        for (; d + 8 * LANES <= dim; d += 8 * LANES)
            add_run_values(values, token_bytes, count, distance, weight, is_first, output, d, dim, rows, 8);
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        add_run_values(values, token_bytes, count, distance, weight, is_first, output, d, dim, rows, 4);
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        add_run_values(values, token_bytes, count, distance, weight, is_first, output, d, dim, rows, 2);
    if (d < dim) add_run_values(values, token_bytes, count, distance, weight, is_first, output, d, dim, rows, 1);
}

/* A case for each number of rows of the group that remain, of which 4 are taken together. */
#define BY_ROWS(remaining, take) \
    switch (remaining) {         \
        case 1: take(1) break;   \
        case 2: take(2) break;   \
        case 3: take(3) break;   \
        default: take(4)         \
    }

/* Scores of all heads of an item and a run of keys, in the order in which the keys lie in memory. */
INLINE void score_run(const Attention *a, const PairScratch *s, const Run *run, int64_t heads, int64_t distance,
                      const int64_t dim) {
    for (int64_t head = 0; head < heads; head++)
        for (int64_t r = 0; r < a->group; r += 4) {
            const int64_t state = head * a->group + r;
#define SCORE_ROWS(rows)                                                                                              \
    run_scores(run->keys + head * a->stride.head * 2, a->stride.token * 2, run->count, r ? 0 : distance,              \
               s->query + state * dim, s->score + state * SCORE_ROW + run->first, dim, rows == 3 ? 4 : rows);
            BY_ROWS(a->group - r, SCORE_ROWS)
        }
}

/* Adds values of a run to those of its tile, for all heads of an item. */
INLINE void add_run(const Attention *a, const PairScratch *s, const Run *run, int64_t heads, int64_t distance,
                    const int64_t dim) {
    for (int64_t head = 0; head < heads; head++)
        for (int64_t r = 0; r < a->group; r += 4) {
            const int64_t state = head * a->group + r;
#define ADD_ROWS(rows)                                                                                                \
    run_values(run->keys + (head * a->stride.head + a->stride.key_to_value) * 2, a->stride.token * 2, run->count,     \
               r ? 0 : distance, s->weight + state * KEY_TILE + run->first, !run->first, s->added + state * dim, dim, rows);
            BY_ROWS(a->group - r, ADD_ROWS)
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

/* The runs of an item's tile that begins at a key; none if the item ends before. */
INLINE void find_item_runs(const Attention *a, const Item *item, int64_t begin, TileRuns *tile) {
    find_runs(a, item, begin, at_most(KEY_TILE, end_key(a, item) - begin), tile);
}

INLINE float lane_sum(const float *sum) { return _mm512_reduce_add_ps(_mm512_loadu_ps(sum)); }

INLINE void begin_decode_states(const PairScratch *s, int64_t states, const int64_t dim) {
    for (int64_t state = 0; state < states; state++) s->max[state] = -INFINITY;
    memset(s->output, 0, states * dim * sizeof *s->output);
    memset(s->sum, 0, states * LANES * sizeof *s->sum);
}

INLINE void begin_joined(const PairScratch *s, int64_t states, const int64_t width) {
    for (int64_t state = 0; state < states; state++) s->joined.max[state] = -INFINITY, s->joined.sum[state] = 0.0f;
    memset(s->joined.output, 0, states * width * sizeof *s->joined.output);
}

/* Ends a piece of keys of a decoding item, or its last one. */
INLINE void join_decode_states(const PairScratch *s, int64_t states, const int64_t dim) {
    for (int64_t state = 0; state < states; state++)
        join_piece(s->joined.output + state * dim, s->joined.max + state, s->joined.sum + state, s->output + state * dim,
                   s->max[state], lane_sum(s->sum + state * LANES), dim);
}

/* One query token of one row: some heads, some keys. `following` is the item that this thread is likely to take next, or
 * null. A tile's keys of all heads are read before its values, each as they lie in memory. */
INLINE void decode_item(const Attention *a, const PairScratch *s, const Item *item, const Item *following, const int64_t dim) {
    const int64_t token = a->query_starts[item->row] + item->query_begin, position = a->positions[item->row] + item->query_begin;
    const int64_t heads = item->head_end - item->head_begin, states = heads * a->group, end = end_key(a, item);
    const int64_t visible = a->window ? at_least(0, position + 1 - a->window) : 0;
    const int64_t value_bytes = a->stride.key_to_value * 2, run_bytes = heads * at_most(a->block_size, KEY_TILE) * dim * 2;
    int64_t begin = first_key(a, item);
    for (int64_t state = 0; state < states; state++) {
        const int64_t query_head = item->head_begin * a->group + state;
        memcpy(s->query + state * dim, a->query + (token * a->query_token + query_head * a->query_head) * 2, dim * 2);
    }
    begin_decode_states(s, states, dim);
    int is_joined = 0;
    TileRuns tiles[2], *tile = &tiles[0], *next = &tiles[1];
    find_item_runs(a, item, begin, tile);
    for (; begin < end; begin += KEY_TILE) {
        if (begin > item->key_begin && begin % SPLIT_KEYS == 0) {
            if (!is_joined) begin_joined(s, states, dim);
            join_decode_states(s, states, dim);
            begin_decode_states(s, states, dim);
            is_joined = 1;
        }
        const int64_t count = at_most(KEY_TILE, end - begin), start = at_least(0, visible - begin);
        const int64_t num_ahead = at_most(tile->num_runs, rounded_up(FETCHED_BYTES, run_bytes) / run_bytes);
        find_item_runs(a, item, begin + KEY_TILE, next);
        if (!next->num_runs && following) find_item_runs(a, following, first_key(a, following), next);
        for (int64_t i = 0; i < tile->num_runs; i++)
            score_run(a, s, &tile->runs[i], heads, fetch_distance(tile, next, i, 0, value_bytes, num_ahead), dim);
        for (int64_t state = 0; state < states; state++)
            s->shrink[state] = soften_decode(a, s->score + state * SCORE_ROW, start, count, s->weight + state * KEY_TILE,
                                             s->max + state, s->sum + state * LANES);
        for (int64_t i = 0; i < tile->num_runs; i++)
            add_run(a, s, &tile->runs[i], heads, fetch_distance(tile, next, i, 1, value_bytes, num_ahead), dim);
        for (int64_t state = 0; state < states; state++)
            for (int64_t d = state * dim; d < (state + 1) * dim; d += LANES) {
                const vfloat earlier = load((const char *)s->output, d, FLOAT32) * s->shrink[state];
                store((char *)s->output, d, earlier + load((const char *)s->added, d, FLOAT32), FLOAT32);
            }
        TileRuns *const done = tile;
        tile = next, next = done;
    }
    if (is_joined) join_decode_states(s, states, dim);
    for (int64_t state = 0; state < states; state++) {
        const float sum = lane_sum(s->sum + state * LANES);
        if (item->partial < 0) {
            const float *output = is_joined ? s->joined.output : s->output;
            finish(a, output + state * dim, is_joined ? s->joined.max[state] : s->max[state],
                   is_joined ? s->joined.sum[state] : sum, token, item->head_begin * a->group + state, dim, BFLOAT16);
            continue;
        }
        float *partial = a->partials + (item->partial + state) * (dim + 2);
        memcpy(partial, s->output + state * dim, dim * sizeof *partial);
        partial[dim] = s->max[state];
        partial[dim + 1] = sum;
    }
}

#include "cpu_pairs_prompts.c"

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
