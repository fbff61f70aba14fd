// Checks of the C kernels against scalar references in double precision, without Python: for processors that only an
// emulator has here. Linked with the library of a target (tests/kernels/test_targets.py); prints a line for each check.

#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "structs.h"

// Random numbers, the same on every machine.
double uniform(void);                                   // in [-1, 1)
float *random_floats(int64_t n, double scale);          // never freed, like all memory here
void *zeros(int64_t n_bytes);

// Compares with the reference: the largest difference, relative to the largest expected value, is at most `tolerance`.
void compare(const char *what, const float *got, const double *expected, int64_t n, double tolerance);
void expect(const char *what, int holds);

extern int threads;

void check_products(void);
void check_attention(void);
void check_sampling(void);
void check_decoding(void);
void check_training(void);

// What the library exports.
int packed_linear(const PackedMatrix *a, const float *x, int64_t n_rows, float *y, int threads);
void single_query_attention(const float *q, const float *k, const float *v, const uint8_t *allowed, const float *bias,
                            float *out, float *scores, int64_t n_rows, int64_t n_heads, int64_t n_kv_heads,
                            int64_t n_keys, int64_t d_head, const int64_t *strides, float scale, int threads);
int decode(const DecodeLayer *layers, int64_t n_layers, const LayerCache *caches, const DecodeStep *s, float *x,
           int threads);
void row_argmax(const float *x, int64_t n_rows, int64_t n, float *values, int64_t *indices, int threads);
int top_p_cutoff(const float *x, const float *maxima, int64_t n_rows, int64_t n, float inverse_temperature, double top_p,
                 float *cutoffs, int64_t *last, int threads);
void page_masses(const float *x, const float *maxima, int64_t n_rows, int64_t n, float inverse_temperature,
                 const float *cutoffs, const int64_t *last, float *masses, int threads);
void block_sizes(const BlockArguments *a, int64_t *n_saved, int64_t *n_workspace);
void block_forward(const BlockArguments *a);
void block_backward(const BlockArguments *a);
double sum_of_squares(int64_t n, float *const *tensors, const int64_t *sizes, int threads);
void scale_tensors(int64_t n, float *const *tensors, const int64_t *sizes, float factor, int threads);
void adamw_step(int64_t n, float *const *weights, float *const *gradients, float *const *means,
                float *const *variances, float *const *steps, const int64_t *sizes, const AdamWSettings *s, int threads);
int64_t abi_version(void);

// Packs a weight (N, K) as `packed_linear` reads it (products.c); `rounded` (N, K), if given, receives its values.
PackedMatrix pack(int64_t kind, const float *weight, int64_t n_outputs, int64_t n_inputs, const float *bias,
                  double *rounded);
