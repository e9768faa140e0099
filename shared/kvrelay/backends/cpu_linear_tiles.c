/* Linear layers of bfloat16 weights by AMX. On a CPU with AMX, loads limit a product as soon as weights are reused, so:
 *
 *   activations are copied once into tiles that lie one after another: rows of 4 KiB would compete for few cache sets
 *   K is cut into blocks of TILE_K, of which a panel's weights and TILE_ROOM rows of activations fit into the L1 cache
 *   the weights of the next block are fetched while the current one is multiplied, a few lines at each step
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

/* Copies rows [first, first + TILE_UNIT) of x [tokens, num_in] into tiles. */
INLINE void pack_activations(const char *x, int64_t first, int64_t num_in, char *packed) {
    const char *from = x + first * num_in * 2;
    char *to = packed + first * num_in * 2;
    for (int64_t k = 0; k < num_in; k += TILE_DEPTH)
        for (int r = 0; r < TILE_UNIT; r++, to += 64) memcpy(to, from + (r * num_in + k) * 2, 64);
}

/* Asks for the lines of results before they are written. */
INLINE void fetch_results(const Linear *l, int64_t first, int64_t num_rows, int64_t panel, const char *out, const int mode) {
    const int64_t bytes = mode == ADD_FLOAT || mode == STORE_FLOAT ? 4 : 2;
    const int64_t wide = (mode == GATED ? PANEL / 2 : PANEL) * bytes, width = result_width(l, mode) * bytes;
    for (int64_t m = first; m < first + num_rows; m++)
        for (int64_t byte = 0; byte < wide; byte += 64) __builtin_prefetch(out + m * width + panel * wide + byte, 1, 3);
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
            for (int64_t m = 0; m < num_rows; m += TILE_ROOM, ahead += ahead_bytes * (count / TILE_DEPTH)) {
                const char *a = packed + (first + m) * row_bytes + k * TILE_UNIT * 2;
                const int64_t rows = at_most(TILE_ROOM, num_rows - m);
                float *to = sums[p] + m * PANEL;
                if (last) fetch_results(l, first + m, rows, panel + p, out, mode);
                if (rows > TILE_UNIT) tile_sums(a, row_bytes, block, count, to, k > 0, ahead, ahead_bytes, 1, 2);
                else tile_sums(a, row_bytes, block, count, to, k > 0, ahead, ahead_bytes, 1, 1);
                for (int64_t r = 0; last && r < rows; r++)
                    put_row(l, to + r * PANEL, first + m + r, panel + p, out, mode, BFLOAT16);
            }
        }
}

#define TILED_PANELS_CASE(mode) \
    case mode: tiled_panels(l, packed, first, num_rows, panel, num_panels, out, mode); break;

static void tiled_item(const Linear *l, const char *packed, int64_t first, int64_t num_rows, int64_t panel,
                       int64_t num_panels, char *out, int mode) {
    switch (mode) {
        TILED_PANELS_CASE(STORE) TILED_PANELS_CASE(STORE_FLOAT) TILED_PANELS_CASE(ADD_FLOAT) TILED_PANELS_CASE(GATED)
    }
}

/* As `linear`, if K is a multiple of TILE_DEPTH and x has room for a multiple of TILE_ROOM tokens. */
static void linear_by_tiles(Team *team, const Linear *l, const char *x, int64_t num_tokens, char *out, int mode, char *packed) {
    const int64_t num_panels = rounded_up(l->num_out, PANEL) / PANEL, threads = atomic_load_explicit(&team->size, memory_order_relaxed);
    const int64_t blocks = rounded_up(num_tokens, TILED_ROWS) / TILED_ROWS;
    const int64_t rows = rounded_up((num_tokens + blocks - 1) / blocks, TILE_ROOM);
    /* A thread takes groups of panels, of which there are at least four for each thread. */
    const int64_t together = at_least(1, at_most(TILED_PANELS, num_panels / (4 * threads)));
    const int64_t groups = (num_panels + together - 1) / together;
    const int64_t at_once = rows * l->num_in * 2 > L2_SHARE ? together : 1;
    SHARE_ITEMS(team, tile, rounded_up(num_tokens, TILE_UNIT) / TILE_UNIT)
        pack_activations(x, tile * TILE_UNIT, l->num_in, packed);
    end_piece(team);
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
