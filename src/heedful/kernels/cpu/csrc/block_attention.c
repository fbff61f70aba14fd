// Attention of a block forward and backward. As in FlashAttention (Dao et al. 2022) the attention weights are computed
// for a few queries at a time, and recomputed in the backward pass from the log-sum-exp of their scores.
//
//     T positions, D head size

#include "block.h"

// The keys and values of one sequence and head, and scratch memory for them as panels.
typedef struct {
  long stride, n_columns;  // row size of qkv; T rounded up to whole panels
  const float *keys, *values;
  float *keys_transposed, *values_transposed, *keys_panels, *values_panels;  // (D, T) and (T, D)
  float *weights, *d_weights;                                                // (QUERY_CHUNK, T)
  float *queries, *d_attended;                                               // (QUERY_CHUNK, D)
} Head;

long attention_scratch(const Block *b) {
  long tall = round_up(b->a.length, TILE_COLUMNS), wide = round_up(b->a.d_head, TILE_COLUMNS);
  return 2 * tall * b->a.d_head + 2 * wide * b->a.length + 2 * QUERY_CHUNK * (tall + wide) + 8 * LANES;
}

static Head open_head(const Block *b, long sequence, long kv_head, float *scratch) {
  long d_head = b->a.d_head, length = b->a.length, wide = round_up(d_head, TILE_COLUMNS);
  Head h = {b->qkv_size, round_up(length, TILE_COLUMNS)};
  h.keys = b->qkv + sequence * length * b->qkv_size + b->queries + kv_head * d_head;
  h.values = h.keys + b->keys;
  struct { float **part; long size; } parts[] = {
      {&h.keys_transposed, h.n_columns * d_head}, {&h.values_transposed, h.n_columns * d_head},
      {&h.keys_panels, wide * length},            {&h.values_panels, wide * length},
      {&h.weights, QUERY_CHUNK * h.n_columns},    {&h.d_weights, QUERY_CHUNK * h.n_columns},
      {&h.queries, QUERY_CHUNK * wide},           {&h.d_attended, QUERY_CHUNK * wide},
  };
  for (int i = 0; i < 8; i++) *parts[i].part = scratch, scratch += round_up(parts[i].size, LANES);
  return h;
}

static void transpose_panels(const Block *b, const float *from, long stride, float *to) {
  for (long t = 0; t < b->a.length; t += TILE_COLUMNS)
    transpose_panel(from + t * stride, stride, b->a.d_head, min_long(TILE_COLUMNS, b->a.length - t),
                    to + t * b->a.d_head);
}

static void copy_panels(const Block *b, const float *from, long stride, long n, float *to) {
  for (long d = 0; d < b->a.d_head; d += TILE_COLUMNS)
    copy_panel(from + d, stride, n, min_long(TILE_COLUMNS, b->a.d_head - d), to + d * n);
}

// weights (m, T) · panels (T, D), up to n_keys of T -> (m, D).
static void weighted_sum(const Block *b, const float *weights, long stride, const float *panels, long n_keys, float *to,
                         long to_stride, long m) {
  for (long d = 0; d < b->a.d_head; d += TILE_COLUMNS)
    multiply_tile(weights, stride, panels + d * b->a.length, n_keys, 0, 0, 0, to + d, to_stride,
                  min_long(TILE_COLUMNS, b->a.d_head - d), m);
}

// a (m, D) · panels (D, T), up to n_keys of T -> (m, T): queries with keys, or gradients with values.
static void dot_products(const Block *b, const float *a, long stride, const float *panels, long n_keys, float *to,
                         long to_stride, long m) {
  for (long t = 0; t < n_keys; t += TILE_COLUMNS)
    multiply_tile(a, stride, panels + t * b->a.d_head, b->a.d_head, 0, 0, 0, to + t, to_stride, TILE_COLUMNS, m);
}

// Number of keys that the m queries from t on can attend to.
static long reachable(const Block *b, long t, long m) {
  return b->a.causal ? min_long(b->a.length, t + m) : b->a.length;
}

// Which of the 16 keys from `key` on query t attends to.
INLINE lanes visible(const Block *b, const uint8_t *mask, long t, long key) {
  lanes seen = first_lanes((b->a.causal ? t + 1 : b->a.length) - key);
  if (mask && seen) seen &= load_bools(first_lanes(b->a.length - key), mask + t * b->a.length + key);
  return seen;
}

// Softmax in place of the scores (m, T) of the queries from t on; their log-sum-exp is saved.
static void softmax(const Block *b, const uint8_t *mask, long t, long m, float *scores, long stride, float *logsumexp) {
  long end = round_up(reachable(b, t, m), LANES);
  vec scale = v_set(b->a.scale);
  for (long i = 0; i < m; i++) {
    float *s = scores + i * stride;
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
    logsumexp[t + i] = sum == 0 ? INFINITY : highest * (float)b->a.scale + logf(sum);
  }
}

void attend(const Block *b, long sequence, long kv_head, float *scratch) {
  Head h = open_head(b, sequence, kv_head, scratch);
  long d_head = b->a.d_head, length = b->a.length, share = b->a.n_heads / b->a.n_kv_heads, begin = sequence * length;
  const uint8_t *mask = b->a.mask ? b->a.mask + sequence * b->a.mask_stride : 0;
  transpose_panels(b, h.keys, h.stride, h.keys_transposed);
  copy_panels(b, h.values, h.stride, length, h.values_panels);
  for (long head = kv_head * share; head < (kv_head + 1) * share; head++)
    for (long t = 0; t < length; t += TILE_ROWS) {
      long m = min_long(TILE_ROWS, length - t), n_keys = reachable(b, t, m);
      const float *queries = b->qkv + (begin + t) * h.stride + head * d_head;
      dot_products(b, queries, h.stride, h.keys_transposed, n_keys, h.weights, h.n_columns, m);
      softmax(b, mask, t, m, h.weights, h.n_columns, b->logsumexp + (sequence * b->a.n_heads + head) * length);
      weighted_sum(b, h.weights, h.n_columns, h.values_panels, n_keys,
                   b->attended + (begin + t) * b->queries + head * d_head, b->queries, m);
    }
}

// Recomputes the weights of m queries from their dot products, and turns the gradients of the weights, in place, into
// those of the scores.
static void softmax_backward(const Block *b, const uint8_t *mask, long t, long m, const float *attended,
                             const float *d_attended, const float *logsumexp, float *weights, float *d_weights,
                             long stride) {
  long end = round_up(reachable(b, t, m), LANES), n = b->a.d_head;
  vec scale = v_set(b->a.scale);
  for (long i = 0; i < m; i++, attended += b->queries, d_attended += b->queries) {
    float *w = weights + i * stride, *d = d_weights + i * stride;
    vec product = v_zero();
    FOR_LANES(n) {
      lanes here = first_lanes(n - k);
      product = v_fma(v_load_lanes(here, attended + k), v_load_lanes(here, d_attended + k), product);
    }
    vec mean = v_set(v_sum(product)), sum = v_set(logsumexp[t + i]);  // Σ weight · gradient
    FOR_LANES(end) {
      lanes seen = visible(b, mask, t + i, k);
      vec at = v_keep(seen, v_exp(v_fms(v_load(w + k), scale, sum)));
      vec change = v_mul(v_sub(v_load_lanes(seen, d + k), mean), scale);
      v_store(w + k, at);
      v_store(d + k, v_keep(seen, v_mul(at, change)));
    }
  }
}

// Adds the contribution of n queries from `from` on to the gradients of keys and values.
static void key_value_gradients(const Block *b, const Head *h, long from, long n, float *d_keys, float *d_values) {
  long stop = reachable(b, from, n), d_head = b->a.d_head;
  for (long key = 0; key < stop; key += TILE_ROWS) {
    long m = min_long(TILE_ROWS, b->a.length - key);
    long skip = b->a.causal && key > from ? key - from : 0;  // earlier queries do not attend to the key
    for (long d = 0; d < d_head; d += TILE_COLUMNS) {
      long wide = min_long(TILE_COLUMNS, d_head - d), to = key * h->stride + d, row = skip * h->n_columns + key;
      long panel = d * n + skip * TILE_COLUMNS;
      multiply_tile_transposed(h->d_weights + row, h->n_columns, h->queries + panel, n - skip, d_keys + to, h->stride,
                               wide, m, 1);
      multiply_tile_transposed(h->weights + row, h->n_columns, h->d_attended + panel, n - skip, d_values + to,
                               h->stride, wide, m, 1);
    }
  }
}

void attend_backward(const Block *b, long sequence, long kv_head, float *scratch) {
  Head h = open_head(b, sequence, kv_head, scratch);
  long d_head = b->a.d_head, length = b->a.length, share = b->a.n_heads / b->a.n_kv_heads, begin = sequence * length;
  const uint8_t *mask = b->a.mask ? b->a.mask + sequence * b->a.mask_stride : 0;
  float *d_keys = b->d_qkv + (h.keys - b->qkv), *d_values = b->d_qkv + (h.values - b->qkv);
  transpose_panels(b, h.keys, h.stride, h.keys_transposed);
  transpose_panels(b, h.values, h.stride, h.values_transposed);
  copy_panels(b, h.keys, h.stride, length, h.keys_panels);
  for (long t = 0; t < length; t++) {
    memset(d_keys + t * h.stride, 0, d_head * sizeof(float));
    memset(d_values + t * h.stride, 0, d_head * sizeof(float));
  }
  for (long head = kv_head * share; head < (kv_head + 1) * share; head++) {
    const float *logsumexp = b->logsumexp + (sequence * b->a.n_heads + head) * length;
    for (long from = 0; from < length; from += QUERY_CHUNK) {
      long n = min_long(QUERY_CHUNK, length - from), at = (begin + from) * h.stride + head * d_head;
      long out = (begin + from) * b->queries + head * d_head;
      for (long i = 0; i < n; i += TILE_ROWS) {
        long m = min_long(TILE_ROWS, n - i), n_keys = reachable(b, from + i, m), row = i * h.stride;
        float *weights = h.weights + i * h.n_columns, *d_weights = h.d_weights + i * h.n_columns;
        const float *attended = b->attended + out + i * b->queries, *d_attended = b->d_attended + out + i * b->queries;
        dot_products(b, b->qkv + at + row, h.stride, h.keys_transposed, n_keys, weights, h.n_columns, m);
        dot_products(b, d_attended, b->queries, h.values_transposed, n_keys, d_weights, h.n_columns, m);
        softmax_backward(b, mask, from + i, m, attended, d_attended, logsumexp, weights, d_weights, h.n_columns);
        weighted_sum(b, d_weights, h.n_columns, h.keys_panels, n_keys, b->d_qkv + at + row, h.stride, m);
      }
      copy_panels(b, b->qkv + at, h.stride, n, h.queries);
      copy_panels(b, b->d_attended + out, b->queries, n, h.d_attended);
      key_value_gradients(b, &h, from, n, d_keys, d_values);
    }
  }
}
