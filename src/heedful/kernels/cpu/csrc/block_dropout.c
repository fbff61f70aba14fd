// Dropout (Srivastava et al. 2014) in a block. Its random numbers are a function of a seed and of where they are used,
// so that the backward pass computes them again and none are stored, whichever thread has which rows.

#include "block.h"

typedef uint64_t words __attribute__((vector_size(64)));  // 8 words of 32 bits; what is above them is ignored

// Their 64-bit products with y.
INLINE void multiply(const words *x, uint32_t y, words *to) {
  ivec at;
  memcpy(&at, x, sizeof(at));
  at = i_multiply_words(at, y);
  memcpy(to, &at, sizeof(at));
}

// Philox4x32-10 (Salmon et al. 2011) with the seed as its key. The counter is (i, row, row >> 32, place). With
// i = 8 g + j, word 0 is for column 32 g + 2 j, word 1 for the next, words 2 and 3 for those 16 columns further.
void dropout_factors(const Block *b, int place, int64_t row, int64_t n, float *factors) {
  const words low = (words){} + 0xffffffff, first = {0, 1, 2, 3, 4, 5, 6, 7};
  double p = b->a.dropout[place];
  uint32_t threshold = p < 1 ? (uint32_t)(p * 4294967296.0) : 0xffffffff;
  float scale = p < 1 ? (float)(1 / (1 - p)) : 0;
  for (int64_t k = 0; k < n; k += DROPOUT_COLUMNS) {
    words w0 = first + (uint64_t)k / 4, w1 = (words){} + (uint64_t)row;
    words w2 = w1 >> 32, w3 = (words){} + (uint64_t)place;
    uint32_t key0 = (uint32_t)*b->a.seed, key1 = (uint32_t)(*b->a.seed >> 32);
    UNROLL for (int round = 0; round < 10; round++, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
      words product0, product2;
      multiply(&w0, 0xD2511F53u, &product0);
      multiply(&w2, 0xCD9E8D57u, &product2);
      w0 = product2 >> 32 ^ w1 ^ key0, w1 = product2;
      w2 = product0 >> 32 ^ w3 ^ key1, w3 = product0;
    }
    words pairs[2] = {(w0 & low) | w1 << 32, (w2 & low) | w3 << 32};
    uint32_t random[DROPOUT_COLUMNS];
    memcpy(random, pairs, sizeof(random));
    for (int i = 0; i < DROPOUT_COLUMNS; i++) factors[k + i] = random[i] < threshold ? 0 : scale;
  }
}

void drop_rows(const Block *b, int place, const float *base, const float *from, float *to, int64_t n, int64_t stride,
               int64_t begin, int64_t end, float *factors) {
  for (int64_t row = begin; row < end; row++) {
    int64_t at = row * stride;
    dropout_factors(b, place, row, n, factors);
    FOR_LANES(n) {
      lanes here = first_lanes(n - k);
      vec x = v_mul(v_load_lanes(here, from + at + k), v_load(factors + k));
      v_store_lanes(to + at + k, here, base ? v_add(x, v_load_lanes(here, base + at + k)) : x);
    }
  }
}
