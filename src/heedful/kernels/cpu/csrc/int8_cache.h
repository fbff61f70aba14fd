// Keys and values in 8 bits (nn/int8_cache.py): a position of a head is D int8 codes and a bfloat16 scale. Keys are
// rotated by a Hadamard matrix first, and so are the queries, which leaves their dot products as they are.

#pragma once
#include "common.h"

#define PARITY(x) (((x) ^ (x) >> 1 ^ (x) >> 2 ^ (x) >> 3) & 1)
#define SIGN(i, j) (1 - 2 * PARITY((i) & (j)))
#define SIGNS_OF_4(i, j) SIGN(i, j), SIGN(i, j + 1), SIGN(i, j + 2), SIGN(i, j + 3)
#define SIGNS_OF(i) {SIGNS_OF_4(i, 0), SIGNS_OF_4(i, 4), SIGNS_OF_4(i, 8), SIGNS_OF_4(i, 12)}

static const float HADAMARD[LANES][LANES] = {
    SIGNS_OF(0), SIGNS_OF(1), SIGNS_OF(2), SIGNS_OF(3), SIGNS_OF(4), SIGNS_OF(5), SIGNS_OF(6), SIGNS_OF(7),
    SIGNS_OF(8), SIGNS_OF(9), SIGNS_OF(10), SIGNS_OF(11), SIGNS_OF(12), SIGNS_OF(13), SIGNS_OF(14), SIGNS_OF(15),
};

// x (D) times an orthogonal Hadamard matrix, in place, in parts of the largest power of two that divides D.
INLINE void rotate_hadamard(float *x, int64_t d_head) {
  int64_t size = d_head & -d_head;
  vec by = v_set(1 / sqrtf((float)size));
  FOR_LANES(d_head) {
    vec sum = v_zero();
    UNROLL for (int i = 0; i < LANES; i++) sum = v_fma(v_set(x[k + i]), v_load(HADAMARD[i]), sum);
    v_store(x + k, v_mul(sum, by));
  }
  for (int64_t step = LANES; step < size; step *= 2)
    for (int64_t i = 0; i < d_head; i += LANES) {
      if (i & step) continue;
      vec a = v_load(x + i), b = v_load(x + i + step);
      v_store(x + i, v_add(a, b));
      v_store(x + i + step, v_sub(a, b));
    }
}

INLINE uint16_t to_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
}

// A bfloat16 that need not be aligned.
INLINE float load_bfloat16(const void *from) {
  uint16_t half;
  memcpy(&half, from, sizeof(half));
  uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// Stores x (D) as codes and a scale, which is NaN if x is not finite.
INLINE void quantize_position(const float *x, int64_t d_head, int8_t *to) {
  vec most = v_zero(), invalid = v_zero();
  FOR_LANES(d_head) {
    vec at = v_load(x + k);
    most = v_max(v_abs(at), most);
    invalid = v_fma(at, v_zero(), invalid);  // NaN where x is not finite, else 0
  }
  uint16_t stored = to_bfloat16((v_highest(most) + v_sum(invalid)) / 127);
  float scale = load_bfloat16(&stored);
  vec inverse = v_set(scale == 0 ? 0 : 1 / scale);
  FOR_LANES(d_head) v_store_bytes(to + k, v_mul(v_load(x + k), inverse));
  memcpy(to + d_head, &stored, sizeof(stored));
}
