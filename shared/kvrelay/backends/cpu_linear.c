/* Linear layers of the decoder: activations [tokens, num_in] times weights packed in panels (see cpu_panels.c), which are
 * of the activations' type or integers with scales (see cpu_integers.c).
 */
#pragma once
#include "cpu_panels.c"
#include "cpu_team.c"

#define ROWS_AT_ONCE 384 /* tokens that share a block of weights while it lies in the cache */

/* Formats of weights: those of elements, FLOAT32 and BFLOAT16, and the integers below, numbered as in fused/panels.py. */
enum { INT8 = 8, INT4 = 9 };

/* A type of scales that no element has: IEEE half precision. */
enum { FLOAT16 = 4 };

typedef struct {
    const char *panels;
    const char *scales;  /* [panels][num_in / group, rounded up][PANEL] of integer weights, or null */
    const int8_t *zeros; /* of the scales' shape: what is subtracted from the integers, or null */
    const float *bias;   /* [panels * PANEL], or null */
    int64_t num_out, num_in, format;
    int64_t group;      /* rows of K that share a scale and a zero point */
    int64_t scale_type; /* FLOAT32, BFLOAT16 or FLOAT16 */
} Linear;

INLINE void put(char *out, int64_t at, float x, const int type) {
    if (type == FLOAT32) {
        ((float *)out)[at] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    ((uint16_t *)out)[at] = x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

#include "cpu_integers.c"

/* ---- a panel's results ---- */

/* What becomes of results: stored in the activations' type or in float, added to floats, or silu(gate) * up stored in the
 * activations' type, where a panel's first half are columns of gate and its second half those of up. GATED_TILES stores
 * them in the tiles that `linear_by_tiles` takes as its input. */
enum { STORE, STORE_FLOAT, ADD_FLOAT, GATED, GATED_TILES };

INLINE int is_gated(const int mode) { return mode == GATED || mode == GATED_TILES; }

INLINE vfloat silu(vfloat x, const int type) {
#if LANES == 16
    if (type == BFLOAT16) {
        const vfloat divisor = 1.0f + rough_exp((vfloat)_mm512_min_ps(_mm512_set1_ps(87.0f), (__m512)-x));
        const vfloat inverse = (vfloat)_mm512_rcp14_ps((__m512)divisor);
        return x * (inverse * fused(-divisor, inverse, splat(2.0f)));
    }
#endif
    return x / (1.0f + vexp(choose(x < splat(-87.0f), splat(87.0f), -x)));
}

INLINE void put_vector(char *out, int64_t at, vfloat x, const int mode, const int type) {
    if (mode == ADD_FLOAT) store(out, at, x + load(out, at, FLOAT32), FLOAT32);
    else store(out, at, x, mode == STORE_FLOAT ? FLOAT32 : type);
}

INLINE int64_t result_width(const Linear *l, const int mode) { return is_gated(mode) ? l->num_out / 2 : l->num_out; }

INLINE vfloat with_bias(const Linear *l, const float *sums, int64_t panel, int64_t column) {
    const vfloat sum = load((const char *)sums, column, FLOAT32);
    return l->bias ? sum + load((const char *)l->bias, panel * PANEL + column, FLOAT32) : sum;
}

INLINE void put_row(const Linear *l, const float *sums, int64_t row, int64_t panel, char *out, const int mode, const int type) {
    const int64_t wide = is_gated(mode) ? PANEL / 2 : PANEL, width = result_width(l, mode);
    const int64_t at = mode == GATED_TILES ? tile_place(row, panel * wide, width) : row * width + panel * wide;
    const int64_t count = at_most(wide, width - panel * wide);
    vfloat results[VECTORS];
    UNROLL for (int64_t v = 0; v < wide / LANES; v++) {
        results[v] = with_bias(l, sums, panel, v * LANES);
        if (is_gated(mode)) results[v] = silu(results[v], type) * with_bias(l, sums, panel, PANEL / 2 + v * LANES);
    }
    if (count == wide) {
        UNROLL for (int64_t v = 0; v < wide / LANES; v++) put_vector(out, at + v * LANES, results[v], mode, type);
        return;
    }
    float x[PANEL];
    memcpy(x, results, sizeof results);
    for (int64_t c = 0; c < count; c++) {
        if (mode == ADD_FLOAT) ((float *)out)[at + c] += x[c];
        else put(out, at + c, x[c], mode == STORE_FLOAT ? FLOAT32 : type);
    }
}

/* ---- products ---- */

/* Columns of one panel, for `num_rows` tokens from `first` on. `type` is that of the layer's activations; those of x may
 * be widened. */
INLINE void linear_panel(const Linear *l, const char *x, int64_t first, int64_t num_rows, int64_t panel, char *out,
                         const int mode, const int type, int padded) {
    const int product = type == BFLOAT16 && WIDENS_ACTIVATIONS ? WIDENED : type;
    float sums[ROWS_AT_ONCE * PANEL] __attribute__((aligned(64)));
    char widened[SUM_BLOCK * PANEL * 4] __attribute__((aligned(64)));
    float scales[GROUPS_AT_ONCE * PANEL] __attribute__((aligned(64)));
    const int64_t row_bytes = activation_bytes(l->num_in, product), run = summed_at_once(l);
    const int64_t step = run * at_most(GROUPS_AT_ONCE, SUM_BLOCK / run);
    const char *weights = panel_of(l, panel, type);
    x += first * row_bytes;
    if (takes_few_rows(l, num_rows, padded, type)) {
        few_rows(l, x, row_bytes, num_rows, panel, sums);
    } else {
        for (int64_t k = 0; k < l->num_in; k += step) {
            const int64_t count = at_most(step, l->num_in - k);
            const char *block = weights + stored_bytes(k, l->format);
            if (l->scales) {
                widen_block(l, block, k, panel, count, widened, scales, type);
                block = widened;
            }
            add_block(x + activation_bytes(k, product), row_bytes, num_rows, block, count, sums, k > 0,
                      l->scales ? scales : NULL, run, product, padded);
        }
    }
    for (int64_t m = 0; m < num_rows; m++) put_row(l, sums + m * PANEL, first + m, panel, out, mode, type);
}

#define LINEAR_PANEL(mode, type) \
    case mode: linear_panel(l, x, first, num_rows, panel, out, mode, type, padded); break;

static void linear_item(const Linear *l, const char *x, int64_t first, int64_t num_rows, int64_t panel, char *out, int mode,
                        int type, int padded) {
    if (type == BFLOAT16)
        switch (mode) {
            LINEAR_PANEL(STORE, BFLOAT16) LINEAR_PANEL(STORE_FLOAT, BFLOAT16)
            LINEAR_PANEL(ADD_FLOAT, BFLOAT16) LINEAR_PANEL(GATED, BFLOAT16)
        }
    else
        switch (mode) {
            LINEAR_PANEL(STORE, FLOAT32) LINEAR_PANEL(STORE_FLOAT, FLOAT32)
            LINEAR_PANEL(ADD_FLOAT, FLOAT32) LINEAR_PANEL(GATED, FLOAT32)
        }
}

/* Memory of this thread for `bytes` of copied activations, kept until its next call: new pages cost more than the
 * copy. */
static char *copy_space(int64_t bytes) {
    static __thread char *space;
    static __thread int64_t space_bytes;
    if (bytes > space_bytes) {
        free(space);
        space = aligned_alloc(64, (size_t)rounded_up(bytes, 64));
        if (!space) abort(); /* as torch does when memory for a step is missing */
        space_bytes = bytes;
    }
    return space;
}

/* The memory that `linear` needs for layers of up to `num_in`: for widened activations, or for tiles of them. Null if it
 * reads them where they are. */
static char *space_to_widen(int64_t num_tokens, int64_t num_in, int type) {
    if (type == BFLOAT16 && WIDENS_ACTIVATIONS) return copy_space(num_tokens * num_in * (int64_t)sizeof(float));
    if (type == BFLOAT16 && takes_tiles(num_tokens, TILE_DEPTH)) return copy_space(rounded_up(num_tokens, TILE_ROOM) * num_in * 2);
    return NULL;
}

static void widen_activations(Team *team, const char *x, int64_t count, char *widened) {
    enum { ITEM = 4096 };
    SHARE_ITEMS(team, item, (count + ITEM - 1) / ITEM) {
        int64_t i = item * ITEM;
        const int64_t end = at_most(count, i + ITEM);
        for (; i + LANES <= end; i += LANES) store(widened, i, load(x, i, BFLOAT16), FLOAT32);
        for (; i < end; i++) ((float *)widened)[i] = element(x, i, BFLOAT16);
    }
    end_piece(team);
}

#include "cpu_linear_tiles.c"

/* Whether `linear_by_tiles` computes a layer's product for so many tokens, if their buffers have room. */
static int is_by_tiles(const Linear *l, int64_t num_tokens, int type) {
    return type == BFLOAT16 && l->format == BFLOAT16 && takes_tiles(num_tokens, l->num_in);
}

/* out = x . weights + bias, by `mode`; each thread of the team calls it, with `begin_tiles` before. If `padded`, x has room
 * for a multiple of TILE_ROOM tokens. `copies` is what `space_to_widen` gave one of them, or x if x is in tiles. */
static void linear(Team *team, const Linear *l, const char *x, int64_t num_tokens, char *out, int mode, int type, int padded,
                   char *copies) {
    const int64_t num_panels = rounded_up(l->num_out, PANEL) / PANEL;
    if (padded && is_by_tiles(l, num_tokens, type)) {
        linear_by_tiles(team, l, x, num_tokens, out, mode, copies);
        return;
    }
    const int64_t items = rounded_up(num_tokens, ROWS_AT_ONCE) / ROWS_AT_ONCE * num_panels;
    if (type == BFLOAT16 && WIDENS_ACTIVATIONS) {
        widen_activations(team, x, num_tokens * l->num_in, copies);
        x = copies;
    }
    SHARE_RUNS(team, item, items) {
        const int64_t first = item / num_panels * ROWS_AT_ONCE, rows = at_most(ROWS_AT_ONCE, num_tokens - first);
        linear_item(l, x, first, rows, item % num_panels, out, mode, type, padded);
    }
    end_piece(team);
}
