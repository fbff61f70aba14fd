// Rows of activations as int8 with a scale per group, but for their outliers.
//
// Activations have outliers, mostly in the same few columns, that leave few of the 127 steps to the rest of a group. As
// in LLM.int8() (Dettmers et al. 2022, section 3.2) they are not quantized but multiplied apart: of each row the
// largest element, while it is more than twice the average of the other groups' largest, and at most one for 64 inputs.
//
//     K inputs, M rows, G inputs in a group

#pragma once
#include "common.h"

#define GROUP 32  // group size: inputs that share a scale

typedef struct {
  int32_t input, ints;  // its index k; four bytes, 1 at k mod 4 and else 0, which select one of four weights
  float value;
} Outlier;

typedef struct {
  int64_t n_groups, max_outliers;
  int8_t *ints;         // (M, groups, G), 0 for outliers
  float *scales;        // (M, groups)
  float *sums;          // (M, groups) of the ints, times the scale
  int32_t *starts;      // (M, groups) of the ints, times -BYTE_OFFSET or -8: the weights' offset
  int32_t *n_outliers;  // (M,)
  Outlier *outliers;    // (M, max_outliers)
} QuantizedRows;

INLINE int64_t count_groups(int64_t n_inputs) { return (n_inputs + GROUP - 1) / GROUP; }
INLINE int64_t max_outliers(int64_t n_inputs) { return (n_inputs + 63) / 64; }

// Quantizes row `row` of x (K) into q. `offset` is what the product leaves added to every weight.
void quantize_row(const float *x, int64_t n_inputs, const QuantizedRows *q, int64_t row, int offset);
