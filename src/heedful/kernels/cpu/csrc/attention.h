// Attention of one query over cached keys and values (attention.c).

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

// o (D) = softmax(scale · q Kᵀ + bias) V over the positions from `begin` on. `allowed` (n_keys) bools and `bias`
// (n_keys) may be NULL; `scores` is scratch for (n_keys). D is a multiple of 16. Masked positions are not read.
void attend_head(const float *query, const HeadCache *cache, long begin, const uint8_t *allowed, const float *bias,
                 long n_keys, long d_head, float scale, float *scores, float *o);
