// Float32 matrix products for training (gemm.c). The left operand is read in place; the right operand is packed into
// panels of 32 columns in every call, since weights change between steps: with hundreds of rows that takes about 1 % of
// the time.

#pragma once
#include "common.h"

#define TILE_ROWS 12       // rows of a tile: 12 x 32 sums stay in registers
#define TILE_COLUMNS 32    // columns of a tile
#define PANEL_DEPTH 256    // depth of a panel: (256, 32) stays in the L1 cache
#define CHUNK_ROWS 384     // rows multiplied by all panels in turn: (384, 256) of the left operand stays in L2

// Rows of y (M, N) = base + bias + x (M, K) · w, with w (K, N), or (N, K) if it is transposed.
typedef struct {
  const float *x; long x_stride;
  const float *w; long w_stride; int transposed;
  long depth, width;
  const float *base; long base_stride;
  const float *bias;
  float *y; long y_stride;
} Gemm;

// The gradients of a weight (N, K) and its bias (N) from the output gradient y (M, N) and the inputs x (M, K).
typedef struct {
  const float *y; long y_stride;
  const float *x; long x_stride;
  long n_outputs, n_inputs;
  float *weight, *bias;
} WeightGradient;

// Computes rows begin to end; `panel` is scratch for PANEL_DEPTH x TILE_COLUMNS floats.
void gemm(Gemm p, long begin, long end, float *panel);

// The contribution of rows begin to end to the 32 columns from n on; n = 0 also computes the bias gradient.
void weight_gradient(const WeightGradient *g, long n, long begin, long end, float *panel);

// c (m, 32) = base + bias + a (m, depth) · panel (depth, 32), up to 12 rows; base and bias may be NULL.
void multiply_tile(const float *a, long a_stride, const float *panel, long depth, const float *base, long base_stride,
                   const float *bias, float *c, long c_stride, long n_columns, long m);

// c (m, 32) = [c +] aᵀ · panel (depth, 32), with a (depth, m).
void multiply_tile_transposed(const float *a, long a_stride, const float *panel, long depth, float *c, long c_stride,
                              long n_columns, long m, int accumulate);

// A panel (depth, 32) of rows `stride` apart; missing columns are 0.
void copy_panel(const float *from, long stride, long depth, long n_columns, float *panel);

// A panel (depth, 32) whose columns are given as rows, `stride` apart.
void transpose_panel(const float *from, long stride, long depth, long n_columns, float *panel);
