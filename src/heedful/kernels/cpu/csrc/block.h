// A pre-norm Transformer block for training: its arguments and the memory layout of its activations.
//
//     B batch, T positions, M = B T rows, E width, F hidden width, H heads, G key/value heads, D head size

#pragma once
#include "gemm.h"
#include "structs.h"

#define QUERY_CHUNK 96  // queries per chunk of the backward pass of attention (a multiple of TILE_ROWS)

typedef struct {
  BlockArguments a;
  // Sizes: M; H D; G D; (H + 2G) D; F or 2F.
  long rows, queries, keys, qkv_size, up_size;
  // Saved for the backward pass.
  float *normed[2], *stats[2];    // (M, E); (M, 2) mean and 1/std
  float *qkv;                     // (M, (H + 2G) D)
  float *attended, *logsumexp;    // (M, H D); (B, H, T) of the scores
  float *middle;                  // (M, E) between the sublayers
  float *up;                      // (M, F) before the activation, or (M, 2F) of gate and up
  // In the workspace.
  float *active;                                            // (M, F)
  float *d_up, *d_middle, *d_attended, *d_qkv, *d_normed;   // gradients of the above
  float *scratch; long scratch_stride;                      // for each thread
  float *partial; long partial_stride;                      // for each thread: weight gradients from its rows
} Block;

// The shape of a part's weight; a norm's has one column.
void part_shape(const Block *b, int part, long *outputs, long *inputs);

// Attention of the queries of one sequence that share a key/value head, and its gradient.
void attend(const Block *b, long sequence, long kv_head, float *scratch);
void attend_backward(const Block *b, long sequence, long kv_head, float *scratch);

// Floats of scratch memory that both need.
long attention_scratch(const Block *b);

// Rows begin to end: normed[which] = norm(x). Backward: to = past + gradient of x; the gradients of the norm's weights
// are added to `partial`.
void normalize_rows(const Block *b, int which, const float *x, long begin, long end);
void normalize_rows_backward(const Block *b, int which, const float *x, const float *past, float *to, long begin,
                             long end);

// Rows begin to end: rotary embedding of queries and keys; direction -1 is the inverse, for gradients.
void rotate_rows(const Block *b, float *qkv, long begin, long end, float direction);

// Rows begin to end: active = activation(up) [· gate]. Backward: the first columns of d_up hold the gradient of `active`
// and are replaced by that of `up`; `active` is recomputed.
void activate_rows(const Block *b, long begin, long end);
void activate_rows_backward(const Block *b, long begin, long end);
