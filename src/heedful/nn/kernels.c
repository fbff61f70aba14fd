// Products of a few rows with a packed matrix, and attention of one new token, for processors with AVX-512 (with its
// BF16 and VNNI extensions): what decoding consists of. Compiled on first use and called by nn/native.py.
//
// A matrix (N, K) is packed into panels of 32 outputs, in each of which the inputs follow one another: a thread reads
// one stream from memory, each lane of a vector is an output of its own, and nothing is summed across lanes. The sum of
// an output runs over the inputs in their order, whatever the number of rows: a row's result never depends, to the last
// bit, on what else is in the batch.
//
//     N outputs, K inputs, M rows, G inputs in a group

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#define WIDE 32   // outputs in a panel
#define TILE 8    // rows that are multiplied at once, at most
#define GROUP 32  // inputs that share a scale
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline))

typedef struct {
  long n_rows, n_inputs, n_outputs;
  const float *bias;  // (N,) or none
  float *y;           // (M, N)
} Product;

INLINE void store(const Product *p, long row, long n, __m512 low, __m512 high) {
  long left = p->n_outputs - n;
  __mmask16 first = left >= 16 ? 0xffff : (1u << left) - 1;
  __mmask16 second = left >= 32 ? 0xffff : left > 16 ? (1u << (left - 16)) - 1 : 0;
  if (p->bias) {
    low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(first, p->bias + n));
    high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(second, p->bias + n + 16));
  }
  float *y = p->y + row * p->n_outputs + n;
  _mm512_mask_storeu_ps(y, first, low);
  _mm512_mask_storeu_ps(y + 16, second, high);
}

// --- float32: panel (K, 32) ----------------------------------------------------------------------------------------

INLINE void float32_tile(const Product *p, const float *x, const float *w, long row, long n, const int m) {
  __m512 low[TILE], high[TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = _mm512_setzero_ps();
  for (long k = 0; k < p->n_inputs; k++, w += WIDE) {
    __m512 a = _mm512_loadu_ps(w), b = _mm512_loadu_ps(w + 16);
    UNROLL for (int i = 0; i < m; i++) {
      __m512 at = _mm512_set1_ps(x[i * p->n_inputs + k]);
      low[i] = _mm512_fmadd_ps(a, at, low[i]);
      high[i] = _mm512_fmadd_ps(b, at, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store(p, row + i, n, low[i], high[i]);
}

// --- float16: panel (K, 32), widened as it is read ------------------------------------------------------------------

INLINE void float16_tile(const Product *p, const float *x, const uint16_t *w, long row, long n, const int m) {
  __m512 low[TILE], high[TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = _mm512_setzero_ps();
  for (long k = 0; k < p->n_inputs; k++, w += WIDE) {
    __m512 a = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w));
    __m512 b = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w + 16)));
    UNROLL for (int i = 0; i < m; i++) {
      __m512 at = _mm512_set1_ps(x[i * p->n_inputs + k]);
      low[i] = _mm512_fmadd_ps(a, at, low[i]);
      high[i] = _mm512_fmadd_ps(b, at, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store(p, row + i, n, low[i], high[i]);
}

// --- bfloat16: panel (K/2, 32, 2), x (M, K/2) pairs ----------------------------------------------------------------

INLINE void bfloat16_tile(const Product *p, const int32_t *x, const int32_t *w, long row, long n, const int m) {
  __m512 low[TILE], high[TILE];
  long pairs = (p->n_inputs + 1) / 2;
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = _mm512_setzero_ps();
  for (long k = 0; k < pairs; k++, w += WIDE) {
    __m512bh a = (__m512bh)_mm512_loadu_si512(w), b = (__m512bh)_mm512_loadu_si512(w + 16);
    UNROLL for (int i = 0; i < m; i++) {
      __m512bh at = (__m512bh)_mm512_set1_epi32(x[i * pairs + k]);
      low[i] = _mm512_dpbf16_ps(low[i], a, at);
      high[i] = _mm512_dpbf16_ps(high[i], b, at);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store(p, row + i, n, low[i], high[i]);
}

// --- int8 and int4: x as int8 with a scale per group ----------------------------------------------------------------

typedef struct {
  long n_groups;
  int8_t *ints;   // (M, groups, G)
  float *scales;  // (M, groups)
  int32_t *sums;  // (M, groups) of the ints
} Rounded;

static void round_row(const float *x, long n_inputs, const Rounded *r, long row) {
  for (long g = 0; g < r->n_groups; g++) {
    long at = g * GROUP, left = n_inputs - at;
    __mmask16 first = left >= 16 ? 0xffff : (1u << left) - 1;
    __mmask16 second = left >= 32 ? 0xffff : left > 16 ? (1u << (left - 16)) - 1 : 0;
    __m512 a = _mm512_maskz_loadu_ps(first, x + at), b = _mm512_maskz_loadu_ps(second, x + at + 16);
    float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q)) most = NAN;  // what is no number stays none
    __m512 steps = _mm512_set1_ps(most > 0 ? 127 / most : 0);
    __m512i i = _mm512_cvtps_epi32(_mm512_mul_ps(a, steps)), j = _mm512_cvtps_epi32(_mm512_mul_ps(b, steps));
    int8_t *ints = r->ints + (row * r->n_groups + g) * GROUP;
    _mm_storeu_si128((__m128i *)ints, _mm512_cvtsepi32_epi8(i));
    _mm_storeu_si128((__m128i *)(ints + 16), _mm512_cvtsepi32_epi8(j));
    r->scales[row * r->n_groups + g] = most / 127;
    r->sums[row * r->n_groups + g] = _mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
  }
}

// 16 numbers of bfloat16.
INLINE __m512 widened(const uint16_t *at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16));
}

// Panel (K/4, 32, 4) of w + 128 as bytes, scales (groups, 32) in bfloat16.
INLINE void int8_tile(const Product *p, const Rounded *r, const uint8_t *w, const uint16_t *scales, long row, long n,
                      const int m) {
  __m512 low[TILE], high[TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = _mm512_setzero_ps();
  const int32_t *x = (const int32_t *)r->ints + row * r->n_groups * (GROUP / 4);
  for (long g = 0; g < r->n_groups; g++, scales += WIDE) {
    __m512i a[TILE], b[TILE];
    UNROLL for (int i = 0; i < m; i++) a[i] = b[i] = _mm512_set1_epi32(-128 * r->sums[(row + i) * r->n_groups + g]);
    for (int k = 0; k < GROUP / 4; k++, w += 4 * WIDE) {
      __m512i c = _mm512_loadu_si512(w), d = _mm512_loadu_si512(w + 64);
      UNROLL for (int i = 0; i < m; i++) {
        __m512i at = _mm512_set1_epi32(x[(i * r->n_groups + g) * (GROUP / 4) + k]);
        a[i] = _mm512_dpbusd_epi32(a[i], c, at);
        b[i] = _mm512_dpbusd_epi32(b[i], d, at);
      }
    }
    __m512 first = widened(scales), second = widened(scales + 16);
    UNROLL for (int i = 0; i < m; i++) {
      __m512 by = _mm512_set1_ps(r->scales[(row + i) * r->n_groups + g]);
      low[i] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(a[i]), by), first, low[i]);
      high[i] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(b[i]), by), second, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store(p, row + i, n, low[i], high[i]);
}

// Panel (K/4, 16, 4): of each byte the low half is for the first 16 outputs, the high half for the others; scales and
// middles (groups, 2, 32) in bfloat16.
INLINE void int4_tile(const Product *p, const Rounded *r, const uint8_t *w, const uint16_t *scales, long row, long n,
                      const int m) {
  __m512 low[TILE], high[TILE];
  const __m512i half = _mm512_set1_epi8(15);
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = _mm512_setzero_ps();
  const int32_t *x = (const int32_t *)r->ints + row * r->n_groups * (GROUP / 4);
  for (long g = 0; g < r->n_groups; g++, scales += 2 * WIDE) {
    __m512i a[TILE], b[TILE];
    UNROLL for (int i = 0; i < m; i++) a[i] = b[i] = _mm512_set1_epi32(-8 * r->sums[(row + i) * r->n_groups + g]);
    for (int k = 0; k < GROUP / 4; k++, w += 2 * WIDE) {
      __m512i both = _mm512_loadu_si512(w);
      __m512i c = _mm512_and_si512(both, half), d = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
      UNROLL for (int i = 0; i < m; i++) {
        __m512i at = _mm512_set1_epi32(x[(i * r->n_groups + g) * (GROUP / 4) + k]);
        a[i] = _mm512_dpbusd_epi32(a[i], c, at);
        b[i] = _mm512_dpbusd_epi32(b[i], d, at);
      }
    }
    __m512 first = widened(scales), second = widened(scales + 16);
    __m512 middle = widened(scales + 32), other = widened(scales + 48);
    UNROLL for (int i = 0; i < m; i++) {
      float scale = r->scales[(row + i) * r->n_groups + g];
      __m512 by = _mm512_set1_ps(scale), sum = _mm512_set1_ps(scale * r->sums[(row + i) * r->n_groups + g]);
      low[i] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(a[i]), by), first, low[i]);
      high[i] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(b[i]), by), second, high[i]);
      low[i] = _mm512_fmadd_ps(sum, middle, low[i]);
      high[i] = _mm512_fmadd_ps(sum, other, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store(p, row + i, n, low[i], high[i]);
}

// --- the loop over panels and rows ----------------------------------------------------------------------------------

#define ROWS(CALL)                                  \
  for (long row = 0; row < p.n_rows; row += TILE) { \
    switch (p.n_rows - row) {                       \
      case 1: CALL(1); break;                       \
      case 2: CALL(2); break;                       \
      case 3: CALL(3); break;                       \
      case 4: CALL(4); break;                       \
      case 5: CALL(5); break;                       \
      case 6: CALL(6); break;                       \
      case 7: CALL(7); break;                       \
      default: CALL(8);                             \
    }                                               \
  }

// Panels are handed out a few at a time: a thread that the system keeps waiting does not keep the others waiting long.
#define PANELS(BYTES, CALL)                                                           \
  long n_panels = (n_outputs + WIDE - 1) / WIDE, few = 1 + 65536 / (BYTES);           \
  if (few > n_panels / (2 * threads)) few = n_panels / (2 * threads) ? n_panels / (2 * threads) : 1; \
  _Pragma("omp parallel for num_threads(threads) schedule(dynamic, few) if (threads > 1)") \
  for (long j = 0; j < n_panels; j++) {                                               \
    long n = j * WIDE;                                                                \
    ROWS(CALL)                                                                        \
  }

void product_float32(const float *x, long n_rows, long n_inputs, const float *w, long n_outputs, const float *bias,
                     float *y, int threads) {
  Product p = {n_rows, n_inputs, n_outputs, bias, y};
#define CALL(M) float32_tile(&p, x + row * n_inputs, w + j * n_inputs * WIDE, row, n, M)
  PANELS(n_inputs * WIDE * 4, CALL)
#undef CALL
}

void product_float16(const float *x, long n_rows, long n_inputs, const uint16_t *w, long n_outputs, const float *bias,
                     float *y, int threads) {
  Product p = {n_rows, n_inputs, n_outputs, bias, y};
#define CALL(M) float16_tile(&p, x + row * n_inputs, w + j * n_inputs * WIDE, row, n, M)
  PANELS(n_inputs * WIDE * 2, CALL)
#undef CALL
}

// `scratch` holds x as bfloat16, (M, K/2) pairs.
void product_bfloat16(const float *x, long n_rows, long n_inputs, const int32_t *w, long n_outputs, const float *bias,
                      float *y, int threads, int32_t *scratch) {
  Product p = {n_rows, n_inputs, n_outputs, bias, y};
  long pairs = (n_inputs + 1) / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n_rows > TILE)
  for (long row = 0; row < n_rows; row++)
    for (long k = 0; k < n_inputs; k += 16) {
      __mmask16 here = n_inputs - k >= 16 ? 0xffff : (1u << (n_inputs - k)) - 1;
      __mmask16 even = n_inputs - k >= 16 ? 0xffff : (1u << ((n_inputs - k + 1) / 2 * 2)) - 1;
      __m256i narrow = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(here, x + row * n_inputs + k));
      _mm256_mask_storeu_epi16((int16_t *)(scratch + row * pairs) + k, even, narrow);
    }
#define CALL(M) bfloat16_tile(&p, scratch + row * pairs, w + j * pairs * WIDE, row, n, M)
  PANELS(pairs * WIDE * 4, CALL)
#undef CALL
}

// `scratch` holds the ints, scales and sums of x: (M, groups, G + 8) bytes.
#define ROUND                                                                                   \
  Product p = {n_rows, n_inputs, n_outputs, bias, y};                                           \
  long groups = (n_inputs + GROUP - 1) / GROUP;                                                 \
  Rounded r = {groups, scratch, (float *)(scratch + n_rows * groups * GROUP), 0};               \
  r.sums = (int32_t *)(r.scales + n_rows * groups);                                             \
  _Pragma("omp parallel for num_threads(threads) if (threads > 1 && n_rows > TILE)")            \
  for (long row = 0; row < n_rows; row++) round_row(x + row * n_inputs, n_inputs, &r, row);

void product_int8(const float *x, long n_rows, long n_inputs, const uint8_t *w, long n_outputs, const float *bias,
                  float *y, int threads, int8_t *scratch, const uint16_t *scales) {
  ROUND
#define CALL(M) int8_tile(&p, &r, w + j * groups * GROUP * WIDE, scales + j * groups * WIDE, row, n, M)
  PANELS(groups * GROUP * WIDE, CALL)
#undef CALL
}

void product_int4(const float *x, long n_rows, long n_inputs, const uint8_t *w, long n_outputs, const float *bias,
                  float *y, int threads, int8_t *scratch, const uint16_t *scales) {
  ROUND
#define CALL(M) int4_tile(&p, &r, w + j * groups * GROUP * WIDE / 2, scales + j * groups * 2 * WIDE, row, n, M)
  PANELS(groups * GROUP * WIDE / 2, CALL)
#undef CALL
}

// --- attention of one token per row ---------------------------------------------------------------------------------

// e to the x for x <= 0 (Cephes' polynomial; within 2 units in the last place).
INLINE __m512 exponential(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.33f));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999507e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1)));
  return _mm512_scalef_ps(y, n);
}

// Queries (B, H, D), keys and values (B, G, S, D), all with their last dimension in one piece and the strides given
// (rows, heads, positions); `allowed` (B, S) and `bias` (B, H, S) may be none. `scores` is room for (B, H, S). D is a
// multiple of 16.
void attend_one(const float *q, const float *k, const float *v, const uint8_t *allowed, const float *bias, float *out,
                float *scores, long n_rows, long n_heads, long n_groups, long n_keys, long size, const long *strides, float scale,
                int threads) {
  long q_row = strides[0], q_head = strides[1], k_row = strides[2], k_head = strides[3], k_key = strides[4];
  long v_row = strides[5], v_head = strides[6], v_key = strides[7], allowed_row = strides[8];
  long bias_row = strides[9], bias_head = strides[10];
  long share = n_heads / n_groups;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && n_rows * n_heads * n_keys > 1024)
  for (long j = 0; j < n_rows * n_groups; j++) {
    long row = j / n_groups, group = j % n_groups;
    const float *keys = k + row * k_row + group * k_head, *values = v + row * v_row + group * v_head;
    const uint8_t *may = allowed ? allowed + row * allowed_row : 0;
    for (long h = group * share; h < (group + 1) * share; h++) {
      const float *query = q + row * q_row + h * q_head;
      const float *add = bias ? bias + row * bias_row + h * bias_head : 0;
      float *s = scores + (row * n_heads + h) * n_keys, *o = out + (row * n_heads + h) * size;
      float most = -INFINITY;
      for (long t = 0; t < n_keys; t++) {
        if (may && !may[t]) {
          s[t] = -INFINITY;
          continue;
        }
        __m512 sum = _mm512_setzero_ps();
        for (long d = 0; d < size; d += 16)
          sum = _mm512_fmadd_ps(_mm512_loadu_ps(query + d), _mm512_loadu_ps(keys + t * k_key + d), sum);
        s[t] = scale * _mm512_reduce_add_ps(sum) + (add ? add[t] : 0);
        most = s[t] > most ? s[t] : most;
      }
      __m512 total = _mm512_setzero_ps();
      for (long t = 0; t < n_keys; t += 16) {
        __mmask16 here = n_keys - t >= 16 ? 0xffff : (1u << (n_keys - t)) - 1;
        __m512 at = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), here, s + t);
        here &= _mm512_cmp_ps_mask(at, _mm512_set1_ps(-INFINITY), _CMP_GT_OQ);
        at = _mm512_maskz_mov_ps(here, exponential(_mm512_sub_ps(at, _mm512_set1_ps(most))));
        total = _mm512_add_ps(total, at);
        _mm512_mask_storeu_ps(s + t, n_keys - t >= 16 ? 0xffff : (1u << (n_keys - t)) - 1, at);
      }
      float part = 1 / _mm512_reduce_add_ps(total);
      for (long d = 0; d < size; d += 64) {
        long left = (size - d) / 16;
        __m512 a = _mm512_setzero_ps(), b = a, c = a, e = a;
        for (long t = 0; t < n_keys; t++) {
          if (s[t] == 0) continue;
          const float *at = values + t * v_key + d;
          __m512 weight = _mm512_set1_ps(s[t]);
          a = _mm512_fmadd_ps(weight, _mm512_loadu_ps(at), a);
          if (left > 1) b = _mm512_fmadd_ps(weight, _mm512_loadu_ps(at + 16), b);
          if (left > 2) c = _mm512_fmadd_ps(weight, _mm512_loadu_ps(at + 32), c);
          if (left > 3) e = _mm512_fmadd_ps(weight, _mm512_loadu_ps(at + 48), e);
        }
        __m512 by = _mm512_set1_ps(part);
        _mm512_storeu_ps(o + d, _mm512_mul_ps(a, by));
        if (left > 1) _mm512_storeu_ps(o + d + 16, _mm512_mul_ps(b, by));
        if (left > 2) _mm512_storeu_ps(o + d + 32, _mm512_mul_ps(c, by));
        if (left > 3) _mm512_storeu_ps(o + d + 48, _mm512_mul_ps(e, by));
      }
    }
  }
}
