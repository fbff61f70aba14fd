// Attention forwards and backwards, for training (training.c). As in FlashAttention (Dao et al. 2022) the weights are never
// all there: those of a few queries at a time, and once more on the way back from the logarithms of their sums.
//
//     T positions, D head size

#pragma once
#include "training_block.h"

// Turns queries and keys of a row by its position, back for the gradient.
static void rotate(const Block *b, float *joint, long begin, long end, float way) {
  for (long row = begin; row < end && b->cos; row++) {
    long at = row % b->length * b->half + row / b->length * b->turn_row;
    const float *cos = b->cos + at, *sin = b->sin + at;
    for (long h = 0; h < b->n_heads + b->n_groups; h++) {
      float *x = joint + row * b->whole + h * b->size;
      long apart = b->interleaved ? 1 : b->half, step = b->interleaved ? 2 : 1;
      for (long i = 0; i < b->half; i++) {
        float one = x[i * step], two = x[i * step + apart];
        x[i * step] = one * cos[i] - two * sin[i] * way;
        x[i * step + apart] = two * cos[i] + one * sin[i] * way;
      }
    }
  }
}

// Where queries, keys and values of one sequence and group lie, and how they are laid out for products.
typedef struct {
  long whole, tall, wide;  // numbers in a row of `joint`; T and D in whole panels
  const float *keys, *values;
  float *keys_turned, *values_turned, *keys_plain, *values_plain, *weights, *d_weights, *queries, *d_seen;
} Head;

static Head open_head(const Block *b, long sequence, long group, float *room) {
  Head h = {b->whole, up_to(b->length, WIDE), up_to(b->size, WIDE)};
  h.keys = b->joint + sequence * b->length * b->whole + b->queries + group * b->size;
  h.values = h.keys + b->keys;
  float **parts[] = {&h.keys_turned, &h.values_turned, &h.keys_plain, &h.values_plain,
                     &h.weights,     &h.d_weights,     &h.queries,    &h.d_seen};
  long sizes[] = {h.tall * b->size, h.tall * b->size, h.wide * b->length, h.wide * b->length,
                  LOOK * h.tall,    LOOK * h.tall,    LOOK * h.wide,      LOOK * h.wide};
  for (int i = 0; i < 8; i++) *parts[i] = room, room += up_to(sizes[i], 16);
  return h;
}

static void turn_all(const float *from, long step, const Block *b, float *to) {
  for (long t = 0; t < b->length; t += WIDE)
    turn_panel(from + t * step, step, b->size, least(WIDE, b->length - t), to + t * b->size);
}

static void copy_all(const float *from, long step, long n, const Block *b, float *to) {
  for (long d = 0; d < b->size; d += WIDE) copy_panel(from + d, step, n, least(WIDE, b->size - d), to + d * n);
}

// a (m, T) · panels (T, D), the first `depth` of T, of panels that are `tall`.
static void weigh(const Block *b, const float *a, long step, const float *panels, long tall, long depth, float *to,
                  long to_step, long m) {
  for (long d = 0; d < b->size; d += WIDE)
    along(a, step, panels + d * tall, depth, 0, 0, 0, to + d, to_step, least(WIDE, b->size - d), m);
}

// Products of m queries with the keys up to `reach`, or of gradients with the values.
static void compare(const Block *b, const float *a, long step, const float *panels, long reach, float *to, long tall,
                    long m) {
  for (long t = 0; t < reach; t += WIDE)
    along(a, step, panels + t * b->size, b->size, 0, 0, 0, to + t, tall, WIDE, m);
}

static long reach(const Block *b, long t, long m) { return b->causal ? least(b->length, t + m) : b->length; }

// Which of 16 keys a query sees.
INLINE __mmask16 visible(const Block *b, const uint8_t *mask, long t, long key) {
  __mmask16 seen = first((b->causal ? t + 1 : b->length) - key);
  if (mask && seen) {
    __m128i may = _mm_maskz_loadu_epi8(first(b->length - key), mask + t * b->length + key);
    seen &= _mm_test_epi8_mask(may, may);
  }
  return seen;
}

// Scores (m, T) of queries from t on become weights; the logarithms of their sums are kept.
static void soften(const Block *b, const uint8_t *mask, long t, long m, float *scores, long tall, float *sums) {
  long end = up_to(reach(b, t, m), 16);
  for (long i = 0; i < m; i++) {
    float *s = scores + i * tall;
    __m512 most = all(-INFINITY), total = _mm512_setzero_ps();
    PARTS(end) {
      __mmask16 seen = visible(b, mask, t + i, k);
      most = _mm512_mask_max_ps(most, seen, most, _mm512_loadu_ps(s + k));
    }
    float highest = _mm512_reduce_max_ps(most);
    PARTS(end) {
      __m512 at = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(s + k), all(highest)), all(b->scale));
      at = _mm512_maskz_mov_ps(visible(b, mask, t + i, k), exponential(at));
      total = _mm512_add_ps(total, at);
      _mm512_storeu_ps(s + k, at);
    }
    float sum = _mm512_reduce_add_ps(total), part = sum == 0 ? 0 : 1 / sum;  // who sees nothing brings nothing back
    PARTS(end) _mm512_storeu_ps(s + k, _mm512_mul_ps(_mm512_loadu_ps(s + k), all(part)));
    sums[t + i] = sum == 0 ? INFINITY : highest * (float)b->scale + logf(sum);
  }
}

// All queries of a sequence that share a head of keys and values.
static void attend(const Block *b, long sequence, long group, float *room) {
  Head h = open_head(b, sequence, group, room);
  const uint8_t *mask = b->mask ? b->mask + sequence * b->mask_row : 0;
  long share = b->n_heads / b->n_groups, out = b->queries, begin = sequence * b->length;
  turn_all(h.keys, h.whole, b, h.keys_turned);
  copy_all(h.values, h.whole, b->length, b, h.values_plain);
  for (long head = group * share; head < (group + 1) * share; head++)
    for (long t = 0; t < b->length; t += HIGH) {
      long m = least(HIGH, b->length - t), far = reach(b, t, m);
      compare(b, b->joint + (begin + t) * h.whole + head * b->size, h.whole, h.keys_turned, far, h.weights, h.tall, m);
      soften(b, mask, t, m, h.weights, h.tall, b->sums + (sequence * b->n_heads + head) * b->length);
      weigh(b, h.weights, h.tall, h.values_plain, b->length, far, b->seen + (begin + t) * out + head * b->size, out, m);
    }
}

// The weights of m queries once more, and from their gradients those of the scores.
static void unsoften(const Block *b, const uint8_t *mask, long t, long m, const float *seen, const float *d_seen,
                     const float *sums, float *weights, float *d_weights, long tall) {
  long end = up_to(reach(b, t, m), 16), step = b->queries;
  for (long i = 0; i < m; i++) {
    float *w = weights + i * tall, *d = d_weights + i * tall;
    __m512 mean = _mm512_setzero_ps();
    PARTS(b->size) {
      __mmask16 here = first(b->size - k);
      mean = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(here, seen + i * step + k),
                             _mm512_maskz_loadu_ps(here, d_seen + i * step + k), mean);
    }
    __m512 level = all(_mm512_reduce_add_ps(mean)), sum = all(sums[t + i]);
    PARTS(end) {
      __mmask16 may = visible(b, mask, t + i, k);
      __m512 at = exponential(_mm512_fmsub_ps(_mm512_loadu_ps(w + k), all(b->scale), sum));
      at = _mm512_maskz_mov_ps(may, at);
      __m512 change = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(may, d + k), level), all(b->scale));
      _mm512_storeu_ps(w + k, at);
      _mm512_storeu_ps(d + k, _mm512_maskz_mul_ps(may, at, change));
    }
  }
}

static void attend_back(const Block *b, long sequence, long group, float *room) {
  Head h = open_head(b, sequence, group, room);
  const uint8_t *mask = b->mask ? b->mask + sequence * b->mask_row : 0;
  long share = b->n_heads / b->n_groups, out = b->queries, begin = sequence * b->length;
  float *d_keys = b->d_joint + (h.keys - b->joint), *d_values = b->d_joint + (h.values - b->joint);
  turn_all(h.keys, h.whole, b, h.keys_turned);
  turn_all(h.values, h.whole, b, h.values_turned);
  copy_all(h.keys, h.whole, b->length, b, h.keys_plain);
  for (long t = 0; t < b->length; t++) {
    memset(d_keys + t * h.whole, 0, b->size * sizeof(float));
    memset(d_values + t * h.whole, 0, b->size * sizeof(float));
  }
  for (long head = group * share; head < (group + 1) * share; head++)
    for (long from = 0; from < b->length; from += LOOK) {
      long n = least(LOOK, b->length - from), at = (begin + from) * h.whole + head * b->size;
      long at_seen = (begin + from) * out + head * b->size;
      for (long i = 0; i < n; i += HIGH) {
        long m = least(HIGH, n - i), far = reach(b, from + i, m);
        float *weights = h.weights + i * h.tall, *d_weights = h.d_weights + i * h.tall;
        compare(b, b->joint + at + i * h.whole, h.whole, h.keys_turned, far, weights, h.tall, m);
        compare(b, b->d_seen + at_seen + i * out, out, h.values_turned, far, d_weights, h.tall, m);
        unsoften(b, mask, from + i, m, b->seen + at_seen + i * out, b->d_seen + at_seen + i * out,
                 b->sums + (sequence * b->n_heads + head) * b->length, weights, d_weights, h.tall);
        weigh(b, d_weights, h.tall, h.keys_plain, b->length, far, b->d_joint + at + i * h.whole, h.whole, m);
      }
      copy_all(b->joint + at, h.whole, n, b, h.queries);
      copy_all(b->d_seen + at_seen, out, n, b, h.d_seen);
      long stop = reach(b, from, n);
      for (long key = 0; key < stop; key += HIGH) {  // the queries before a key have not seen it
        long m = least(HIGH, b->length - key), skip = b->causal && key > from ? key - from : 0;
        for (long d = 0; d < b->size; d += WIDE) {
          long wide = least(WIDE, b->size - d), place = key * h.whole + d, row = skip * h.tall + key;
          long panel = d * n + skip * WIDE;
          across(h.d_weights + row, h.tall, h.queries + panel, n - skip, d_keys + place, h.whole, wide, m, 1);
          across(h.weights + row, h.tall, h.d_seen + panel, n - skip, d_values + place, h.whole, wide, m, 1);
        }
      }
    }
}
