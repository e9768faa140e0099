/* Attention of one item in float, over a pool of any type. Included by cpu_kernel.c. */
/* What a thread keeps while it works on an item; M is padded to a multiple of 8. */
typedef struct {
    float *query;    /* [heads of the item, M, head_dim], scaled */
    float *output;   /* the same shape, not yet divided by the sum */
    float *weight;   /* [M, TILE] */
    float *max, *sum; /* [heads of the item, M] */
    Joined joined;   /* states are those of the item's heads and M */
    float *keys;     /* [TILE / LANES, head_dim, LANES]: a tile, transposed in strips */
    float *values;   /* [TILE, head_dim] */
} Scratch;

INLINE int64_t padded(int64_t rows) { return (rows + 7) / 8 * 8; }

static float *take(float **free_space, int64_t count) {
    float *start = *free_space;
    *free_space += (count + 15) / 16 * 16;
    return start;
}

static int64_t scratch_floats(const Attention *a) {
    return a->max_states * (3 * a->head_dim + 4) + a->max_rows * TILE + 2 * TILE * a->head_dim + 10 * 16;
}

static Scratch lay_out(const Attention *a, float *space) {
    Scratch s;
    s.query = take(&space, a->max_states * a->head_dim);
    s.output = take(&space, a->max_states * a->head_dim);
    s.weight = take(&space, a->max_rows * TILE);
    s.max = take(&space, a->max_states);
    s.sum = take(&space, a->max_states);
    s.joined.output = take(&space, a->max_states * a->head_dim);
    s.joined.max = take(&space, a->max_states);
    s.joined.sum = take(&space, a->max_states);
    s.keys = take(&space, TILE * a->head_dim);
    s.values = take(&space, TILE * a->head_dim);
    return s;
}

/* Offsets in the pool, in elements, of the keys of a tile; those past its end repeat the last one. */
INLINE void find_keys(const Attention *a, int row, int64_t begin, int64_t count, int64_t *offsets) {
    const int32_t *table = a->block_tables + row * a->table_stride;
    int64_t block = begin / a->block_size, slot = begin % a->block_size;
    for (int64_t i = 0; i < TILE; i++) {
        offsets[i] = table[block] * a->stride.block + slot * a->stride.token;
        if (i + 1 < count && ++slot == a->block_size) slot = 0, block++;
    }
}

/* Asks for the K and V of one head and tile ahead of their turn: heads lie apart, and the CPU does not guess the jumps. */
INLINE void prefetch(const Attention *a, const int64_t *offsets, int64_t head, const int64_t dim, const int type) {
    const int64_t element_bytes = bytes_of(type), value_bytes = a->stride.key_to_value * element_bytes;
    for (int k = 0; k < TILE; k++) {
        const char *key = a->pool + (offsets[k] + head * a->stride.head) * element_bytes;
        for (int64_t byte = 0; byte < dim * element_bytes; byte += 64) {
            __builtin_prefetch(key + byte, 0, 2);
            __builtin_prefetch(key + value_bytes + byte, 0, 2);
        }
    }
}

/* weight[m][0..TILE) = query[m] . key, M a multiple of `together`; keys straight from the pool. */
INLINE void direct_scores(const Attention *a, const float *query, int64_t rows, const int64_t *offsets, int64_t head,
                          float *weight, const int64_t dim, const int type, const int together) {
    const int keys = LANES / together;
    for (int64_t m = 0; m < rows; m += together)
        for (int first = 0; first < TILE; first += keys) {
            vfloat sums[LANES] = {};
            for (int64_t d = 0; d < dim; d += LANES) {
                vfloat q[4];
                UNROLL for (int r = 0; r < together; r++) q[r] = load((const char *)(query + (m + r) * dim), d, FLOAT32);
                UNROLL for (int k = 0; k < keys; k++) {
                    vfloat key = load(a->pool, offsets[first + k] + head * a->stride.head + d, type);
                    UNROLL for (int r = 0; r < together; r++) sums[r * keys + k] = fused(q[r], key, sums[r * keys + k]);
                }
            }
            vfloat dots = sum_each(sums);
            UNROLL for (int r = 0; r < together; r++)
                memcpy(weight + (m + r) * TILE + first, (char *)&dots + r * keys * 4, keys * 4);
        }
}

/* The tile's keys as floats, [strip, head_dim, LANES], and its values, [TILE, head_dim]. */
INLINE void load_tile(const Attention *a, const Scratch *s, const int64_t *offsets, int64_t head, int64_t count,
                      const int64_t dim, const int type) {
    for (int64_t first = 0; first < TILE; first += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            vfloat v[LANES];
            UNROLL for (int k = 0; k < LANES; k++) v[k] = load(a->pool, offsets[first + k] + head * a->stride.head + d, type);
            transpose(v);
            UNROLL for (int k = 0; k < LANES; k++) memcpy(s->keys + first * dim + (d + k) * LANES, &v[k], sizeof v[k]);
        }
    const char *values = a->pool + a->stride.key_to_value * bytes_of(type);
    for (int64_t k = 0; k < count; k++)
        for (int64_t d = 0; d < dim; d += LANES) {
            vfloat v = load(values, offsets[k] + head * a->stride.head + d, type);
            memcpy(s->values + k * dim + d, &v, sizeof v);
        }
}

/* weight[m][0..TILE) = query[m] . key from the transposed tile: ROWS rows by two strips in registers. Sums are those of
 * `direct_scores`: a chain for each of LANES elements of the head, and these as `sum_each` adds them. */
INLINE void tiled_scores(const Scratch *s, int64_t rows, const int64_t dim) {
    for (int64_t first = 0; first < TILE; first += 2 * LANES) {
        const float *strip = s->keys + first * dim;
        for (int64_t m = 0; m < rows; m += ROWS) {
            vfloat levels[5][ROWS][2];
            for (int64_t i = 0; i < LANES; i++) {
                vfloat sums[ROWS][2] = {};
                for (int64_t d = counted_lane(i); d < dim; d += LANES) {
                    vfloat left, right;
                    memcpy(&left, strip + d * LANES, sizeof left);
                    memcpy(&right, strip + (dim + d) * LANES, sizeof right);
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const vfloat q = splat(s->query[(m + r) * dim + d]);
                        sums[r][0] = fused(q, left, sums[r][0]);
                        sums[r][1] = fused(q, right, sums[r][1]);
                    }
                }
                int64_t level = 0;
                for (int64_t carry = i; carry & 1; carry /= 2, level++)
                    UNROLL for (int r = 0; r < ROWS; r++)
                        UNROLL for (int v = 0; v < 2; v++) sums[r][v] = levels[level][r][v] + sums[r][v];
                memcpy(levels[level], sums, sizeof sums);
            }
            const int last = LANES == 16 ? 4 : 3;
            UNROLL for (int r = 0; r < ROWS; r++)
                memcpy(s->weight + (m + r) * TILE + first, levels[last][r], sizeof levels[last][r]);
        }
    }
}

/* Turns a row's scores into weights, exp(score - max), and returns by how much earlier results shrink. */
INLINE float soften(const Attention *a, float *weight, int64_t visible_begin, int64_t visible_end, float *max, float *sum) {
    vfloat w[TILE / LANES], best = splat(-INFINITY);
    vint lane;
    UNROLL for (int i = 0; i < LANES; i++) lane[i] = i;
    UNROLL for (int i = 0; i < TILE / LANES; i++) {
        memcpy(&w[i], weight + i * LANES, sizeof w[i]);
        if (a->softcap != 0) w[i] = (float)a->softcap * vtanh(w[i] * (float)(1 / a->softcap));
        if (visible_begin > 0 || visible_end < TILE) {
            vint key = lane + i * LANES;
            vint seen = (key >= (int32_t)visible_begin) & (key < (int32_t)visible_end);
            w[i] = choose(seen, w[i], splat(-INFINITY));
        }
        best = larger(w[i], best);
    }
    float new_max = horizontal_max(best);
    if (!(new_max > *max)) new_max = *max;
    const float base = new_max == -INFINITY ? 0.0f : new_max; /* nothing seen yet: weights are exp(-inf) */
    vfloat total = splat(0.0f);
    UNROLL for (int i = 0; i < TILE / LANES; i++) {
        w[i] = vexp(w[i] - base);
        total += w[i];
        memcpy(weight + i * LANES, &w[i], sizeof w[i]);
    }
    const float shrink = new_max == *max ? 1.0f : exp_one(*max - base);
    *sum = fused_one(*sum, shrink, horizontal_sum(total));
    *max = new_max;
    return shrink;
}

/* output[m] += weight[m] . values for `together` rows and `wide` vectors of the head at a time. */
INLINE void add_values(const char *values, const int64_t *offsets, int64_t count, const float *weight, float *output,
                       int64_t d, const int64_t dim, const int type, const int together, const int wide) {
    vfloat sums[ROWS][4];
    UNROLL for (int r = 0; r < together; r++)
        UNROLL for (int i = 0; i < wide; i++) sums[r][i] = load((const char *)(output + r * dim), d + i * LANES, FLOAT32);
    for (int64_t k = 0; k < count; k++) {
        vfloat value[4];
        UNROLL for (int i = 0; i < wide; i++) value[i] = load(values, offsets[k] + d + i * LANES, type);
        UNROLL for (int r = 0; r < together; r++)
            UNROLL for (int i = 0; i < wide; i++) sums[r][i] = fused(splat(weight[r * TILE + k]), value[i], sums[r][i]);
    }
    UNROLL for (int r = 0; r < together; r++)
        UNROLL for (int i = 0; i < wide; i++) memcpy(output + r * dim + d + i * LANES, &sums[r][i], sizeof(vfloat));
}

INLINE void add_all_values(const char *values, const int64_t *offsets, int64_t count, const float *weight, float *output,
                           int64_t rows, const int64_t dim, const int type, const int together, const int wide) {
    for (int64_t m = 0; m < rows; m += together) {
        int64_t d = 0;
        for (; d + wide * LANES <= dim; d += wide * LANES)
            add_values(values, offsets, count, weight + m * TILE, output + m * dim, d, dim, type, together, wide);
        for (; d < dim; d += LANES)
            add_values(values, offsets, count, weight + m * TILE, output + m * dim, d, dim, type, together, 1);
    }
}

/* One tile of keys for one KV head: scores, weights, values. */
INLINE void do_tile(const Attention *a, const Scratch *s, const Item *item, int64_t head, int64_t begin, int64_t count,
                    const int64_t *offsets, const int64_t dim, const int type, const int direct) {
    const int64_t rows = (item->query_end - item->query_begin) * a->group, stored = padded(rows);
    const int64_t local = head - item->head_begin;
    const float *query = s->query + local * stored * dim;
    float *output = s->output + local * stored * dim;
    if (!direct) {
        Scratch own = *s;
        own.query = (float *)query;
        load_tile(a, s, offsets, head, count, dim, type);
        tiled_scores(&own, stored, dim);
    } else if (rows == 1) {
        direct_scores(a, query, 1, offsets, head, s->weight, dim, type, 1);
    } else if (rows == 2) {
        direct_scores(a, query, 2, offsets, head, s->weight, dim, type, 2);
    } else {
        direct_scores(a, query, (rows + 3) / 4 * 4, offsets, head, s->weight, dim, type, 4);
    }
    const int64_t first_position = a->positions[item->row] + item->query_begin;
    for (int64_t m = 0; m < rows; m++) {
        const int64_t position = first_position + m / a->group;
        const int64_t end = at_most(count, position + 1 - begin);
        const int64_t start = a->window ? at_least(0, position + 1 - a->window - begin) : 0;
        const float shrink =
            soften(a, s->weight + m * TILE, start, end, s->max + local * stored + m, s->sum + local * stored + m);
        if (shrink != 1.0f)
            for (int64_t d = 0; d < dim; d++) output[m * dim + d] *= shrink;
    }
    if (!direct) {
        int64_t tile_offsets[TILE];
        for (int64_t k = 0; k < TILE; k++) tile_offsets[k] = k * dim;
        add_all_values((const char *)s->values, tile_offsets, count, s->weight, output, stored, dim, FLOAT32, ROWS, 2);
        return;
    }
    const char *values = a->pool + (a->stride.key_to_value + head * a->stride.head) * bytes_of(type);
    if (rows == 1)
        add_all_values(values, offsets, count, s->weight, output, 1, dim, type, 1, 4);
    else if (rows == 2)
        add_all_values(values, offsets, count, s->weight, output, 2, dim, type, 2, 4);
    else
        add_all_values(values, offsets, count, s->weight, output, (rows + 3) / 4 * 4, dim, type, 4, 2);
}

/* The type of queries and output, beside a pool of `type`: known when this is compiled, where it is the same. */
INLINE int query_type(const Attention *a, const int type) { return type <= BFLOAT16 ? type : (int)a->query_type; }

INLINE void load_queries(const Attention *a, const Scratch *s, const Item *item, const int64_t dim, const int type) {
    const int own = query_type(a, type);
    const int64_t rows = (item->query_end - item->query_begin) * a->group, stored = padded(rows);
    const int64_t first_token = a->query_starts[item->row] + item->query_begin;
    for (int64_t head = item->head_begin; head < item->head_end; head++) {
        float *query = s->query + (head - item->head_begin) * stored * dim;
        for (int64_t m = 0; m < stored; m++) {
            const int64_t token = first_token + m / a->group, query_head = head * a->group + m % a->group;
            for (int64_t d = 0; d < dim; d += LANES) {
                vfloat q = splat(0.0f);
                if (m < rows) q = load(a->query, token * a->query_token + query_head * a->query_head + d, own);
                q *= (float)a->scaling;
                memcpy(query + m * dim + d, &q, sizeof q);
            }
        }
    }
}

/* Divides by the sum, counts the sink, and writes head_dim values of the output. */
INLINE void finish(const Attention *a, const float *output, float max, float sum, int64_t token, int64_t query_head,
                   const int64_t dim, const int type) {
    float scale = 1.0f;
    if (a->sinks) {
        const float sink = a->sinks[query_head], top = sink > max ? sink : max;
        scale = exp_one(max - top);
        sum = fused_one(sum, scale, exp_one(sink - top));
    }
    const int64_t width = a->num_kv_heads * a->group * dim, column = query_head * dim;
    for (int64_t d = 0; d < dim; d += LANES)
        store(a->output, a->output_in_tiles ? tile_place(token, column + d, width) : token * width + column + d,
              load((const char *)output, d, FLOAT32) * (scale / sum), query_type(a, type));
}

INLINE void write_results(const Attention *a, const Scratch *s, const Item *item, const int64_t dim, const int type) {
    const int64_t rows = (item->query_end - item->query_begin) * a->group, stored = padded(rows);
    const int64_t first_token = a->query_starts[item->row] + item->query_begin;
    for (int64_t head = item->head_begin; head < item->head_end; head++)
        for (int64_t m = 0; m < rows; m++) {
            const int64_t state = (head - item->head_begin) * stored + m;
            const float *output = s->output + state * dim;
            if (item->partial < 0) {
                finish(a, output, s->max[state], s->sum[state], first_token + m / a->group,
                       head * a->group + m % a->group, dim, type);
                continue;
            }
            float *partial = a->partials + (item->partial + (head - item->head_begin) * rows + m) * (dim + 2);
            memcpy(partial, output, dim * sizeof *output);
            partial[dim] = s->max[state];
            partial[dim + 1] = s->sum[state];
        }
}

/* Ends a piece of keys that others follow. */
INLINE void join_states(const Scratch *s, int64_t states, int is_first, const int64_t dim) {
    for (int64_t i = 0; i < states; i++) {
        if (is_first) s->joined.max[i] = -INFINITY, s->joined.sum[i] = 0.0f;
        if (is_first) memset(s->joined.output + i * dim, 0, dim * sizeof(float));
        join_piece(s->joined.output + i * dim, s->joined.max + i, s->joined.sum + i, s->output + i * dim, s->max[i], s->sum[i],
                   dim);
    }
}

INLINE void begin_states(const Scratch *s, int64_t states, const int64_t dim) {
    memset(s->output, 0, states * dim * sizeof *s->output);
    for (int64_t i = 0; i < states; i++) s->max[i] = -INFINITY, s->sum[i] = 0.0f;
}

INLINE void do_item(const Attention *a, const Scratch *s, const Item *item, const int64_t dim, const int type) {
    const int64_t rows = (item->query_end - item->query_begin) * a->group, stored = padded(rows);
    const int64_t states = (item->head_end - item->head_begin) * stored;
    const int64_t first_position = a->positions[item->row] + item->query_begin;
    const int64_t last_position = a->positions[item->row] + item->query_end - 1;
    const int64_t end = at_most(item->key_end, last_position + 1);
    int64_t begin = item->key_begin;
    /* Tiles begin at multiples of TILE, wherever the window does: a row's sums do not depend on its neighbours. */
    if (a->window) begin = at_least(begin, at_least(0, first_position + 1 - a->window) / TILE * TILE);
    load_queries(a, s, item, dim, type);
    begin_states(s, states, dim);
    memset(s->weight, 0, stored * TILE * sizeof *s->weight);
    int is_joined = 0;
    int64_t offsets[2][TILE];
    int current = 0;
    if (begin < end) find_keys(a, item->row, begin, at_most(TILE, end - begin), offsets[current]);
    for (; begin < end; begin += TILE, current ^= 1) {
        if (begin > item->key_begin && begin % SPLIT_KEYS == 0) {
            join_states(s, states, !is_joined, dim);
            is_joined = 1;
            begin_states(s, states, dim);
        }
        const int64_t count = at_most(TILE, end - begin), next = begin + TILE;
        if (next < end) find_keys(a, item->row, next, at_most(TILE, end - next), offsets[!current]);
        for (int64_t head = item->head_begin; head < item->head_end; head++) {
            if (next < end) prefetch(a, offsets[!current], head, dim, type);
            if (rows <= DIRECT_ROWS)
                do_tile(a, s, item, head, begin, count, offsets[current], dim, type, 1);
            else
                do_tile(a, s, item, head, begin, count, offsets[current], dim, type, 0);
        }
    }
    Scratch results = *s;
    if (is_joined) {
        join_states(s, states, 0, dim);
        results.output = s->joined.output, results.max = s->joined.max, results.sum = s->joined.sum;
    }
    write_results(a, &results, item, dim, type);
}
