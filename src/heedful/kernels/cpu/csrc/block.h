// A pre-norm Transformer block for training: its arguments and the memory layout of its activations.
//
//     B batch, T positions, M = B T rows, E width, F hidden width, H heads, G key/value heads, D head size

#pragma once
#include "gemm.h"
#include "structs.h"

#define QUERY_CHUNK 96       // queries per chunk of the backward pass of attention (a multiple of TILE_ROWS)
#define DROPOUT_COLUMNS 32   // columns whose dropout factors are computed together

typedef struct {
  BlockArguments a;
  // Sizes: M; H D; G D; (H + 2G) D; F or 2F.
  int64_t rows, queries, keys, qkv_size, up_size;
  // Saved for the backward pass.
  float *normed[2], *stats[2];    // (M, E); (M, 2) mean and 1/std
  float *qkv;                     // (M, (H + 2G) D)
  float *attended, *logsumexp;    // (M, H D); (B, H, T) of the scores
  float *middle;                  // (M, E) between the sublayers
  float *up;                      // (M, F) before the activation, or (M, 2F) of gate and up
  // In the workspace.
  float *active;                                            // (M, F)
  float *d_up, *d_middle, *d_attended, *d_qkv, *d_normed;   // gradients of the above
  float *d_output[2];                                       // (M, E) of the sublayers before dropout, if there is any
  float *scratch; int64_t scratch_stride;                      // for each thread
  float *partial; int64_t partial_stride;                      // for each thread: weight gradients from its rows
} Block;

// The shape of a part's weight; a norm's has one column.
void part_shape(const Block *b, int part, int64_t *outputs, int64_t *inputs);

// The dropout factors of a row of n columns: 0 with the probability p at this place, else 1 / (1 - p). `factors` has
// room for a multiple of DROPOUT_COLUMNS.
void dropout_factors(const Block *b, int place, int64_t row, int64_t n, float *factors);

// Rows begin to end, `stride` apart: n columns of to = [base +] from · dropout factors. `factors` is scratch.
void drop_rows(const Block *b, int place, const float *base, const float *from, float *to, int64_t n, int64_t stride,
               int64_t begin, int64_t end, float *factors);

// Attention of the queries of one sequence that share a key/value head, and its gradient.
void attend(const Block *b, int64_t sequence, int64_t kv_head, float *scratch);
void attend_backward(const Block *b, int64_t sequence, int64_t kv_head, float *scratch);

// Floats of scratch memory that both need.
int64_t attention_scratch(const Block *b);

// Rows begin to end: normed[which] = norm(x). Backward: to = past + gradient of x; the gradients of the norm's weights
// are added to `partial`.
void normalize_rows(const Block *b, int which, const float *x, int64_t begin, int64_t end);
void normalize_rows_backward(const Block *b, int which, const float *x, const float *past, float *to, int64_t begin,
                             int64_t end);

// Rows begin to end: rotary embedding of queries and keys; direction -1 is the inverse, for gradients.
void rotate_rows(const Block *b, float *qkv, int64_t begin, int64_t end, float direction);

// Rows begin to end: active = activation(up) [· gate]. Backward: the first columns of d_up hold the gradient of `active`
// and are replaced by that of `up`; `active` is recomputed.
void activate_rows(const Block *b, int64_t begin, int64_t end);
void activate_rows_backward(const Block *b, int64_t begin, int64_t end);
