// Matrix products for training, with a tile of accumulators in registers.

#include "gemm.h"

// sum + w x: of float32, or of pairs of bfloat16.
INLINE vec multiply_add(const int pairs, vec w, vec x, vec sum) {
#if BFLOAT16_DOT
  if (pairs) return v_dot_pairs(sum, (ivec)w, (ivec)x);
#endif
  return v_fma(w, x, sum);
}

// c (m, 32) = base + bias + a (m, depth) · panel (depth, 32), or aᵀ if it is transposed; the depth is in words.
INLINE void tile(const float *a, int64_t stride, const int transposed, const int pairs, const float *panel,
                 int64_t depth, const float *base, int64_t base_stride, const float *bias, float *c, int64_t c_stride,
                 int64_t n_columns, const int m) {
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
  for (int64_t k = 0; k < depth; k++, panel += TILE_COLUMNS) {
    vec left = v_load(panel), right = v_load(panel + LANES);
    UNROLL for (int i = 0; i < m; i++) {
      const float *from = i < 3 ? a : i < 6 ? a3 : i < 9 ? a6 : a9;
      vec at = v_set(transposed ? a[i] : from[i % 3 * stride]);
      low[i] = multiply_add(pairs, left, at, low[i]);
      high[i] = multiply_add(pairs, right, at, high[i]);
    }
    if (transposed) a += stride;
    else a++, a3++, a6++, a9++;
  }
  UNROLL for (int i = 0; i < m; i++) {
    v_store_lanes(c + i * c_stride, one, low[i]);
    v_store_lanes(c + i * c_stride + LANES, two, high[i]);
  }
}

INLINE void tile_of(const float *a, int64_t stride, const int transposed, const int pairs, const float *panel,
                    int64_t depth, const float *base, int64_t base_stride, const float *bias, float *c,
                    int64_t c_stride, int64_t n_columns, int64_t m) {
#define CASE(n)                                                                                              \
  case n:                                                                                                    \
    if (n <= TILE_ROWS)                                                                                      \
      tile(a, stride, transposed, pairs, panel, depth, base, base_stride, bias, c, c_stride, n_columns, n);  \
    break;
  switch (m) {
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
  }
#undef CASE
}

void multiply_tile(const float *a, int64_t a_stride, const float *panel, int64_t depth, const float *base,
                   int64_t base_stride, const float *bias, float *c, int64_t c_stride, int64_t n_columns, int64_t m) {
  tile_of(a, a_stride, 0, 0, panel, depth, base, base_stride, bias, c, c_stride, n_columns, m);
}

void multiply_tile_transposed(const float *a, int64_t a_stride, const float *panel, int64_t depth, float *c,
                              int64_t c_stride, int64_t n_columns, int64_t m, int accumulate) {
  tile_of(a, a_stride, 1, 0, panel, depth, accumulate ? c : 0, c_stride, 0, c, c_stride, n_columns, m);
}

void copy_panel(const float *from, int64_t stride, int64_t depth, int64_t n_columns, float *panel) {
  lanes one = first_lanes(n_columns), two = first_lanes(n_columns - LANES);
  for (int64_t k = 0; k < depth; k++) {
    v_store(panel + k * TILE_COLUMNS, v_load_lanes(one, from + k * stride));
    v_store(panel + k * TILE_COLUMNS + LANES, v_load_lanes(two, from + k * stride + LANES));
  }
}

void transpose_panel(const float *from, int64_t stride, int64_t depth, int64_t n_columns, float *panel) {
  for (int64_t half = 0; half < TILE_COLUMNS; half += LANES)
    FOR_LANES(depth) {
      vec r[LANES];
      lanes here = first_lanes(depth - k);
      UNROLL for (int i = 0; i < LANES; i++)
        r[i] = half + i < n_columns ? v_load_lanes(here, from + (half + i) * stride + k) : v_zero();
      v_transpose(r);
      int64_t n = min_long(LANES, depth - k);
      for (int64_t i = 0; i < n; i++) v_store(panel + (k + i) * TILE_COLUMNS + half, r[i]);
    }
}

// Prefetches the cache lines begin to end of what the panel at (k, n) is made of.
static void prefetch_panel(const Gemm *p, int64_t k, int64_t n, int64_t begin, int64_t end) {
  if (n >= p->width) n = 0, k += PANEL_DEPTH;
  if (k >= p->depth) return;
  int64_t deep = min_long(PANEL_DEPTH, p->depth - k), wide = min_long(TILE_COLUMNS, p->width - n);
  int64_t lines = ((p->transposed ? deep : wide) + 15) / 16, rows = p->transposed ? wide : deep;
  const float *from = p->transposed ? p->w + n * p->w_stride + k : p->w + k * p->w_stride + n;
  for (int64_t i = begin; i < min_long(end, lines * rows); i++)
    prefetch(from + i / lines * p->w_stride + i % lines * 16);
}

static void gemm_float32(const Gemm *p, int64_t begin, int64_t end, float *panel) {
  for (int64_t r = begin; r < end; r += CHUNK_ROWS)
    for (int64_t k = 0; k < p->depth; k += PANEL_DEPTH)
      for (int64_t n = 0; n < p->width; n += TILE_COLUMNS) {
        int64_t deep = min_long(PANEL_DEPTH, p->depth - k), wide = min_long(TILE_COLUMNS, p->width - n);
        int64_t stop = min_long(end, r + CHUNK_ROWS);
        if (p->transposed) transpose_panel(p->w + n * p->w_stride + k, p->w_stride, deep, wide, panel);
        else copy_panel(p->w + k * p->w_stride + n, p->w_stride, deep, wide, panel);
        for (int64_t i = r, lines = 0; i < stop; i += TILE_ROWS, lines += 32) {
          prefetch_panel(p, k, n + TILE_COLUMNS, lines, lines + 32);
          float *y = p->y + i * p->y_stride + n;
          const float *base = k ? y : p->base ? p->base + i * p->base_stride + n : 0;
          multiply_tile(p->x + i * p->x_stride + k, p->x_stride, panel, deep, base, k ? p->y_stride : p->base_stride,
                        k || !p->bias ? 0 : p->bias + n, y, p->y_stride, wide, min_long(TILE_ROWS, stop - i));
        }
      }
}

static void weight_gradient_float32(const WeightGradient *g, int64_t begin, int64_t end, float *panel) {
  for (int64_t n = 0; n < g->n_inputs; n += TILE_COLUMNS)
    for (int64_t k = begin; k < end; k += PANEL_DEPTH) {
      int64_t deep = min_long(PANEL_DEPTH, end - k), wide = min_long(TILE_COLUMNS, g->n_inputs - n);
      copy_panel(g->x + k * g->x_stride + n, g->x_stride, deep, wide, panel);
      for (int64_t i = 0; i < g->n_outputs; i += TILE_ROWS)
        multiply_tile_transposed(g->y + k * g->y_stride + i, g->y_stride, panel, deep,
                                 g->weight + i * g->n_inputs + n, g->n_inputs, wide,
                                 min_long(TILE_ROWS, g->n_outputs - i), k > begin);
    }
}

#if BFLOAT16_DOT
// --- bfloat16: a word is two elements, of adjacent columns or of adjacent rows, a missing one 0 -----------------------

#define PAIRS_DEPTH (2 * PANEL_DEPTH)  // elements in the depth of a panel

static void pair_columns(const float *from, int64_t stride, int64_t n_rows, int64_t n, float *to, int64_t to_stride) {
  for (int64_t i = 0; i < n_rows; i++)
    FOR_LANES(n)
      v_store_bfloat16((int16_t *)(to + i * to_stride) + k, first_lanes(round_up(n - k, 2)),
                       v_load_lanes(first_lanes(n - k), from + i * stride + k));
}

static void pair_rows(const float *from, int64_t stride, int64_t n_rows, int64_t n, float *to, int64_t to_stride) {
  for (int64_t i = 0; i < n_rows; i += 2, to += to_stride)
    FOR_LANES(to_stride) {
      lanes here = first_lanes(n - k);
      const float *at = from + i * stride + k;
      vec second = i + 1 < n_rows ? v_load_lanes(here, at + stride) : v_zero();
      v_store_lanes(to + k, first_lanes(to_stride - k), (vec)v_to_pairs(v_load_lanes(here, at), second));
    }
}

static void gemm_bfloat16(const Gemm *p, int64_t begin, int64_t end, float *panel) {
  float *rows = panel + PANEL_DEPTH * TILE_COLUMNS, *left = rows + PANEL_DEPTH * TILE_COLUMNS;
  for (int64_t r = begin; r < end; r += CHUNK_ROWS)
    for (int64_t k = 0; k < p->depth; k += PAIRS_DEPTH) {
      int64_t stop = min_long(end, r + CHUNK_ROWS), deep = min_long(PAIRS_DEPTH, p->depth - k), words = (deep + 1) / 2;
      pair_columns(p->x + r * p->x_stride + k, p->x_stride, stop - r, deep, left, words);
      for (int64_t n = 0; n < p->width; n += TILE_COLUMNS) {
        int64_t wide = min_long(TILE_COLUMNS, p->width - n);
        if (p->transposed) {
          pair_columns(p->w + n * p->w_stride + k, p->w_stride, wide, deep, rows, words);
          transpose_panel(rows, words, words, wide, panel);
        } else {
          pair_rows(p->w + k * p->w_stride + n, p->w_stride, deep, wide, panel, TILE_COLUMNS);
        }
        for (int64_t i = r; i < stop; i += TILE_ROWS) {
          float *y = p->y + i * p->y_stride + n;
          const float *base = k ? y : p->base ? p->base + i * p->base_stride + n : 0;
          tile_of(left + (i - r) * words, words, 0, 1, panel, words, base, k ? p->y_stride : p->base_stride,
                  k || !p->bias ? 0 : p->bias + n, y, p->y_stride, wide, min_long(TILE_ROWS, stop - i));
        }
      }
    }
}

static void weight_gradient_bfloat16(const WeightGradient *g, int64_t begin, int64_t end, float *panel) {
  float *left = panel + 2 * PANEL_DEPTH * TILE_COLUMNS;
  for (int64_t k = begin; k < end; k += PAIRS_DEPTH)
    for (int64_t r = 0; r < g->n_outputs; r += CHUNK_ROWS) {
      int64_t deep = min_long(PAIRS_DEPTH, end - k), tall = min_long(CHUNK_ROWS, g->n_outputs - r);
      pair_rows(g->y + k * g->y_stride + r, g->y_stride, deep, tall, left, tall);
      for (int64_t n = 0; n < g->n_inputs; n += TILE_COLUMNS) {
        int64_t wide = min_long(TILE_COLUMNS, g->n_inputs - n);
        pair_rows(g->x + k * g->x_stride + n, g->x_stride, deep, wide, panel, TILE_COLUMNS);
        for (int64_t i = 0; i < tall; i += TILE_ROWS) {
          float *weight = g->weight + (r + i) * g->n_inputs + n;
          tile_of(left + i, tall, 1, 1, panel, (deep + 1) / 2, k > begin ? weight : 0, g->n_inputs, 0, weight,
                  g->n_inputs, wide, min_long(TILE_ROWS, tall - i));
        }
      }
    }
}
#else
#define gemm_bfloat16 gemm_float32
#define weight_gradient_bfloat16 weight_gradient_float32
#endif

void gemm(Gemm p, int64_t begin, int64_t end, float *scratch) {
  (p.bfloat16 ? gemm_bfloat16 : gemm_float32)(&p, begin, end, scratch);
}

void weight_gradient(const WeightGradient *g, int64_t begin, int64_t end, float *scratch) {
  (g->bfloat16 ? weight_gradient_bfloat16 : weight_gradient_float32)(g, begin, end, scratch);
  if (!g->bias) return;
  memset(g->bias, 0, g->n_outputs * sizeof(float));
  for (int64_t m = begin; m < end; m++)
    FOR_LANES(g->n_outputs) {
      lanes here = first_lanes(g->n_outputs - k);
      vec at = v_load_lanes(here, g->y + m * g->y_stride + k);
      v_store_lanes(g->bias + k, here, v_add(at, v_load_lanes(here, g->bias + k)));
    }
}
