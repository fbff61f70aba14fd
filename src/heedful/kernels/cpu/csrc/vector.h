// Float32 vectors for AVX-512, the only instruction set supported. All code that depends on the vector width uses these
// functions, apart from the packed int8, int4 and bfloat16 products (linear.c).

#pragma once
#include <immintrin.h>
#include <math.h>

#define LANES 16  // float32 elements of a vector
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define FOR_LANES(n) for (long k = 0; k < (n); k += LANES)

typedef __m512 vec;
typedef __mmask16 lanes;  // one bit per lane

INLINE lanes first_lanes(long n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
INLINE vec v_set(float x) { return _mm512_set1_ps(x); }
INLINE vec v_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE vec v_load_lanes(lanes some, const float *from) { return _mm512_maskz_loadu_ps(some, from); }  // others are 0
INLINE void v_store(float *to, vec x) { _mm512_storeu_ps(to, x); }
INLINE void v_store_lanes(float *to, lanes some, vec x) { _mm512_mask_storeu_ps(to, some, x); }

INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }    // a b + c
INLINE vec v_fms(vec a, vec b, vec c) { return _mm512_fmsub_ps(a, b, c); }    // a b - c
INLINE vec v_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
INLINE vec v_abs(vec x) { return _mm512_abs_ps(x); }
INLINE vec v_sqrt(vec x) { return _mm512_sqrt_ps(x); }
INLINE vec v_round(vec x) { return _mm512_roundscale_ps(x, 0); }
INLINE vec v_reciprocal_estimate(vec x) { return _mm512_rcp14_ps(x); }  // 14 bits

// If either is NaN, the result is b.
INLINE vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }

INLINE lanes v_greater(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE lanes v_equal(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE lanes v_not_less(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }             // true for NaN
INLINE lanes v_not_less_or_equal(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }    // true for NaN
INLINE lanes v_is_nan(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q); }              // a or b

INLINE vec v_select(lanes some, vec a, vec b) { return _mm512_mask_mov_ps(b, some, a); }  // a in these lanes, else b
INLINE vec v_keep(lanes some, vec x) { return _mm512_maskz_mov_ps(some, x); }             // else 0
INLINE vec v_scale_by_power_of_two(lanes some, vec x, vec n) { return _mm512_maskz_scalef_ps(some, x, n); }  // x 2ⁿ
INLINE float v_sum(vec x) { return _mm512_reduce_add_ps(x); }
INLINE float v_highest(vec x) { return _mm512_reduce_max_ps(x); }

// Up to 16 bytes of a boolean mask as lanes.
INLINE lanes load_bools(lanes some, const unsigned char *from) {
  __m128i bytes = _mm_maskz_loadu_epi8(some, from);
  return _mm_test_epi8_mask(bytes, bytes);
}

INLINE void prefetch(const void *address) { _mm_prefetch((const char *)address, _MM_HINT_T1); }

// The horizontal sums of 16 vectors as one vector. All use the same order of additions, so that a sum does not depend on
// its index.
INLINE vec v_sums(const vec *x) {
  vec a[8], b[4];
  UNROLL for (int i = 0; i < 8; i++)
    a[i] = v_add(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
  UNROLL for (int i = 0; i < 4; i++)
    b[i] = v_add(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
  vec c = v_add(_mm512_unpacklo_ps(b[0], b[1]), _mm512_unpackhi_ps(b[0], b[1]));
  vec d = v_add(_mm512_unpacklo_ps(b[2], b[3]), _mm512_unpackhi_ps(b[2], b[3]));
  vec e = v_add(_mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee));
  return _mm512_shuffle_f32x4(e, e, 0xd8);  // undo the order of the quarters: vectors 0-3, 8-11, 4-7, 12-15
}

// Transpose a matrix of 16 x 16 in place.
INLINE void v_transpose(vec *r) {
  vec t[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
    r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  UNROLL for (int i = 0; i < 16; i += 8) UNROLL for (int j = 0; j < 4; j++) {
    t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0x88);
    t[i + j + 4] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0xdd);
  }
  UNROLL for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
  }
}
