// A pre-norm Transformer block for training: its arguments, and where its activations lie.
//
//     B batch, T positions, M = B T rows, E width, F hidden width, H heads, G key/value heads, D head size

#pragma once
#include "gemm.h"
#include "structs.h"

#define QUERY_CHUNK 96  // queries whose attention weights exist together in the backward pass (a multiple of TILE_ROWS)

typedef struct {
  BlockArguments a;
  // Sizes: M, numbers in a row of queries, of keys, of queries, keys and values; F or 2F.
  long rows, queries, keys, qkv_size, up_size;
  // Parts of what is kept.
  float *normed[2], *stats[2];    // (M, E); (M, 2) means and 1/deviations
  float *qkv;                     // (M, (H + 2G) D)
  float *attended, *logsumexp;    // (M, H D); (B, H, T) of the scores
  float *middle;                  // (M, E) between the sublayers
  float *up;                      // (M, F) before the activation, or (M, 2F) of gate and up
  // Parts of the workspace.
  float *active;                                            // (M, F)
  float *d_up, *d_middle, *d_attended, *d_qkv, *d_normed;   // like theirs
  float *scratch; long scratch_stride;                      // for each thread
  float *partial; long partial_stride;                      // for each thread: the weight gradients of its own rows
} Block;

// The rows and columns of a part's weight; a norm's is a column.
void part_shape(const Block *b, int part, long *outputs, long *inputs);

// Attention of the queries of one sequence that share a key/value head, and its gradient.
void attend(const Block *b, long sequence, long kv_head, float *scratch);
void attend_backward(const Block *b, long sequence, long kv_head, float *scratch);

// Numbers of scratch memory that both need.
long attention_scratch(const Block *b);

// Rows begin to end: normed[which] = norm(x). Backward: to = past + the gradient of x; those of the norm's weights go
// to `partial`.
void normalize_rows(const Block *b, int which, const float *x, long begin, long end);
void normalize_rows_backward(const Block *b, int which, const float *x, const float *past, float *to, long begin,
                             long end);

// Rows begin to end: queries and keys are rotated by their position, back for the gradient (direction -1).
void rotate_rows(const Block *b, float *qkv, long begin, long end, float direction);

// Rows begin to end: active = activation(up) [· gate], and its gradient, in place of that of `active` in the first
// columns of d_up; `active` is computed again.
void activate_rows(const Block *b, long begin, long end);
void activate_rows_backward(const Block *b, long begin, long end);
