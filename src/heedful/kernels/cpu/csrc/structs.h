// The structs that Python fills in (structs.py has the same fields). abi.c exports their layouts, which Python compares
// with its own when it loads the library. Increment ABI_VERSION when the meaning of a field changes.
//
//     N outputs, K inputs, M tokens, B rows, H heads, G key/value heads, D head size, E width, T and S positions

#pragma once
#include <stdint.h>

#define ABI_VERSION 1
#define SINGLE_BLOCK (1L << 40)  // block_size where the cache of a row is one contiguous block

enum { FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 };   // PackedMatrix.kind
enum { NO_NORM, LAYER_NORM, RMS_NORM };            // NormWeights.kind
enum { PRE_NORM, POST_NORM, PARALLEL };            // DecodeLayer.residual
// Parts of a block: BlockArguments.weights
enum { ATTENTION_NORM, FEEDFORWARD_NORM, QUERY, KEY, VALUE, OUTPUT, UP, GATE, DOWN, N_PARTS };

// A weight (N, K) packed as linear.c reads it.
typedef struct {
  long kind, n_inputs, n_outputs;
  const void *weight, *scales;
  const float *bias;  // (N,) or NULL
} PackedMatrix;

typedef struct {
  long kind, size;  // number of elements normalized together
  const float *weight, *bias;
  double eps;
} NormWeights;

typedef struct {
  long residual, activation, gated, window, n_heads, n_kv_heads, d_head;
  double scale, cross_scale;
  NormWeights attention_norm, attention_post_norm, cross_norm, feedforward_norm, feedforward_post_norm, query_norm,
      key_norm;
  PackedMatrix qkv, output, cross_query, cross_output, up, down;  // gated: `up` begins with the gate's outputs
} DecodeLayer;

typedef struct {
  float *keys, *values;  // (blocks, G, block_size, D)
  long block_stride, head_stride;
  const float *cross_keys, *cross_values;  // (B, G, S, D)
  long cross_row_stride, cross_head_stride, cross_position_stride;
} LayerCache;

// The new tokens of a prefill or decode step, one or several per row, in order.
typedef struct {
  long n_tokens, width;
  const long *rows, *positions;  // (M) the row of each token, and its position in it
  const long *block_tables;      // (B, max_blocks) the blocks of each row's cache
  long max_blocks, block_size, clear_blocks;  // whether a block is zeroed when its first position is written
  const float *cos, *sin;                     // (M or 1, n_rotated_pairs) or NULL
  long n_rotated_pairs, rotation_stride, interleaved;
  const float *bias;  // (M or 1, H or 1, S) added to the scores of self-attention, or NULL
  long bias_token_stride, bias_head_stride;
  const long *n_memory;  // (M) positions of the encoder's output, or NULL
} DecodeStep;

// A pre-norm block for training.
typedef struct {
  long n_sequences, length, width, hidden, n_heads, n_kv_heads, d_head;
  long rms, activation, gated, causal, threads;
  double scale, eps;
  const float *weights[N_PARTS][2];  // weight and bias, NULL where absent
  float *gradients[N_PARTS][2];      // NULL where not needed
  const uint8_t *mask;               // (B or 1, T, T), true where attention is allowed, or NULL
  long mask_stride;
  const float *cos, *sin;  // (B or 1, T, n_rotated_pairs) or NULL
  long n_rotated_pairs, rotation_stride, interleaved;
  const float *x, *d_y;  // (B, T, E) and the gradient of the output
  float *y, *d_x;
  float *saved, *workspace;  // saved by forward for backward; temporary memory of one call
} BlockArguments;

typedef struct {
  double lr, beta1, beta2, eps, weight_decay;
} AdamWSettings;
