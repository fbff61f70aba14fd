// Attention of one query for each row over keys and values, with a mask, a bias and grouped heads.
//
//     B rows, H heads, G key/value heads, S positions, D head size

#include "check.h"

enum { B = 3, H = 4, G = 2 };

static void reference(const float *q, const float *k, const float *v, const uint8_t *allowed, const float *bias,
                      int64_t n_keys, int64_t d_head, double scale, double *out) {
  double *scores = zeros(n_keys * sizeof(double)), highest = -INFINITY, total = 0;
  for (int64_t t = 0; t < n_keys; t++) {
    scores[t] = -INFINITY;
    if (allowed && !allowed[t]) continue;
    double sum = 0;
    for (int64_t d = 0; d < d_head; d++) sum += (double)q[d] * k[t * d_head + d];
    scores[t] = scale * sum + (bias ? bias[t] : 0);
    highest = fmax(highest, scores[t]);
  }
  for (int64_t t = 0; t < n_keys; t++) total += scores[t] = exp(scores[t] - highest);
  for (int64_t d = 0; d < d_head; d++) {
    out[d] = 0;
    for (int64_t t = 0; t < n_keys; t++) out[d] += scores[t] / total * v[t * d_head + d];
  }
}

static void check_size(int64_t n_keys, int64_t d_head, int masked, int biased) {
  float *q = random_floats(B * H * d_head, 2), *k = random_floats(B * G * n_keys * d_head, 2);
  float *v = random_floats(B * G * n_keys * d_head, 1), *bias = biased ? random_floats(B * H * n_keys, 3) : 0;
  float *out = zeros(B * H * d_head * sizeof(float)), *scores = zeros(B * H * n_keys * sizeof(float));
  double *expected = zeros(B * H * d_head * sizeof(double));
  uint8_t *allowed = masked ? zeros(B * n_keys) : 0;
  for (int64_t i = 0; masked && i < B * n_keys; i++) allowed[i] = i % n_keys == 0 || uniform() > 0;
  int64_t row = G * n_keys * d_head;
  int64_t strides[] = {H * d_head, d_head, row, n_keys * d_head, d_head, row, n_keys * d_head, d_head, n_keys,
                       H * n_keys, n_keys};
  for (int64_t j = 0; j < B * H; j++) {
    int64_t at = (j / H * G + j % H / (H / G)) * n_keys * d_head;
    reference(q + j * d_head, k + at, v + at, masked ? allowed + j / H * n_keys : 0, biased ? bias + j * n_keys : 0,
              n_keys, d_head, 0.2, expected + j * d_head);
  }
  single_query_attention(q, k, v, allowed, bias, out, scores, B, H, G, n_keys, d_head, strides, 0.2f, threads);
  char what[100];
  snprintf(what, sizeof(what), "attention over %d positions of %d%s%s", (int)n_keys, (int)d_head,
           masked ? ", masked" : "", biased ? ", biased" : "");
  compare(what, out, expected, B * H * d_head, 1e-5);
}

void check_attention(void) {
  check_size(1, 16, 0, 0);
  check_size(37, 64, 0, 0);
  check_size(300, 80, 1, 0);
  check_size(50, 128, 1, 1);
}
