/* Vectors of LANES floats for the CPU kernels, in plain C with GCC's vector extensions (GCC 9 or newer, or a recent
 * clang): loads and stores of every element type, exp and tanh, and sums and transposes across vectors.
 *
 * The kernels are compiled without contraction: a product and a sum are rounded once where `fused` says so, and nowhere
 * else, so that a formula gives the same bits in whatever code it is compiled into.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));
typedef int16_t vshort __attribute__((vector_size(LANES * 2)));
typedef uint8_t vbyte __attribute__((vector_size(LANES)));

/* Element types, numbered as in cpu.py. */
enum { FLOAT32, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };

INLINE int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t rounded_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

INLINE vfloat splat(float x) { return x - (vfloat){}; }

#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
#define HAS_FUSED 1
#else
#define HAS_FUSED 0
#endif

/* a * b + c, rounded once where the CPU has an instruction for it. */
INLINE vfloat fused(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif HAS_FUSED
    vfloat sum;
    UNROLL for (int i = 0; i < LANES; i++) sum[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sum;
#else
    return a * b + c;
#endif
}

/* The same for one number. */
INLINE float fused_one(float a, float b, float c) { return HAS_FUSED ? __builtin_fmaf(a, b, c) : a * b + c; }

INLINE vfloat choose(vint mask, vfloat yes, vfloat no) { return (vfloat)((mask & (vint)yes) | (~mask & (vint)no)); }

INLINE vfloat larger(vfloat a, vfloat b) { return choose(a > b, a, b); }

INLINE int64_t bytes_of(const int type) { return type == FLOAT32 ? 4 : type == BFLOAT16 ? 2 : 1; }

#if defined(__F16C__)
INLINE vfloat from_half(vhalf x) {
#if LANES == 16
    return (vfloat)_mm512_cvtph_ps((__m256i)x);
#else
    return (vfloat)_mm256_cvtph_ps((__m128i)x);
#endif
}

/* E5M2 is the upper byte of a half. So is E4M3 with its exponent moved into a half's, whose bias is larger by 8. */
INLINE vfloat widen(vbyte raw, const int type) {
    const vhalf upper = __builtin_convertvector(raw, vhalf) << 8;
    if (type == FLOAT8_E5M2) return from_half(upper);
    const vhalf moved = (vhalf)((vshort)upper >> 1) & 0xbfff;
    const vhalf is_nan = (vhalf)((moved & 0x3fff) == 0x3f80); /* all ones are the one NaN; there is no infinity */
    return from_half(moved | is_nan) * 256.0f;
}
#else
/* Exponent and mantissa are moved to where a float has them, and the exponent is biased anew. What is below the least
 * normal number gets that one's exponent, and the leading 1 is taken off again. */
INLINE vfloat widen(vbyte narrow, const int type) {
    const int mantissa = type == FLOAT8_E4M3 ? 3 : 2, bias = type == FLOAT8_E4M3 ? 120 : 112;
    const vuint raw = __builtin_convertvector(narrow, vuint), magnitude = raw & 0x7f, moved = magnitude << (23 - mantissa);
    const vfloat least = (vfloat)((vuint){} + ((uint32_t)(bias + 1) << 23));
    const vfloat normal = (vfloat)(moved + ((uint32_t)bias << 23));
    const vfloat subnormal = (vfloat)(moved + ((uint32_t)(bias + 1) << 23)) - least;
    const vfloat special = (vfloat)(moved | 0x7f800000); /* infinity or NaN; E4M3 has but the one NaN */
    const vint is_special = (vint)magnitude >= (type == FLOAT8_E4M3 ? 0x7f : 0x7c);
    const vfloat x = choose((vint)magnitude < 1 << mantissa, subnormal, choose(is_special, special, normal));
    return (vfloat)((vuint)x | (raw & 0x80) << 24);
}
#endif

INLINE vfloat load(const char *base, int64_t index, const int type) {
    if (type == FLOAT8_E4M3 || type == FLOAT8_E5M2) {
        vbyte raw;
        memcpy(&raw, base + index, sizeof raw);
        return widen(raw, type);
    }
    if (type == BFLOAT16) {
        vhalf raw;
        memcpy(&raw, base + index * 2, sizeof raw);
        return (vfloat)(__builtin_convertvector(raw, vuint) << 16);
    }
    vfloat x;
    memcpy(&x, base + index * 4, sizeof x);
    return x;
}

INLINE float element(const char *base, int64_t index, const int type) {
    if (type == FLOAT32) return ((const float *)base)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)base)[index] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE void store(char *base, int64_t index, vfloat x, const int type) {
#if defined(__AVX512BF16__)
    if (type == BFLOAT16) {
        const __m256bh raw = _mm512_cvtneps_pbh((__m512)x); /* to nearest, ties to even */
        memcpy(base + index * 2, &raw, sizeof raw);
        return;
    }
#endif
    if (type == BFLOAT16) {
        vuint bits = (vuint)x;
        vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
        vint is_nan = x != x;
        vuint kept = ((vuint)is_nan & ((bits >> 16) | 0x40)) | (~(vuint)is_nan & rounded);
        vhalf raw = __builtin_convertvector(kept, vhalf);
        memcpy(base + index * 2, &raw, sizeof raw);
    } else {
        memcpy(base + index * 4, &x, sizeof x);
    }
}

/* exp for x <= 88, about 1e-7 relative; below -87 it is 0. NaN stays NaN. */
INLINE vfloat vexp(vfloat x) {
    const vfloat magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vint tiny = x < splat(-87.0f);
    vfloat shifted = fused(x, splat(1.44269504089f), magic);
    vfloat n = shifted - magic;
    vfloat r = fused(n, splat(2.12194440e-4f), fused(n, splat(-0.693359375f), x));
    vfloat p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    vint exponent = ((vint)shifted - (vint)magic + 127) << 23;
    return choose(tiny, splat(0.0f), p * (vfloat)exponent);
}

INLINE float exp_one(float x) { return vexp(splat(x))[0]; }

#if LANES == 16
/* 2^t for t < 127, about 3e-6 relative, which is far below the rounding of the result to bfloat16; below 2^-126 it is 0.
 * NaN stays NaN. Lanes that give 0 are masked: numbers too small for a float take the CPU a hundred cycles. */
INLINE vfloat rough_exp2(vfloat t) {
    enum { DOWN = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC };
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)t, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
#if defined(__AVX512DQ__)
    const vfloat r = (vfloat)_mm512_reduce_ps((__m512)t, DOWN); /* t - floor(t) */
#else
    const vfloat r = t - (vfloat)_mm512_roundscale_ps((__m512)t, DOWN);
#endif
    vfloat p = splat(0.013534167781472206f);
    p = fused(p, r, splat(0.052011460065841675f));
    p = fused(p, r, splat(0.2414427548646927f));
    p = fused(p, r, splat(0.6930038332939148f));
    p = fused(p, r, splat(1.0000026226043701f));
    return (vfloat)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)t); /* p * 2^floor(t) */
}

#define LOG2_E 1.44269504089f

/* exp for x <= 87, as exact as `rough_exp2`. */
INLINE vfloat rough_exp(vfloat x) { return rough_exp2(x * LOG2_E); }
#endif

INLINE vfloat vtanh(vfloat x) {
    x = choose(x > splat(15.0f), splat(15.0f), choose(x < splat(-15.0f), splat(-15.0f), x));
    return 1.0f - 2.0f / (vexp(2.0f * x) + 1.0f);
}

INLINE float horizontal_sum(vfloat x) {
    float sum = 0;
    UNROLL for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

INLINE float horizontal_max(vfloat x) {
    float max = x[0];
    UNROLL for (int i = 1; i < LANES; i++) max = x[i] > max ? x[i] : max;
    return max;
}

/* Lanes in an order in which `sum_each` adds neighbours: each two of them, then each two of these sums, and so on. Who takes
 * them one after the other keeps one sum of each level, as a binary counter keeps a digit. */
INLINE int64_t counted_lane(int64_t i) {
    int64_t lane = 0;
    for (int64_t bit = 1; bit < LANES; bit *= 2) lane = lane * 2 + (i & bit ? 1 : 0);
    return lane;
}

/* Butterflies: of two vectors, the halves of each pair of runs of s lanes. LOW keeps lanes without bit s of both, HIGH
 * those with it, so that lane e of LOW(a, b) and HIGH(a, b) comes from a where e lacks bit s, and from b elsewhere. */
#define LOW_LANE(e, s) (((e) & (s)) ? LANES + (e) - (s) : (e))
#define HIGH_LANE(e, s) (((e) & (s)) ? LANES + (e) : (e) + (s))
#define EIGHT(lane, e, s) \
    lane(e, s), lane(e + 1, s), lane(e + 2, s), lane(e + 3, s), lane(e + 4, s), lane(e + 5, s), lane(e + 6, s), lane(e + 7, s)
#if LANES == 16
#define ALL_LANES(lane, s) EIGHT(lane, 0, s), EIGHT(lane, 8, s)
#else
#define ALL_LANES(lane, s) EIGHT(lane, 0, s)
#endif
#if defined(__clang__)
#define SHUFFLE(a, b, lane, s) __builtin_shufflevector(a, b, ALL_LANES(lane, s))
#else
#define SHUFFLE(a, b, lane, s) __builtin_shuffle(a, b, (vint){ALL_LANES(lane, s)})
#endif

#define FOLD(s)                        \
    UNROLL for (int i = 0; i < (s); i++)      \
        v[i] = SHUFFLE(v[i], v[i + (s)], LOW_LANE, s) + SHUFFLE(v[i], v[i + (s)], HIGH_LANE, s);

/* Lane e of the result is the sum of the lanes of v[e]; v is spoilt. */
INLINE vfloat sum_each(vfloat v[LANES]) {
#if LANES == 16
    FOLD(8)
#endif
    FOLD(4) FOLD(2) FOLD(1)
    return v[0];
}

#define SWAP(s)                                                  \
    UNROLL for (int i = 0; i < LANES; i++)                              \
        if (!(i & (s))) {                                        \
            vfloat low = SHUFFLE(v[i], v[i + (s)], LOW_LANE, s); \
            v[i + (s)] = SHUFFLE(v[i], v[i + (s)], HIGH_LANE, s); \
            v[i] = low;                                          \
        }

INLINE void transpose(vfloat v[LANES]) {
#if LANES == 16
    SWAP(8)
#endif
    SWAP(4) SWAP(2) SWAP(1)
}

