/* Decoder layers on a CPU, for the layer shape that Llama, Mistral, Qwen2 and Qwen3 share:
 *
 *   h += o_proj(attention(rope(norm(q_proj(n))), rope(norm(k_proj(n))), v_proj(n)))   with n = rms_norm(h)
 *   h += down_proj(silu(gate_proj(m)) * up_proj(m))                                   with m = rms_norm(h)
 *
 * `kvrelay_decoder_layers` runs all layers over a few tokens (decoding) in one call: a step of a small model would
 * otherwise spend more time between its operators than in them. Larger batches call the pieces one at a time and leave
 * the matrix products to the caller.
 *
 * The residual stream and every sum are float. Activations that enter a matrix product have the weights' type, float or
 * bfloat16. Each output of a product is summed in an order that depends on neither the batch nor the threads.
 */
#include "cpu_kernel.c"

#define LINEAR_CHUNK 32 /* weight rows that a thread takes at a time; their bytes stay in the second-level cache */

typedef struct {
    const char *weight; /* [num_out, num_in], row-major */
    const float *bias;  /* [num_out], or null */
    int64_t num_out, num_in;
} Linear;

typedef struct {
    Linear qkv, output, gate_up, down;
    const float *input_norm, *mlp_norm, *query_norm, *key_norm; /* the last two: [head_dim], or null */
    const float *sinks;
    int64_t window;
    double scaling, softcap;
} DecoderLayer;

typedef struct {
    const DecoderLayer *layers;
    int64_t num_layers, type; /* type: of weights and activations, FLOAT32 or BFLOAT16 */
    int64_t hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size;
    double norm_eps;
} Decoder;

typedef struct {
    int64_t num_tokens;
    float *hidden;           /* [tokens, hidden_size]: embeddings before, the last layer's output after */
    const float *cos, *sin;  /* [tokens, head_dim / 2] */
    Attention *attention;    /* planned for this step; pool, query, output and layer parameters are filled per layer */
    char *pool;              /* the first layer's keys of block 0 */
    int64_t layer_bytes;     /* from a layer's keys to the next layer's */
    const int32_t *write_blocks, *write_slots;
    char *normed;            /* [tokens, hidden_size], the weights' type */
    char *qkv;               /* [tokens, (num_heads + 2 * num_kv_heads) * head_dim], the weights' type */
    char *attended;          /* [tokens, num_heads * head_dim], the weights' type */
    char *gate_up;           /* [tokens, 2 * intermediate_size], float: gate, then up */
    char *activated;         /* [tokens, intermediate_size], the weights' type */
} DecoderStep;

/* ---- matrix products of a few tokens ---- */

INLINE float element(const char *base, int64_t index, const int type) {
    if (type == FLOAT32) return ((const float *)base)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#if defined(__AVX512F__)
#define KEEP_IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define KEEP_IN_REGISTER(x)
#endif

/* One vector of a product's operands, and sum += a . b with it. */
#if defined(__AVX512BF16__)
typedef __m512i vpairs;
#define WIDTH(type) ((type) == BFLOAT16 ? 32 : LANES)
INLINE vpairs operand(const char *from, const int type) { (void)type; return _mm512_loadu_si512(from); }
INLINE vfloat add_dot(vfloat sum, vpairs a, vpairs b, const int type) {
    if (type == BFLOAT16) return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    return sum + (vfloat)a * (vfloat)b;
}
#else
typedef vfloat vpairs;
#define WIDTH(type) LANES
INLINE vpairs operand(const char *from, const int type) { return load(from, 0, type); }
INLINE vfloat add_dot(vfloat sum, vpairs a, vpairs b, const int type) { (void)type; return sum + a * b; }
#endif

/* Lane r * tokens + t of the result: weight row r . token t, for LANES / tokens rows that lie `row_bytes` apart. */
INLINE vfloat dot_tile(const char *weight, int64_t row_bytes, const char *x, int64_t num_in, const int type,
                       const int tokens) {
    const int64_t bytes = bytes_of(type), width = WIDTH(type), token_bytes = num_in * bytes;
    const int rows = LANES / tokens, group = rows < 4 ? rows : 4; /* few rows at once: few streams from memory */
    vfloat acc[LANES] = {};
    const int64_t whole = num_in / width * width * bytes;
    UNROLL for (int first = 0; first < rows; first += group) {
        const char *w = weight + first * row_bytes;
        for (int64_t k = 0; k < whole; k += width * bytes) {
            vpairs token[4];
            UNROLL for (int t = 0; t < tokens; t++) {
                token[t] = operand(x + k + t * token_bytes, type);
                KEEP_IN_REGISTER(token[t]); /* GCC 12 would load it again for each row */
            }
            UNROLL for (int r = 0; r < group; r++) {
                const vpairs row = operand(w + k + r * row_bytes, type);
                UNROLL for (int t = 0; t < tokens; t++)
                    acc[(first + r) * tokens + t] = add_dot(acc[(first + r) * tokens + t], row, token[t], type);
            }
        }
    }
    vfloat sums = sum_each(acc);
    for (int64_t k = whole; k < token_bytes; k += bytes)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += element(weight + lane / tokens * row_bytes + k, 0, type) *
                          element(x + lane % tokens * token_bytes + k, 0, type);
    return sums;
}

enum { STORE, STORE_FLOAT, ADD_FLOAT };

INLINE void put(char *out, int64_t at, float x, const int mode, const int type) {
    if (mode == ADD_FLOAT) ((float *)out)[at] += x;
    else if (mode == STORE_FLOAT || type == FLOAT32) ((float *)out)[at] = x;
    else {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        ((uint16_t *)out)[at] = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    }
}

/* Weight rows [begin, end) of a product, for `tokens` tokens from `first` on. Rows that fill no tile go one at a time. */
INLINE void linear_tile(const Linear *l, const char *x, int64_t first, char *out, const int mode, const int type,
                        int64_t begin, int64_t end, const int tokens) {
    const int64_t row_bytes = l->num_in * bytes_of(type);
    const char *from = x + first * row_bytes;
    for (int64_t row = begin; row < end;) {
        const int rows = row + LANES / tokens <= end ? LANES / tokens : 1;
        const vfloat sums = dot_tile(l->weight + row * row_bytes, rows > 1 ? row_bytes : 0, from, l->num_in, type, tokens);
        for (int r = 0; r < rows; r++)
            UNROLL for (int t = 0; t < tokens; t++)
                put(out, (first + t) * l->num_out + row + r, sums[r * tokens + t] + (l->bias ? l->bias[row + r] : 0.0f),
                    mode, type);
        row += rows;
    }
}

INLINE void linear_chunk(const Linear *l, const char *x, int64_t num_tokens, char *out, const int mode, const int type,
                         int64_t begin, int64_t end) {
    int64_t first = 0;
    for (; first + 4 <= num_tokens; first += 4) linear_tile(l, x, first, out, mode, type, begin, end, 4);
    if (first + 2 <= num_tokens) linear_tile(l, x, first, out, mode, type, begin, end, 2), first += 2;
    if (first < num_tokens) linear_tile(l, x, first, out, mode, type, begin, end, 1);
}

static void linear(const Linear *l, const char *x, int64_t num_tokens, char *out, int mode, int type, int threads) {
    const int64_t num_chunks = (l->num_out + LINEAR_CHUNK - 1) / LINEAR_CHUNK;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
        const int64_t begin = chunk * LINEAR_CHUNK, end = at_most(l->num_out, begin + LINEAR_CHUNK);
        if (type == BFLOAT16) linear_chunk(l, x, num_tokens, out, mode, BFLOAT16, begin, end);
        else linear_chunk(l, x, num_tokens, out, mode, FLOAT32, begin, end);
    }
}

/* ---- between the products ---- */

/* out = x / rms(x) * weight; `size` elements. In place where `out` is `x`. */
INLINE void norm_vector(const char *x, const int from, const float *weight, char *out, const int to, int64_t size, double eps) {
    vfloat squares = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vfloat v = load(x, i, from);
        squares += v * v;
    }
    float total = horizontal_sum(squares);
    for (; i < size; i++) total += element(x, i, from) * element(x, i, from);
    const float scale = 1.0f / sqrtf(total / (float)size + (float)eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(out, i, load(x, i, from) * scale * load((const char *)weight, i, FLOAT32), to);
    for (; i < size; i++) put(out, i, element(x, i, from) * scale * weight[i], STORE, to);
}

/* Rotates the halves of a head (NeoX order): head_dim is a multiple of 16, half of it may not be one of LANES. */
INLINE void rotate(char *head, const float *cos, const float *sin, int64_t dim, const int type) {
    const int64_t half = dim / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const vfloat a = load(head, i, type), b = load(head, half + i, type);
        const vfloat c = load((const char *)cos, i, FLOAT32), s = load((const char *)sin, i, FLOAT32);
        store(head, i, a * c - b * s, type);
        store(head, half + i, b * c + a * s, type);
    }
    for (; i < half; i++) {
        const float a = element(head, i, type), b = element(head, half + i, type);
        put(head, i, a * cos[i] - b * sin[i], STORE, type);
        put(head, half + i, b * cos[i] + a * sin[i], STORE, type);
    }
}

INLINE void norm_and_rotate(const Decoder *d, const DecoderLayer *layer, char *qkv, int64_t token, const float *cos,
                            const float *sin, const int type) {
    const int64_t bytes = bytes_of(type), dim = d->head_dim;
    char *heads = qkv + token * (d->num_heads + 2 * d->num_kv_heads) * dim * bytes;
    for (int64_t head = 0; head < d->num_heads + d->num_kv_heads; head++) {
        char *at = heads + head * dim * bytes;
        const float *weight = head < d->num_heads ? layer->query_norm : layer->key_norm;
        if (weight) norm_vector(at, type, weight, at, type, dim, d->norm_eps);
        rotate(at, cos + token * (dim / 2), sin + token * (dim / 2), dim, type);
    }
}

/* out = silu(x[0 .. size)) * x[size .. 2 * size) */
INLINE void silu_and_multiply(const char *x, const int from, char *out, const int to, int64_t size) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        const vfloat gate = load(x, i, from), up = load(x, size + i, from);
        store(out, i, gate / (1.0f + vexp(choose(gate < splat(-87.0f), splat(87.0f), -gate))) * up, to);
    }
    for (; i < size; i++) {
        const float gate = element(x, i, from);
        put(out, i, gate / (1.0f + expf(-gate)) * element(x, size + i, from), STORE, to);
    }
}

/* ---- what Python calls ---- */

/* Each piece is compiled for both types of weights. */
#define FOR_TYPE(type, call)                        \
    do {                                            \
        if ((type) == BFLOAT16) call(BFLOAT16);     \
        else call(FLOAT32);                         \
    } while (0)

/* hidden [tokens, size] += delta (of `type`, or null); normed = rms_norm(hidden) * weight, in `type`. */
void kvrelay_add_and_norm(float *hidden, const char *delta, const float *weight, char *normed, int64_t num_tokens,
                          int64_t size, double eps, int64_t type, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (num_tokens > 4)
    for (int64_t token = 0; token < num_tokens; token++) {
        float *row = hidden + token * size;
#define ADD_AND_NORM(type)                                                                              \
    do {                                                                                                \
        if (delta)                                                                                      \
            for (int64_t i = 0; i < size; i++) row[i] += element(delta, token * size + i, type);         \
        norm_vector((const char *)row, FLOAT32, weight, normed + token * size * bytes_of(type), type, size, eps); \
    } while (0)
        FOR_TYPE(type, ADD_AND_NORM);
    }
}

/* Norms and rotates the queries and keys of `qkv` in place. */
void kvrelay_norm_and_rotate(const Decoder *d, int64_t layer, char *qkv, int64_t num_tokens, const float *cos,
                             const float *sin, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (num_tokens > 2)
    for (int64_t token = 0; token < num_tokens; token++) {
#define NORM_AND_ROTATE(type) norm_and_rotate(d, &d->layers[layer], qkv, token, cos, sin, type)
        FOR_TYPE(d->type, NORM_AND_ROTATE);
    }
}

/* activated = silu(gate) * up; `gate_up` is [tokens, 2 * size] of type `from`. */
void kvrelay_silu_and_multiply(const char *gate_up, int64_t from, char *activated, int64_t to, int64_t num_tokens,
                               int64_t size, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (num_tokens * size > 4096)
    for (int64_t token = 0; token < num_tokens; token++) {
        const char *x = gate_up + token * 2 * size * bytes_of((int)from);
        char *out = activated + token * size * bytes_of((int)to);
        if (to == FLOAT32) silu_and_multiply(x, FLOAT32, out, FLOAT32, size);
        else if (from == FLOAT32) silu_and_multiply(x, FLOAT32, out, BFLOAT16, size);
        else silu_and_multiply(x, BFLOAT16, out, BFLOAT16, size);
    }
}

/* out [tokens, num_out] = x . weight + bias; `out` is float if `to_float`, else of `type`. */
void kvrelay_linear(const Linear *l, const char *x, int64_t num_tokens, char *out, int64_t to_float, int64_t type,
                    int64_t threads) {
    linear(l, x, num_tokens, out, to_float ? STORE_FLOAT : STORE, (int)type, (int)threads);
}

/* All layers over a few tokens. */
void kvrelay_decoder_layers(const Decoder *d, const DecoderStep *s, int64_t threads) {
    const int type = (int)d->type;
    const int64_t bytes = bytes_of(type), dim = d->head_dim, n = s->num_tokens, heads = d->num_heads + 2 * d->num_kv_heads;
    Attention *a = s->attention;
    for (int64_t i = 0; i < d->num_layers; i++) {
        const DecoderLayer *layer = &d->layers[i];
        kvrelay_add_and_norm(s->hidden, NULL, layer->input_norm, s->normed, n, d->hidden_size, d->norm_eps, type, threads);
        linear(&layer->qkv, s->normed, n, s->qkv, STORE, type, (int)threads);
        kvrelay_norm_and_rotate(d, i, s->qkv, n, s->cos, s->sin, threads);
        char *pool = s->pool + i * s->layer_bytes;
        const char *keys = s->qkv + d->num_heads * dim * bytes, *values = keys + d->num_kv_heads * dim * bytes;
        kvrelay_write(pool, &a->stride, keys, heads * dim, dim, s->write_blocks, s->write_slots, n, d->num_kv_heads,
                      dim * bytes, bytes);
        kvrelay_write(pool + a->stride.key_to_value * bytes, &a->stride, values, heads * dim, dim, s->write_blocks,
                      s->write_slots, n, d->num_kv_heads, dim * bytes, bytes);
        a->pool = pool;
        a->query = s->qkv, a->query_token = heads * dim, a->query_head = dim;
        a->output = s->attended;
        a->sinks = layer->sinks, a->window = layer->window, a->scaling = layer->scaling, a->softcap = layer->softcap;
        kvrelay_attend(a);
        linear(&layer->output, s->attended, n, (char *)s->hidden, ADD_FLOAT, type, (int)threads);
        kvrelay_add_and_norm(s->hidden, NULL, layer->mlp_norm, s->normed, n, d->hidden_size, d->norm_eps, type, threads);
        linear(&layer->gate_up, s->normed, n, s->gate_up, STORE_FLOAT, type, (int)threads);
        kvrelay_silu_and_multiply(s->gate_up, FLOAT32, s->activated, type, n, d->intermediate_size, threads);
        linear(&layer->down, s->activated, n, (char *)s->hidden, ADD_FLOAT, type, (int)threads);
    }
}

int64_t kvrelay_decoder_struct_bytes(void) {
    return sizeof(Linear) * 1000000000 + sizeof(DecoderLayer) * 1000000 + sizeof(Decoder) * 1000 + sizeof(DecoderStep);
}
