/* Cuts a step's attention into items: tiles of a chunk's queries per KV head, pieces of a decoding row's keys.
 *
 * The cut of a row depends on the row alone, with one exception: heads of decoding rows are taken together if there is
 * enough work, so that a block is read from end to end.
 */
enum { SPLIT_KEYS = 512, CHUNK_ROWS = 256 }; /* keys per piece of a decoding row; query tokens times heads of a tile, which packs the keys that it reads */

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
