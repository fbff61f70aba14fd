// Functions shared by the kernels: exp, activations with their derivatives, LayerNorm and RMSNorm of a row, rotary
// embeddings. NaN and infinity propagate as in PyTorch's operators.

#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vector.h"

// Of OpenMP, whose header Apple's compiler lacks.
int omp_get_thread_num(void);
int omp_get_num_threads(void);

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))  // other symbols are hidden
#endif

enum { RELU, GELU, GELU_TANH, SILU };

INLINE int64_t min_long(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_long(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// e^x by Cephes' polynomial, within 2 ulp. Denormal results are flushed to 0.
INLINE vec v_exp(vec x) {
  lanes normal = v_not_less(x, v_set(-87.33f));
  x = v_min(v_set(89), x);  // e^89 is infinite
  vec n = v_round(v_mul(x, v_set(1.44269504f)));
  vec r = v_fnma(n, v_set(0.693359375f), x);
  r = v_fnma(n, v_set(-2.12194440e-4f), r);
  vec y = v_set(1.9875691500e-4f);
  y = v_fma(y, r, v_set(1.3981999507e-3f));
  y = v_fma(y, r, v_set(8.3334519073e-3f));
  y = v_fma(y, r, v_set(4.1665795894e-2f));
  y = v_fma(y, r, v_set(1.6666665459e-1f));
  y = v_fma(y, r, v_set(5.0000001201e-1f));
  y = v_fma(y, v_mul(r, r), v_add(r, v_set(1)));
  return v_scale_by_power_of_two(normal, y, n);
}

// An activation and its derivative at x. `kind` is a compile-time constant.
INLINE vec activate(const int kind, vec x, vec *derivative) {
  const vec one = v_set(1), zero = v_zero();
  if (kind == RELU) {
    *derivative = v_keep(v_not_less_or_equal(x, zero), one);
    return v_max(zero, x);
  }
  if (kind == GELU) {  // x Φ(x), with 1 - erf by Abramowitz & Stegun 7.1.26, within 1.5e-7
    vec z = v_mul(v_abs(x), v_set(0.70710678f));
    vec bell = v_exp(v_mul(v_mul(x, x), v_set(-0.5f)));
    vec t = v_reciprocal(v_fma(z, v_set(0.3275911f), one)), y = v_set(1.061405429f);
    y = v_fma(y, t, v_set(-1.453152027f));
    y = v_fma(y, t, v_set(1.421413741f));
    y = v_fma(y, t, v_set(-0.284496736f));
    y = v_fma(y, t, v_set(0.254829592f));
    vec tail = v_mul(v_mul(v_mul(y, t), bell), v_set(0.5f));
    vec cdf = v_select(v_greater(x, zero), v_sub(one, tail), tail);
    *derivative = v_fma(v_mul(x, bell), v_set(0.39894228f), cdf);
    return v_mul(x, cdf);
  }
  vec u = x, slope = one;  // x sigmoid(u)
  if (kind == GELU_TANH) {  // u = 2 √(2/π) (x + 0.044715 x³)
    vec square = v_mul(x, x);
    u = v_mul(x, v_fma(square, v_set(0.0713548163f), v_set(1.59576912f)));
    slope = v_fma(square, v_set(3 * 0.0713548163f), v_set(1.59576912f));
  }
  vec s = v_reciprocal(v_add(one, v_exp(v_sub(zero, u)))), y = v_mul(x, s);
  *derivative = v_fma(v_mul(y, slope), v_sub(one, s), s);
  return y;
}

// Calls f(arguments..., kind) with the activation as a compile-time constant.
#define BY_ACTIVATION(kind, f, ...)                        \
  switch (kind) {                                          \
    case RELU: f(__VA_ARGS__, RELU); break;                \
    case GELU: f(__VA_ARGS__, GELU); break;                \
    case GELU_TANH: f(__VA_ARGS__, GELU_TANH); break;      \
    case SILU: f(__VA_ARGS__, SILU); break;                \
  }

// y = (x - mean) / std · weight + bias of a row (n); for RMSNorm mean = 0 and there is no bias. y may alias x.
// Returns 1 / std.
INLINE float normalize_row(int rms, const float *weight, const float *bias, float eps, const float *x, float *y,
                           int64_t n, float *mean_out) {
  vec sum = v_zero(), squares = v_zero();
  float mean = 0;
  if (!rms) {
    FOR_LANES(n) sum = v_add(sum, v_load_lanes(first_lanes(n - k), x + k));
    mean = v_sum(sum) / n;
  }
  vec center = v_set(mean);
  FOR_LANES(n) {
    lanes here = first_lanes(n - k);
    vec at = v_keep(here, v_sub(v_load_lanes(here, x + k), center));
    squares = v_fma(at, at, squares);
  }
  float inverse = 1 / sqrtf(v_sum(squares) / n + eps);
  FOR_LANES(n) {
    lanes here = first_lanes(n - k);
    vec at = v_mul(v_sub(v_load_lanes(here, x + k), center), v_set(inverse));
    at = v_mul(at, v_load_lanes(here, weight + k));
    if (bias) at = v_add(at, v_load_lanes(here, bias + k));
    v_store_lanes(y + k, here, at);
  }
  *mean_out = mean;
  return inverse;
}

// Rotary embedding (Su et al. 2021) of one head, in place; direction -1 is the inverse. The elements of a pair are
// adjacent (interleaved) or n_pairs apart.
INLINE void rotate_head(float *x, const float *cos, const float *sin, int64_t n_pairs, int interleaved,
                        float direction) {
  int64_t apart = interleaved ? 1 : n_pairs, step = interleaved ? 2 : 1;
  for (int64_t i = 0; i < n_pairs; i++) {
    float *a = x + i * step, *b = a + apart;
    float first = *a * cos[i] - *b * sin[i] * direction, second = *b * cos[i] + *a * sin[i] * direction;
    *a = first, *b = second;
  }
}
