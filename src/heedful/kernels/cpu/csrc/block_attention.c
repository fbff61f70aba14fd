// Attention of a block forward and backward. As in FlashAttention (Dao et al. 2022) the attention weights are computed
// for a few queries at a time, and recomputed in the backward pass from the log-sum-exp of their scores.
//
//     T positions, D head size

#include "block.h"

// The keys and values of one sequence and head, and scratch memory for them as panels.
typedef struct {
  int64_t stride, n_columns;  // row size of qkv; T rounded up to whole panels
  const float *keys, *values;
  float *keys_transposed, *values_transposed, *keys_panels, *values_panels;  // (D, T) and (T, D)
  float *weights, *d_weights;                                                // (QUERY_CHUNK, T)
  float *queries, *d_attended;                                               // (QUERY_CHUNK, D)
  float *factors;                                                            // (T,) of dropout, or NULL
} Head;

int64_t attention_scratch(const Block *b) {
  int64_t tall = round_up(b->a.length, TILE_COLUMNS), wide = round_up(b->a.d_head, TILE_COLUMNS);
  return 2 * tall * b->a.d_head + 2 * wide * b->a.length + 2 * QUERY_CHUNK * (tall + wide) + tall + 9 * LANES;
}

static Head open_head(const Block *b, int64_t sequence, int64_t kv_head, float *scratch) {
  int64_t d_head = b->a.d_head, length = b->a.length, wide = round_up(d_head, TILE_COLUMNS);
  Head h = {b->qkv_size, round_up(length, TILE_COLUMNS)};
  h.keys = b->qkv + sequence * length * b->qkv_size + b->queries + kv_head * d_head;
  h.values = h.keys + b->keys;
  struct { float **part; int64_t size; } parts[] = {
      {&h.keys_transposed, h.n_columns * d_head}, {&h.values_transposed, h.n_columns * d_head},
      {&h.keys_panels, wide * length},            {&h.values_panels, wide * length},
      {&h.weights, QUERY_CHUNK * h.n_columns},    {&h.d_weights, QUERY_CHUNK * h.n_columns},
      {&h.queries, QUERY_CHUNK * wide},           {&h.d_attended, QUERY_CHUNK * wide},
      {&h.factors, h.n_columns},
  };
  for (int i = 0; i < 9; i++) *parts[i].part = scratch, scratch += round_up(parts[i].size, LANES);
  if (!b->a.dropout[DROP_WEIGHTS]) h.factors = 0;
  return h;
}

static void transpose_panels(const Block *b, const float *from, int64_t stride, float *to) {
  for (int64_t t = 0; t < b->a.length; t += TILE_COLUMNS)
    transpose_panel(from + t * stride, stride, b->a.d_head, min_long(TILE_COLUMNS, b->a.length - t),
                    to + t * b->a.d_head);
}

static void copy_panels(const Block *b, const float *from, int64_t stride, int64_t n, float *to) {
  for (int64_t d = 0; d < b->a.d_head; d += TILE_COLUMNS)
    copy_panel(from + d, stride, n, min_long(TILE_COLUMNS, b->a.d_head - d), to + d * n);
}

// weights (m, T) · panels (T, D), up to n_keys of T -> (m, D).
static void weighted_sum(const Block *b, const float *weights, int64_t stride, const float *panels, int64_t n_keys,
                         float *to, int64_t to_stride, int64_t m) {
  for (int64_t d = 0; d < b->a.d_head; d += TILE_COLUMNS)
    multiply_tile(weights, stride, panels + d * b->a.length, n_keys, 0, 0, 0, to + d, to_stride,
                  min_long(TILE_COLUMNS, b->a.d_head - d), m);
}

// a (m, D) · panels (D, T), up to n_keys of T -> (m, T): queries with keys, or gradients with values.
static void dot_products(const Block *b, const float *a, int64_t stride, const float *panels, int64_t n_keys, float *to,
                         int64_t to_stride, int64_t m) {
  for (int64_t t = 0; t < n_keys; t += TILE_COLUMNS)
    multiply_tile(a, stride, panels + t * b->a.d_head, b->a.d_head, 0, 0, 0, to + t, to_stride, TILE_COLUMNS, m);
}

// Number of keys that the m queries from t on can attend to.
static int64_t reachable(const Block *b, int64_t t, int64_t m) {
  return b->a.causal ? min_long(b->a.length, t + m) : b->a.length;
}

// Which of the 16 keys from `key` on query t attends to.
INLINE lanes visible(const Block *b, const uint8_t *mask, int64_t t, int64_t key) {
  lanes seen = first_lanes((b->a.causal ? t + 1 : b->a.length) - key);
  if (mask && seen) seen &= load_bools(first_lanes(b->a.length - key), mask + t * b->a.length + key);
  return seen;
}

// Softmax and dropout in place of the scores (m, T) of the queries from t on; their log-sum-exp is saved. `row` is the
// head's first query among those of all heads.
static void softmax(const Block *b, const Head *h, const uint8_t *mask, int64_t row, int64_t t, int64_t m) {
  int64_t end = round_up(reachable(b, t, m), LANES);
  vec scale = v_set(b->a.scale);
  for (int64_t i = 0; i < m; i++) {
    float *s = h->weights + i * h->n_columns;
    vec most = v_set(-INFINITY), total = v_zero();
    FOR_LANES(end) most = v_select(visible(b, mask, t + i, k), v_max(most, v_load(s + k)), most);
    float highest = v_highest(most);
    if (highest == -INFINITY) highest = 0;
    FOR_LANES(end) {
      vec at = v_exp(v_mul(v_sub(v_load(s + k), v_set(highest)), scale));
      at = v_keep(visible(b, mask, t + i, k), at);
      total = v_add(total, at);
      v_store(s + k, at);
    }
    float sum = v_sum(total), normalizer = sum == 0 ? 0 : 1 / sum;  // 0 if all keys are masked
    FOR_LANES(end) v_store(s + k, v_mul(v_load(s + k), v_set(normalizer)));
    b->logsumexp[row + t + i] = sum == 0 ? INFINITY : highest * (float)b->a.scale + logf(sum);
    if (!h->factors) continue;
    dropout_factors(b, DROP_WEIGHTS, row + t + i, end, h->factors);
    FOR_LANES(end) v_store(s + k, v_mul(v_load(s + k), v_load(h->factors + k)));
  }
}

void attend(const Block *b, int64_t sequence, int64_t kv_head, float *scratch) {
  Head h = open_head(b, sequence, kv_head, scratch);
  int64_t d_head = b->a.d_head, length = b->a.length, share = b->a.n_heads / b->a.n_kv_heads, begin = sequence * length;
  const uint8_t *mask = b->a.mask ? b->a.mask + sequence * b->a.mask_stride : 0;
  transpose_panels(b, h.keys, h.stride, h.keys_transposed);
  copy_panels(b, h.values, h.stride, length, h.values_panels);
  for (int64_t head = kv_head * share; head < (kv_head + 1) * share; head++)
    for (int64_t t = 0; t < length; t += TILE_ROWS) {
      int64_t m = min_long(TILE_ROWS, length - t), n_keys = reachable(b, t, m);
      const float *queries = b->qkv + (begin + t) * h.stride + head * d_head;
      dot_products(b, queries, h.stride, h.keys_transposed, n_keys, h.weights, h.n_columns, m);
      softmax(b, &h, mask, (sequence * b->a.n_heads + head) * length, t, m);
      weighted_sum(b, h.weights, h.n_columns, h.values_panels, n_keys,
                   b->attended + (begin + t) * b->queries + head * d_head, b->queries, m);
    }
}

// Recomputes the weights of m queries from t on from their dot products, and turns the gradients of the weights, in
// place, into those of the scores. With dropout, both weights are those after it.
static void softmax_backward(const Block *b, const Head *h, const uint8_t *mask, int64_t row, int64_t t, int64_t m,
                             const float *attended, const float *d_attended, float *weights, float *d_weights) {
  int64_t end = round_up(reachable(b, t, m), LANES), n = b->a.d_head;
  vec scale = v_set(b->a.scale);
  for (int64_t i = 0; i < m; i++, attended += b->queries, d_attended += b->queries) {
    float *w = weights + i * h->n_columns, *d = d_weights + i * h->n_columns;
    vec product = v_zero();
    FOR_LANES(n) {
      lanes here = first_lanes(n - k);
      product = v_fma(v_load_lanes(here, attended + k), v_load_lanes(here, d_attended + k), product);
    }
    vec mean = v_set(v_sum(product)), sum = v_set(b->logsumexp[row + t + i]);  // Σ weight · gradient
    if (h->factors) dropout_factors(b, DROP_WEIGHTS, row + t + i, end, h->factors);
    FOR_LANES(end) {
      lanes seen = visible(b, mask, t + i, k);
      vec at = v_keep(seen, v_exp(v_fms(v_load(w + k), scale, sum)));
      vec factor = h->factors ? v_load(h->factors + k) : v_set(1);
      vec change = v_mul(v_fms(v_load_lanes(seen, d + k), factor, mean), scale);
      v_store(w + k, v_mul(at, factor));
      v_store(d + k, v_keep(seen, v_mul(at, change)));
    }
  }
}

// Adds the contribution of n queries from `from` on to the gradients of keys and values.
static void key_value_gradients(const Block *b, const Head *h, int64_t from, int64_t n, float *d_keys,
                                float *d_values) {
  int64_t stop = reachable(b, from, n), d_head = b->a.d_head;
  for (int64_t key = 0; key < stop; key += TILE_ROWS) {
    int64_t m = min_long(TILE_ROWS, b->a.length - key);
    int64_t skip = b->a.causal && key > from ? key - from : 0;  // earlier queries do not attend to the key
    for (int64_t d = 0; d < d_head; d += TILE_COLUMNS) {
      int64_t wide = min_long(TILE_COLUMNS, d_head - d), to = key * h->stride + d, row = skip * h->n_columns + key;
      int64_t panel = d * n + skip * TILE_COLUMNS;
      multiply_tile_transposed(h->d_weights + row, h->n_columns, h->queries + panel, n - skip, d_keys + to, h->stride,
                               wide, m, 1);
      multiply_tile_transposed(h->weights + row, h->n_columns, h->d_attended + panel, n - skip, d_values + to,
                               h->stride, wide, m, 1);
    }
  }
}

void attend_backward(const Block *b, int64_t sequence, int64_t kv_head, float *scratch) {
  Head h = open_head(b, sequence, kv_head, scratch);
  int64_t d_head = b->a.d_head, length = b->a.length, share = b->a.n_heads / b->a.n_kv_heads, begin = sequence * length;
  const uint8_t *mask = b->a.mask ? b->a.mask + sequence * b->a.mask_stride : 0;
  float *d_keys = b->d_qkv + (h.keys - b->qkv), *d_values = b->d_qkv + (h.values - b->qkv);
  transpose_panels(b, h.keys, h.stride, h.keys_transposed);
  transpose_panels(b, h.values, h.stride, h.values_transposed);
  copy_panels(b, h.keys, h.stride, length, h.keys_panels);
  for (int64_t t = 0; t < length; t++) {
    memset(d_keys + t * h.stride, 0, d_head * sizeof(float));
    memset(d_values + t * h.stride, 0, d_head * sizeof(float));
  }
  for (int64_t head = kv_head * share; head < (kv_head + 1) * share; head++) {
    for (int64_t from = 0; from < length; from += QUERY_CHUNK) {
      int64_t n = min_long(QUERY_CHUNK, length - from), at = (begin + from) * h.stride + head * d_head;
      int64_t out = (begin + from) * b->queries + head * d_head;
      for (int64_t i = 0; i < n; i += TILE_ROWS) {
        int64_t m = min_long(TILE_ROWS, n - i), n_keys = reachable(b, from + i, m), row = i * h.stride;
        float *weights = h.weights + i * h.n_columns, *d_weights = h.d_weights + i * h.n_columns;
        const float *attended = b->attended + out + i * b->queries, *d_attended = b->d_attended + out + i * b->queries;
        dot_products(b, b->qkv + at + row, h.stride, h.keys_transposed, n_keys, weights, h.n_columns, m);
        dot_products(b, d_attended, b->queries, h.values_transposed, n_keys, d_weights, h.n_columns, m);
        softmax_backward(b, &h, mask, (sequence * b->a.n_heads + head) * length, from + i, m, attended, d_attended,
                         weights, d_weights);
        weighted_sum(b, d_weights, h.n_columns, h.keys_panels, n_keys, b->d_qkv + at + row, h.stride, m);
      }
      copy_panels(b, b->qkv + at, h.stride, n, h.queries);
      copy_panels(b, b->d_attended + out, b->queries, n, h.d_attended);
      key_value_gradients(b, &h, from, n, d_keys, d_values);
    }
  }
}
