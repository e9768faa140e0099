/* Matrix products with operands packed into panels of PANEL columns, for the decoder's weights and for prompt attention.
 *
 * A packed matrix of N columns and K rows is a sequence of panels. A panel holds its columns side by side for each row:
 *   float:     [K][PANEL]
 *   bfloat16:  [K / 2][PANEL][2], pairs of rows, which the CPU multiplies and adds at once; K is padded to K_MULTIPLE
 * so that a product reads its weights as one stream, whatever the number of tokens. Rows are summed one after another in
 * blocks of SUM_BLOCK, whose sums are added in float: the order depends on neither the number of tokens nor the threads.
 */
#pragma once
#include "cpu_vectors.c"

#define PANEL 32
#define VECTORS (PANEL / LANES)
/* Sums kept in registers: TILE_ROWS rows by TILE_VECTORS vectors of columns, or up to WIDE_ROWS rows by a whole panel. */
#define TILE_ROWS (LANES == 16 ? 12 : 6)
#define TILE_VECTORS 2
#define WIDE_ROWS (LANES == 16 ? 12 : 2)
#define SUM_BLOCK 512
#define K_MULTIPLE 32
/* How far ahead a panel is fetched, and into which cache. CPUs with AMX were measured with their own constants. On AMD Zen 4,
 * measured on one long run of panels, a product of up to five rows reads up to a half faster if the hardware's
 * prefetcher alone follows it, and one of more rows a quarter faster if lines are fetched far ahead into the second cache:
 * 4 KiB are used up before they arrive. */
#define PREFETCH_BYTES 4096 /* of integer weights, and of all on CPUs with AMX */
#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
#define PREFETCH_LOCALITY 2
#define PREFETCH_ROWS 6 /* the fewest rows of a product that fetches */
#define PANEL_PREFETCH_BYTES 8192
#else
#define PREFETCH_LOCALITY 3
#define PREFETCH_ROWS 1
#define PANEL_PREFETCH_BYTES PREFETCH_BYTES
#endif

/* A type of products beside FLOAT32 and BFLOAT16: panels of bfloat16 times activations that were widened to float. It is
 * for CPUs that do not multiply bfloat16: they would widen each activation again for every panel, and with 16 registers
 * there is no room to do so. Sums are those of BFLOAT16 on such a CPU, in the same order. */
enum { WIDENED = 10 };

/* Bytes of `count` rows of a panel for products of this type. */
INLINE int64_t panel_bytes(int64_t count, const int type) { return count * PANEL * (type == FLOAT32 ? 4 : 2); }

INLINE int64_t whole_panel_bytes(int64_t num_in, const int type) {
    return panel_bytes(type == BFLOAT16 ? rounded_up(num_in, K_MULTIPLE) : num_in, type);
}

/* sum += low * (low halves of w) + high * (high halves of w), for a pair of bfloat16. */
INLINE vfloat add_pair(vfloat sum, uint32_t pair, vuint w) {
#if defined(__AVX512BF16__)
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)pair), (__m512bh)w);
#else
    const vuint both = pair - (vuint){};
    sum = fused((vfloat)(both << 16), (vfloat)(w << 16), sum);
    return fused((vfloat)(both & 0xffff0000), (vfloat)(w & 0xffff0000), sum);
#endif
}

/* One step over a row of floats or a pair of rows of bfloat16: acc[r] += a[r] . w, for `rows` rows and `vectors` vectors of
 * columns. Rows are addressed from every third one: that takes few enough registers. */
INLINE void add_step(vfloat acc[TILE_ROWS][VECTORS], const char *const a[TILE_ROWS / 3], int64_t row_bytes, const char *panel,
                     const int64_t a_bytes, const int type, const int rows, const int vectors) {
    vuint w[VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) memcpy(&w[v], panel + v * sizeof w[v], sizeof w[v]);
    UNROLL for (int r = 0; r < rows; r++) {
        uint32_t bits = 0;
        memcpy(&bits, a[r / 3] + r % 3 * row_bytes, a_bytes);
        UNROLL for (int v = 0; v < vectors; v++) {
            if (type == BFLOAT16) {
                acc[r][v] = add_pair(acc[r][v], bits, w[v]);
            } else {
                float x;
                memcpy(&x, &bits, sizeof x);
                acc[r][v] = fused(splat(x), (vfloat)w[v], acc[r][v]);
            }
        }
    }
}

/* The second rows of pairs of bfloat16. Two shifts, where GCC would make a mask of them, which takes the register of a sum. */
INLINE vfloat upper_half(vuint pair) {
    pair >>= 16;
#if defined(__AVX2__) && LANES == 8
    __asm__("" : "+x"(pair));
#endif
    return (vfloat)(pair << 16);
}

/* One step over a pair of rows of bfloat16 by widened activations, of which the second counts if a has `a_bytes` for it. */
INLINE void add_widened_step(vfloat acc[TILE_ROWS][VECTORS], const char *const a[TILE_ROWS / 3], int64_t row_bytes,
                             const char *panel, const int64_t a_bytes, const int rows, const int vectors) {
    UNROLL for (int half = 0; half < a_bytes / 4; half++) {
        vfloat w[VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) {
            vuint pair;
            memcpy(&pair, panel + v * sizeof pair, sizeof pair);
            w[v] = half ? upper_half(pair) : (vfloat)(pair << 16);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            float x;
            memcpy(&x, a[r / 3] + r % 3 * row_bytes + half * 4, sizeof x);
            UNROLL for (int v = 0; v < vectors; v++) acc[r][v] = fused(splat(x), w[v], acc[r][v]);
        }
        __asm__ volatile("" ::: "memory"); /* else GCC loads for the next half early, and spills sums for want of registers */
    }
}

/* Bytes of `count` activations of a row in a product of this type. */
INLINE int64_t activation_bytes(int64_t count, const int type) { return count * (type == BFLOAT16 ? 2 : 4); }

/* sums[r] = acc[r], or that times `scales`; or added to sums[r]. */
INLINE void put_sums(vfloat acc[TILE_ROWS][VECTORS], float *sums, int add, const float *scales, const int rows,
                     const int vectors) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) {
            vfloat sum = acc[r][v];
            if (scales) sum *= load((const char *)scales, v * LANES, FLOAT32);
            if (add) sum += load((const char *)sums, r * PANEL + v * LANES, FLOAT32);
            memcpy(sums + r * PANEL + v * LANES, &sum, sizeof sum);
        }
}

/* The same for acc[r] = a[r] . block, for `rows` rows, `vectors` vectors of columns, and `count` of the product's K. */
INLINE void block_of_columns(const char *a, int64_t row_bytes, const char *block, int64_t count, float *sums, int add,
                             const float *scales, const int type, const int rows, const int vectors) {
    vfloat acc[TILE_ROWS][VECTORS] = {};
    const int64_t steps = type == FLOAT32 ? count : count / 2;
    const int64_t a_bytes = activation_bytes(type == FLOAT32 ? 1 : 2, type);
    const char *thirds[TILE_ROWS / 3];
    UNROLL for (int r = 0; r < TILE_ROWS / 3; r++) thirds[r] = a + 3 * r * row_bytes;
    for (int64_t step = 0; step < steps; step++, block += sizeof(vfloat) * VECTORS) {
        if (rows >= PREFETCH_ROWS)
            UNROLL for (int line = 0; line < vectors * (int)sizeof(vfloat); line += 64)
                __builtin_prefetch(block + PANEL_PREFETCH_BYTES + line, 0, PREFETCH_LOCALITY);
        if (type == WIDENED) add_widened_step(acc, thirds, row_bytes, block, a_bytes, rows, vectors);
        else add_step(acc, thirds, row_bytes, block, a_bytes, type, rows, vectors);
        UNROLL for (int r = 0; r < TILE_ROWS / 3; r++) thirds[r] += a_bytes;
    }
    if (type == BFLOAT16 && (count & 1)) add_step(acc, thirds, row_bytes, block, 2, type, rows, vectors);
    if (type == WIDENED && (count & 1)) add_widened_step(acc, thirds, row_bytes, block, 4, rows, vectors);
    put_sums(acc, sums, add, scales, rows, vectors);
}

/* The same for a whole panel, of which each `run` of K has its own scales, PANEL after those of the one before. */
INLINE void block_of_rows(const char *a, int64_t row_bytes, const char *block, int64_t count, float *sums, int add,
                          const float *scales, int64_t run, const int type, const int rows) {
    const int vectors = rows <= WIDE_ROWS ? VECTORS : TILE_VECTORS;
    for (int64_t k = 0; k < count; k += run) {
        const int64_t some = at_most(run, count - k);
        UNROLL for (int v = 0; v < VECTORS; v += vectors)
            block_of_columns(a, row_bytes, block + v * sizeof(vfloat), some, sums + v * LANES, add || k > 0,
                             scales ? scales + v * LANES : NULL, type, rows, vectors);
        a += activation_bytes(some, type);
        block += panel_bytes(some, type);
        if (scales) scales += PANEL;
    }
}

#define ROWS_CASE(n) \
    case n: block_of_rows(a, row_bytes, block, count, sums, add, scales, run, type, n); return;

INLINE void block_sums(const char *a, int64_t row_bytes, const char *block, int64_t count, float *sums, int add,
                       const float *scales, int64_t run, const int type, int rows) {
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
#if LANES == 16
        ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12)
#endif
        default: __builtin_unreachable();
    }
}

static void block_sums_float32(const char *a, int64_t row_bytes, const char *block, int64_t count, float *sums, int add,
                               const float *scales, int64_t run, int rows) {
    block_sums(a, row_bytes, block, count, sums, add, scales, run, FLOAT32, rows);
}

static void block_sums_bfloat16(const char *a, int64_t row_bytes, const char *block, int64_t count, float *sums, int add,
                                const float *scales, int64_t run, int rows) {
    block_sums(a, row_bytes, block, count, sums, add, scales, run, BFLOAT16, rows);
}

static void block_sums_widened(const char *a, int64_t row_bytes, const char *block, int64_t count, float *sums, int add,
                               const float *scales, int64_t run, int rows) {
    block_sums(a, row_bytes, block, count, sums, add, scales, run, WIDENED, rows);
}

#include "cpu_tiles.c"

/* Whether bfloat16 activations are widened before a product. */
#if defined(__AVX512BF16__) || HAS_TILES
#define WIDENS_ACTIVATIONS 0
#else
#define WIDENS_ACTIVATIONS 1
#endif

/* sums[m] = a[m] . block, or that of each `run` of K times its PANEL of `scales`; or added to sums[m]; for any number of
 * rows and `count` of the product's K. Rows are taken in tiles of about the same height. If `padded`, a and sums have room
 * for rows up to a multiple of TILE_ROOM, so that AMX may take them. */
static void add_block(const char *a, int64_t row_bytes, int64_t num_rows, const char *block, int64_t count, float *sums,
                      int add, const float *scales, int64_t run, const int type, int padded) {
    if (type == BFLOAT16 && padded && takes_tiles(num_rows, count) && takes_tiles(num_rows, at_most(run, count))) {
        for (int64_t k = 0; k < count; k += run)
            add_block_by_tiles(a + activation_bytes(k, type), row_bytes, num_rows, block + panel_bytes(k, type),
                               at_most(run, count - k), sums, add || k > 0, scales ? scales + k / run * PANEL : NULL);
        return;
    }
    int64_t tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t first = 0; first < num_rows; tiles--) {
        const int rows = (int)((num_rows - first + tiles - 1) / tiles);
        const char *from = a + first * row_bytes;
        if (type == BFLOAT16) block_sums_bfloat16(from, row_bytes, block, count, sums + first * PANEL, add, scales, run, rows);
        else if (type == WIDENED) block_sums_widened(from, row_bytes, block, count, sums + first * PANEL, add, scales, run, rows);
        else block_sums_float32(from, row_bytes, block, count, sums + first * PANEL, add, scales, run, rows);
        first += rows;
    }
}

/* Turns AMX off if it does not give the sums of the vector units, and returns whether it did. Small integers have exact
 * sums in any order. */
int64_t kvrelay_check_tiles(void) {
    enum { CHECKED_ROWS = 40, ROOM = 64, COUNT = 96 };
    uint16_t a[ROOM * COUNT], block[COUNT * PANEL];
    float by_tiles[ROOM * PANEL], by_vectors[ROOM * PANEL];
    if (!tiles_are_on) return 1;
    for (int i = 0; i < ROOM * COUNT; i++) a[i] = (uint16_t)(0x3f80 + (i * 7 % 5) * 0x80);
    for (int i = 0; i < COUNT * PANEL; i++) block[i] = (uint16_t)(0xbf80 + (i * 11 % 3) * 0x80 - (i * 13 % 2) * 0x8000);
    begin_tiles();
    for (int add = 0; add < 2; add++)
        add_block((const char *)a, COUNT * 2, CHECKED_ROWS, (const char *)block, COUNT, by_tiles, add, NULL, COUNT, BFLOAT16, 1);
    end_tiles();
    for (int add = 0; add < 2; add++)
        add_block((const char *)a, COUNT * 2, CHECKED_ROWS, (const char *)block, COUNT, by_vectors, add, NULL, COUNT, BFLOAT16, 0);
    tiles_are_on = memcmp(by_tiles, by_vectors, CHECKED_ROWS * PANEL * sizeof(float)) == 0;
    return tiles_are_on;
}

/* The instructions of products of bfloat16, for logs. */
const char *kvrelay_instructions(void) {
#if defined(__AVX512BF16__)
    return tiles_are_on ? "AMX and AVX512-BF16" : "AVX512-BF16";
#elif LANES == 16
    return "AVX512";
#else
    return "vectors of 8 floats";
#endif
}
