/* Rounds weights to 4 bits, each run of GROUP inputs of an output with a scale and a zero point of its own. A vector holds
 * as many outputs, so that sums run over inputs in one order, with the same bits by all instructions.
 */
#pragma once
#include "cpu_vectors.c"

#define GROUP 32

/* The nearest integer of |x| < 2^22, the even one of two. */
INLINE vfloat nearest(vfloat x) { return x + 12582912.0f - 12582912.0f; }

INLINE vfloat as_bfloat16(vfloat x) {
    const vuint bits = (vuint)x;
    return (vfloat)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}

INLINE vfloat smaller(vfloat a, vfloat b) { return choose(a < b, a, b); }

/* Integers from -zero to 15 - zero. */
INLINE vfloat codes_of(vfloat x, vfloat inverse, vfloat zero) {
    return smaller(larger(nearest(x * inverse), -zero), 15.0f - zero);
}

typedef struct {
    vfloat scale, zero, error;
} Grid;

/* The grid of some scale, which is then fitted to the codes it gives, and its squared error, in which an input counts by
 * its `importance`. */
INLINE Grid fitted(const vfloat *x, const float *importance, vfloat scale, vfloat zero) {
    vfloat products = splat(0), squares = splat(0), error = splat(0);
    vfloat inverse = 1.0f / scale;
    for (int k = 0; k < GROUP; k++) {
        const vfloat code = codes_of(x[k], inverse, zero), counted = code * importance[k];
        products += counted * x[k];
        squares += counted * code;
    }
    scale = as_bfloat16(choose(squares > 0.0f, products / squares, scale));
    inverse = 1.0f / scale;
    for (int k = 0; k < GROUP; k++) {
        const vfloat off = codes_of(x[k], inverse, zero) * scale - x[k];
        error += off * off * importance[k];
    }
    return (Grid){scale, zero, error};
}

/* The best of grids that leave out more and more of the group's range. Zero is on each of them. */
INLINE Grid best_grid(const vfloat *x, const float *importance) {
    enum { RANGES = 12 };
    vfloat low = splat(0), high = splat(0);
    for (int k = 0; k < GROUP; k++) {
        low = smaller(low, x[k]);
        high = larger(high, x[k]);
    }
    Grid best = {splat(0), splat(0), splat(INFINITY)};
    for (int i = 0; i < RANGES; i++) {
        const vfloat scale = larger((high - low) * ((1.0f - 0.03f * (float)i) / 15.0f), splat(1e-30f));
        const vfloat below = nearest(7.0f - 0.5f * (low + high) / scale);
        for (int up = 0; up < 2; up++) {
            const vfloat zero = smaller(larger(below + (float)up, splat(0)), splat(15.0f));
            const Grid tried = fitted(x, importance, scale, zero);
            const vint better = tried.error < best.error;
            best.scale = choose(better, tried.scale, best.scale);
            best.zero = choose(better, tried.zero, best.zero);
            best.error = choose(better, tried.error, best.error);
        }
    }
    return best;
}

/* Rounds `rows` [num_rows, num_in] of `type`: signed codes of their shape, and bfloat16 scales and zero points
 * [groups, num_rows]. `importance` [num_in] is not negative. */
void kvrelay_round_to_int4(const char *rows, const float *importance, int8_t *codes, uint16_t *scales, int8_t *zeros,
                           int64_t type, int64_t num_rows, int64_t num_in, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads)
    for (int64_t first = 0; first < num_rows; first += LANES) {
        const int64_t lanes = at_most(LANES, num_rows - first);
        for (int64_t k = 0; k < num_in; k += GROUP) {
            const int64_t count = at_most(GROUP, num_in - k);
            float weights[GROUP][LANES] __attribute__((aligned(64))) = {0}, counted[GROUP] = {0};
            memcpy(counted, importance + k, count * sizeof *counted);
            for (int64_t lane = 0; lane < lanes; lane++)
                for (int64_t i = 0; i < count; i++) weights[i][lane] = element(rows, (first + lane) * num_in + k + i, (int)type);
            vfloat x[GROUP];
            memcpy(x, weights, sizeof x);
            const Grid grid = best_grid(x, counted);
            for (int64_t i = 0; i < count; i++) {
                const vfloat code = codes_of(x[i], 1.0f / grid.scale, grid.zero) + grid.zero - 8.0f;
                for (int64_t lane = 0; lane < lanes; lane++) codes[(first + lane) * num_in + k + i] = (int8_t)code[lane];
            }
            for (int64_t lane = 0; lane < lanes; lane++) {
                const int64_t at = k / GROUP * num_rows + first + lane;
                uint32_t bits;
                const float scale = grid.scale[lane];
                memcpy(&bits, &scale, sizeof bits);
                scales[at] = (uint16_t)(bits >> 16);
                zeros[at] = (int8_t)(grid.zero[lane] - 8.0f);
            }
        }
    }
}
