// Attention of queries over cached keys and values (attention.c).

#pragma once
#include "common.h"
#include "structs.h"

extern const int64_t FIRST_BLOCK[1];  // the block table of a row whose cache is one contiguous block

// The cached keys and values of one head, in blocks of block_size positions; block i is at table[i] · block_stride.
typedef struct {
  const char *keys, *values;
  int64_t key_stride, value_stride;  // between positions, in bytes as all strides here
  const int64_t *table;
  int64_t block_size, block_stride;
  int prefetched;  // whether to prefetch, because they are not yet in the processor's cache
  int kind;        // FLOAT32, or INT8 (int8_cache.h): then queries are rotated as the keys are
} HeadCache;

#define MAX_RUN 12  // consecutive queries of a row that `attend_run` computes together: they read the same keys

// o (D) = softmax(scale · q Kᵀ + bias) V over the positions from `begin` on. `allowed` (n_keys) bools and `bias`
// (n_keys) may be NULL; `scores` is scratch for (n_keys). D is a multiple of 16. Masked positions are not read.
void attend_head(const float *query, const HeadCache *cache, int64_t begin, const uint8_t *allowed, const float *bias,
                 int64_t n_keys, int64_t d_head, float scale, float *scores, float *o);

// The same for n consecutive queries, the first of which sees the positions up to `end`, each one position more, and all
// at most `window` of them (0: all). Query i is at `queries` + i · query_stride, its bias (over all positions, or NULL)
// at `bias` + i · bias_stride, its output at o + i · o_stride. `scratch` has run_scratch(n, end + n, D) floats. Bitwise
// the results of `attend_head`.
void attend_run(const float *queries, int64_t query_stride, const HeadCache *cache, int64_t end, int64_t window,
                const float *bias, int64_t bias_stride, int64_t n, int64_t d_head, float scale, float *scratch,
                float *o, int64_t o_stride);

int64_t run_scratch(int64_t n, int64_t n_keys, int64_t d_head);
