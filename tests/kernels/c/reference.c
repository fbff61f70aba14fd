#include "reference.h"

void reference_shape(const Reference *r, int part, int64_t *outputs, int64_t *inputs) {
  int64_t queries = r->n_heads * r->d_head, keys = r->n_kv_heads * r->d_head, e = r->width, f = r->hidden;
  int64_t rows[] = {e, e, queries, keys, keys, e, f, f, e}, columns[] = {1, 1, e, e, e, queries, e, e, f};
  *outputs = rows[part], *inputs = columns[part];
}

static double *as_doubles(const float *x, int64_t n) {
  double *y = zeros(n * sizeof(double));
  for (int64_t i = 0; i < n; i++) y[i] = x[i];
  return y;
}

Reference random_block(int rms, int activation, int gated, int rotary, int causal, int64_t length,
                       float *weights[N_PARTS][2], float **cosines, float **sines) {
  Reference r = {rms, activation, gated, rotary, causal, length, 64, 96, 4, 2, 16, 1e-5, 0.25};
  for (int i = 0; i < N_PARTS; i++) {
    int64_t outputs, inputs;
    reference_shape(&r, i, &outputs, &inputs);
    int norm = i <= FEEDFORWARD_NORM, absent = i == GATE && !gated;
    weights[i][0] = absent ? 0 : random_floats(outputs * inputs, norm ? 0.5 : 0.3);
    weights[i][1] = absent || rms ? 0 : random_floats(outputs, 0.3);
    for (int64_t j = 0; norm && j < outputs; j++) weights[i][0][j] += 1;
    r.weights[i][0] = absent ? 0 : as_doubles(weights[i][0], outputs * inputs);
    r.weights[i][1] = weights[i][1] ? as_doubles(weights[i][1], outputs) : 0;
  }
  int64_t pairs = r.d_head / 2;
  *cosines = zeros(length * pairs * sizeof(float)), *sines = zeros(length * pairs * sizeof(float));
  for (int64_t t = 0; t < length; t++)
    for (int64_t i = 0; i < pairs; i++) {
      double angle = t * pow(100, -(double)i / pairs);
      (*cosines)[t * pairs + i] = (float)cos(angle), (*sines)[t * pairs + i] = (float)sin(angle);
    }
  r.cos = as_doubles(*cosines, length * pairs), r.sin = as_doubles(*sines, length * pairs);
  return r;
}

static void norm(const Reference *r, int part, const double *x, double *y) {
  int64_t n = r->width;
  double mean = 0, square = 0;
  for (int64_t i = 0; i < n; i++) mean += r->rms ? 0 : x[i] / n;
  for (int64_t i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / n;
  for (int64_t i = 0; i < n; i++) {
    double bias = r->weights[part][1] ? r->weights[part][1][i] : 0;
    y[i] = (x[i] - mean) / sqrt(square + r->eps) * r->weights[part][0][i] + bias;
  }
}

static void linear(const Reference *r, int part, const double *x, double *y) {
  int64_t outputs, inputs;
  reference_shape(r, part, &outputs, &inputs);
  for (int64_t n = 0; n < outputs; n++) {
    y[n] = r->weights[part][1] ? r->weights[part][1][n] : 0;
    for (int64_t k = 0; k < inputs; k++) y[n] += r->weights[part][0][n * inputs + k] * x[k];
  }
}

static void rotate(const Reference *r, double *x, int64_t n_heads, int64_t t) {
  int64_t pairs = r->d_head / 2;
  for (int64_t h = 0; r->rotary && h < n_heads; h++)
    for (int64_t i = 0; i < pairs; i++) {
      double *a = x + h * r->d_head + i, *b = a + pairs, c = r->cos[t * pairs + i], s = r->sin[t * pairs + i];
      double first = *a * c - *b * s, second = *b * c + *a * s;
      *a = first, *b = second;
    }
}

static double activation(int kind, double x) {
  switch (kind) {
    case RELU: return x > 0 ? x : 0;
    case GELU: return x / 2 * (1 + erf(x / sqrt(2)));
    case GELU_TANH: return x / 2 * (1 + tanh(0.79788456080286536 * (x + 0.044715 * x * x * x)));
    default: return x / (1 + exp(-x));
  }
}

static void attend(const Reference *r, const double *q, const double *keys, const double *values, int64_t n_keys,
                   double *out) {
  int64_t d_head = r->d_head, stride = r->n_kv_heads * d_head;
  double *weights = zeros(n_keys * sizeof(double));
  for (int64_t h = 0; h < r->n_heads; h++) {
    int64_t at = h / (r->n_heads / r->n_kv_heads) * d_head;
    double total = 0;
    for (int64_t t = 0; t < n_keys; t++) {
      double score = 0;
      for (int64_t d = 0; d < d_head; d++) score += q[h * d_head + d] * keys[t * stride + at + d];
      total += weights[t] = exp(r->scale * score);
    }
    for (int64_t d = 0; d < d_head; d++) {
      out[h * d_head + d] = 0;
      for (int64_t t = 0; t < n_keys; t++) out[h * d_head + d] += weights[t] / total * values[t * stride + at + d];
    }
  }
  free(weights);
}

void reference_block(const Reference *r, const double *x, double *y) {
  int64_t n = r->length, e = r->width, queries = r->n_heads * r->d_head, stride = r->n_kv_heads * r->d_head;
  double *q = zeros(n * queries * 8), *k = zeros(n * stride * 8), *v = zeros(n * stride * 8), *normed = zeros(e * 8);
  double *attended = zeros(queries * 8), *up = zeros(r->hidden * 8), *gate = zeros(r->hidden * 8);
  double *delta = zeros(e * 8);
  for (int64_t t = 0; t < n; t++) {
    norm(r, ATTENTION_NORM, x + t * e, normed);
    linear(r, QUERY, normed, q + t * queries);
    linear(r, KEY, normed, k + t * stride);
    linear(r, VALUE, normed, v + t * stride);
    rotate(r, q + t * queries, r->n_heads, t);
    rotate(r, k + t * stride, r->n_kv_heads, t);
  }
  for (int64_t t = 0; t < n; t++) {
    attend(r, q + t * queries, k, v, r->causal ? t + 1 : n, attended);
    linear(r, OUTPUT, attended, delta);
    for (int64_t i = 0; i < e; i++) y[t * e + i] = x[t * e + i] + delta[i];
    norm(r, FEEDFORWARD_NORM, y + t * e, normed);
    linear(r, UP, normed, up);
    if (r->gated) linear(r, GATE, normed, gate);
    for (int64_t i = 0; i < r->hidden; i++)
      up[i] = r->gated ? activation(r->activation, gate[i]) * up[i] : activation(r->activation, up[i]);
    linear(r, DOWN, up, delta);
    for (int64_t i = 0; i < e; i++) y[t * e + i] += delta[i];
  }
  free(q), free(k), free(v), free(normed), free(attended), free(up), free(gate), free(delta);
}
