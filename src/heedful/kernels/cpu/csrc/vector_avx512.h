// Vectors of 16 elements for AVX-512 (F, BW, DQ, VL); with VNNI and BF16 where the compiler is told that they exist.

#pragma once
#include <immintrin.h>

#define FLOAT_TILE 8
#define INT_TILE 4
#define GEMM_ROWS 12
#define KEYS_AT_ONCE 16
#define SUM_ROWS 6
#define SUM_COLUMNS 4

typedef __m512 vec;
typedef __m512i ivec;  // 16 int32, 64 bytes, or 16 pairs of bfloat16

INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
INLINE vec v_set(float x) { return _mm512_set1_ps(x); }
INLINE vec v_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE vec v_load_lanes(lanes some, const float *from) { return _mm512_maskz_loadu_ps(some, from); }  // others are 0
INLINE vec v_load_halves(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }      // 16 float16
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

// 1/x for x >= 1: a 14-bit estimate and one Newton step.
INLINE vec v_reciprocal(vec x) {
  vec y = _mm512_rcp14_ps(x);
  vec finite = v_mul(y, v_fnma(x, y, v_set(2)));
  return v_select(v_equal(y, v_zero()), y, finite);  // 1/∞ is 0
}

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

// --- integers --------------------------------------------------------------------------------------------------------

INLINE ivec i_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE ivec i_load(const void *from) { return _mm512_loadu_si512(from); }
// The 64-bit products of y and the lower 32 bits of each of 8 elements.
INLINE ivec i_multiply_words(ivec x, uint32_t y) { return _mm512_mul_epu32(x, _mm512_set1_epi64(y)); }
INLINE vec i_to_float(ivec x) { return _mm512_cvtepi32_ps(x); }
INLINE ivec i_low_nibbles(ivec x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }  // of each byte
INLINE ivec i_high_nibbles(ivec x) { return i_low_nibbles(_mm512_srli_epi16(x, 4)); }

// Adds to each int32 of `sums` the products of four bytes: of w, which are weights + 128, and of x, which are int8.
// i_dot_nibbles: the same for w from 0 to 15.
#ifdef __AVX512VNNI__
#define BYTE_OFFSET 128
INLINE ivec i_dot_bytes(ivec sums, ivec w, ivec x) { return _mm512_dpbusd_epi32(sums, w, x); }
INLINE ivec i_dot_nibbles(ivec sums, ivec w, ivec x) { return _mm512_dpbusd_epi32(sums, w, x); }
#else
#define BYTE_OFFSET 0
INLINE ivec i_dot_nibbles(ivec sums, ivec w, ivec x) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
INLINE ivec i_dot_bytes(ivec sums, ivec w, ivec x) {  // |x| · (±w): unsigned times signed, whose pairs fit 16 bits
  w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
  w = _mm512_mask_sub_epi8(w, _mm512_movepi8_mask(x), _mm512_setzero_si512(), w);
  return i_dot_nibbles(sums, _mm512_abs_epi8(x), w);
}
#endif

INLINE vec v_load_bytes(const int8_t *from) {  // 16 int8
  return i_to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

// Stores x, rounded, as 16 int8, and returns their sum.
INLINE int32_t v_store_bytes(int8_t *to, vec x) {
  __m512i rounded = _mm512_cvtps_epi32(x);
  _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(rounded));
  return _mm512_reduce_add_epi32(rounded);
}

// --- bfloat16 --------------------------------------------------------------------------------------------------------

// The first and the second of 16 pairs.
INLINE vec v_first_of_pairs(ivec pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
INLINE vec v_second_of_pairs(ivec pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)));
}

#ifdef __AVX512BF16__
#define BFLOAT16_DOT 1
INLINE vec v_dot_pairs(vec sums, ivec a, ivec b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }
INLINE void v_store_bfloat16(int16_t *to, lanes some, vec x) {
  _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(x));
}
INLINE ivec v_to_pairs(vec first, vec second) {  // lane by lane
  return _mm512_or_si512(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first)),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second)), 16));
}
#else
#define BFLOAT16_DOT 0
#endif
