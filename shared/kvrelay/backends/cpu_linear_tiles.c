/* Linear layers of bfloat16 weights by AMX. On a CPU with AMX, loads limit a product as soon as weights are reused, so:
 *
 *   activations are in tiles that lie one after another, written so by the piece before or copied once: rows of 4 KiB
 *   would compete for few cache sets
 *   K is cut into blocks of TILE_K, of which a panel's weights and TILE_ROOM rows of activations fit into the L1 cache
 *   the weights of the next block are fetched while the current one is multiplied, a few lines at each step
 *   results are put out while the next rows are multiplied
 *   if the activations exceed their share of the L2 cache, several panels take a block of K before the next block
 *
 * A sum over K is continued from block to block, so it does not depend on how K is cut.
 */
#if HAS_TILES
#define TILE_K 256
#define TILED_ROWS 512 /* tokens that share a block of weights, at most */
#define TILED_PANELS 4 /* panels that share a block of activations, at most */
#if defined(EMULATE_TILES)
#define L2_SHARE (1 << 15)
#else
#define L2_SHARE (1 << 20) /* bytes of activations that stay in the L2 cache */
#endif

/* Copies rows [first, first + TILE_UNIT) of x [tokens, num_in] into tiles, see `tile_place`. */
INLINE void pack_activations(const char *x, int64_t first, int64_t num_in, char *packed) {
    const char *from = x + first * num_in * 2;
    char *to = packed + first * num_in * 2;
    for (int64_t k = 0; k < num_in; k += TILE_DEPTH)
        for (int r = 0; r < TILE_UNIT; r++, to += 64) memcpy(to, from + (r * num_in + k) * 2, 64);
}

/* A panel's sums for some tokens, on their way to the output. Their rows are put out while later ones are multiplied, a few
 * at each step of a product, because the vector units are idle then; their lines of the output are asked for one step of
 * TILE_ROOM rows earlier. */
typedef struct {
    const Linear *l;
    const float *sums; /* [num_rows, PANEL] */
    char *out;
    int64_t first, num_rows, panel; /* first: the token of row 0 */
    int64_t asked, summed, put;     /* rows of which that is done */
} Results;

INLINE void ask_for_rows(Results *r, int64_t count, const int mode) {
    if (mode == GATED_TILES) return; /* the CPU sees that their lines follow each other */
    const int64_t bytes = mode == ADD_FLOAT || mode == STORE_FLOAT ? 4 : 2, width = result_width(r->l, mode) * bytes;
    const int64_t wide = (is_gated(mode) ? PANEL / 2 : PANEL) * bytes, end = at_most(r->num_rows, r->asked + count);
    for (; r->asked < end; r->asked++)
        for (int64_t byte = 0; byte < wide; byte += 64)
            __builtin_prefetch(r->out + (r->first + r->asked) * width + r->panel * wide + byte, 1, 3);
}

INLINE void put_rows(Results *r, int64_t count, const int mode) {
    const int64_t end = at_most(r->summed, r->put + count);
    for (; r->put < end; r->put++) put_row(r->l, r->sums + r->put * PANEL, r->first + r->put, r->panel, r->out, mode, BFLOAT16);
}

/* sums = a . block for one or two packed tiles of rows; or added to sums. Each step along K also fetches `ahead_bytes` of
 * weights from `ahead` on, and puts out some `results` of earlier rows unless they are null. */
INLINE void tiled_rows(const char *a, int64_t row_bytes, const char *block, int64_t count, float *sums, int add,
                       const char *ahead, int64_t ahead_bytes, Results *results, const int mode, const int heights) {
    const int64_t each_step = (TILE_ROOM * TILE_DEPTH + count - 1) / count;
    begin_sums(sums, add, heights);
    for (int64_t k = 0; k < count; k += TILE_DEPTH, a += TILE_BYTES, ahead += ahead_bytes) {
        for (int64_t line = 0; line < ahead_bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        add_tiles(a, a + TILE_UNIT * row_bytes, 64, block + k * PANEL * 2, heights);
        if (results) {
            ask_for_rows(results, each_step, mode);
            put_rows(results, each_step, mode);
        }
    }
    end_sums(sums, heights);
}

/* Columns of `num_panels` panels, for `num_rows` tokens from `first` on. */
INLINE void tiled_panels(const Linear *l, const char *packed, int64_t first, int64_t num_rows, int64_t panel,
                         int64_t num_panels, char *out, const int mode) {
    float sums[TILED_PANELS][TILED_ROWS * PANEL] __attribute__((aligned(64)));
    const int64_t row_bytes = l->num_in * 2, size = panel_bytes(l->num_in, BFLOAT16);
    const int64_t bands = rounded_up(num_rows, TILE_ROOM) / TILE_ROOM;
    const int64_t ahead_bytes = rounded_up(panel_bytes(TILE_DEPTH, BFLOAT16) / bands, 64);
    for (int64_t k = 0; k < l->num_in; k += TILE_K)
        for (int64_t p = 0; p < num_panels; p++) {
            const int64_t count = at_most(TILE_K, l->num_in - k), last = k + count == l->num_in;
            const char *block = l->panels + (panel + p) * size + panel_bytes(k, BFLOAT16);
            const char *ahead = p + 1 < num_panels ? block + size : block - p * size + panel_bytes(count, BFLOAT16);
            Results results = {l, sums[p], out, first, num_rows, panel + p, 0, 0, 0};
            for (int64_t m = 0; m < num_rows; m += TILE_ROOM, ahead += ahead_bytes * (count / TILE_DEPTH)) {
                const char *a = packed + (first + m) * row_bytes + k * TILE_UNIT * 2;
                const int64_t rows = at_most(TILE_ROOM, num_rows - m);
                float *to = sums[p] + m * PANEL;
#define TILED_ROWS_OF(results, heights) \
    tiled_rows(a, row_bytes, block, count, to, k > 0, ahead, ahead_bytes, results, mode, heights)
                if (!last && rows > TILE_UNIT) TILED_ROWS_OF(NULL, 2);
                else if (!last) TILED_ROWS_OF(NULL, 1);
                else if (rows > TILE_UNIT) TILED_ROWS_OF(&results, 2);
                else TILED_ROWS_OF(&results, 1);
                if (last) results.summed = m + rows;
            }
            put_rows(&results, num_rows, mode);
        }
}

#define TILED_PANELS_CASE(mode) \
    case mode: tiled_panels(l, packed, first, num_rows, panel, num_panels, out, mode); break;

static void tiled_item(const Linear *l, const char *packed, int64_t first, int64_t num_rows, int64_t panel,
                       int64_t num_panels, char *out, int mode) {
    switch (mode) {
        TILED_PANELS_CASE(STORE) TILED_PANELS_CASE(STORE_FLOAT) TILED_PANELS_CASE(ADD_FLOAT) TILED_PANELS_CASE(GATED)
        TILED_PANELS_CASE(GATED_TILES)
    }
}

/* As `linear`, if K is a multiple of TILE_DEPTH and x has room for a multiple of TILE_ROOM tokens, or is in tiles, which
 * it is if `packed` is x. */
static void linear_by_tiles(Team *team, const Linear *l, const char *x, int64_t num_tokens, char *out, int mode, char *packed) {
    const int64_t num_panels = rounded_up(l->num_out, PANEL) / PANEL, threads = atomic_load_explicit(&team->size, memory_order_relaxed);
    const int64_t blocks = rounded_up(num_tokens, TILED_ROWS) / TILED_ROWS;
    const int64_t rows = rounded_up((num_tokens + blocks - 1) / blocks, TILE_ROOM);
    /* A thread takes groups of panels, of which there are at least four for each thread. */
    const int64_t together = at_least(1, at_most(TILED_PANELS, num_panels / (4 * threads)));
    const int64_t groups = (num_panels + together - 1) / together;
    const int64_t at_once = rows * l->num_in * 2 > L2_SHARE ? together : 1;
    if (packed != x) {
        SHARE_ITEMS(team, tile, rounded_up(num_tokens, TILE_UNIT) / TILE_UNIT)
            pack_activations(x, tile * TILE_UNIT, l->num_in, packed);
        end_piece(team);
    }
    SHARE_ITEMS(team, item, blocks * groups) {
        const int64_t first = item / groups * rows, some = at_most(rows, num_tokens - first);
        const int64_t begin = item % groups * together, end = at_most(num_panels, begin + together);
        for (int64_t panel = begin; some > 0 && panel < end; panel += at_once)
            tiled_item(l, packed, first, some, panel, at_most(at_once, end - panel), out, mode);
    }
    end_piece(team);
}
#else
static void linear_by_tiles(Team *team, const Linear *l, const char *x, int64_t num_tokens, char *out, int mode, char *packed) {
    (void)team, (void)l, (void)x, (void)num_tokens, (void)out, (void)mode, (void)packed;
}
#endif
