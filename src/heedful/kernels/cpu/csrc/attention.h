// Attention of one query over cached keys and values (attention.c).

#pragma once
#include "common.h"
#include "structs.h"

extern const long FIRST_BLOCK[1];  // the block table of a row whose cache is one contiguous block

// Where the keys and values of one head lie: in blocks of block_size positions, the i-th of them at table[i] strides.
typedef struct {
  const float *keys, *values;
  long key_stride, value_stride;  // between positions
  const long *table;
  long block_size, block_stride;
  int prefetched;  // whether they come from memory and are prefetched, rather than from a cache
} HeadCache;

// o (D) = softmax(scale · q Kᵀ + bias) V over the positions from `begin` on. `allowed` (n_keys) bools and `bias`
// (n_keys) may be none; `scores` is scratch for (n_keys). D is a multiple of 16. Masked positions are not read.
void attend_head(const float *query, const HeadCache *cache, long begin, const uint8_t *allowed, const float *bias,
                 long n_keys, long d_head, float scale, float *scores, float *o);
