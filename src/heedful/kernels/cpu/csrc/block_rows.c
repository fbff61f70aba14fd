// The row-wise operations of a block, forward and backward: norms, rotary embeddings, activations.

#include "block.h"

void normalize_rows(const Block *b, int which, const float *x, int64_t begin, int64_t end) {
  const float *weight = b->a.weights[which][0], *bias = b->a.weights[which][1];
  int64_t n = b->a.width;
  for (int64_t row = begin; row < end; row++) {
    float *stats = b->stats[which] + 2 * row;
    float *y = b->normed[which] + row * n;
    stats[1] = normalize_row(b->a.rms, weight, bias, (float)b->a.eps, x + row * n, y, n, stats);
  }
}

// With u = (x - mean) / std and g = weight · d: d_x = (g - mean(g) - u mean(g u)) / std.
void normalize_rows_backward(const Block *b, int which, const float *x, const float *past, float *to, int64_t begin,
                             int64_t end) {
  const float *weight = b->a.weights[which][0];
  int64_t n = b->a.width;
  float *d_weight = b->partial + omp_get_thread_num() * b->partial_stride + 2 * which * n, *d_bias = d_weight + n;
  memset(d_weight, 0, 2 * n * sizeof(float));
  for (int64_t row = begin; row < end; row++) {
    const float *at_x = x + row * n, *d = b->d_normed + row * n;
    vec mean = v_set(b->stats[which][2 * row]), inverse = v_set(b->stats[which][2 * row + 1]);
    vec sum = v_zero(), product = v_zero();
#define LOAD_ROW                                                                                  \
  lanes here = first_lanes(n - k);                                                                \
  vec u = v_mul(v_keep(here, v_sub(v_load_lanes(here, at_x + k), mean)), inverse);                \
  vec outer = v_load_lanes(here, d + k), g = v_mul(outer, v_load_lanes(here, weight + k))
    FOR_LANES(n) {
      LOAD_ROW;
      sum = v_add(sum, g);
      product = v_fma(g, u, product);
      v_store_lanes(d_weight + k, here, v_fma(outer, u, v_load_lanes(here, d_weight + k)));
      v_store_lanes(d_bias + k, here, v_add(outer, v_load_lanes(here, d_bias + k)));
    }
    vec mean_g = v_set(b->a.rms ? 0 : v_sum(sum) / n), mean_gu = v_set(v_sum(product) / n);
    FOR_LANES(n) {
      LOAD_ROW;
      vec change = v_mul(v_sub(v_fnma(u, mean_gu, g), mean_g), inverse);
      v_store_lanes(to + row * n + k, here, v_add(change, v_load_lanes(here, past + row * n + k)));
    }
#undef LOAD_ROW
  }
}

void rotate_rows(const Block *b, float *qkv, int64_t begin, int64_t end, float direction) {
  const BlockArguments *a = &b->a;
  for (int64_t row = begin; row < end && a->cos; row++) {
    int64_t at = row % a->length * a->n_rotated_pairs + row / a->length * a->rotation_stride;
    for (int64_t h = 0; h < a->n_heads + a->n_kv_heads; h++)
      rotate_head(qkv + row * b->qkv_size + h * a->d_head, a->cos + at, a->sin + at, a->n_rotated_pairs, a->interleaved,
                  direction);
  }
}

INLINE void activate_as(const Block *b, int64_t begin, int64_t end, const int kind) {
  int64_t n = b->a.hidden;
  for (int64_t row = begin; row < end; row++) FOR_LANES(n) {
    lanes here = first_lanes(n - k);
    const float *x = b->up + row * b->up_size + k;
    vec derivative, y = activate(kind, v_load_lanes(here, x), &derivative);
    if (b->a.gated) y = v_mul(y, v_load_lanes(here, x + n));
    v_store_lanes(b->active + row * n + k, here, y);
  }
}

INLINE void activate_backward_as(const Block *b, int64_t begin, int64_t end, const int kind) {
  int64_t n = b->a.hidden;
  for (int64_t row = begin; row < end; row++) FOR_LANES(n) {
    lanes here = first_lanes(n - k);
    const float *x = b->up + row * b->up_size + k;
    float *d = b->d_up + row * b->up_size + k;
    vec derivative, y = activate(kind, v_load_lanes(here, x), &derivative), at = v_load_lanes(here, d);
    if (b->a.gated) {
      vec other = v_load_lanes(here, x + n);
      v_store_lanes(d + n, here, v_mul(at, y));
      y = v_mul(y, other), at = v_mul(at, other);
    }
    // Where ReLU is flat the gradient is 0, even if the incoming one is infinite.
    vec d_x = kind == RELU ? v_keep(v_greater(derivative, v_zero()), at) : v_mul(at, derivative);
    v_store_lanes(d, here, d_x);
    v_store_lanes(b->active + row * n + k, here, y);
  }
}

void activate_rows(const Block *b, int64_t begin, int64_t end) {
  BY_ACTIVATION(b->a.activation, activate_as, b, begin, end)
}

void activate_rows_backward(const Block *b, int64_t begin, int64_t end) {
  BY_ACTIVATION(b->a.activation, activate_backward_as, b, begin, end)
}
