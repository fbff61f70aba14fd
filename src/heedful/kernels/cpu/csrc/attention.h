// Attention of queries over cached keys and values (attention.c).

#pragma once
#include "common.h"
#include "structs.h"

extern const long FIRST_BLOCK[1];  // the block table of a row whose cache is one contiguous block

// The cached keys and values of one head, in blocks of block_size positions; block i is at table[i] · block_stride.
typedef struct {
  const float *keys, *values;
  long key_stride, value_stride;  // between positions
  const long *table;
  long block_size, block_stride;
  int prefetched;  // whether to prefetch, because they are not yet in the processor's cache
} HeadCache;

#define MAX_RUN 12  // consecutive queries of a row that `attend_run` computes together: they read the same keys

// o (D) = softmax(scale · q Kᵀ + bias) V over the positions from `begin` on. `allowed` (n_keys) bools and `bias`
// (n_keys) may be NULL; `scores` is scratch for (n_keys). D is a multiple of 16. Masked positions are not read.
void attend_head(const float *query, const HeadCache *cache, long begin, const uint8_t *allowed, const float *bias,
                 long n_keys, long d_head, float scale, float *scores, float *o);

// The same for n consecutive queries, the first of which sees the positions up to `end`, each one position more, and all
// at most `window` of them (0: all). Query i is at `queries` + i · query_stride, its bias (over all positions, or NULL)
// at `bias` + i · bias_stride, its output at o + i · o_stride. `scratch` has run_scratch(n, end + n, D) floats. Bitwise
// the results of `attend_head`.
void attend_run(const float *queries, long query_stride, const HeadCache *cache, long end, long window,
                const float *bias, long bias_stride, long n, long d_head, float scale, float *scratch, float *o,
                long o_stride);

long run_scratch(long n, long n_keys, long d_head);
