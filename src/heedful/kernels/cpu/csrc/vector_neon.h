// Vectors of 16 elements for 64-bit Arm: NEON with dot products (Armv8.2), as four registers of 4; with the int8 matrix
// extension (i8mm) where the compiler is told that it exists.

#pragma once
#include <arm_neon.h>

#define FLOAT_TILE 3
#define INT_TILE 3
#define GEMM_ROWS 3
#define KEYS_AT_ONCE 4
#define SUM_ROWS 3
#define SUM_COLUMNS 2
#define BFLOAT16_DOT 0

typedef struct { float32x4_t a, b, c, d; } vec;
typedef struct { int32x4_t a, b, c, d; } ivec;  // 16 int32, 64 bytes, or 16 pairs of bfloat16

#define UNARY(name, f) \
  INLINE vec name(vec x) { return (vec){f(x.a), f(x.b), f(x.c), f(x.d)}; }
#define BINARY(name, f) \
  INLINE vec name(vec x, vec y) { return (vec){f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}; }

// The four lanes from `begin` on as all bits of an element.
INLINE uint32x4_t mask_of(lanes some, const int begin) {
  const uint32x4_t each = {1u << begin, 2u << begin, 4u << begin, 8u << begin};
  return vtstq_u32(vdupq_n_u32(some), each);
}
INLINE lanes lanes_of(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {
  const uint8x16_t each = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  uint16x8_t low = vcombine_u16(vmovn_u32(a), vmovn_u32(b)), high = vcombine_u16(vmovn_u32(c), vmovn_u32(d));
  uint8x16_t bits = vandq_u8(vcombine_u8(vmovn_u16(low), vmovn_u16(high)), each);
  return vaddv_u8(vget_low_u8(bits)) | vaddv_u8(vget_high_u8(bits)) << 8;
}

INLINE vec v_set(float x) {
  float32x4_t all = vdupq_n_f32(x);
  return (vec){all, all, all, all};
}
INLINE vec v_zero(void) { return v_set(0); }
INLINE vec v_load(const float *from) {
  return (vec){vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
INLINE void v_store(float *to, vec x) {
  vst1q_f32(to, x.a), vst1q_f32(to + 4, x.b), vst1q_f32(to + 8, x.c), vst1q_f32(to + 12, x.d);
}
INLINE vec v_load_lanes(lanes some, const float *from) {  // others are 0
  if (some == 0xffff) return v_load(from);
  float each[LANES] = {0};
  for (int i = 0; some >> i; i++)
    if (some >> i & 1) each[i] = from[i];
  return v_load(each);
}
INLINE void v_store_lanes(float *to, lanes some, vec x) {
  if (some == 0xffff) {
    v_store(to, x);
    return;
  }
  float each[LANES];
  v_store(each, x);
  for (int i = 0; some >> i; i++)
    if (some >> i & 1) to[i] = each[i];
}
INLINE vec v_load_halves(const void *from) {  // 16 float16
  const uint16_t *at = from;
#define HALVES(i) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at + 4 * i)))
  return (vec){HALVES(0), HALVES(1), HALVES(2), HALVES(3)};
#undef HALVES
}

BINARY(v_add, vaddq_f32)
BINARY(v_sub, vsubq_f32)
BINARY(v_mul, vmulq_f32)
BINARY(v_div, vdivq_f32)
UNARY(v_abs, vabsq_f32)
UNARY(v_sqrt, vsqrtq_f32)
UNARY(v_round, vrndnq_f32)

INLINE vec v_fma(vec x, vec y, vec z) {  // x y + z
  return (vec){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
INLINE vec v_fnma(vec x, vec y, vec z) {  // z - x y
  return (vec){vfmsq_f32(z.a, x.a, y.a), vfmsq_f32(z.b, x.b, y.b), vfmsq_f32(z.c, x.c, y.c), vfmsq_f32(z.d, x.d, y.d)};
}
INLINE vec v_fms(vec x, vec y, vec z) { return v_fma(x, y, v_sub(v_set(-0.0f), z)); }  // x y - z

// If either is NaN, the result is y.
INLINE float32x4_t lesser(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE float32x4_t greater(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
BINARY(v_min, lesser)
BINARY(v_max, greater)

INLINE lanes inverted(lanes some) { return ~some; }
#define COMPARE(f, x, y) lanes_of(f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d))
INLINE lanes v_greater(vec x, vec y) { return COMPARE(vcgtq_f32, x, y); }
INLINE lanes v_equal(vec x, vec y) { return COMPARE(vceqq_f32, x, y); }
INLINE lanes v_not_less(vec x, vec y) { return inverted(COMPARE(vcltq_f32, x, y)); }           // true for NaN
INLINE lanes v_not_less_or_equal(vec x, vec y) { return inverted(COMPARE(vcleq_f32, x, y)); }  // true for NaN
INLINE lanes v_is_nan(vec x, vec y) { return inverted(v_equal(x, x) & v_equal(y, y)); }        // x or y
#undef COMPARE

INLINE vec v_select(lanes some, vec x, vec y) {  // x in these lanes, else y
  return (vec){vbslq_f32(mask_of(some, 0), x.a, y.a), vbslq_f32(mask_of(some, 4), x.b, y.b),
               vbslq_f32(mask_of(some, 8), x.c, y.c), vbslq_f32(mask_of(some, 12), x.d, y.d)};
}
INLINE vec v_keep(lanes some, vec x) { return some == 0xffff ? x : v_select(some, x, v_zero()); }  // else 0

INLINE float32x4_t power_of_two(int32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
INLINE float32x4_t scale_quarter(float32x4_t x, float32x4_t n) {  // in two factors: 2¹²⁸ alone would be infinite
  int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1);
  return vmulq_f32(vmulq_f32(x, power_of_two(half)), power_of_two(vsubq_s32(whole, half)));
}
INLINE vec v_scale_by_power_of_two(lanes some, vec x, vec n) {  // x 2ⁿ
  return v_keep(some, (vec){scale_quarter(x.a, n.a), scale_quarter(x.b, n.b), scale_quarter(x.c, n.c),
                            scale_quarter(x.d, n.d)});
}

INLINE float v_sum(vec x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(x.c, x.d))); }
INLINE float v_highest(vec x) { return vmaxvq_f32(greater(greater(x.a, x.b), greater(x.c, x.d))); }
INLINE vec v_reciprocal(vec x) { return v_div(v_set(1), x); }

// Up to 16 bytes of a boolean mask as lanes.
INLINE lanes load_bools(lanes some, const unsigned char *from) {
  lanes found = 0;
  for (int i = 0; some >> i; i++)
    if (some >> i & 1) found |= (from[i] != 0) << i;
  return found;
}

INLINE void prefetch(const void *address) { __builtin_prefetch(address, 0, 2); }

// The horizontal sums of 4 registers as one.
INLINE float32x4_t sums_of_4(const float32x4_t *x) {
  return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
}

// The horizontal sums of 16 vectors as one vector. All use the same order of additions, so that a sum does not depend on
// its index.
INLINE vec v_sums(const vec *x) {
  float32x4_t t[LANES];
  UNROLL for (int i = 0; i < LANES; i++) t[i] = vaddq_f32(vaddq_f32(x[i].a, x[i].b), vaddq_f32(x[i].c, x[i].d));
  return (vec){sums_of_4(t), sums_of_4(t + 4), sums_of_4(t + 8), sums_of_4(t + 12)};
}

// Transpose a matrix of 16 x 16 in place.
INLINE void v_transpose(vec *r) {
  float from[LANES][LANES], to[LANES][LANES];
  for (int i = 0; i < LANES; i++) v_store(from[i], r[i]);
  for (int i = 0; i < LANES; i += 4)
    for (int j = 0; j < LANES; j += 4) {
      float32x4x2_t a = vtrnq_f32(vld1q_f32(&from[i][j]), vld1q_f32(&from[i + 1][j]));
      float32x4x2_t b = vtrnq_f32(vld1q_f32(&from[i + 2][j]), vld1q_f32(&from[i + 3][j]));
      for (int k = 0; k < 2; k++) {
        vst1q_f32(&to[j + k][i], vcombine_f32(vget_low_f32(a.val[k]), vget_low_f32(b.val[k])));
        vst1q_f32(&to[j + k + 2][i], vcombine_f32(vget_high_f32(a.val[k]), vget_high_f32(b.val[k])));
      }
    }
  for (int i = 0; i < LANES; i++) r[i] = v_load(to[i]);
}

// --- integers --------------------------------------------------------------------------------------------------------

INLINE ivec i_set(int32_t x) {
  int32x4_t all = vdupq_n_s32(x);
  return (ivec){all, all, all, all};
}
INLINE ivec i_load(const void *from) {
  const int32_t *at = from;
  return (ivec){vld1q_s32(at), vld1q_s32(at + 4), vld1q_s32(at + 8), vld1q_s32(at + 12)};
}
// The 64-bit products of y and the lower 32 bits of each of 8 elements.
INLINE int32x4_t multiply_words(int32x4_t x, uint32_t y) {
  return vreinterpretq_s32_u64(vmull_u32(vmovn_u64(vreinterpretq_u64_s32(x)), vdup_n_u32(y)));
}
INLINE ivec i_multiply_words(ivec x, uint32_t y) {
  return (ivec){multiply_words(x.a, y), multiply_words(x.b, y), multiply_words(x.c, y), multiply_words(x.d, y)};
}
INLINE vec i_to_float(ivec x) {
  return (vec){vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}

#define BYTES vreinterpretq_s8_s32
#define UNSIGNED vreinterpretq_u8_s32
INLINE int32x4_t low_nibbles(int32x4_t x) {
  return vreinterpretq_s32_u8(vandq_u8(UNSIGNED(x), vdupq_n_u8(15)));
}
INLINE int32x4_t high_nibbles(int32x4_t x) { return vreinterpretq_s32_u8(vshrq_n_u8(UNSIGNED(x), 4)); }
INLINE ivec i_low_nibbles(ivec x) {  // of each byte
  return (ivec){low_nibbles(x.a), low_nibbles(x.b), low_nibbles(x.c), low_nibbles(x.d)};
}
INLINE ivec i_high_nibbles(ivec x) {
  return (ivec){high_nibbles(x.a), high_nibbles(x.b), high_nibbles(x.c), high_nibbles(x.d)};
}

// Adds to each int32 of `sums` the products of four bytes: of w, which are weights + 128, and of x, which are int8.
#ifdef __ARM_FEATURE_MATMUL_INT8
#define BYTE_OFFSET 128
INLINE int32x4_t dot_quarter(int32x4_t sums, int32x4_t w, int32x4_t x) {
  return vusdotq_s32(sums, UNSIGNED(w), BYTES(x));
}
#else
#define BYTE_OFFSET 0
INLINE int32x4_t dot_quarter(int32x4_t sums, int32x4_t w, int32x4_t x) {
  return vdotq_s32(sums, veorq_s8(BYTES(w), vdupq_n_s8(-128)), BYTES(x));
}
#endif
INLINE ivec i_dot_bytes(ivec sums, ivec w, ivec x) {
  return (ivec){dot_quarter(sums.a, w.a, x.a), dot_quarter(sums.b, w.b, x.b), dot_quarter(sums.c, w.c, x.c),
                dot_quarter(sums.d, w.d, x.d)};
}

// The same for w from 0 to 15.
INLINE ivec i_dot_nibbles(ivec sums, ivec w, ivec x) {
  return (ivec){vdotq_s32(sums.a, BYTES(w.a), BYTES(x.a)), vdotq_s32(sums.b, BYTES(w.b), BYTES(x.b)),
                vdotq_s32(sums.c, BYTES(w.c), BYTES(x.c)), vdotq_s32(sums.d, BYTES(w.d), BYTES(x.d))};
}

INLINE vec v_load_bytes(const int8_t *from) {  // 16 int8
  int8x16_t bytes = vld1q_s8(from);
  int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
  return i_to_float((ivec){vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
                           vmovl_s16(vget_high_s16(high))});
}

// Stores x, rounded, as 16 int8, and returns their sum.
INLINE int32_t v_store_bytes(int8_t *to, vec x) {
  int32x4_t a = vcvtnq_s32_f32(x.a), b = vcvtnq_s32_f32(x.b), c = vcvtnq_s32_f32(x.c), d = vcvtnq_s32_f32(x.d);
  int16x8_t low = vcombine_s16(vqmovn_s32(a), vqmovn_s32(b)), high = vcombine_s16(vqmovn_s32(c), vqmovn_s32(d));
  vst1q_s8(to, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
  return vaddvq_s32(vaddq_s32(vaddq_s32(a, b), vaddq_s32(c, d)));
}
#undef BYTES
#undef UNSIGNED

// --- bfloat16 --------------------------------------------------------------------------------------------------------

// The first and the second of 16 pairs.
INLINE float32x4_t first_of_pairs(int32x4_t pairs) { return vreinterpretq_f32_s32(vshlq_n_s32(pairs, 16)); }
INLINE float32x4_t second_of_pairs(int32x4_t pairs) {
  return vreinterpretq_f32_s32(vandq_s32(pairs, vdupq_n_s32((int32_t)0xffff0000)));
}
INLINE vec v_first_of_pairs(ivec x) {
  return (vec){first_of_pairs(x.a), first_of_pairs(x.b), first_of_pairs(x.c), first_of_pairs(x.d)};
}
INLINE vec v_second_of_pairs(ivec x) {
  return (vec){second_of_pairs(x.a), second_of_pairs(x.b), second_of_pairs(x.c), second_of_pairs(x.d)};
}

#undef UNARY
#undef BINARY
