// Vectors of 16 elements for AVX2 with FMA and F16C, as two registers of 8.

#pragma once
#include <immintrin.h>

#define FLOAT_TILE 3
#define INT_TILE 2
#define GEMM_ROWS 3
#define KEYS_AT_ONCE 4
#define SUM_ROWS 3
#define SUM_COLUMNS 2
#define BYTE_OFFSET 0
#define BFLOAT16_DOT 0

typedef struct { __m256 a, b; } vec;
typedef struct { __m256i a, b; } ivec;  // 16 int32, 64 bytes, or 16 pairs of bfloat16

// A bit of each lane as all bits of an element: the first or the second 8 lanes.
INLINE __m256i mask_of(uint32_t bits) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), each), each);
}
INLINE lanes lanes_of(__m256 a, __m256 b) { return _mm256_movemask_ps(a) | _mm256_movemask_ps(b) << 8; }

INLINE vec v_zero(void) { return (vec){_mm256_setzero_ps(), _mm256_setzero_ps()}; }
INLINE vec v_set(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vec v_load(const float *from) { return (vec){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE vec v_load_lanes(lanes some, const float *from) {  // others are 0
  if (some == 0xffff) return v_load(from);
  return (vec){_mm256_maskload_ps(from, mask_of(some)), _mm256_maskload_ps(from + 8, mask_of(some >> 8))};
}
INLINE vec v_load_halves(const void *from) {  // 16 float16
  const __m128i *at = from;
  return (vec){_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
INLINE void v_store(float *to, vec x) { _mm256_storeu_ps(to, x.a), _mm256_storeu_ps(to + 8, x.b); }
INLINE void v_store_lanes(float *to, lanes some, vec x) {
  if (some == 0xffff) {
    v_store(to, x);
    return;
  }
  _mm256_maskstore_ps(to, mask_of(some), x.a);
  _mm256_maskstore_ps(to + 8, mask_of(some >> 8), x.b);
}

INLINE vec v_add(vec x, vec y) { return (vec){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE vec v_sub(vec x, vec y) { return (vec){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE vec v_mul(vec x, vec y) { return (vec){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE vec v_div(vec x, vec y) { return (vec){_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE vec v_fma(vec x, vec y, vec z) {  // x y + z
  return (vec){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE vec v_fms(vec x, vec y, vec z) {  // x y - z
  return (vec){_mm256_fmsub_ps(x.a, y.a, z.a), _mm256_fmsub_ps(x.b, y.b, z.b)};
}
INLINE vec v_fnma(vec x, vec y, vec z) {  // z - x y
  return (vec){_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
INLINE vec v_abs(vec x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return (vec){_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE vec v_sqrt(vec x) { return (vec){_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
INLINE vec v_round(vec x) {
  return (vec){_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
               _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

// If either is NaN, the result is y.
INLINE vec v_min(vec x, vec y) { return (vec){_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE vec v_max(vec x, vec y) { return (vec){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }

#define COMPARE(x, y, how) lanes_of(_mm256_cmp_ps(x.a, y.a, how), _mm256_cmp_ps(x.b, y.b, how))
INLINE lanes v_greater(vec x, vec y) { return COMPARE(x, y, _CMP_GT_OQ); }
INLINE lanes v_equal(vec x, vec y) { return COMPARE(x, y, _CMP_EQ_OQ); }
INLINE lanes v_not_less(vec x, vec y) { return COMPARE(x, y, _CMP_NLT_UQ); }           // true for NaN
INLINE lanes v_not_less_or_equal(vec x, vec y) { return COMPARE(x, y, _CMP_NLE_UQ); }  // true for NaN
INLINE lanes v_is_nan(vec x, vec y) { return COMPARE(x, y, _CMP_UNORD_Q); }            // x or y
#undef COMPARE

INLINE vec v_select(lanes some, vec x, vec y) {  // x in these lanes, else y
  return (vec){_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(mask_of(some))),
               _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(mask_of(some >> 8)))};
}
INLINE vec v_keep(lanes some, vec x) {  // else 0
  if (some == 0xffff) return x;
  return (vec){_mm256_and_ps(x.a, _mm256_castsi256_ps(mask_of(some))),
               _mm256_and_ps(x.b, _mm256_castsi256_ps(mask_of(some >> 8)))};
}

INLINE __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
INLINE __m256 scale_half(__m256 x, __m256 n) {  // in two factors: 2¹²⁸ alone would be infinite
  __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}
INLINE vec v_scale_by_power_of_two(lanes some, vec x, vec n) {  // x 2ⁿ
  return v_keep(some, (vec){scale_half(x.a, n.a), scale_half(x.b, n.b)});
}

INLINE float v_sum(vec x) {
  __m256 eight = _mm256_add_ps(x.a, x.b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
INLINE float v_highest(vec x) {
  __m256 eight = _mm256_max_ps(x.a, x.b);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

INLINE vec v_reciprocal(vec x) { return v_div(v_set(1), x); }

// Up to 16 bytes of a boolean mask as lanes.
INLINE lanes load_bools(lanes some, const unsigned char *from) {
  lanes found = 0;
  if (some == 0xffff)
    return ~_mm_movemask_epi8(_mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)from), _mm_setzero_si128()));
  for (int i = 0; i < LANES; i++)
    if (some >> i & 1) found |= (from[i] != 0) << i;
  return found;
}

INLINE void prefetch(const void *address) { _mm_prefetch((const char *)address, _MM_HINT_T1); }

// The horizontal sums of 8 registers as one.
INLINE __m256 sums_of_8(const __m256 *x) {
  __m256 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  __m256 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// The horizontal sums of 16 vectors as one vector. All use the same order of additions, so that a sum does not depend on
// its index.
INLINE vec v_sums(const vec *x) {
  __m256 t[LANES];
  UNROLL for (int i = 0; i < LANES; i++) t[i] = _mm256_add_ps(x[i].a, x[i].b);
  return (vec){sums_of_8(t), sums_of_8(t + 8)};
}

// Transpose 8 x 8 elements.
INLINE void transpose_8(__m256 *r) {
  __m256 t[8];
  UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    r[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
    r[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
  }
  UNROLL for (int j = 0; j < 4; j++) {
    t[j] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x20);
    t[j + 4] = _mm256_permute2f128_ps(r[j], r[j + 4], 0x31);
  }
  UNROLL for (int j = 0; j < 8; j++) r[j] = t[j];
}

// Transpose a matrix of 16 x 16 in place.
INLINE void v_transpose(vec *r) {
  __m256 quarter[4][8];
  UNROLL for (int i = 0; i < 8; i++) {
    quarter[0][i] = r[i].a, quarter[1][i] = r[i + 8].a;
    quarter[2][i] = r[i].b, quarter[3][i] = r[i + 8].b;
  }
  UNROLL for (int i = 0; i < 4; i++) transpose_8(quarter[i]);
  UNROLL for (int i = 0; i < 8; i++) {
    r[i] = (vec){quarter[0][i], quarter[1][i]};
    r[i + 8] = (vec){quarter[2][i], quarter[3][i]};
  }
}

// --- integers --------------------------------------------------------------------------------------------------------

INLINE ivec i_set(int32_t x) { return (ivec){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE ivec i_load(const void *from) {
  const __m256i *at = from;
  return (ivec){_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
// The 64-bit products of y and the lower 32 bits of each of 8 elements.
INLINE ivec i_multiply_words(ivec x, uint32_t y) {
  const __m256i by = _mm256_set1_epi64x(y);
  return (ivec){_mm256_mul_epu32(x.a, by), _mm256_mul_epu32(x.b, by)};
}
INLINE vec i_to_float(ivec x) { return (vec){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE ivec i_low_nibbles(ivec x) {  // of each byte
  const __m256i half = _mm256_set1_epi8(15);
  return (ivec){_mm256_and_si256(x.a, half), _mm256_and_si256(x.b, half)};
}
INLINE ivec i_high_nibbles(ivec x) {
  return i_low_nibbles((ivec){_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}

INLINE __m256i dot_half(__m256i sums, __m256i w, __m256i x) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
INLINE __m256i dot_half_signed(__m256i sums, __m256i w, __m256i x) {
  w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  return dot_half(sums, _mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
}

// Adds to each int32 of `sums` the products of four bytes: of w, which are weights + 128, and of x, which are int8. It
// multiplies |x| by ±w: unsigned times signed, as the instruction wants, and pairs of products fit 16 bits.
INLINE ivec i_dot_bytes(ivec sums, ivec w, ivec x) {
  return (ivec){dot_half_signed(sums.a, w.a, x.a), dot_half_signed(sums.b, w.b, x.b)};
}

// The same for w from 0 to 15.
INLINE ivec i_dot_nibbles(ivec sums, ivec w, ivec x) {
  return (ivec){dot_half(sums.a, w.a, x.a), dot_half(sums.b, w.b, x.b)};
}

INLINE vec v_load_bytes(const int8_t *from) {  // 16 int8
  __m128i bytes = _mm_loadu_si128((const __m128i *)from);
  return i_to_float((ivec){_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}

// Stores x, rounded, as 16 int8, and returns their sum.
INLINE int32_t v_store_bytes(int8_t *to, vec x) {
  __m256i first = _mm256_cvtps_epi32(x.a), second = _mm256_cvtps_epi32(x.b);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xd8);
  __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128((__m128i *)to, _mm_packs_epi16(low, high));
  __m256i eight = _mm256_add_epi32(first, second);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}

// --- bfloat16 --------------------------------------------------------------------------------------------------------

// The first and the second of 16 pairs.
INLINE vec v_first_of_pairs(ivec pairs) {
  return (vec){_mm256_castsi256_ps(_mm256_slli_epi32(pairs.a, 16)),
               _mm256_castsi256_ps(_mm256_slli_epi32(pairs.b, 16))};
}
INLINE vec v_second_of_pairs(ivec pairs) {
  const __m256i high = _mm256_set1_epi32(0xffff0000);
  return (vec){_mm256_castsi256_ps(_mm256_and_si256(pairs.a, high)),
               _mm256_castsi256_ps(_mm256_and_si256(pairs.b, high))};
}
