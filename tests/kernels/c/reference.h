// A Transformer block as the papers have it, in double precision, over one sequence: x + attention(norm(x)), then
// x + feedforward(norm(x)). For decoding and for training.
//
//     T positions, E width, F hidden width, H heads, G key/value heads, D head size

#pragma once
#include "check.h"

typedef struct {
  int rms, activation, gated, rotary, causal;
  int64_t length, width, hidden, n_heads, n_kv_heads, d_head;
  double eps, scale;
  double *weights[N_PARTS][2];  // weight and bias, NULL where absent
  double *cos, *sin;            // (T, D/2)
} Reference;

enum { RELU, GELU, GELU_TANH, SILU };  // as in common.h

// Outputs and inputs of a part.
void reference_shape(const Reference *r, int part, int64_t *outputs, int64_t *inputs);

// Random weights, and the same in single precision.
Reference random_block(int rms, int activation, int gated, int rotary, int causal, int64_t length,
                       float *weights[N_PARTS][2], float **cosines, float **sines);

// y (T, E) from x (T, E).
void reference_block(const Reference *r, const double *x, double *y);
