// Matrix products for training (gemm.c). The left operand is read in place; the right operand is packed into panels of
// 32 columns in every call, since weights change between steps: with hundreds of rows that takes about 1 % of the time.
//
// Operands and results are float32. With `bfloat16` the operands are rounded to it and the sums are float32: both are
// packed then, as words of two elements that are adjacent in depth. Without an instruction for it (BFLOAT16_DOT) that
// would be slower than float32, which is computed instead.

#pragma once
#include "common.h"

#define TILE_ROWS GEMM_ROWS  // rows of a tile: with AVX-512 12 x 32 sums stay in registers
#define TILE_COLUMNS 32      // columns of a tile
#define PANEL_DEPTH 256      // depth of a panel: (256, 32) stays in the L1 cache
#define CHUNK_ROWS 384       // rows multiplied by all panels in turn: (384, 256) of the left operand stays in L2

// Floats of scratch memory that a product needs: a panel, and if it is in bfloat16 one of rows and the left operand.
#define GEMM_SCRATCH(bfloat16) (PANEL_DEPTH * (TILE_COLUMNS + (bfloat16) * (TILE_COLUMNS + CHUNK_ROWS)))

// Rows of y (M, N) = base + bias + x (M, K) · w, with w (K, N), or (N, K) if it is transposed.
typedef struct {
  const float *x; int64_t x_stride;
  const float *w; int64_t w_stride; int transposed;
  int64_t depth, width;
  const float *base; int64_t base_stride;
  const float *bias;
  float *y; int64_t y_stride;
  int bfloat16;
} Gemm;

// The gradients of a weight (N, K) and its bias (N) from the output gradient y (M, N) and the inputs x (M, K).
typedef struct {
  const float *y; int64_t y_stride;
  const float *x; int64_t x_stride;
  int64_t n_outputs, n_inputs;
  float *weight, *bias;
  int bfloat16;
} WeightGradient;

// Computes rows begin to end.
void gemm(Gemm p, int64_t begin, int64_t end, float *scratch);

// The contribution of rows begin to end.
void weight_gradient(const WeightGradient *g, int64_t begin, int64_t end, float *scratch);

// c (m, 32) = base + bias + a (m, depth) · panel (depth, 32), up to 12 rows; base and bias may be NULL.
void multiply_tile(const float *a, int64_t a_stride, const float *panel, int64_t depth, const float *base,
                   int64_t base_stride, const float *bias, float *c, int64_t c_stride, int64_t n_columns, int64_t m);

// c (m, 32) = [c +] aᵀ · panel (depth, 32), with a (depth, m).
void multiply_tile_transposed(const float *a, int64_t a_stride, const float *panel, int64_t depth, float *c,
                              int64_t c_stride, int64_t n_columns, int64_t m, int accumulate);

// A panel (depth, 32) of rows `stride` apart; missing columns are 0.
void copy_panel(const float *from, int64_t stride, int64_t depth, int64_t n_columns, float *panel);

// A panel (depth, 32) whose columns are given as rows, `stride` apart.
void transpose_panel(const float *from, int64_t stride, int64_t depth, int64_t n_columns, float *panel);
