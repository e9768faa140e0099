/* Attention over paged KV on a CPU.
 *
 * The pool is read where it lies. Work comes as items: some query tokens of one row, some KV heads, a range of keys. The
 * queries of all heads that share a KV head are the rows of one small matrix, M of them:
 *   few rows (decoding):  dot products straight from the pool, several keys at once; bound by memory.
 *   many rows (prefill):  tiles of keys, converted to float and transposed once, then outer products in registers.
 * Both keep a running maximum and sum ("online softmax": Milakov and Gimelshein, arXiv 1805.02867) in float.
 *
 * The bits of a query's output depend on its position, on the keys and values before it, and on the instructions that the
 * CPU has, on nothing else: a prompt, its chunks and decoding give the same, alone or beside others; but for prompts in
 * bfloat16 by AMX. Every other path adds up in one order:
 *   scores:  elements of the head that are LANES (of pairs: 2 * LANES) apart are a chain; `sum_each` adds the chains
 *   keys:    tiles begin at multiples of their size, and each may raise the maximum once, by which earlier results shrink;
 *            weights are added by lane, values one key (or pair of keys) after the other
 *   pieces:  results begin anew at multiples of SPLIT_KEYS, so that threads may share a long context ("flash decoding":
 *            Dao, Haziza, Massa and Sizov, 2023), and are joined in the order of the keys
 *
 * Strides are in elements. Queries and output are float or bfloat16; the pool has the same, or 8-bit floats, which are
 * widened as they are loaded.
 */
#include <pthread.h>

#include "cpu_panels.c"
#include "cpu_team.c"

enum { SPLIT_KEYS = 512 };              /* keys of a piece: see `join_piece` */
#define TILE 32                         /* keys looked at between two updates of the running maximum */
#define DIRECT_ROWS 8                   /* up to so many rows, the keys are not worth transposing */
#define ROWS (LANES == 16 ? 8 : 4)      /* rows of an outer product kept in registers */

typedef struct {
    int64_t block, key_to_value, token, head; /* of the pool */
} PoolStrides;

typedef struct {
    int32_t row, head_begin, head_end, query_begin, query_end, key_begin, key_end;
    int32_t partial; /* where its unfinished results go, in partials; -1: it has all keys and writes the output */
} Item;

typedef struct {
    int32_t row, num_splits, partial; /* partials of a split are [kv head, query, head of the group] */
} SplitRow;

/* Fields are of 8 bytes each: the same struct is declared in cpu.py. */
typedef struct {
    const char *pool; /* the layer's keys of block 0 */
    PoolStrides stride;
    int64_t pool_type, query_type; /* the output has the query's */
    int64_t head_dim, block_size, num_kv_heads, group; /* group: query heads per KV head */
    int64_t num_threads, num_items, num_split_rows;
    int64_t max_rows, max_states; /* of an item: M, and M times its KV heads; both with M padded to 8 */
    const Item *items;
    const SplitRow *split_rows;
    float *partials; /* each head_dim values, the maximum, the sum */
    const int32_t *query_starts, *positions, *block_tables;
    int64_t table_stride;
    const char *query;
    int64_t query_token, query_head; /* strides */
    char *output;                    /* [tokens, heads, head_dim] */
    const float *sinks;              /* [heads], or null */
    int64_t window;                  /* 0: none */
    double scaling, softcap;         /* softcap 0: none */
    int64_t output_in_tiles;         /* see `tile_place`; the output is bfloat16 then */
} Attention;

/* Results of some queries, joined over the pieces of their keys until now. */
typedef struct {
    float *output, *max, *sum; /* [states, head_dim], [states], [states] */
} Joined;

/* Adds a piece's results to those of earlier keys; a piece that a query sees nothing of changes nothing. */
INLINE void join_piece(float *joined, float *joined_max, float *joined_sum, const float *output, float max, float sum,
                       const int64_t dim) {
    if (sum == 0.0f) return;
    const float top = max > *joined_max ? max : *joined_max;
    const float before = exp_one(*joined_max - top), scale = exp_one(max - top);
    for (int64_t d = 0; d < dim; d += LANES) {
        const vfloat x = load((const char *)output, d, FLOAT32) * scale;
        store((char *)joined, d, fused(load((const char *)joined, d, FLOAT32), splat(before), x), FLOAT32);
    }
    *joined_sum = fused_one(*joined_sum, before, sum * scale);
    *joined_max = top;
}

#include "cpu_attention_items.c"

/* Joins the pieces of one decoding row's query head, in the order of the keys. */
INLINE void join_splits(const Attention *a, const SplitRow *split, int64_t query_head, const int64_t dim, const int type) {
    const int64_t heads = a->num_kv_heads * a->group;
    const float *first = a->partials + (split->partial + query_head) * (dim + 2);
    float joined[dim], max = -INFINITY, sum = 0.0f;
    memset(joined, 0, sizeof joined);
    for (int64_t i = 0; i < split->num_splits; i++) {
        const float *partial = first + i * heads * (dim + 2);
        join_piece(joined, &max, &sum, partial, partial[dim], partial[dim + 1], dim);
    }
    finish(a, joined, max, sum, a->query_starts[split->row], query_head, dim, type);
}

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_PAIRS 1
#include "cpu_attention_pairs.c"
#else
#define HAS_PAIRS 0
#endif

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void make_scratch_key(void) {
    if (pthread_key_create(&scratch_key, free)) abort();
}

/* A thread's scratch, kept between calls: new pages cost more than a small step. It ends with the thread: OpenMP ends
 * some if a later region has fewer. */
static char *scratch_space(int64_t bytes) {
    static __thread char *space;
    static __thread int64_t size;
    if (bytes > size) {
        void *fresh = NULL;
        pthread_once(&scratch_once, make_scratch_key);
        free(space);
        if (posix_memalign(&fresh, 64, bytes)) abort();
        space = fresh, size = bytes;
        pthread_setspecific(scratch_key, space);
    }
    return space;
}

INLINE void attend(Team *team, const Attention *a, const int64_t dim, const int type) {
    const int64_t heads = a->num_kv_heads * a->group;
#if HAS_PAIRS
    if (type == BFLOAT16) {
        const PairScratch pairs = lay_out_pairs(a, scratch_space(pair_scratch_bytes(a)));
        SHARE_ITEMS(team, i, a->num_items) pair_item(a, &pairs, i, dim);
    } else
#endif
    {
        const Scratch scratch = lay_out(a, (float *)scratch_space(scratch_floats(a) * sizeof(float)));
        SHARE_ITEMS(team, i, a->num_items) do_item(a, &scratch, &a->items[i], dim, type);
    }
    end_piece(team);
    if (!a->num_split_rows) return;
    SHARE_ITEMS(team, i, a->num_split_rows * heads) join_splits(a, &a->split_rows[i / heads], i % heads, dim, type);
    end_piece(team);
}

/* Head sizes that are common get code of their own; others share the general one. head_dim is a multiple of 16. */
#define ATTEND(type)                                           \
    case type:                                                 \
        if (a->head_dim == 128) attend(team, a, 128, type);    \
        else if (a->head_dim == 64) attend(team, a, 64, type); \
        else attend(team, a, a->head_dim, type);               \
        break;

/* Each thread of the team calls it, with `begin_tiles` before. */
static void attend_by_type(Team *team, const Attention *a) {
    switch (a->pool_type) {
        ATTEND(FLOAT32)
        ATTEND(BFLOAT16)
        ATTEND(FLOAT8_E4M3)
        ATTEND(FLOAT8_E5M2)
    }
}

/* ---- what Python calls ---- */

/* The widths in bytes that the caller checks its own declarations against. */
int64_t kvrelay_struct_bytes(void) { return sizeof(Attention) * 10000 + sizeof(Item) * 100 + sizeof(SplitRow); }

void kvrelay_attend(const Attention *a) {
    Team team = {0};
#pragma omp parallel num_threads((int)a->num_threads)
    {
        join_team(&team);
        begin_tiles();
        attend_by_type(&team, a);
        end_tiles();
    }
}

/* Copies the K or V of new tokens to their blocks. `pool` is the layer's keys or values of block 0; `from_token` and
 * `from_head` are the strides of `from`. */
void kvrelay_write(char *pool, const PoolStrides *stride, const char *from, int64_t from_token, int64_t from_head,
                   const int32_t *blocks, const int32_t *slots, int64_t num_tokens, int64_t num_kv_heads,
                   int64_t head_bytes, int64_t element_bytes) {
    for (int64_t token = 0; token < num_tokens; token++) {
        char *to = pool + (blocks[token] * stride->block + slots[token] * stride->token) * element_bytes;
        const char *source = from + token * from_token * element_bytes;
        for (int64_t head = 0; head < num_kv_heads; head++)
            memcpy(to + head * stride->head * element_bytes, source + head * from_head * element_bytes, head_bytes);
    }
}

/* ---- the cut of a step into items ---- */

/* Cuts a step's attention into items: tiles of a chunk's queries per KV head, pieces of a decoding row's keys.
 *
 * The cut of a row depends on the row alone, with one exception: heads of decoding rows are taken together if there is
 * enough work, so that a block is read from end to end.
 */
enum { CHUNK_ROWS = 256 }; /* query tokens times heads of a tile, which packs the keys that it reads */

typedef struct {
    int64_t num_items, num_split_rows, num_partials, max_rows, max_states;
} WorkSize;

typedef struct {
    int64_t cost, index;
} ItemOrder;

static int by_cost(const void *left, const void *right) {
    const ItemOrder *a = left, *b = right;
    if (a->cost != b->cost) return a->cost > b->cost ? -1 : 1;
    return a->index < b->index ? -1 : a->index > b->index;
}

static int is_decode(int64_t query_len, int64_t group) { return query_len == 1 && group <= CHUNK_ROWS; }

static int64_t pieces(int64_t total, int64_t size) { return (total + size - 1) / size; }

/* KV heads that an item of a decoding row takes: as many as leave two items for each thread. */
static int64_t heads_together(int64_t num_kv_heads, int64_t num_pieces, int64_t threads) {
    for (int64_t each = 1; each < num_kv_heads; each++)
        if (num_kv_heads % each == 0 && num_pieces * each >= 2 * threads) return num_kv_heads / each;
    return 1;
}

/* The longest items first, so that no thread begins a long one while the others are done. Returns 0 without memory. */
static int sort_items(Item *items, int64_t count) {
    ItemOrder *order = malloc(count * (sizeof *order + sizeof *items));
    if (!order) return 0;
    int sorted = 1;
    for (int64_t i = 0; i < count; i++) {
        const Item *item = &items[i];
        order[i].cost = (int64_t)(item->key_end - item->key_begin) * (item->query_end - item->query_begin) *
                        (item->head_end - item->head_begin);
        order[i].index = i;
        sorted &= !i || order[i - 1].cost >= order[i].cost;
    }
    if (!sorted) {
        Item *copies = (Item *)(order + count);
        memcpy(copies, items, count * sizeof *items);
        qsort(order, count, sizeof *order, by_cost);
        for (int64_t i = 0; i < count; i++) items[i] = copies[order[i].index];
    }
    free(order);
    return 1;
}

/* Counts into `size`, and fills `items` and `split_rows` if they are not null: call it first without, then with memory
 * for what it counted. Returns 0 without memory. */
int64_t kvrelay_cut_work(const int32_t *query_lens, const int32_t *positions, int64_t num_rows, int64_t num_kv_heads,
                         int64_t group, int64_t threads, Item *items, SplitRow *split_rows, WorkSize *size) {
    const int64_t tile = at_least(1, CHUNK_ROWS / group), wide = num_kv_heads * group;
    int64_t num_pieces = 0;
    for (int64_t row = 0; row < num_rows; row++)
        if (is_decode(query_lens[row], group)) num_pieces += pieces(positions[row] + 1, SPLIT_KEYS);
    const int64_t heads = heads_together(num_kv_heads, num_pieces, threads);
    *size = (WorkSize){0};
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t queries = query_lens[row];
        if (is_decode(queries, group)) continue;
        for (int64_t begin = 0; begin < queries; begin += tile) {
            const int64_t end = at_most(begin + tile, queries);
            size->max_rows = at_least(size->max_rows, padded((end - begin) * group));
            size->max_states = at_least(size->max_states, padded((end - begin) * group));
            for (int64_t head = 0; head < num_kv_heads; head++, size->num_items++)
                if (items)
                    items[size->num_items] =
                        (Item){row, head, head + 1, begin, end, 0, (int32_t)(positions[row] + end), -1};
        }
    }
    for (int64_t row = 0; row < num_rows; row++) {
        if (!is_decode(query_lens[row], group)) continue;
        const int64_t keys = positions[row] + 1, splits = pieces(keys, SPLIT_KEYS);
        size->max_rows = at_least(size->max_rows, padded(group));
        size->max_states = at_least(size->max_states, padded(group) * heads);
        for (int64_t split = 0; split < splits; split++)
            for (int64_t head = 0; head < num_kv_heads; head += heads, size->num_items++)
                if (items) {
                    const int64_t partial = size->num_partials + split * wide + head * group;
                    items[size->num_items] = (Item){row, head, head + heads, 0, 1, split * SPLIT_KEYS,
                                                    at_most((split + 1) * SPLIT_KEYS, keys), splits > 1 ? partial : -1};
                }
        if (splits == 1) continue;
        if (split_rows) split_rows[size->num_split_rows] = (SplitRow){row, splits, size->num_partials};
        size->num_split_rows++;
        size->num_partials += splits * wide;
    }
    return items ? sort_items(items, size->num_items) : 1;
}
