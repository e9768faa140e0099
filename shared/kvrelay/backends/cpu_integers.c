/* Integer weights in panels. Those of many tokens are widened to the activations' type a block at a time, those of a few in
 * registers. Both add up in one order: the products of a group, and its sum times the scale to the groups before it.
 *
 * INT8 holds one byte for each element of a panel, in a panel's order. INT4 holds a vector of bytes for two vectors of a
 * panel: the first in the lower four bits, biased by 8, and the second in the upper four.
 */
#define INT4_BIAS 8
#define GROUPS_AT_ONCE 16 /* groups of a block at most */

INLINE int64_t stored_bytes(int64_t count, int64_t format) {
    return format == INT4 ? count * PANEL / 2 : format == INT8 ? count * PANEL : panel_bytes(count, (int)format);
}

INLINE const char *panel_of(const Linear *l, int64_t panel, const int type) {
    return l->panels + panel * stored_bytes(type == BFLOAT16 ? rounded_up(l->num_in, K_MULTIPLE) : l->num_in, l->format);
}

/* Rows of K whose products are summed before they are scaled, or added to others. */
INLINE int64_t summed_at_once(const Linear *l) { return l->scales ? at_most(SUM_BLOCK, l->group) : SUM_BLOCK; }

/* Elements of a vector of the activations' type. */
#define WIDE(type) ((type) == BFLOAT16 ? 32 : 16)

/* Half precision, finite numbers only: exponent and mantissa are moved to where a float has them, with another bias. */
INLINE vfloat half_to_float(const char *base, int64_t index) {
    vhalf raw;
    memcpy(&raw, base + index * 2, sizeof raw);
    const vuint bits = __builtin_convertvector(raw, vuint);
    const vfloat magnitude = (vfloat)((bits & 0x7fff) << 13) * 0x1p112f;
    return (vfloat)((vuint)magnitude | (bits & 0x8000) << 16);
}

/* The index of a panel's scales and zero points of row `k`. */
INLINE int64_t group_place(const Linear *l, int64_t panel, int64_t k) {
    const int64_t groups = (l->num_in + l->group - 1) / l->group;
    return (panel * groups + k / l->group) * PANEL;
}

INLINE void load_scales(const Linear *l, int64_t at, float *scales) {
    for (int c = 0; c < PANEL; c += LANES) {
        const vfloat x = l->scale_type == FLOAT16    ? half_to_float(l->scales, at + c)
                         : l->scale_type == BFLOAT16 ? load(l->scales, at + c, BFLOAT16)
                                                     : load(l->scales, at + c, FLOAT32);
        store((char *)scales, c, x, FLOAT32);
    }
}

/* Zero points of a panel's columns in the order of its elements, of which those of bfloat16 are in pairs. */
#define SPREAD (2 * PANEL)

INLINE void spread_zeros(const int8_t *zeros, int16_t *spread, const int type) {
    for (int c = 0; c < PANEL; c++)
        if (type == BFLOAT16) spread[2 * c] = spread[2 * c + 1] = zeros[c];
        else spread[c] = spread[PANEL + c] = zeros[c];
}

/* Each of `widen_*` stores integers, minus their zero points if `shifted`. The differences have at most 9 bits with a
 * sign, so bfloat16 holds all of them. */
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
INLINE __m512 integers(const char *from, const int16_t *zeros, const int shifted) {
    __m512i codes = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
    if (shifted) codes = _mm512_sub_epi32(codes, _mm512_cvtepi16_epi32(_mm256_load_si256((const __m256i *)zeros)));
    return _mm512_cvtepi32_ps(codes);
}

INLINE vuint int8_vector(const char *from, const int16_t *zeros, const int shifted) {
    return (vuint)_mm512_cvtne2ps_pbh(integers(from + 16, zeros + 16, shifted), integers(from, zeros, shifted));
}

INLINE void widen_int8(const char *from, char *to, int64_t count, const int16_t *zeros, const int shifted, const int type) {
    for (int64_t i = 0; i < count; i += 32) {
        __builtin_prefetch(from + i + PREFETCH_BYTES, 0, PREFETCH_LOCALITY);
        const int16_t *zero = zeros + i % SPREAD;
        if (type == BFLOAT16) {
            _mm512_store_si512(to + i * 2, (__m512i)int8_vector(from + i, zero, shifted));
        } else {
            _mm512_store_ps((float *)to + i, integers(from + i, zero, shifted));
            _mm512_store_ps((float *)to + i + 16, integers(from + i + 16, zero + 16, shifted));
        }
    }
}

/* Biased codes become the lowest bits of an index into a table: vpermw takes five of them, which hold every difference of
 * code and zero point, and vpermps takes four. */
INLINE __m512 int4_values(void) {
    return _mm512_cvtepi32_ps(_mm512_set_epi32(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8));
}

/* Of codes alone the table repeats; differences of -16 to 15 are indices in two's complement. */
INLINE __m512i int4_table(const int shifted) {
    const __m512 values = int4_values(), eight = _mm512_set1_ps(8.0f);
    const __m512 first = shifted ? _mm512_add_ps(values, eight) : values, second = shifted ? _mm512_sub_ps(values, eight) : values;
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

/* Two vectors of bfloat16. */
INLINE void int4_vectors(const char *from, __m512i table, const int16_t *zeros, const int shifted, vuint w[2]) {
    __m512i low = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from)), high = _mm512_srli_epi16(low, 4);
    if (shifted) {
        const __m512i bias = _mm512_set1_epi16(INT4_BIAS);
        low = _mm512_sub_epi16(_mm512_and_si512(low, _mm512_set1_epi16(15)), _mm512_add_epi16(_mm512_load_si512(zeros), bias));
        high = _mm512_sub_epi16(high, _mm512_add_epi16(_mm512_load_si512(zeros + 32), bias));
    }
    w[0] = (vuint)_mm512_permutexvar_epi16(low, table);
    w[1] = (vuint)_mm512_permutexvar_epi16(high, table);
}

INLINE void widen_int4(const char *from, char *to, int64_t count, const int16_t *zeros, const int shifted, const int type) {
    const __m512i table = int4_table(shifted);
    const __m512 values = int4_values();
    int16_t own[SPREAD] __attribute__((aligned(64))); /* which stores to `to` do not change */
    memcpy(own, zeros, sizeof own);
    for (int64_t i = 0; i < count; i += 2 * WIDE(type)) {
        __builtin_prefetch(from + i / 2 + PREFETCH_BYTES, 0, PREFETCH_LOCALITY);
        if (type == BFLOAT16) {
            vuint w[2];
            int4_vectors(from + i / 2, table, own, shifted, w);
            memcpy(to + i * 2, w, sizeof w);
        } else {
            const __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from + i / 2)));
            __m512 first = _mm512_permutexvar_ps(low, values);
            __m512 second = _mm512_permutexvar_ps(_mm512_srli_epi32(low, 4), values);
            if (shifted) {
                const __m256i *zero = (const __m256i *)own;
                first = _mm512_sub_ps(first, _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_load_si256(zero))));
                second = _mm512_sub_ps(second, _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_load_si256(zero + 1))));
            }
            _mm512_store_ps((float *)to + i, first);
            _mm512_store_ps((float *)to + i + 16, second);
        }
    }
}

/* ---- a few tokens ---- */

#define FEW_ROWS 8

/* sums[r] = x[r] . panel, for `rows` rows of bfloat16. */
INLINE void rows_of_integers(const Linear *l, const char *x, int64_t row_bytes, int64_t panel, float *sums, const int format,
                             const int shifted, const int rows) {
    const char *thirds[TILE_ROWS / 3], *from = panel_of(l, panel, BFLOAT16);
    UNROLL for (int r = 0; r < TILE_ROWS / 3; r++) thirds[r] = x + 3 * r * row_bytes;
    const int64_t run = summed_at_once(l), bytes = stored_bytes(2, format);
    const __m512i table = int4_table(shifted);
    int16_t zeros[SPREAD] __attribute__((aligned(64))) = {0};
    float scales[PANEL] __attribute__((aligned(64)));
    for (int64_t k = 0; k < l->num_in; k += run) {
        const int64_t at = group_place(l, panel, k), count = at_most(run, l->num_in - k);
        vfloat acc[TILE_ROWS][VECTORS] = {};
        if (shifted) spread_zeros(l->zeros + at, zeros, BFLOAT16);
        for (int64_t i = 0; i < count; i += 2, from += bytes) {
            vuint w[VECTORS];
            __builtin_prefetch(from + PREFETCH_BYTES, 0, PREFETCH_LOCALITY);
            if (format == INT4) int4_vectors(from, table, zeros, shifted, w);
            else UNROLL for (int v = 0; v < VECTORS; v++) w[v] = int8_vector(from + v * 32, zeros + v * 32, shifted);
            if (i + 1 < count) add_step(acc, thirds, row_bytes, (const char *)w, 4, BFLOAT16, rows, VECTORS);
            else add_step(acc, thirds, row_bytes, (const char *)w, 2, BFLOAT16, rows, VECTORS);
            UNROLL for (int r = 0; r < TILE_ROWS / 3; r++) thirds[r] += 4;
        }
        load_scales(l, at, scales);
        put_sums(acc, sums, k > 0, scales, rows, VECTORS);
    }
}

#define FEW_ROWS_CASE(n) \
    case n: rows_of_integers(l, x, row_bytes, panel, sums, format, shifted, n); return;

INLINE void few_rows_of(const Linear *l, const char *x, int64_t row_bytes, int64_t num_rows, int64_t panel, float *sums,
                        const int format, const int shifted) {
    switch (num_rows) {
        FEW_ROWS_CASE(1) FEW_ROWS_CASE(2) FEW_ROWS_CASE(3) FEW_ROWS_CASE(4)
        FEW_ROWS_CASE(5) FEW_ROWS_CASE(6) FEW_ROWS_CASE(7) FEW_ROWS_CASE(8)
        default: __builtin_unreachable();
    }
}

static void few_rows(const Linear *l, const char *x, int64_t row_bytes, int64_t num_rows, int64_t panel, float *sums) {
    if (l->format == INT4 && l->zeros) few_rows_of(l, x, row_bytes, num_rows, panel, sums, INT4, 1);
    else if (l->format == INT4) few_rows_of(l, x, row_bytes, num_rows, panel, sums, INT4, 0);
    else few_rows_of(l, x, row_bytes, num_rows, panel, sums, INT8, 0);
}

/* Whether `few_rows` computes a panel: not for the rare zero points of 8 bits, nor if `padded` rows may take AMX. */
INLINE int takes_few_rows(const Linear *l, int64_t num_rows, int padded, const int type) {
    if (type != BFLOAT16 || !l->scales || (l->format == INT8 && l->zeros)) return 0;
    return num_rows <= FEW_ROWS && !(padded && takes_tiles(num_rows, TILE_DEPTH));
}
#else
INLINE void widen_int8(const char *from, char *to, int64_t count, const int16_t *zeros, const int shifted, const int type) {
    for (int64_t i = 0; i < count; i++) put(to, i, (float)((int8_t)from[i] - (shifted ? zeros[i % SPREAD] : 0)), type);
}

INLINE void widen_int4(const char *from, char *to, int64_t count, const int16_t *zeros, const int shifted, const int type) {
    for (int64_t i = 0; i < count; i += 2 * WIDE(type))
        for (int64_t e = 0; e < WIDE(type); e++) {
            const uint8_t both = (uint8_t)from[i / 2 + e];
            const int low = shifted ? zeros[e] : 0, high = shifted ? zeros[WIDE(type) + e] : 0;
            put(to, i + e, (float)((both & 15) - INT4_BIAS - low), type);
            put(to, i + WIDE(type) + e, (float)((both >> 4) - INT4_BIAS - high), type);
        }
}

INLINE int takes_few_rows(const Linear *l, int64_t num_rows, int padded, const int type) {
    (void)l, (void)num_rows, (void)padded, (void)type;
    return 0;
}

static void few_rows(const Linear *l, const char *x, int64_t row_bytes, int64_t num_rows, int64_t panel, float *sums) {
    (void)l, (void)x, (void)row_bytes, (void)num_rows, (void)panel, (void)sums;
}
#endif

/* Widens a block of a panel's weights from row `k` on, where a group begins, and takes the scales of its groups. */
INLINE void widen_block(const Linear *l, const char *block, int64_t k, int64_t panel, int64_t count, char *widened,
                        float *scales, const int type) {
    const int64_t run = summed_at_once(l), end = k + count;
    for (; k < end; k += run, scales += PANEL) {
        int16_t spread[SPREAD] __attribute__((aligned(64))) = {0};
        const int64_t at = group_place(l, panel, k), rows = at_most(run, end - k);
        const int64_t elements = (type == BFLOAT16 ? rounded_up(rows, 2) : rows) * PANEL;
        load_scales(l, at, scales);
        if (l->zeros) {
            spread_zeros(l->zeros + at, spread, type);
            if (l->format == INT8) widen_int8(block, widened, elements, spread, 1, type);
            else widen_int4(block, widened, elements, spread, 1, type);
        } else {
            if (l->format == INT8) widen_int8(block, widened, elements, spread, 0, type);
            else widen_int4(block, widened, elements, spread, 0, type);
        }
        block += stored_bytes(rows, l->format);
        widened += elements * (type == BFLOAT16 ? 2 : 4);
    }
}
