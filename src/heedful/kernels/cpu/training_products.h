// Products, and functions of one number with their slopes, for training on processors with AVX-512 (training.c).
//
// A product's left factor is taken as it lies, its right factor in panels of 32 columns that are laid out anew each time:
// with hundreds of rows that costs a hundredth of the product, and weights may change between any two.

#pragma once
#include <immintrin.h>
#include <string.h>

#define HIGH 12    // rows of a tile: 12 x 32 sums stay in registers
#define WIDE 32    // columns of a tile
#define DEEP 256   // how far a tile sums before the next one is taken: a panel (256, 32) of the right factor is at hand
#define CHUNK 384  // rows that go through all panels together: their part (384, 256) of the left factor is at hand
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

static long least(long a, long b) { return a < b ? a : b; }
static long up_to(long n, long of) { return (n + of - 1) / of * of; }
INLINE __mmask16 first(long n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
INLINE __m512 all(float x) { return _mm512_set1_ps(x); }
#define PARTS(n) for (long k = 0; k < (n); k += 16)

// --- products --------------------------------------------------------------------------------------------------------

// c (m, 32) = base + bias + a (m, depth) · panel (depth, 32). The left factor has its rows `step` apart, or, if it is
// read across (transposed), its columns.
INLINE void tile(const float *a, long step, const int across, const float *panel, long depth, const float *base,
                 long base_step, const float *bias, float *c, long c_step, long n_columns, const int m) {
  __m512 low[HIGH], high[HIGH];
  __mmask16 one = first(n_columns), two = first(n_columns - 16);
  __m512 low_bias = bias ? _mm512_maskz_loadu_ps(one, bias) : _mm512_setzero_ps();
  __m512 high_bias = bias ? _mm512_maskz_loadu_ps(two, bias + 16) : _mm512_setzero_ps();
  UNROLL for (int i = 0; i < m; i++) {
    low[i] = low_bias, high[i] = high_bias;
    if (base) {
      low[i] = _mm512_add_ps(low[i], _mm512_maskz_loadu_ps(one, base + i * base_step));
      high[i] = _mm512_add_ps(high[i], _mm512_maskz_loadu_ps(two, base + i * base_step + 16));
    }
  }
  const float *a3 = a + 3 * step, *a6 = a + 6 * step, *a9 = a + 9 * step;  // few enough to stay in registers
  for (long k = 0; k < depth; k++, panel += WIDE) {
    __m512 left = _mm512_loadu_ps(panel), right = _mm512_loadu_ps(panel + 16);
    UNROLL for (int i = 0; i < m; i++) {
      const float *from = i < 3 ? a : i < 6 ? a3 : i < 9 ? a6 : a9;
      __m512 at = all(across ? a[i] : from[i % 3 * step]);
      low[i] = _mm512_fmadd_ps(left, at, low[i]);
      high[i] = _mm512_fmadd_ps(right, at, high[i]);
    }
    if (across) a += step;
    else a++, a3++, a6++, a9++;
  }
  UNROLL for (int i = 0; i < m; i++) {
    _mm512_mask_storeu_ps(c + i * c_step, one, low[i]);
    _mm512_mask_storeu_ps(c + i * c_step + 16, two, high[i]);
  }
}

// The same for any number of rows up to 12.
INLINE void strip(const float *a, long step, const int across, const float *panel, long depth, const float *base,
                  long base_step, const float *bias, float *c, long c_step, long n_columns, long m) {
#define CASE(n) \
  case n: tile(a, step, across, panel, depth, base, base_step, bias, c, c_step, n_columns, n); break;
  switch (m) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
}

static __attribute__((noinline)) void along(const float *a, long step, const float *panel, long depth,
                                            const float *base, long base_step, const float *bias, float *c,
                                            long c_step, long n_columns, long m) {
  strip(a, step, 0, panel, depth, base, base_step, bias, c, c_step, n_columns, m);
}

static __attribute__((noinline)) void across(const float *a, long step, const float *panel, long depth, float *c,
                                             long c_step, long n_columns, long m, int add) {
  strip(a, step, 1, panel, depth, add ? c : 0, c_step, 0, c, c_step, n_columns, m);
}

// A panel (depth, 32) of rows `step` apart; columns that are not there are 0.
static void copy_panel(const float *from, long step, long depth, long n_columns, float *panel) {
  __mmask16 one = first(n_columns), two = first(n_columns - 16);
  for (long k = 0; k < depth; k++) {
    _mm512_storeu_ps(panel + k * WIDE, _mm512_maskz_loadu_ps(one, from + k * step));
    _mm512_storeu_ps(panel + k * WIDE + 16, _mm512_maskz_loadu_ps(two, from + k * step + 16));
  }
}

INLINE void transpose(__m512 *r) {
  __m512 t[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 16; i += 4) UNROLL for (int j = 0; j < 2; j++) {
    __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
    r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  }
  UNROLL for (int i = 0; i < 16; i += 8) UNROLL for (int j = 0; j < 4; j++) {
    t[i + j] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0x88);
    t[i + j + 4] = _mm512_shuffle_f32x4(r[i + j], r[i + j + 4], 0xdd);
  }
  UNROLL for (int j = 0; j < 8; j++) {
    r[j] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0x88);
    r[j + 8] = _mm512_shuffle_f32x4(t[j], t[j + 8], 0xdd);
  }
}

// A panel (depth, 32) of which the columns are given as rows, `step` apart.
static void turn_panel(const float *from, long step, long depth, long n_columns, float *panel) {
  for (long half = 0; half < WIDE; half += 16)
    PARTS(depth) {
      __m512 r[16];
      UNROLL for (int i = 0; i < 16; i++) r[i] = half + i < n_columns
          ? _mm512_maskz_loadu_ps(first(depth - k), from + (half + i) * step + k) : _mm512_setzero_ps();
      transpose(r);
      long n = least(16, depth - k);
      for (long i = 0; i < n; i++) _mm512_storeu_ps(panel + (k + i) * WIDE + half, r[i]);
    }
}

// Rows begin to end of y (M, N) = base + bias + x (M, K) · w, with w (K, N), or (N, K) if it is turned.
typedef struct {
  const float *x; long x_step;
  const float *w; long w_step; int turned;
  long depth, width;
  const float *base; long base_step;
  const float *bias;
  float *y; long y_step;
} Product;

// Asks for lines begin to end of what the panel at (k, n) is made of, so that they are there in time.
static void ask_for(const Product *p, long k, long n, long begin, long end) {
  if (n >= p->width) n = 0, k += DEEP;
  if (k >= p->depth) return;
  long deep = least(DEEP, p->depth - k), wide = least(WIDE, p->width - n);
  long lines = ((p->turned ? deep : wide) + 15) / 16, rows = p->turned ? wide : deep;
  const float *from = p->turned ? p->w + n * p->w_step + k : p->w + k * p->w_step + n;
  for (long i = begin; i < least(end, lines * rows); i++)
    _mm_prefetch((const char *)(from + i / lines * p->w_step + i % lines * 16), _MM_HINT_T1);
}

static void multiply(Product p, long begin, long end, float *panel) {
  for (long r = begin; r < end; r += CHUNK)
    for (long k = 0; k < p.depth; k += DEEP)
      for (long n = 0; n < p.width; n += WIDE) {
        long deep = least(DEEP, p.depth - k), wide = least(WIDE, p.width - n), stop = least(end, r + CHUNK);
        if (p.turned) turn_panel(p.w + n * p.w_step + k, p.w_step, deep, wide, panel);
        else copy_panel(p.w + k * p.w_step + n, p.w_step, deep, wide, panel);
        for (long i = r, lines = 0; i < stop; i += HIGH, lines += 32) {
          ask_for(&p, k, n + WIDE, lines, lines + 32);
          float *y = p.y + i * p.y_step + n;
          const float *base = k ? y : p.base ? p.base + i * p.base_step + n : 0;
          along(p.x + i * p.x_step + k, p.x_step, panel, deep, base, k ? p.y_step : p.base_step,
                k || !p.bias ? 0 : p.bias + n, y, p.y_step, wide, least(HIGH, stop - i));
        }
      }
}

// The gradient of a weight (N, K) from those of the outputs y (M, N) and the inputs x (M, K), and that of its bias (N).
typedef struct {
  const float *y; long y_step;
  const float *x; long x_step;
  long n_outputs, n_inputs;
  float *weight, *bias;
} Gradient;

// What rows begin to end give of it, in 32 columns from n on; the first columns do the bias.
static void gradient(const Gradient *g, long n, long begin, long end, float *panel) {
  long wide = least(WIDE, g->n_inputs - n);
  for (long k = begin; k < end; k += DEEP) {
    long deep = least(DEEP, end - k);
    copy_panel(g->x + k * g->x_step + n, g->x_step, deep, wide, panel);
    for (long i = 0; i < g->n_outputs; i += HIGH)
      across(g->y + k * g->y_step + i, g->y_step, panel, deep, g->weight + i * g->n_inputs + n, g->n_inputs, wide,
             least(HIGH, g->n_outputs - i), k > begin);
  }
  if (n || !g->bias) return;
  memset(g->bias, 0, g->n_outputs * sizeof(float));
  for (long m = begin; m < end; m++)
    PARTS(g->n_outputs) {
      __mmask16 here = first(g->n_outputs - k);
      __m512 at = _mm512_maskz_loadu_ps(here, g->y + m * g->y_step + k);
      _mm512_mask_storeu_ps(g->bias + k, here, _mm512_add_ps(at, _mm512_maskz_loadu_ps(here, g->bias + k)));
    }
}

// --- functions of one number -----------------------------------------------------------------------------------------

// e^x (Cephes' polynomial, within 2 units in the last place).
INLINE __m512 exponential(__m512 x) {
  x = _mm512_min_ps(all(87.33f), _mm512_max_ps(all(-87.33f), x));  // in this order what is no number stays none
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, all(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, all(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, all(-2.12194440e-4f), r);
  __m512 y = all(1.9875691500e-4f);
  y = _mm512_fmadd_ps(y, r, all(1.3981999507e-3f));
  y = _mm512_fmadd_ps(y, r, all(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, r, all(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, r, all(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, r, all(5.0000001201e-1f));
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, all(1)));
  return _mm512_scalef_ps(y, n);
}

// 1/x for x from 1 on: an estimate of 14 bits, and Newton's step for twice as many.
INLINE __m512 inverse(__m512 x) {
  __m512 y = _mm512_rcp14_ps(x);
  return _mm512_mul_ps(y, _mm512_fnmadd_ps(x, y, all(2)));
}

enum { RELU, GELU, GELU_TANH, SILU };

// An activation and its slope at x.
INLINE __m512 activate(const int act, __m512 x, __m512 *slope) {
  const __m512 one = all(1), zero = _mm512_setzero_ps();
  if (act == RELU) {
    __mmask16 positive = _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ);
    *slope = _mm512_maskz_mov_ps(positive, one);
    return _mm512_max_ps(x, zero);
  }
  if (act == GELU) {  // x Φ(x), by 1 - erf (Abramowitz & Stegun 7.1.26, within 1.5e-7)
    __m512 z = _mm512_mul_ps(_mm512_abs_ps(x), all(0.70710678f));
    __m512 bell = exponential(_mm512_mul_ps(_mm512_mul_ps(x, x), all(-0.5f)));
    __m512 t = inverse(_mm512_fmadd_ps(z, all(0.3275911f), one)), y = all(1.061405429f);
    y = _mm512_fmadd_ps(y, t, all(-1.453152027f));
    y = _mm512_fmadd_ps(y, t, all(1.421413741f));
    y = _mm512_fmadd_ps(y, t, all(-0.284496736f));
    y = _mm512_fmadd_ps(y, t, all(0.254829592f));
    __m512 tail = _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(y, t), bell), all(0.5f));
    __m512 below = _mm512_mask_sub_ps(tail, _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), one, tail);
    *slope = _mm512_fmadd_ps(_mm512_mul_ps(x, bell), all(0.39894228f), below);
    return _mm512_mul_ps(x, below);
  }
  __m512 u = x, rise = one;  // x · sigmoid(u)
  if (act == GELU_TANH) {    // 2 √(2/π) (x + 0.044715 x³)
    __m512 square = _mm512_mul_ps(x, x);
    u = _mm512_mul_ps(x, _mm512_fmadd_ps(square, all(0.0713548163f), all(1.59576912f)));
    rise = _mm512_fmadd_ps(square, all(3 * 0.0713548163f), all(1.59576912f));
  }
  __m512 s = inverse(_mm512_add_ps(one, exponential(_mm512_sub_ps(zero, u)))), y = _mm512_mul_ps(x, s);
  *slope = _mm512_fmadd_ps(_mm512_mul_ps(y, rise), _mm512_sub_ps(one, s), s);
  return y;
}
