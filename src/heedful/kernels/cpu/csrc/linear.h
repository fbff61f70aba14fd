// y = x Wᵀ + b with a packed weight (linear.c).

#pragma once
#include "common.h"
#include "structs.h"

// Loops over rows by the threads of a team: each has its share, and waits for the others at the end. A single row is
// computed by every thread, into memory of its own, since that takes no longer than to wait for the one that does.
#define FOR_ROWS(i, n) for (int64_t i = first_row(n), end_row = last_row(n); i < end_row; i++)

INLINE int64_t share_of_rows(int64_t n_rows, int thread) {
  int64_t threads = omp_get_num_threads();
  return thread * (n_rows / threads) + min_long(thread, n_rows % threads);
}
INLINE int64_t first_row(int64_t n_rows) { return n_rows == 1 ? 0 : share_of_rows(n_rows, omp_get_thread_num()); }
INLINE int64_t last_row(int64_t n_rows) { return n_rows == 1 ? 1 : share_of_rows(n_rows, omp_get_thread_num() + 1); }

INLINE void wait_for_rows(int64_t n_rows) {
  if (n_rows == 1) return;
#pragma omp barrier
}

// Bytes of scratch memory that `multiply_packed` needs for x in a lower precision, of all threads.
int64_t packed_scratch(const PackedMatrix *a, int64_t n_rows, int threads);

// y (M, N) = x (M, K) Wᵀ + b. All threads of a team call it together; of a single row each may have a copy.
void multiply_packed(const PackedMatrix *a, const float *x, int64_t n_rows, float *y, char *scratch, int threads);
