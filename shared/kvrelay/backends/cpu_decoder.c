/* Decoder layers on a CPU, for the layer shape that Llama, Mistral, Qwen2 and Qwen3 share:
 *
 *   h += o_proj(attention(rope(norm(q_proj(n))), rope(norm(k_proj(n))), v_proj(n)))   with n = rms_norm(h)
 *   h += down_proj(silu(gate_proj(m)) * up_proj(m))                                   with m = rms_norm(h)
 *
 * `kvrelay_decoder_layers` runs all layers over a step's tokens in one call: a step of a small model would otherwise spend
 * more time between its operators than in them.
 *
 * The residual stream and every sum are float. Activations that enter a matrix product are float or bfloat16.
 */
#include "cpu_linear.c"
#include "cpu_rounding.c"
#include "cpu_kernel.c"
#include "cpu_sampling.c"
#include "cpu_ranks.c"

typedef struct {
    Linear qkv, output, gate_up, down;
    const float *input_norm, *mlp_norm, *query_norm, *key_norm; /* the last two: [head_dim], or null */
    const float *sinks;
    int64_t window;
    double scaling, softcap;
} DecoderLayer;

typedef struct {
    const DecoderLayer *layers;
    int64_t num_layers, type; /* type: of activations, FLOAT32 or BFLOAT16 */
    int64_t hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size;
    double norm_eps;
} Decoder;

typedef struct {
    int64_t num_tokens;
    float *hidden;           /* [tokens, hidden_size]: embeddings before, the last layer's output after */
    const float *cos, *sin;  /* [angles, head_dim / 2] */
    const int64_t *angles;   /* [tokens]: each token's row of cos and sin */
    const Attention *attention; /* planned for this step, without pool, query, output and layer parameters; null: none of
                                 * the layers attends, for tokens whose output is of no use */
    char *pool;              /* the first layer's keys of block 0 */
    int64_t layer_bytes;     /* from a layer's keys to the next layer's */
    const int32_t *write_blocks, *write_slots;
    /* Of the decoder's type, with room for a multiple of 2 * TILE_UNIT tokens; all but qkv may be in tiles: */
    char *normed;    /* [tokens, hidden_size] */
    char *qkv;       /* [tokens, (num_heads + 2 * num_kv_heads) * head_dim] */
    char *attended;  /* [tokens, num_heads * head_dim] */
    char *activated; /* [tokens, intermediate_size] */
    /* If the heads and the MLPs are divided among ranks, or MLPs alone; else null: */
    Ranks *ranks;
    float *partial; /* [tokens, hidden_size]: this rank's part of a product. For MLPs alone, and `activated`: all tokens */
    /* If MLPs alone are divided, so that each rank has tokens of its own; else null: */
    const int64_t *counts; /* [ranks]: the tokens of each */
    char *gathered;        /* [all tokens, hidden_size]: `normed` of all ranks, not in tiles */
    int64_t wait_ms;
    GoesOn goes_on; /* see `add_over_ranks` */
} DecoderStep;

/* ---- between the products ---- */

/* Each piece is compiled for both types of weights. */
#define FOR_TYPE(type, call)                        \
    do {                                            \
        if ((type) == BFLOAT16) call(BFLOAT16);     \
        else call(FLOAT32);                         \
    } while (0)

/* out = x / rms(x) * weight; `size` elements. In place where `out` is `x`. If `in_tiles`, out is a token's row of tiles. */
INLINE void norm_vector(const char *x, const int from, const float *weight, char *out, const int to, int64_t size, double eps,
                        const int in_tiles) {
    vfloat squares = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vfloat v = load(x, i, from);
        squares = fused(v, v, squares);
    }
    float total = horizontal_sum(squares);
    for (; i < size; i++) total = fused_one(element(x, i, from), element(x, i, from), total);
    const float scale = 1.0f / sqrtf(total / (float)size + (float)eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(out, in_tiles ? tile_place(0, i, size) : i, load(x, i, from) * scale * load((const char *)weight, i, FLOAT32), to);
    for (; i < size; i++) put(out, i, element(x, i, from) * scale * weight[i], to); /* never of tiles */
}

/* Rotates the halves of a head (NeoX order): head_dim is a multiple of 16, half of it may not be one of LANES. */
INLINE void rotate(char *head, const float *cos, const float *sin, int64_t dim, const int type) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vfloat a = load(head, i, type), b = load(head, half + i, type);
        const vfloat c = load((const char *)cos, i, FLOAT32), s = load((const char *)sin, i, FLOAT32);
        store(head, i, fused(a, c, -(b * s)), type);
        store(head, half + i, fused(b, c, a * s), type);
    }
    for (; i < half; i++) {
        const float a = element(head, i, type), b = element(head, half + i, type);
        put(head, i, fused_one(a, cos[i], -(b * sin[i])), type);
        put(head, half + i, fused_one(b, cos[i], a * sin[i]), type);
    }
}

INLINE void norm_and_rotate(const Decoder *d, const DecoderLayer *layer, char *qkv, int64_t token, int64_t angle,
                            const float *cos, const float *sin, const int type) {
    const int64_t bytes = bytes_of(type), dim = d->head_dim;
    char *heads = qkv + token * (d->num_heads + 2 * d->num_kv_heads) * dim * bytes;
    for (int64_t head = 0; head < d->num_heads + d->num_kv_heads; head++) {
        char *at = heads + head * dim * bytes;
        const float *weight = head < d->num_heads ? layer->query_norm : layer->key_norm;
        if (weight) norm_vector(at, type, weight, at, type, dim, d->norm_eps, 0);
        rotate(at, cos + angle * (dim / 2), sin + angle * (dim / 2), dim, type);
    }
}

static void add_and_norm(float *hidden, const char *delta, const float *weight, char *normed, int64_t token, int64_t size,
                         double eps, int64_t type, int in_tiles) {
    float *row = hidden + token * size;
    char *to = normed + (in_tiles ? tile_place(token, 0, size) : token * size) * bytes_of((int)type);
#define ADD_AND_NORM(type)                                                                       \
    do {                                                                                         \
        if (delta)                                                                               \
            for (int64_t i = 0; i < size; i++) row[i] += element(delta, token * size + i, type); \
        if (in_tiles) norm_vector((const char *)row, FLOAT32, weight, to, type, size, eps, 1);   \
        else norm_vector((const char *)row, FLOAT32, weight, to, type, size, eps, 0);            \
    } while (0)
    FOR_TYPE(type, ADD_AND_NORM);
}

/* ---- what Python calls ---- */

/* hidden [tokens, size] += delta (of `type`, or null); normed = rms_norm(hidden) * weight, in `type`. */
void kvrelay_add_and_norm(float *hidden, const char *delta, const float *weight, char *normed, int64_t num_tokens,
                          int64_t size, double eps, int64_t type, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (num_tokens > 4)
    for (int64_t token = 0; token < num_tokens; token++)
        add_and_norm(hidden, delta, weight, normed, token, size, eps, type, 0);
}

/* out [tokens, num_in] = rows of a weight in panels, as float. Returns 0 if a token has no row. */
int64_t kvrelay_embed_from_panels(const Linear *l, const int64_t *token_ids, int64_t num_tokens, float *out) {
    const int64_t rows = (l->num_in + 31) / 32 * 32; /* of K, of a panel of bfloat16 */
    for (int64_t token = 0; token < num_tokens; token++) {
        const int64_t id = token_ids[token], panel = id / PANEL, column = id % PANEL;
        if (id < 0 || id >= l->num_out) return 0;
        if (l->format == BFLOAT16)
            for (int64_t k = 0; k < l->num_in; k++)
                out[token * l->num_in + k] =
                    element(l->panels, (panel * rows / 2 + k / 2) * PANEL * 2 + column * 2 + k % 2, BFLOAT16);
        else
            for (int64_t k = 0; k < l->num_in; k++)
                out[token * l->num_in + k] = element(l->panels, (panel * l->num_in + k) * PANEL + column, FLOAT32);
    }
    return 1;
}

/* out [tokens, size] = rows of a table [num_rows, size] of `type`, as float. Returns 0 if a token has no row. */
int64_t kvrelay_embed(const char *table, int64_t num_rows, int64_t size, int64_t type, const int64_t *token_ids,
                      int64_t num_tokens, float *out) {
    for (int64_t token = 0; token < num_tokens; token++) {
        if (token_ids[token] < 0 || token_ids[token] >= num_rows) return 0;
#define EMBED(type)                             \
    for (int64_t i = 0; i < size; i++)          \
        out[token * size + i] = element(table, token_ids[token] * size + i, type)
        FOR_TYPE(type, EMBED);
    }
    return 1;
}

/* Norms and rotates the queries and keys of `qkv` in place, each token by its row of cos and sin. */
void kvrelay_norm_and_rotate(const Decoder *d, int64_t layer, char *qkv, int64_t num_tokens, const int64_t *angles,
                             const float *cos, const float *sin, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (num_tokens > 2)
    for (int64_t token = 0; token < num_tokens; token++) {
#define NORM_AND_ROTATE(type) norm_and_rotate(d, &d->layers[layer], qkv, token, angles[token], cos, sin, type)
        FOR_TYPE(d->type, NORM_AND_ROTATE);
    }
}

/* out [tokens, num_out] = x . weights + bias, by `mode`; [tokens, num_out / 2] if that is GATED. */
void kvrelay_linear(const Linear *l, const char *x, int64_t num_tokens, char *out, int64_t mode, int64_t type,
                    int64_t padded, int64_t threads) {
    char *const widened = space_to_widen(num_tokens, l->num_in, (int)type);
    Team team = {0};
#pragma omp parallel num_threads((int)threads)
    {
        join_team(&team);
        begin_tiles();
        linear(&team, l, x, num_tokens, out, (int)mode, (int)type, (int)padded, widened);
        end_tiles();
    }
}

/* Norms and rotates one token's queries and keys, and writes its keys and values to the pool. */
static void rotate_and_write(const Decoder *d, const DecoderStep *s, int64_t layer, char *pool, int64_t token) {
    const int64_t bytes = bytes_of((int)d->type), dim = d->head_dim, row = (d->num_heads + 2 * d->num_kv_heads) * dim;
    const PoolStrides *stride = &s->attention->stride;
#define NORM_AND_ROTATE_STEP(type) \
    norm_and_rotate(d, &d->layers[layer], s->qkv, token, s->angles[token], s->cos, s->sin, type)
    FOR_TYPE(d->type, NORM_AND_ROTATE_STEP);
    const char *keys = s->qkv + (token * row + d->num_heads * dim) * bytes, *values = keys + d->num_kv_heads * dim * bytes;
    const int32_t *block = s->write_blocks + token, *slot = s->write_slots + token;
    kvrelay_write(pool, stride, keys, row, dim, block, slot, 1, d->num_kv_heads, dim * bytes, bytes);
    kvrelay_write(pool + stride->key_to_value * bytes, stride, values, row, dim, block, slot, 1, d->num_kv_heads, dim * bytes,
                  bytes);
}

/* The tokens of ranks before `rank`; of all ranks for their number. */
static int64_t tokens_before(const DecoderStep *s, int64_t rank) {
    int64_t count = 0;
    for (int64_t i = 0; i < rank; i++) count += s->counts[i];
    return count;
}

/* The tokens that enter a step's MLPs. */
static int64_t mlp_tokens(const DecoderStep *s) {
    return s->counts ? tokens_before(s, s->ranks->size) : s->num_tokens;
}

/* hidden += x . weights + bias, for the tokens of `x` from `first` on that `hidden` has, summed over `ranks` unless these
 * are null. `is_lost` is set, and later sums are left out, if another rank is lost. */
static void add_product(Team *team, const DecoderStep *s, Ranks *ranks, const Linear *l, const char *x, int64_t num_tokens,
                        int64_t first, int type, char *widened, atomic_int *is_lost) {
    const int64_t width = l->num_out, begin = first * width, end = begin + s->num_tokens * width;
    linear(team, l, x, num_tokens, (char *)(ranks ? s->partial : s->hidden), ranks ? STORE_FLOAT : ADD_FLOAT, type, 1, widened);
    if (!ranks) return;
    SHARE_ITEMS(team, item, 1)
        if (!atomic_load(is_lost)
            && !add_over_ranks(ranks, s->partial, num_tokens * width, begin, end, s->hidden, s->wait_ms, s->goes_on))
            atomic_store(is_lost, 1);
    end_piece(team);
}

/* Norms the tokens, and adds their MLP's output. */
static void add_mlp(Team *team, const Decoder *d, const DecoderStep *s, const DecoderLayer *layer, char *widened,
                    atomic_int *is_lost) {
    const int type = (int)d->type;
    const int64_t n = mlp_tokens(s);
    const int by_tiles = is_by_tiles(&layer->gate_up, n, type), in_tiles = by_tiles && !s->counts;
    SHARE_SMALL_ITEMS(team, token, s->num_tokens)
        add_and_norm(s->hidden, NULL, layer->mlp_norm, s->normed, token, d->hidden_size, d->norm_eps, type, in_tiles);
    end_piece(team);
    const char *x = s->normed;
    if (s->counts) {
        SHARE_ITEMS(team, item, 1)
            if (!atomic_load(is_lost)
                && !gather_rows_over_ranks(s->ranks, s->normed, s->counts, d->hidden_size * bytes_of(type), s->gathered,
                                           s->wait_ms, s->goes_on))
                atomic_store(is_lost, 1);
        end_piece(team);
        x = s->gathered;
    }
    const int activated_in_tiles = by_tiles && is_by_tiles(&layer->down, n, type);
    linear(team, &layer->gate_up, x, n, s->activated, activated_in_tiles ? GATED_TILES : GATED, type, 1,
           in_tiles ? s->normed : widened);
    add_product(team, s, s->ranks, &layer->down, s->activated, n, s->counts ? tokens_before(s, s->ranks->rank) : 0, type,
                activated_in_tiles ? s->activated : widened, is_lost);
}

/* Adds the attention's output, and writes keys and values to the pool. What a product by AMX takes is written in tiles. */
static void add_attention(Team *team, const Decoder *d, const DecoderStep *s, int64_t i, Attention *a, char *widened,
                          atomic_int *is_lost) {
    const DecoderLayer *layer = &d->layers[i];
    const int type = (int)d->type;
    const int64_t n = s->num_tokens, dim = d->head_dim;
    const int in_tiles = is_by_tiles(&layer->qkv, n, type);
    SHARE_SMALL_ITEMS(team, token, n)
        add_and_norm(s->hidden, NULL, layer->input_norm, s->normed, token, d->hidden_size, d->norm_eps, type, in_tiles);
    end_piece(team);
    linear(team, &layer->qkv, s->normed, n, s->qkv, STORE, type, 1, in_tiles ? s->normed : widened);
    char *const pool = s->pool + i * s->layer_bytes;
    a->pool = pool;
    a->query = s->qkv, a->query_token = (d->num_heads + 2 * d->num_kv_heads) * dim, a->query_head = dim;
    a->output = s->attended, a->output_in_tiles = is_by_tiles(&layer->output, n, type);
    a->sinks = layer->sinks, a->window = layer->window, a->scaling = layer->scaling, a->softcap = layer->softcap;
    SHARE_SMALL_ITEMS(team, token, n) rotate_and_write(d, s, i, pool, token);
    end_piece(team);
    attend_by_type(team, a);
    add_product(team, s, s->counts ? NULL : s->ranks, &layer->output, s->attended, n, 0, type,
                a->output_in_tiles ? s->attended : widened, is_lost);
}

/* All layers over a step. Returns 0 if another rank is lost. */
int64_t kvrelay_decoder_layers(const Decoder *d, const DecoderStep *s, int64_t threads) {
    const int64_t widest = at_least(at_least(d->hidden_size, d->num_heads * d->head_dim), d->intermediate_size);
    char *const widened = space_to_widen(at_least(s->num_tokens, mlp_tokens(s)), widest, (int)d->type);
    Team team = {0};
    atomic_int is_lost = 0;
#pragma omp parallel num_threads((int)threads)
    {
        Attention attention = s->attention ? *s->attention : (Attention){0}; /* a copy for each thread */
        join_team(&team);
        begin_tiles();
        for (int64_t i = 0; i < d->num_layers; i++) {
            if (s->attention) add_attention(&team, d, s, i, &attention, widened, &is_lost);
            add_mlp(&team, d, s, &d->layers[i], widened, &is_lost);
        }
        end_tiles();
    }
    return !atomic_load(&is_lost);
}

int64_t kvrelay_decoder_struct_bytes(void) {
    return sizeof(Linear) * 1000000000 + sizeof(DecoderLayer) * 1000000 + sizeof(Decoder) * 1000 + sizeof(DecoderStep);
}
