// A block as the kernels for training see it, where its numbers lie, and what it does row by row (training.c).
//
//     B batch, T positions, M = B T rows, E model width, F hidden width, H heads, G heads of keys and values, D head size

#pragma once
#include <math.h>
#include <omp.h>
#include <stdint.h>

#include "training_products.h"

#define LOOK 96  // queries whose weights are at hand together when attention goes backwards (a multiple of HIGH)

enum { NORM_0, NORM_1, QUERY, KEY, VALUE, OUTPUT, UP, GATE, DOWN, N_PARTS };  // what has weights

// One block, as kernels/cpu/block.py describes it.
typedef struct {
  long n_sequences, length, width, hidden, n_heads, n_groups, size;
  long rms, act, gated, causal, threads;
  double scale, eps;
  const float *weights[N_PARTS][2];   // weight and bias; none where there is none
  float *gradients[N_PARTS][2];       // none where none is wanted
  const uint8_t *mask; long mask_row;                        // (B or 1, T, T), True where looking is allowed
  const float *cos, *sin; long half, turn_row, interleaved;  // (B or 1, T, R/2)
  const float *x, *d_y;                                      // what goes in and comes out, (M, E)
  float *y, *d_x;
  float *kept, *room;  // what forward leaves for backward; room for one call
  // Parts of what is kept.
  float *normed[2], *stats[2];  // (M, E); (M, 2) means and 1/deviations
  float *joint;                 // (M, (H + 2G) D) queries, keys, values
  float *seen, *sums;           // (M, H D); (B, H, T) logarithms of the softmax's sums
  float *middle;                // (M, E) between the sublayers
  float *before;                // (M, F) of up, or (M, 2F) of gate and up
  // Parts of the room.
  float *active;                                             // (M, F)
  float *d_before, *d_middle, *d_seen, *d_joint, *d_normed;  // like theirs
  float *own; long own_step;                                 // a part for each thread
  float *partial; long partial_step;                         // a part for each thread: all gradients of its own rows
  // Sizes that follow from those above: rows, numbers in a row of queries, of keys, of all three; of `before`.
  long rows, queries, keys, whole, wide;
} Block;

static long attention_room(const Block *b) {
  long tall = up_to(b->length, WIDE), wide = up_to(b->size, WIDE);
  return 2 * tall * b->size + 2 * wide * b->length + 2 * LOOK * (tall + wide) + 8 * 16;
}

// Rows and columns of a part's weight; a norm's is a column.
static void part_shape(const Block *b, int part, long *outputs, long *inputs) {
  long rows[] = {b->width, b->width, b->queries, b->keys, b->keys, b->width, b->hidden, b->hidden, b->width};
  long columns[] = {1, 1, b->width, b->width, b->width, b->queries, b->width, b->width, b->hidden};
  *outputs = rows[part], *inputs = columns[part];
}

// Divides what is kept, and the room, into their parts, and says how many numbers they are.
void block_layout(Block *b, long *n_kept, long *n_room) {
  b->rows = b->n_sequences * b->length;
  b->queries = b->n_heads * b->size, b->keys = b->n_groups * b->size, b->whole = b->queries + 2 * b->keys;
  b->wide = b->gated ? 2 * b->hidden : b->hidden;
  float **parts[] = {&b->normed[0], &b->normed[1], &b->stats[0], &b->stats[1], &b->joint,    &b->seen,
                     &b->sums,      &b->middle,    &b->before,   &b->active,   &b->d_before, &b->d_middle,
                     &b->d_seen,    &b->d_joint,   &b->d_normed};
  long sizes[] = {b->width,   b->width, 2,         2,        b->whole, b->queries, b->n_heads, b->width,
                  b->wide, b->hidden, b->wide, b->width, b->queries, b->whole, b->width};
  long at[2] = {0, 0};
  for (int i = 0; i < 15; i++) {
    int which = i > 8;
    *parts[i] = (which ? b->room : b->kept) + at[which];
    at[which] += up_to(b->rows * sizes[i], 16);
  }
  b->own = b->room + at[1];
  b->own_step = up_to(attention_room(b) > DEEP * WIDE ? attention_room(b) : DEEP * WIDE, 16);
  b->partial = b->own + b->threads * b->own_step;
  long total = 0;
  for (int i = 0; i < N_PARTS; i++) {
    long outputs, inputs;
    part_shape(b, i, &outputs, &inputs);
    if (i != GATE || b->gated) total += outputs * (inputs + 1);
  }
  b->partial_step = up_to(total, 16);
  *n_kept = at[0], *n_room = at[1] + b->threads * (b->own_step + b->partial_step);
}

// --- norms -----------------------------------------------------------------------------------------------------------

static void normalize(const Block *b, int which, const float *from, long begin, long end) {
  const float *weight = b->weights[which][0], *bias = b->weights[which][1];
  long n = b->width;
  for (long row = begin; row < end; row++) {
    const float *x = from + row * n;
    float *y = b->normed[which] + row * n, mean = 0;
    __m512 sum = _mm512_setzero_ps(), squares = sum;
    if (!b->rms) {
      PARTS(n) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(first(n - k), x + k));
      mean = _mm512_reduce_add_ps(sum) / n;
    }
    PARTS(n) {
      __m512 at = _mm512_maskz_sub_ps(first(n - k), _mm512_maskz_loadu_ps(first(n - k), x + k), all(mean));
      squares = _mm512_fmadd_ps(at, at, squares);
    }
    float by = 1 / sqrtf(_mm512_reduce_add_ps(squares) / n + (float)b->eps);
    PARTS(n) {
      __mmask16 here = first(n - k);
      __m512 at = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(here, x + k), all(mean)), all(by));
      at = _mm512_mul_ps(at, _mm512_maskz_loadu_ps(here, weight + k));
      if (bias) at = _mm512_add_ps(at, _mm512_maskz_loadu_ps(here, bias + k));
      _mm512_mask_storeu_ps(y + k, here, at);
    }
    b->stats[which][2 * row] = mean, b->stats[which][2 * row + 1] = by;
  }
}

// to = past + the gradient of x, from that of the normalized rows; the norm's own is summed up per thread.
static void normalize_back(const Block *b, int which, const float *x, const float *past, float *to, long begin,
                           long end) {
  const float *weight = b->weights[which][0];
  long n = b->width;
  float *d_weight = b->partial + omp_get_thread_num() * b->partial_step + 2 * which * n, *d_bias = d_weight + n;
  memset(d_weight, 0, 2 * n * sizeof(float));
  for (long row = begin; row < end; row++) {
    const float *at_x = x + row * n, *d = b->d_normed + row * n;
    __m512 mean = all(b->stats[which][2 * row]), by = all(b->stats[which][2 * row + 1]);
    __m512 sum = _mm512_setzero_ps(), turn = sum;
#define LOAD_ROW                                                                                        \
  __mmask16 here = first(n - k);                                                                         \
  __m512 unit = _mm512_mul_ps(_mm512_maskz_sub_ps(here, _mm512_maskz_loadu_ps(here, at_x + k), mean), by); \
  __m512 outer = _mm512_maskz_loadu_ps(here, d + k);                                                     \
  __m512 inner = _mm512_mul_ps(outer, _mm512_maskz_loadu_ps(here, weight + k))
    PARTS(n) {
      LOAD_ROW;
      sum = _mm512_add_ps(sum, inner);
      turn = _mm512_fmadd_ps(inner, unit, turn);
      __m512 so_far = _mm512_maskz_loadu_ps(here, d_weight + k);
      _mm512_mask_storeu_ps(d_weight + k, here, _mm512_fmadd_ps(outer, unit, so_far));
      _mm512_mask_storeu_ps(d_bias + k, here, _mm512_add_ps(outer, _mm512_maskz_loadu_ps(here, d_bias + k)));
    }
    __m512 level = all(b->rms ? 0 : _mm512_reduce_add_ps(sum) / n), slope = all(_mm512_reduce_add_ps(turn) / n);
    PARTS(n) {
      LOAD_ROW;
      __m512 change = _mm512_mul_ps(_mm512_sub_ps(_mm512_fnmadd_ps(unit, slope, inner), level), by);
      _mm512_mask_storeu_ps(to + row * n + k, here,
                            _mm512_add_ps(change, _mm512_maskz_loadu_ps(here, past + row * n + k)));
    }
  }
}

// --- the position-wise network ---------------------------------------------------------------------------------------

INLINE void feed_as(const Block *b, long begin, long end, const int act) {
  long n = b->hidden;
  for (long row = begin; row < end; row++) PARTS(n) {
    __mmask16 here = first(n - k);
    const float *x = b->before + row * b->wide + k;
    __m512 slope, y = activate(act, _mm512_maskz_loadu_ps(here, x), &slope);
    if (b->gated) y = _mm512_mul_ps(y, _mm512_maskz_loadu_ps(here, x + n));
    _mm512_mask_storeu_ps(b->active + row * n + k, here, y);
  }
}

// d_before holds the gradient of what is active, in its first columns; `active` is made once more.
INLINE void feed_back_as(const Block *b, long begin, long end, const int act) {
  long n = b->hidden;
  for (long row = begin; row < end; row++) PARTS(n) {
    __mmask16 here = first(n - k);
    const float *x = b->before + row * b->wide + k;
    float *d = b->d_before + row * b->wide + k;
    __m512 slope, y = activate(act, _mm512_maskz_loadu_ps(here, x), &slope), at = _mm512_maskz_loadu_ps(here, d);
    if (b->gated) {
      __m512 other = _mm512_maskz_loadu_ps(here, x + n);
      _mm512_mask_storeu_ps(d + n, here, _mm512_mul_ps(at, y));
      y = _mm512_mul_ps(y, other), at = _mm512_mul_ps(at, other);
    }
    _mm512_mask_storeu_ps(d, here, _mm512_mul_ps(at, slope));
    _mm512_mask_storeu_ps(b->active + row * n + k, here, y);
  }
}

#define BY_ACT(f)                                        \
  switch (b->act) {                                      \
    case RELU: f(b, begin, end, RELU); break;            \
    case GELU: f(b, begin, end, GELU); break;            \
    case GELU_TANH: f(b, begin, end, GELU_TANH); break;  \
    case SILU: f(b, begin, end, SILU); break;            \
  }
static void feed(const Block *b, long begin, long end) { BY_ACT(feed_as) }
static void feed_back(const Block *b, long begin, long end) { BY_ACT(feed_back_as) }
