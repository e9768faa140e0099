/* Attention over a bfloat16 pool with bfloat16 queries, by instructions that multiply pairs of bfloat16 (AVX512-BF16, and
 * AMX for prompts). Sums, the maximum and the softmax are float; weights are rounded to bfloat16 before they meet values,
 * as in the modules of transformers.
 *
 * Decoding reads keys and values once for all query heads of their KV head. Prompts pack a tile of keys and values into
 * panels (see cpu_panels.c) for all rows of an item.
 */
#define KEY_TILE 64
#define SCORE_ROW (KEY_TILE + LANES) /* scores are stored several at a time, also past a tile's end */
#define PROMPT_ROWS TILE_ROOM /* rows of a prompt's item that go through scores, softmax and values at a time */
#define PROMPT_KEYS 128 /* keys that they meet at a time */

/* What a thread keeps while it works on an item; rows are padded to a multiple of PROMPT_ROWS. */
typedef struct {
    uint16_t *query;  /* decoding: [heads of the item, group, head_dim]; prompts: [rows, head_dim] */
    float *output;    /* decoding: the same shape; prompts: [head_dim / PANEL, rows, PANEL] */
    float *max;       /* [rows] or [heads, group] */
    float *sum;       /* the same, LANES partial sums each */
    float *shrink;    /* [heads, group]: by how much earlier results shrink */
    float *score;     /* [PROMPT_KEYS / PANEL, PROMPT_ROWS, PANEL], or [heads, group, SCORE_ROW] */
    uint16_t *weight; /* [PROMPT_ROWS, PROMPT_KEYS], or [heads, group, KEY_TILE] */
    char *keys;       /* [PROMPT_KEYS / PANEL] panels of head_dim rows */
    char *values;     /* [head_dim / PANEL] panels of PROMPT_KEYS rows */
} PairScratch;

INLINE int64_t padded_dim(int64_t dim) { return rounded_up(dim, PANEL); }

/* Scores of PROMPT_ROWS rows of a prompt, or of all rows of a decoding item, and as many weights. */
INLINE int64_t score_room(const Attention *a) {
    return at_least(PROMPT_ROWS * PROMPT_KEYS, rounded_up(a->max_states, PROMPT_ROWS) * SCORE_ROW);
}

static int64_t pair_scratch_bytes(const Attention *a) {
    const int64_t states = rounded_up(a->max_states, PROMPT_ROWS), dim = padded_dim(a->head_dim);
    const int64_t scores = score_room(a);
    return states * (dim * 6 + (2 + LANES) * 4) + scores * 6 + 2 * PROMPT_KEYS * dim * 2 + 9 * 64;
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
    s.shrink = (float *)take_bytes(&space, states * 4);
    s.score = (float *)take_bytes(&space, score_room(a) * 4);
    s.weight = (uint16_t *)take_bytes(&space, score_room(a) * 2);
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

#include "cpu_pairs_decoding.c"
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
