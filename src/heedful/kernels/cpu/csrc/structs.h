// The structs that Python fills in (structs.py has the same fields). abi.c exports their layouts, which Python compares
// with its own when it loads the library. Increment ABI_VERSION when the meaning of a field changes.
//
//     N outputs, K inputs, M tokens, B rows, H heads, G key/value heads, D head size, E width, T and S positions

#pragma once
#include <stdint.h>

#define ABI_VERSION 2
#define SINGLE_BLOCK (INT64_C(1) << 40)  // block_size where the cache of a row is one contiguous block

enum { FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 };   // PackedMatrix.kind, LayerCache.kind
enum { NO_NORM, LAYER_NORM, RMS_NORM };            // NormWeights.kind
enum { PRE_NORM, POST_NORM, PARALLEL };            // DecodeLayer.residual
// Parts of a block: BlockArguments.weights
enum { ATTENTION_NORM, FEEDFORWARD_NORM, QUERY, KEY, VALUE, OUTPUT, UP, GATE, DOWN, N_PARTS };
// Where a block has dropout: attention weights, attention's output, hidden and output of the feed-forward network.
enum { DROP_WEIGHTS, DROP_ATTENTION, DROP_HIDDEN, DROP_FEEDFORWARD, N_DROPOUTS };

// A weight (N, K) packed as linear.c reads it.
typedef struct {
  int64_t kind, n_inputs, n_outputs;
  const void *weight, *scales;
  const float *bias;  // (N,) or NULL
} PackedMatrix;

typedef struct {
  int64_t kind, size;  // number of elements normalized together
  const float *weight, *bias;
  double eps;
} NormWeights;

typedef struct {
  int64_t residual, activation, gated, window, n_heads, n_kv_heads, d_head;
  double scale, cross_scale;
  NormWeights attention_norm, attention_post_norm, cross_norm, feedforward_norm, feedforward_post_norm, query_norm,
      key_norm;
  PackedMatrix qkv, output, cross_query, cross_output, up, down;  // gated: `up` begins with the gate's outputs
} DecodeLayer;

typedef struct {
  int64_t kind;          // FLOAT32, or INT8 as in int8_cache.h
  char *keys, *values;   // (blocks, G, block_size, D)
  int64_t block_stride, head_stride, position_stride;  // in bytes
  const char *cross_keys, *cross_values;               // (B, G, S, D)
  int64_t cross_row_stride, cross_head_stride, cross_position_stride;
} LayerCache;

// The new tokens of a prefill or decode step, one or several per row, in order.
typedef struct {
  int64_t n_tokens, width;
  const int64_t *rows, *positions;  // (M) the row of each token, and its position in it
  const int64_t *block_tables;      // (B, max_blocks) the blocks of each row's cache
  int64_t max_blocks, block_size, clear_blocks;  // whether a block is zeroed when its first position is written
  const float *cos, *sin;                     // (M or 1, n_rotated_pairs) or NULL
  int64_t n_rotated_pairs, rotation_stride, interleaved;
  const float *bias;  // (M or 1, H or 1, S) added to the scores of self-attention, or NULL
  int64_t bias_token_stride, bias_head_stride;
  const int64_t *n_memory;  // (M) positions of the encoder's output, or NULL
  NormWeights norm;         // after the last layer
} DecodeStep;

// A pre-norm block for training.
typedef struct {
  int64_t n_sequences, length, width, hidden, n_heads, n_kv_heads, d_head;
  int64_t rms, activation, gated, causal, bfloat16, threads;
  double scale, eps;
  const float *weights[N_PARTS][2];  // weight and bias, NULL where absent
  float *gradients[N_PARTS][2];      // NULL where not needed
  const uint8_t *mask;               // (B or 1, T, T), true where attention is allowed, or NULL
  int64_t mask_stride;
  const float *cos, *sin;  // (B or 1, T, n_rotated_pairs) or NULL
  int64_t n_rotated_pairs, rotation_stride, interleaved;
  const float *x, *d_y;  // (B, T, E) and the gradient of the output
  float *y, *d_x;
  double dropout[N_DROPOUTS];  // probabilities
  const uint64_t *seed;        // of dropout, or NULL without any
  float *saved, *workspace;  // saved by forward for backward; temporary memory of one call
} BlockArguments;

typedef struct {
  double lr, beta1, beta2, eps, weight_decay;
} AdamWSettings;
