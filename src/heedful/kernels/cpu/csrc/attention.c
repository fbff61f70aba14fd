// Attention of one or several queries per row over cached keys and values, contiguous or in blocks (paged).
//
// A single query reads every key and value once, so that memory is the limit. Several consecutive ones (prefill) are
// computed together, a few keys or values at a time, which are then read from the processor's cache. Every sum has the
// same order in both, so that a token's result does not depend on how a prompt is divided.
//
//     B rows, H heads, G key/value heads, S keys, D head size

#include "attention.h"
#include "int8_cache.h"

#define AHEAD 32  // positions to prefetch: the hardware prefetcher stops at the end of a 4 kB block

const int64_t FIRST_BLOCK[1] = {0};

// An iterator over the positions of a head, across blocks.
typedef struct {
  const char *base, *at;
  const int64_t *table;
  int64_t left;  // positions to the end of this block
} Cursor;

INLINE Cursor cursor_at(const HeadCache *cache, const char *base, int64_t stride, int64_t position) {
  int64_t offset = position % cache->block_size;
  const int64_t *table = cache->table + position / cache->block_size;
  return (Cursor){base, base + *table * cache->block_stride + offset * stride, table, cache->block_size - offset};
}

INLINE const char *next_position(Cursor *c, const HeadCache *cache, int64_t stride) {
  if (!c->left) c->at = c->base + *++c->table * cache->block_stride, c->left = cache->block_size;
  const char *at = c->at;
  c->at += stride, c->left--;
  return at;
}

INLINE void prefetch_next(Cursor *c, const HeadCache *cache, int64_t stride, int64_t size) {
  const char *at = next_position(c, cache, stride);
  for (int64_t d = 0; d < size; d += 64) prefetch(at + d);
}

INLINE int64_t element_bytes(int kind) { return kind == INT8 ? 1 : sizeof(float); }

// 16 elements of a position, without its scale. `kind` is a compile-time constant.
INLINE vec load_elements(const char *position, int64_t d, const int kind) {
  return kind == INT8 ? v_load_bytes((const int8_t *)position + d) : v_load((const float *)position + d);
}

// Scores of all keys; returns the highest. Masked ones are -∞. `kind` is a compile-time constant.
INLINE float score_keys(const float *query, const HeadCache *cache, int64_t begin, const uint8_t *allowed,
                        const float *bias, int64_t n_keys, int64_t d_head, float scale, float *scores,
                        int64_t n_ahead, const int kind) {
  vec none = v_set(-INFINITY), most = none;
  Cursor keys = cursor_at(cache, cache->keys, cache->key_stride, begin), ahead = keys;
  if (n_ahead > 0) ahead = cursor_at(cache, cache->keys, cache->key_stride, begin + AHEAD);
  for (int64_t t = 0; t < n_keys; t += LANES) {
    vec products[LANES];
    float scales[LANES] = {0};  // of the keys
    int n = (int)min_long(LANES, n_keys - t);
    for (int i = 0; i < n; i++) {
      const char *key = next_position(&keys, cache, cache->key_stride);
      if (t + i < n_ahead) prefetch_next(&ahead, cache, cache->key_stride, d_head * element_bytes(kind));
      vec sum = v_zero();
      for (int64_t d = 0; d < d_head; d += LANES) sum = v_fma(v_load(query + d), load_elements(key, d, kind), sum);
      products[i] = sum;
      if (kind == INT8) scales[i] = load_bfloat16(key + d_head);
    }
    for (int i = n; i < LANES; i++) products[i] = v_zero();
    lanes here = first_lanes(n), seen = here;
    vec at = v_mul(v_sums(products), v_set(scale));
    if (kind == INT8) at = v_mul(at, v_load(scales));
    if (bias) at = v_add(at, v_load_lanes(here, bias + t));
    if (allowed) seen &= load_bools(here, allowed + t);
    at = v_select(seen, at, none);
    most = v_select(v_greater(at, most), at, most);  // NaN is ignored here; it reaches the sum of exponentials
    v_store_lanes(scores + t, here, at);
  }
  return v_highest(most);
}

// e^(score - highest) in place; returns the sum. Masked positions become 0, and all do if every score is -∞.
INLINE float exponentiate(float *scores, const uint8_t *allowed, int64_t n, float highest) {
  vec total = v_zero();
  if (highest == -INFINITY) highest = 0;
  FOR_LANES(n) {
    lanes here = first_lanes(n - k), seen = allowed ? load_bools(here, allowed + k) : here;
    vec at = v_keep(seen, v_exp(v_sub(v_load_lanes(here, scores + k), v_set(highest))));
    total = v_add(total, at);
    v_store_lanes(scores + k, here, at);
  }
  return v_sum(total);
}

// o = normalizer · Σ weight · value. Masked positions are not read; `masked` and `kind` are compile-time constants.
INLINE void sum_values(const HeadCache *cache, int64_t begin, const uint8_t *allowed, const int masked,
                       const float *weights, float normalizer, int64_t n_keys, int64_t d_head, int64_t n_ahead,
                       float *o, const int kind) {
  int64_t stride = cache->value_stride, bytes = element_bytes(kind);
  vec by = v_set(normalizer);
  for (int64_t d = 0; d < d_head; d += 4 * LANES) {
    int64_t n = (d_head - d) / LANES;
    vec a = v_zero(), b = a, c = a, e = a;
    Cursor values = cursor_at(cache, cache->values, stride, begin), ahead = values;
    if (n_ahead > 0) ahead = cursor_at(cache, cache->values + d * bytes, stride, begin + AHEAD);
    for (int64_t t = 0; t < n_keys; t++) {
      if (t < n_ahead) prefetch_next(&ahead, cache, stride, (n > 3 ? 4 : n) * LANES * bytes);
      const char *at = next_position(&values, cache, stride);
      if (masked && !allowed[t]) continue;
      vec weight = v_set(kind == INT8 ? weights[t] * load_bfloat16(at + d_head) : weights[t]);
      a = v_fma(weight, load_elements(at, d, kind), a);
      if (n > 1) b = v_fma(weight, load_elements(at, d + LANES, kind), b);
      if (n > 2) c = v_fma(weight, load_elements(at, d + 2 * LANES, kind), c);
      if (n > 3) e = v_fma(weight, load_elements(at, d + 3 * LANES, kind), e);
    }
    v_store(o + d, v_mul(a, by));
    if (n > 1) v_store(o + d + LANES, v_mul(b, by));
    if (n > 2) v_store(o + d + 2 * LANES, v_mul(c, by));
    if (n > 3) v_store(o + d + 3 * LANES, v_mul(e, by));
  }
}

// Inlined, so that the compiler specializes it where the cache is a single block.
INLINE void attend_inline(const float *query, const HeadCache *cache, int64_t begin, const uint8_t *allowed,
                          const float *bias, int64_t n_keys, int64_t d_head, float scale, float *scores, float *o,
                          const int kind) {
  int64_t n_ahead = cache->prefetched ? n_keys - AHEAD : 0;
  float highest = score_keys(query, cache, begin, allowed, bias, n_keys, d_head, scale, scores, n_ahead, kind);
  float sum = exponentiate(scores, allowed, n_keys, highest);
  float normalizer = sum == 0 ? 0 : 1 / sum;  // 0 if all keys are masked
  if (allowed) sum_values(cache, begin, allowed, 1, scores, normalizer, n_keys, d_head, n_ahead, o, kind);
  else sum_values(cache, begin, 0, 0, scores, normalizer, n_keys, d_head, n_ahead, o, kind);
}

void attend_head(const float *query, const HeadCache *cache, int64_t begin, const uint8_t *allowed, const float *bias,
                 int64_t n_keys, int64_t d_head, float scale, float *scores, float *o) {
  const HeadCache copy = *cache;  // keeps the fields in registers
  if (copy.kind == INT8) attend_inline(query, &copy, begin, allowed, bias, n_keys, d_head, scale, scores, o, INT8);
  else attend_inline(query, &copy, begin, allowed, bias, n_keys, d_head, scale, scores, o, FLOAT32);
}

// --- several queries -------------------------------------------------------------------------------------------------

#define VALUES 64    // positions whose values are summed at a time: with D = 64 they stay in the L1 cache

typedef struct {
  HeadCache cache;
  int64_t n, origin, d_head, width;  // origin: the position of the first column of `weights`, a multiple of 16
  int64_t begins[MAX_RUN], ends[MAX_RUN];
  float *keys;     // (16, D) a copy of the keys of a group that is not contiguous, or not of floats
  float *values;   // (VALUES, D) a copy of the values from position `tile` on that are not floats
  float *weights;  // (n, width) scores, then weights
  int64_t tile;
} Run;

int64_t run_scratch(int64_t n, int64_t n_keys, int64_t d_head) {
  return (LANES + VALUES) * d_head + n * (round_up(n_keys, LANES) + LANES);
}

// The elements of a position as floats, without its scale.
INLINE void copy_elements(const char *position, int64_t d_head, int kind, float *to) {
  if (kind == INT8) FOR_LANES(d_head) v_store(to + k, load_elements(position, k, INT8));
  else memcpy(to, position, d_head * sizeof(float));
}

// The 16 keys from position t on, of which n exist, `*stride` floats apart; copied if they are not floats in one block.
// `scales` are those of int8.
INLINE const float *key_group(const Run *r, int64_t t, int64_t n, int64_t *stride, float *scales) {
  const HeadCache *cache = &r->cache;
  Cursor keys = cursor_at(cache, cache->keys, cache->key_stride, t);
  *stride = cache->key_stride / (int64_t)sizeof(float);
  if (cache->kind == FLOAT32 && n == LANES && keys.left >= LANES) return (const float *)keys.at;
  *stride = r->d_head;
  memset(r->keys, 0, LANES * r->d_head * sizeof(float));
  for (int64_t i = 0; i < n; i++) {
    const char *key = next_position(&keys, cache, cache->key_stride);
    copy_elements(key, r->d_head, cache->kind, r->keys + i * r->d_head);
    if (cache->kind == INT8) scales[i] = load_bfloat16(key + r->d_head);
  }
  return r->keys;
}

// The dot products of a query with 16 keys.
INLINE vec dot_products(const float *query, const float *keys, int64_t stride, int64_t d_head) {
  vec products[LANES];
  UNROLL for (int first = 0; first < LANES; first += KEYS_AT_ONCE) {
    vec sums[KEYS_AT_ONCE];
    UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) sums[i] = v_zero();
    for (int64_t d = 0; d < d_head; d += LANES) {
      vec q = v_load(query + d);
      UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++)
        sums[i] = v_fma(q, v_load(keys + (first + i) * stride + d), sums[i]);
    }
    UNROLL for (int i = 0; i < KEYS_AT_ONCE; i++) products[first + i] = sums[i];
  }
  return v_sums(products);
}

// The scores of all queries and keys; `most` are the highest of each query.
static void score_run(const Run *r, const float *queries, int64_t query_stride, const float *bias, int64_t bias_stride,
                      float scale, vec *most) {
  int64_t last = r->ends[r->n - 1], stride, bytes = r->d_head * element_bytes(r->cache.kind);
  float scales[LANES] = {0};
  for (int64_t i = 0; i < r->n; i++) most[i] = v_set(-INFINITY);
  for (int64_t t = r->origin; t < last; t += LANES) {
    const float *keys = key_group(r, t, min_long(LANES, last - t), &stride, scales);
    if (t + 2 * LANES <= last) {
      Cursor ahead = cursor_at(&r->cache, r->cache.keys, r->cache.key_stride, t + LANES);
      for (int i = 0; i < LANES; i++) prefetch_next(&ahead, &r->cache, r->cache.key_stride, bytes);
    }
    for (int64_t i = 0; i < r->n; i++) {
      lanes seen = first_lanes(r->ends[i] - t) & ~first_lanes(r->begins[i] - t);
      if (!seen) continue;
      vec at = v_mul(dot_products(queries + i * query_stride, keys, stride, r->d_head), v_set(scale));
      if (r->cache.kind == INT8) at = v_mul(at, v_load(scales));
      if (bias) at = v_add(at, v_load_lanes(seen, bias + i * bias_stride + t));
      most[i] = v_select(seen & v_greater(at, most[i]), at, most[i]);
      v_store_lanes(r->weights + i * r->width + t - r->origin, seen, at);
    }
  }
}

// Copies the values from position t to `end`, and multiplies the weights by their scales.
static void copy_values(Run *r, int64_t t, int64_t end) {
  Cursor values = cursor_at(&r->cache, r->cache.values, r->cache.value_stride, t);
  r->tile = t;
  for (; t < end; t++) {
    const char *value = next_position(&values, &r->cache, r->cache.value_stride);
    float scale = load_bfloat16(value + r->d_head);
    copy_elements(value, r->d_head, INT8, r->values + (t - r->tile) * r->d_head);
    for (int64_t i = 0; i < r->n; i++)
      if (t >= r->begins[i] && t < r->ends[i]) r->weights[i * r->width + t - r->origin] *= scale;
  }
}

// Adds weight · value of the positions from t to `end` to m outputs (m, columns x 16).
INLINE void add_values(const Run *r, int64_t first, int64_t t, int64_t end, int64_t d, float *o, int64_t o_stride,
                       const int m, const int columns) {
  vec sums[SUM_ROWS][SUM_COLUMNS];
  const float *weights = r->weights + first * r->width - r->origin;
  int64_t stride = r->cache.value_stride;
  Cursor values;
  if (r->cache.kind == INT8) {
    stride = r->d_head * sizeof(float);
    values = (Cursor){0, (const char *)r->values + (t - r->tile) * stride, 0, VALUES};
  } else {
    values = cursor_at(&r->cache, r->cache.values, stride, t);
  }
  UNROLL for (int i = 0; i < m; i++)
    UNROLL for (int c = 0; c < columns; c++) sums[i][c] = v_load(o + i * o_stride + c * LANES);
  for (; t < end; t++) {
    const float *at = (const float *)next_position(&values, &r->cache, stride) + d;
    vec value[SUM_COLUMNS];
    UNROLL for (int c = 0; c < columns; c++) value[c] = v_load(at + c * LANES);
    UNROLL for (int i = 0; i < m; i++) {
      vec weight = v_set(weights[i * r->width + t]);
      UNROLL for (int c = 0; c < columns; c++) sums[i][c] = v_fma(weight, value[c], sums[i][c]);
    }
  }
  UNROLL for (int i = 0; i < m; i++)
    UNROLL for (int c = 0; c < columns; c++) v_store(o + i * o_stride + c * LANES, sums[i][c]);
}

// The same for all of D and any number of outputs up to SUM_ROWS.
static void add_weighted(const Run *r, int64_t first, int64_t t, int64_t end, float *o, int64_t o_stride, int64_t m) {
  if (t >= end) return;
#define ADD(M, C) if (M <= SUM_ROWS) add_values(r, first, t, end, d, o + d, o_stride, M, C)
#define ADD_ROWS(C)                       \
  switch (m) {                            \
    case 1: ADD(1, C); break;             \
    case 2: ADD(2, C); break;             \
    case 3: ADD(3, C); break;             \
    case 4: ADD(4, C); break;             \
    case 5: ADD(5, C); break;             \
    default: ADD(6, C);                   \
  }
  int64_t d = 0;
  for (; d + SUM_COLUMNS * LANES <= r->d_head; d += SUM_COLUMNS * LANES) ADD_ROWS(SUM_COLUMNS)
  for (; d < r->d_head; d += LANES) ADD_ROWS(1)
#undef ADD_ROWS
#undef ADD
}

// The sums of all queries. Of SUM_ROWS queries the positions that all of them see are added together, those before and
// after by each alone, in their order.
static void sum_run(Run *r, float *o, int64_t o_stride) {
  int64_t first = r->begins[0], last = r->ends[r->n - 1];
  for (int64_t t = first; t < last; t += VALUES) {
    int64_t stop = min_long(t + VALUES, last);
    if (r->cache.kind == INT8) copy_values(r, t, stop);
    for (int64_t i = 0; i < r->n; i += SUM_ROWS) {
      int64_t m = min_long(SUM_ROWS, r->n - i);
      int64_t from = max_long(t, min_long(stop, r->begins[i + m - 1]));
      int64_t to = max_long(from, min_long(stop, r->ends[i]));
      for (int64_t j = i; j < i + m; j++)
        add_weighted(r, j, max_long(t, r->begins[j]), min_long(from, r->ends[j]), o + j * o_stride, o_stride, 1);
      add_weighted(r, i, from, to, o + i * o_stride, o_stride, m);
      for (int64_t j = i; j < i + m; j++)
        add_weighted(r, j, to, min_long(stop, r->ends[j]), o + j * o_stride, o_stride, 1);
    }
  }
}

void attend_run(const float *queries, int64_t query_stride, const HeadCache *cache, int64_t end, int64_t window,
                const float *bias, int64_t bias_stride, int64_t n, int64_t d_head, float scale, float *scratch,
                float *o, int64_t o_stride) {
  float *values = scratch + LANES * d_head;
  Run r = {*cache, n, 0, d_head, 0, {0}, {0}, scratch, values, values + VALUES * d_head, 0};
  vec most[MAX_RUN];
  for (int64_t i = 0; i < n; i++) {
    r.ends[i] = end + i;
    r.begins[i] = window && r.ends[i] > window ? r.ends[i] - window : 0;
    memset(o + i * o_stride, 0, d_head * sizeof(float));
  }
  r.origin = r.begins[0] / LANES * LANES;
  r.width = round_up(r.ends[n - 1] - r.origin, LANES) + LANES;
  score_run(&r, queries, query_stride, bias, bias_stride, scale, most);
  float normalizers[MAX_RUN];
  for (int64_t i = 0; i < n; i++) {
    float *scores = r.weights + i * r.width + r.begins[i] - r.origin;
    float sum = exponentiate(scores, 0, r.ends[i] - r.begins[i], v_highest(most[i]));
    normalizers[i] = sum == 0 ? 0 : 1 / sum;
  }
  sum_run(&r, o, o_stride);
  for (int64_t i = 0; i < n; i++)
    FOR_LANES(d_head) v_store(o + i * o_stride + k, v_mul(v_load(o + i * o_stride + k), v_set(normalizers[i])));
}

// --- one query per row, for PyTorch's tensors ------------------------------------------------------------------------

// Queries (B, H, D), keys and values (B, G, S, D), with the strides given: of rows and heads of q; rows, heads and
// positions of k, then of v; rows of `allowed` (B, S); rows and heads of `bias` (B, H, S). The last two may be NULL.
// `scores` is scratch for (B, H, S).
EXPORT void single_query_attention(const float *q, const float *k, const float *v, const uint8_t *allowed,
                                   const float *bias, float *out, float *scores, int64_t n_rows, int64_t n_heads,
                                   int64_t n_kv_heads, int64_t n_keys, int64_t d_head, const int64_t *strides,
                                   float scale, int threads) {
  int64_t share = n_heads / n_kv_heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && n_rows * n_heads * n_keys > 1024)
  for (int64_t j = 0; j < n_rows * n_heads; j++) {
    int64_t row = j / n_heads, h = j % n_heads, kv = h / share;
    const char *keys = (const char *)(k + row * strides[2] + kv * strides[3]);
    const char *values = (const char *)(v + row * strides[5] + kv * strides[6]);
    HeadCache cache = {keys, values, strides[4] * 4, strides[7] * 4, FIRST_BLOCK, SINGLE_BLOCK, 0, 1, FLOAT32};
    attend_inline(q + row * strides[0] + h * strides[1], &cache, 0, allowed ? allowed + row * strides[8] : 0,
                  bias ? bias + row * strides[9] + h * strides[10] : 0, n_keys, d_head, scale, scores + j * n_keys,
                  out + j * d_head, FLOAT32);
  }
}
