/* The products of cpu_panels.c by AMX, the matrix unit of some x86 CPUs: 32 rows by 32 columns at a time.
 *
 * Compiled if the compiler's target has AMX, and used if Linux grants the process its registers. With EMULATE_TILES the
 * instructions are plain C, which tests run on any CPU.
 */
#define TILE_UNIT 16 /* rows of a tile; a tile's row has 64 bytes */
#define TILE_DEPTH 32 /* bfloat16 of a tile's row: what a product of tiles sums */
#define TILE_BYTES (TILE_UNIT * 64)
#define TILE_ROOM (2 * TILE_UNIT) /* rows that products take at a time, so that each load serves two of them */
#define TILE_MIN_ROWS 2 /* one row is bound by reading the weights, which the vector units do as fast */

#if defined(EMULATE_TILES)
typedef struct {
    unsigned char row[TILE_UNIT][64];
} EmulatedTile;
static __thread EmulatedTile emulated_tiles[8];

static void emulate_load(int tile, const char *from, int64_t stride) {
    for (int r = 0; r < TILE_UNIT; r++) memcpy(emulated_tiles[tile].row[r], from + r * stride, 64);
}

static void emulate_store(int tile, char *to, int64_t stride) {
    for (int r = 0; r < TILE_UNIT; r++) memcpy(to + r * stride, emulated_tiles[tile].row[r], 64);
}

static float emulate_widen(const unsigned char *bfloat) {
    uint32_t bits = (uint32_t)bfloat[0] << 16 | (uint32_t)bfloat[1] << 24;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static int64_t emulated_dots;

/* For tests: the number of products of tiles until now. */
int64_t kvrelay_emulated_dots(void) { return emulated_dots; }

static void emulate_dot(int sums, int a, int b) {
    emulated_dots++;
    for (int m = 0; m < TILE_UNIT; m++)
        for (int n = 0; n < TILE_UNIT; n++) {
            float sum;
            memcpy(&sum, emulated_tiles[sums].row[m] + 4 * n, sizeof sum);
            for (int k = 0; k < TILE_DEPTH; k++)
                sum = fused_one(emulate_widen(emulated_tiles[a].row[m] + 2 * k),
                                emulate_widen(emulated_tiles[b].row[k / 2] + 4 * n + k % 2 * 2), sum);
            memcpy(emulated_tiles[sums].row[m] + 4 * n, &sum, sizeof sum);
        }
}

#define HAS_TILES 1
#define TILE_ZERO(tile) memset(&emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define TILE_LOAD(tile, from, stride) emulate_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulate_store(tile, (char *)(to), stride)
#define TILE_DOT(sums, a, b) emulate_dot(sums, a, b)
static int may_use_tiles(void) { return 1; }
static void begin_tiles(void) {}
static void end_tiles(void) {}

#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_DOT(sums, a, b) _tile_dpbf16ps(sums, a, b)
enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

/* Linux grants the registers to all threads of a process, once it has asked. */
static int may_use_tiles(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0; }

/* Sets up all eight tiles for this thread. */
static void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = TILE_UNIT;
    _tile_loadconfig(&config);
}

/* Idle registers would be saved at every switch of threads. */
static void end_tiles(void) { _tile_release(); }

#else
#define HAS_TILES 0
static int may_use_tiles(void) { return 0; }
static void begin_tiles(void) {}
static void end_tiles(void) {}
#endif

static int tiles_are_on;

__attribute__((constructor)) static void ask_for_tiles(void) { tiles_are_on = may_use_tiles(); }

/* Whether products go through AMX. */
int64_t kvrelay_tiles(void) { return tiles_are_on; }

/* Turns AMX off or on again, for checks; returns whether it is on. */
int64_t kvrelay_use_tiles(int64_t on) { return tiles_are_on = on && may_use_tiles(); }

static int takes_tiles(int64_t num_rows, int64_t count) {
    return HAS_TILES && tiles_are_on && num_rows >= TILE_MIN_ROWS && count % TILE_DEPTH == 0;
}

/* Where an activation is, in elements, if [tokens, width] of them are in tiles: [tokens / TILE_UNIT][width / TILE_DEPTH]
 * tiles of TILE_UNIT rows. TILE_DEPTH columns of a token are contiguous. */
INLINE int64_t tile_place(int64_t token, int64_t column, int64_t width) {
    return token / TILE_UNIT * TILE_UNIT * width + column / TILE_DEPTH * TILE_UNIT * TILE_DEPTH +
           token % TILE_UNIT * TILE_DEPTH + column % TILE_DEPTH;
}

#if HAS_TILES
/* A product of one or two tiles of rows by a panel begins from zero or, if `add`, from `sums`. */
INLINE void begin_sums(const float *sums, int add, const int heights) {
    const int64_t sums_bytes = PANEL * sizeof *sums;
    if (add) {
        TILE_LOAD(0, (const char *)sums, sums_bytes);
        TILE_LOAD(1, (const char *)(sums + TILE_UNIT), sums_bytes);
        if (heights == 2) {
            TILE_LOAD(2, (const char *)(sums + TILE_UNIT * PANEL), sums_bytes);
            TILE_LOAD(3, (const char *)(sums + TILE_UNIT * PANEL + TILE_UNIT), sums_bytes);
        }
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        if (heights == 2) {
            TILE_ZERO(2);
            TILE_ZERO(3);
        }
    }
}

/* Adds TILE_DEPTH of K. Rows of a tile of activations are `stride` bytes apart, the second tile begins at `second`. */
INLINE void add_tiles(const char *first, const char *second, int64_t stride, const char *block, const int heights) {
    TILE_LOAD(4, first, stride);
    TILE_LOAD(6, block, PANEL * 4);
    TILE_LOAD(7, block + 64, PANEL * 4);
    TILE_DOT(0, 4, 6);
    TILE_DOT(1, 4, 7);
    if (heights == 2) {
        TILE_LOAD(5, second, stride);
        TILE_DOT(2, 5, 6);
        TILE_DOT(3, 5, 7);
    }
}

INLINE void end_sums(float *sums, const int heights) {
    const int64_t sums_bytes = PANEL * sizeof *sums;
    TILE_STORE(0, sums, sums_bytes);
    TILE_STORE(1, sums + TILE_UNIT, sums_bytes);
    if (heights == 2) {
        TILE_STORE(2, sums + TILE_UNIT * PANEL, sums_bytes);
        TILE_STORE(3, sums + TILE_UNIT * PANEL + TILE_UNIT, sums_bytes);
    }
}

/* sums = a . block for one or two tiles of rows; or added to sums. */
INLINE void tile_sums(const char *a, int64_t row_bytes, const char *block, int64_t count, float *sums, int add, const int heights) {
    begin_sums(sums, add, heights);
    for (int64_t k = 0; k < count; k += TILE_DEPTH)
        add_tiles(a + k * 2, a + TILE_UNIT * row_bytes + k * 2, row_bytes, block + k * PANEL * 2, heights);
    end_sums(sums, heights);
}

static void add_block_by_tiles(const char *a, int64_t row_bytes, int64_t num_rows, const char *block, int64_t count,
                               float *sums, int add, const float *scales) {
    float scaled[TILE_ROOM * PANEL] __attribute__((aligned(64)));
    for (int64_t first = 0; first < num_rows; first += TILE_ROOM) {
        const char *from = a + first * row_bytes;
        float *to = scales ? scaled : sums + first * PANEL;
        if (num_rows - first > TILE_UNIT) tile_sums(from, row_bytes, block, count, to, add && !scales, 2);
        else tile_sums(from, row_bytes, block, count, to, add && !scales, 1);
        for (int64_t m = first; scales && m < at_most(num_rows, first + TILE_ROOM); m++)
            for (int c = 0; c < PANEL; c++)
                sums[m * PANEL + c] = (add ? sums[m * PANEL + c] : 0.0f) + scales[c] * scaled[(m - first) * PANEL + c];
    }
}
#else
static void add_block_by_tiles(const char *a, int64_t row_bytes, int64_t num_rows, const char *block, int64_t count,
                               float *sums, int add, const float *scales) {
    (void)a, (void)row_bytes, (void)num_rows, (void)block, (void)count, (void)sums, (void)add, (void)scales;
}
#endif
