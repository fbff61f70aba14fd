// y = x Wᵀ + b with a packed weight (linear.c).

#pragma once
#include "common.h"
#include "structs.h"

// Bytes of scratch memory that `multiply_packed` needs for x in a lower precision.
long packed_scratch(const PackedMatrix *a, long n_rows);

// y (M, N) = x (M, K) Wᵀ + b. All threads of a team call it together.
void multiply_packed(const PackedMatrix *a, const float *x, long n_rows, float *y, char *scratch, int threads);
