// Attention of one query per row over cached keys and values, contiguous or in blocks (paged).
//
//     B rows, H heads, G key/value heads, S keys, D head size

#include "attention.h"

#define AHEAD 32  // positions to prefetch: the hardware prefetcher stops at the end of a 4 kB block

const long FIRST_BLOCK[1] = {0};

// An iterator over the positions of a head, across blocks.
typedef struct {
  const float *base, *at;
  const long *table;
  long left;  // positions to the end of this block
} Cursor;

INLINE Cursor cursor_at(const HeadCache *cache, const float *base, long stride, long position) {
  long offset = position % cache->block_size;
  const long *table = cache->table + position / cache->block_size;
  return (Cursor){base, base + *table * cache->block_stride + offset * stride, table, cache->block_size - offset};
}

INLINE const float *next_position(Cursor *c, const HeadCache *cache, long stride) {
  if (!c->left) c->at = c->base + *++c->table * cache->block_stride, c->left = cache->block_size;
  const float *at = c->at;
  c->at += stride, c->left--;
  return at;
}

INLINE void prefetch_next(Cursor *c, const HeadCache *cache, long stride, long size) {
  const char *at = (const char *)next_position(c, cache, stride);
  for (long d = 0; d < size * 4; d += 64) prefetch(at + d);
}

// Scores of all keys; returns the highest. Masked ones are -∞.
INLINE float score_keys(const float *query, const HeadCache *cache, long begin, const uint8_t *allowed,
                        const float *bias, long n_keys, long d_head, float scale, float *scores, long n_ahead) {
  vec none = v_set(-INFINITY), most = none;
  Cursor keys = cursor_at(cache, cache->keys, cache->key_stride, begin), ahead = keys;
  if (n_ahead > 0) ahead = cursor_at(cache, cache->keys, cache->key_stride, begin + AHEAD);
  for (long t = 0; t < n_keys; t += LANES) {
    vec products[LANES];
    int n = (int)min_long(LANES, n_keys - t);
    for (int i = 0; i < n; i++) {
      const float *key = next_position(&keys, cache, cache->key_stride);
      if (t + i < n_ahead) prefetch_next(&ahead, cache, cache->key_stride, d_head);
      vec sum = v_zero();
      for (long d = 0; d < d_head; d += LANES) sum = v_fma(v_load(query + d), v_load(key + d), sum);
      products[i] = sum;
    }
    for (int i = n; i < LANES; i++) products[i] = v_zero();
    lanes here = first_lanes(n), seen = here;
    vec at = v_mul(v_sums(products), v_set(scale));
    if (bias) at = v_add(at, v_load_lanes(here, bias + t));
    if (allowed) seen &= load_bools(here, allowed + t);
    at = v_select(seen, at, none);
    most = v_select(v_greater(at, most), at, most);  // NaN is ignored here; it reaches the sum of exponentials
    v_store_lanes(scores + t, here, at);
  }
  return v_highest(most);
}

// e^(score - highest) in place; returns the sum. Masked positions become 0, and all do if every score is -∞.
INLINE float exponentiate(float *scores, const uint8_t *allowed, long n, float highest) {
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

// o = normalizer · Σ weight · value. Masked positions are not read; `masked` is a compile-time constant.
INLINE void sum_values(const HeadCache *cache, long begin, const uint8_t *allowed, const int masked,
                       const float *weights, float normalizer, long n_keys, long d_head, long n_ahead, float *o) {
  long stride = cache->value_stride;
  vec by = v_set(normalizer);
  for (long d = 0; d < d_head; d += 4 * LANES) {
    long n = (d_head - d) / LANES;
    vec a = v_zero(), b = a, c = a, e = a;
    Cursor values = cursor_at(cache, cache->values, stride, begin), ahead = values;
    if (n_ahead > 0) ahead = cursor_at(cache, cache->values + d, stride, begin + AHEAD);
    for (long t = 0; t < n_keys; t++) {
      if (t < n_ahead) prefetch_next(&ahead, cache, stride, n > 3 ? 64 : n * 16);
      const float *at = next_position(&values, cache, stride) + d;
      if (masked && !allowed[t]) continue;
      vec weight = v_set(weights[t]);
      a = v_fma(weight, v_load(at), a);
      if (n > 1) b = v_fma(weight, v_load(at + LANES), b);
      if (n > 2) c = v_fma(weight, v_load(at + 2 * LANES), c);
      if (n > 3) e = v_fma(weight, v_load(at + 3 * LANES), e);
    }
    v_store(o + d, v_mul(a, by));
    if (n > 1) v_store(o + d + LANES, v_mul(b, by));
    if (n > 2) v_store(o + d + 2 * LANES, v_mul(c, by));
    if (n > 3) v_store(o + d + 3 * LANES, v_mul(e, by));
  }
}

// Inlined, so that the compiler specializes it where the cache is a single block.
INLINE void attend_inline(const float *query, const HeadCache *cache, long begin, const uint8_t *allowed,
                          const float *bias, long n_keys, long d_head, float scale, float *scores, float *o) {
  long n_ahead = cache->prefetched ? n_keys - AHEAD : 0;
  float highest = score_keys(query, cache, begin, allowed, bias, n_keys, d_head, scale, scores, n_ahead);
  float sum = exponentiate(scores, allowed, n_keys, highest);
  float normalizer = sum == 0 ? 0 : 1 / sum;  // 0 if all keys are masked
  if (allowed) sum_values(cache, begin, allowed, 1, scores, normalizer, n_keys, d_head, n_ahead, o);
  else sum_values(cache, begin, 0, 0, scores, normalizer, n_keys, d_head, n_ahead, o);
}

void attend_head(const float *query, const HeadCache *cache, long begin, const uint8_t *allowed, const float *bias,
                 long n_keys, long d_head, float scale, float *scores, float *o) {
  const HeadCache copy = *cache;  // keeps the fields in registers
  attend_inline(query, &copy, begin, allowed, bias, n_keys, d_head, scale, scores, o);
}

// Queries (B, H, D), keys and values (B, G, S, D), with the strides given: of rows and heads of q; rows, heads and
// positions of k, then of v; rows of `allowed` (B, S); rows and heads of `bias` (B, H, S). The last two may be NULL.
// `scores` is scratch for (B, H, S).
EXPORT void single_query_attention(const float *q, const float *k, const float *v, const uint8_t *allowed,
                                   const float *bias, float *out, float *scores, long n_rows, long n_heads,
                                   long n_kv_heads, long n_keys, long d_head, const long *strides, float scale,
                                   int threads) {
  long share = n_heads / n_kv_heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && n_rows * n_heads * n_keys > 1024)
  for (long j = 0; j < n_rows * n_heads; j++) {
    long row = j / n_heads, h = j % n_heads, kv = h / share;
    HeadCache cache = {k + row * strides[2] + kv * strides[3], v + row * strides[5] + kv * strides[6], strides[4],
                       strides[7], FIRST_BLOCK, SINGLE_BLOCK, 0, 1};
    attend_inline(q + row * strides[0] + h * strides[1], &cache, 0, allowed ? allowed + row * strides[8] : 0,
                  bias ? bias + row * strides[9] + h * strides[10] : 0, n_keys, d_head, scale, scores + j * n_keys,
                  out + j * d_head);
  }
}
