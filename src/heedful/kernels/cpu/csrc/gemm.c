// Float32 matrix products for training, with 12 x 32 accumulators in registers.

#include "gemm.h"

// c (m, 32) = base + bias + a (m, depth) · panel (depth, 32), or aᵀ if it is transposed.
INLINE void tile(const float *a, long stride, const int transposed, const float *panel, long depth, const float *base,
                 long base_stride, const float *bias, float *c, long c_stride, long n_columns, const int m) {
  vec low[TILE_ROWS], high[TILE_ROWS];
  lanes one = first_lanes(n_columns), two = first_lanes(n_columns - LANES);
  vec low_bias = bias ? v_load_lanes(one, bias) : v_zero(), high_bias = bias ? v_load_lanes(two, bias + 16) : v_zero();
  UNROLL for (int i = 0; i < m; i++) {
    low[i] = low_bias, high[i] = high_bias;
    if (base) {
      low[i] = v_add(low[i], v_load_lanes(one, base + i * base_stride));
      high[i] = v_add(high[i], v_load_lanes(two, base + i * base_stride + LANES));
    }
  }
  const float *a3 = a + 3 * stride, *a6 = a + 6 * stride, *a9 = a + 9 * stride;  // few enough to stay in registers
  for (long k = 0; k < depth; k++, panel += TILE_COLUMNS) {
    vec left = v_load(panel), right = v_load(panel + LANES);
    UNROLL for (int i = 0; i < m; i++) {
      const float *from = i < 3 ? a : i < 6 ? a3 : i < 9 ? a6 : a9;
      vec at = v_set(transposed ? a[i] : from[i % 3 * stride]);
      low[i] = v_fma(left, at, low[i]);
      high[i] = v_fma(right, at, high[i]);
    }
    if (transposed) a += stride;
    else a++, a3++, a6++, a9++;
  }
  UNROLL for (int i = 0; i < m; i++) {
    v_store_lanes(c + i * c_stride, one, low[i]);
    v_store_lanes(c + i * c_stride + LANES, two, high[i]);
  }
}

INLINE void tile_of(const float *a, long stride, const int transposed, const float *panel, long depth,
                    const float *base, long base_stride, const float *bias, float *c, long c_stride, long n_columns,
                    long m) {
#define CASE(n) \
  case n: tile(a, stride, transposed, panel, depth, base, base_stride, bias, c, c_stride, n_columns, n); break;
  switch (m) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
#undef CASE
}

void multiply_tile(const float *a, long a_stride, const float *panel, long depth, const float *base, long base_stride,
                   const float *bias, float *c, long c_stride, long n_columns, long m) {
  tile_of(a, a_stride, 0, panel, depth, base, base_stride, bias, c, c_stride, n_columns, m);
}

void multiply_tile_transposed(const float *a, long a_stride, const float *panel, long depth, float *c, long c_stride,
                              long n_columns, long m, int accumulate) {
  tile_of(a, a_stride, 1, panel, depth, accumulate ? c : 0, c_stride, 0, c, c_stride, n_columns, m);
}

void copy_panel(const float *from, long stride, long depth, long n_columns, float *panel) {
  lanes one = first_lanes(n_columns), two = first_lanes(n_columns - LANES);
  for (long k = 0; k < depth; k++) {
    v_store(panel + k * TILE_COLUMNS, v_load_lanes(one, from + k * stride));
    v_store(panel + k * TILE_COLUMNS + LANES, v_load_lanes(two, from + k * stride + LANES));
  }
}

void transpose_panel(const float *from, long stride, long depth, long n_columns, float *panel) {
  for (long half = 0; half < TILE_COLUMNS; half += LANES)
    FOR_LANES(depth) {
      vec r[LANES];
      lanes here = first_lanes(depth - k);
      UNROLL for (int i = 0; i < LANES; i++)
        r[i] = half + i < n_columns ? v_load_lanes(here, from + (half + i) * stride + k) : v_zero();
      v_transpose(r);
      long n = min_long(LANES, depth - k);
      for (long i = 0; i < n; i++) v_store(panel + (k + i) * TILE_COLUMNS + half, r[i]);
    }
}

// Prefetches the cache lines begin to end of what the panel at (k, n) is made of.
static void prefetch_panel(const Gemm *p, long k, long n, long begin, long end) {
  if (n >= p->width) n = 0, k += PANEL_DEPTH;
  if (k >= p->depth) return;
  long deep = min_long(PANEL_DEPTH, p->depth - k), wide = min_long(TILE_COLUMNS, p->width - n);
  long lines = ((p->transposed ? deep : wide) + 15) / 16, rows = p->transposed ? wide : deep;
  const float *from = p->transposed ? p->w + n * p->w_stride + k : p->w + k * p->w_stride + n;
  for (long i = begin; i < min_long(end, lines * rows); i++) prefetch(from + i / lines * p->w_stride + i % lines * 16);
}

void gemm(Gemm p, long begin, long end, float *panel) {
  for (long r = begin; r < end; r += CHUNK_ROWS)
    for (long k = 0; k < p.depth; k += PANEL_DEPTH)
      for (long n = 0; n < p.width; n += TILE_COLUMNS) {
        long deep = min_long(PANEL_DEPTH, p.depth - k), wide = min_long(TILE_COLUMNS, p.width - n);
        long stop = min_long(end, r + CHUNK_ROWS);
        if (p.transposed) transpose_panel(p.w + n * p.w_stride + k, p.w_stride, deep, wide, panel);
        else copy_panel(p.w + k * p.w_stride + n, p.w_stride, deep, wide, panel);
        for (long i = r, lines = 0; i < stop; i += TILE_ROWS, lines += 32) {
          prefetch_panel(&p, k, n + TILE_COLUMNS, lines, lines + 32);
          float *y = p.y + i * p.y_stride + n;
          const float *base = k ? y : p.base ? p.base + i * p.base_stride + n : 0;
          multiply_tile(p.x + i * p.x_stride + k, p.x_stride, panel, deep, base, k ? p.y_stride : p.base_stride,
                        k || !p.bias ? 0 : p.bias + n, y, p.y_stride, wide, min_long(TILE_ROWS, stop - i));
        }
      }
}

void weight_gradient(const WeightGradient *g, long n, long begin, long end, float *panel) {
  long wide = min_long(TILE_COLUMNS, g->n_inputs - n);
  for (long k = begin; k < end; k += PANEL_DEPTH) {
    long deep = min_long(PANEL_DEPTH, end - k);
    copy_panel(g->x + k * g->x_stride + n, g->x_stride, deep, wide, panel);
    for (long i = 0; i < g->n_outputs; i += TILE_ROWS)
      multiply_tile_transposed(g->y + k * g->y_stride + i, g->y_stride, panel, deep,
                               g->weight + i * g->n_inputs + n, g->n_inputs, wide,
                               min_long(TILE_ROWS, g->n_outputs - i), k > begin);
  }
  if (n || !g->bias) return;
  memset(g->bias, 0, g->n_outputs * sizeof(float));
  for (long m = begin; m < end; m++)
    FOR_LANES(g->n_outputs) {
      lanes here = first_lanes(g->n_outputs - k);
      vec at = v_load_lanes(here, g->y + m * g->y_stride + k);
      v_store_lanes(g->bias + k, here, v_add(at, v_load_lanes(here, g->bias + k)));
    }
}
