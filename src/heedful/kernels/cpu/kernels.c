// What decoding consists of, for processors with AVX-512 (with its BF16 and VNNI extensions): products of some rows
// with a packed matrix, attention of one new token, and a whole pile of blocks for new tokens of several rows. Compiled
// on first use; called by kernels/cpu/native.py and kernels/cpu/decode.py.
//
// A matrix (N, K) is packed into panels of 32 outputs, in each of which the inputs follow one another: a thread reads
// one stream from memory, each lane of a vector is an output of its own, and nothing is summed across lanes. The sum of
// an output runs over the inputs in their order, whatever the number of rows: a row's result never depends, to the last
// bit, on what else is in the batch.
//
//     N outputs, K inputs, M rows, G inputs in a group

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

// --- float32 and float16 (widened as it is read): panel (K, 32) ----------------------------------------------------

INLINE void float_tile(const Product *p, const float *x, const void *panel, long row, long n, const int m,
                       const int is_half) {
  __m512 low[TILE], high[TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = _mm512_setzero_ps();
  for (long k = 0; k < p->n_inputs; k++) {
    const __m256i *halves = (const __m256i *)panel + 2 * k;
    const float *floats = (const float *)panel + k * WIDE;
    __m512 a = is_half ? _mm512_cvtph_ps(_mm256_loadu_si256(halves)) : _mm512_loadu_ps(floats);
    __m512 b = is_half ? _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)) : _mm512_loadu_ps(floats + 16);
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

// --- a product: all threads of a team call it together --------------------------------------------------------------

enum { FLOAT32, FLOAT16, BFLOAT16, INT8, INT4 };

typedef struct {
  long kind, n_inputs, n_outputs;
  const void *w, *scales;
  const float *bias;
} Matrix;

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
#define PANELS(CALL)                                     \
  _Pragma("omp for schedule(dynamic, few)")              \
  for (long j = 0; j < n_panels; j++) {                  \
    long n = j * WIDE;                                   \
    ROWS(CALL)                                           \
  }

static long room(const Matrix *a, long n_rows) {  // bytes that `multiply` needs for x in another form
  long groups = (a->n_inputs + GROUP - 1) / GROUP;
  return n_rows * (a->kind == BFLOAT16 ? (a->n_inputs + 1) / 2 * 4 : a->kind >= INT8 ? groups * (GROUP + 8) : 0);
}

// y (M, N) = x (M, K) Wᵀ + b; `scratch` has the room for it.
static void multiply(const Matrix *a, const float *x, long n_rows, float *y, char *scratch, int threads) {
  static const long bits[] = {32, 16, 16, 8, 4};
  Product p = {n_rows, a->n_inputs, a->n_outputs, a->bias, y};
  long n_panels = (a->n_outputs + WIDE - 1) / WIDE, few = 1 + 65536 * 8 / (a->n_inputs * WIDE * bits[a->kind]);
  long most = n_panels / (2 * threads);
  few = few < most ? few : most ? most : 1;
  if (a->kind == FLOAT32) {
#define CALL(M) float_tile(&p, x + row * p.n_inputs, (const float *)a->w + n * p.n_inputs, row, n, M, 0)
    PANELS(CALL)
#undef CALL
  } else if (a->kind == FLOAT16) {
#define CALL(M) float_tile(&p, x + row * p.n_inputs, (const uint16_t *)a->w + n * p.n_inputs, row, n, M, 1)
    PANELS(CALL)
#undef CALL
  } else if (a->kind == BFLOAT16) {
    long pairs = (p.n_inputs + 1) / 2;
    int32_t *narrow = (int32_t *)scratch;
#pragma omp for
    for (long row = 0; row < n_rows; row++)
      for (long k = 0; k < p.n_inputs; k += 16) {
        __mmask16 here = p.n_inputs - k >= 16 ? 0xffff : (1u << (p.n_inputs - k)) - 1;
        __mmask16 even = p.n_inputs - k >= 16 ? 0xffff : (1u << ((p.n_inputs - k + 1) / 2 * 2)) - 1;
        __m256i at = (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(here, x + row * p.n_inputs + k));
        _mm256_mask_storeu_epi16((int16_t *)(narrow + row * pairs) + k, even, at);
      }
#define CALL(M) bfloat16_tile(&p, narrow + row * pairs, (const int32_t *)a->w + n * pairs, row, n, M)
    PANELS(CALL)
#undef CALL
  } else {
    long groups = (p.n_inputs + GROUP - 1) / GROUP;
    Rounded r = {groups, (int8_t *)scratch, (float *)(scratch + n_rows * groups * GROUP), 0};
    r.sums = (int32_t *)(r.scales + n_rows * groups);
#pragma omp for
    for (long row = 0; row < n_rows; row++) round_row(x + row * p.n_inputs, p.n_inputs, &r, row);
    const uint8_t *w = a->w;
    const uint16_t *scales = a->scales;
    if (a->kind == INT8) {
#define CALL(M) int8_tile(&p, &r, w + n * groups * GROUP, scales + n * groups, row, n, M)
      PANELS(CALL)
#undef CALL
    } else {
#define CALL(M) int4_tile(&p, &r, w + n * groups * GROUP / 2, scales + n * groups * 2, row, n, M)
      PANELS(CALL)
#undef CALL
    }
  }
}

// False where there is no memory for it; so `decode`.
int product(const Matrix *a, const float *x, long n_rows, float *y, int threads) {
  char *scratch = malloc(room(a, n_rows) + 1);
  if (!scratch) return 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  multiply(a, x, n_rows, y, scratch, threads);
  free(scratch);
  return 1;
}

// --- attention of one token -----------------------------------------------------------------------------------------

// e to the x (Cephes' polynomial; within 2 units in the last place), from 1e-38 to 1e38.
INLINE __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.33f)), _mm512_set1_ps(87.33f));
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

// What 16 vectors of 16 sum up to, each; all by the same tree, wherever in the 16 a vector stands.
INLINE __m512 sums_of(const __m512 *parts) {
  __m512 a[8], b[4];
  UNROLL for (int i = 0; i < 8; i++)
    a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(parts[i], parts[i + 8], 0x44),
                         _mm512_shuffle_f32x4(parts[i], parts[i + 8], 0xee));
  UNROLL for (int i = 0; i < 4; i++)
    b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
  __m512 c = _mm512_add_ps(_mm512_unpacklo_ps(b[0], b[1]), _mm512_unpackhi_ps(b[0], b[1]));
  __m512 d = _mm512_add_ps(_mm512_unpacklo_ps(b[2], b[3]), _mm512_unpackhi_ps(b[2], b[3]));
  __m512 e = _mm512_add_ps(_mm512_shuffle_ps(c, d, 0x44), _mm512_shuffle_ps(c, d, 0xee));
  return _mm512_shuffle_f32x4(e, e, 0xd8);  // its quarters are of the vectors 0 to 3, 8 to 11, 4 to 7, 12 to 15
}

// Where the keys and values of one head lie: in blocks of `block` positions, the i-th of them at table[i] strides.
typedef struct {
  const float *keys, *values;
  long k_key, v_key;  // strides between positions
  const long *table;
  long block, stride;
  int far;  // in memory rather than in a cache: asked for ahead of time
} Seen;

// From position `from` on: a pointer that moves on by `key`, from block to block.
typedef struct {
  const float *base, *at;
  const long *table;
  long left;  // positions to the end of this block
} Walk;

INLINE Walk walk(const Seen *seen, const float *base, long key, long from) {
  long place = from % seen->block;
  const long *table = seen->table + from / seen->block;
  return (Walk){base, base + *table * seen->stride + place * key, table, seen->block - place};
}

INLINE const float *next(Walk *w, const Seen *seen, long key) {
  if (!w->left) w->at = w->base + *++w->table * seen->stride, w->left = seen->block;
  const float *at = w->at;
  w->at += key, w->left--;
  return at;
}

#define AHEAD 32  // positions: in blocks of 4 kB, what the processor foresees by itself ends all too soon

INLINE void fetch(Walk *w, const Seen *seen, long key, long size) {
  const char *at = (const char *)next(w, seen, key);
  for (long d = 0; d < size * 4; d += 64) _mm_prefetch(at + d, _MM_HINT_T1);
}

// One head: a query (D) looks at the positions `from` to `from + n_keys`. `may` (n_keys), where looking is allowed, and
// `add` (n_keys), what is added to the scores, may be none; `s` is room for (n_keys). D is a multiple of 16.
INLINE void attend_head(const float *query, const Seen *seen, long from, const uint8_t *may, const float *add,
                        long n_keys, long size, float scale, float *s, float *o) {
  __m512 none = _mm512_set1_ps(-INFINITY), most = none, by = _mm512_set1_ps(scale);
  Walk at_key = walk(seen, seen->keys, seen->k_key, from), ahead;
  long n_ahead = seen->far ? n_keys - AHEAD : 0;
  if (n_ahead > 0) ahead = walk(seen, seen->keys, seen->k_key, from + AHEAD);
  for (long t = 0; t < n_keys; t += 16) {
    __m512 parts[16];
    int n = n_keys - t >= 16 ? 16 : n_keys - t;
    for (int i = 0; i < n; i++) {
      const float *key = next(&at_key, seen, seen->k_key);
      if (t + i < n_ahead) fetch(&ahead, seen, seen->k_key, size);
      __m512 sum = _mm512_setzero_ps();
      for (long d = 0; d < size; d += 16)
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(query + d), _mm512_loadu_ps(key + d), sum);
      parts[i] = sum;
    }
    for (int i = n; i < 16; i++) parts[i] = _mm512_setzero_ps();
    __mmask16 here = n == 16 ? 0xffff : (1u << n) - 1;
    __m512 at = _mm512_mul_ps(sums_of(parts), by);
    if (add) at = _mm512_add_ps(at, _mm512_maskz_loadu_ps(here, add + t));
    if (may) here &= _mm_test_epi8_mask(_mm_maskz_loadu_epi8(here, may + t), _mm_set1_epi8(-1));
    at = _mm512_mask_mov_ps(none, here, at);
    most = _mm512_mask_max_ps(most, _mm512_cmp_ps_mask(at, most, _CMP_GT_OQ), at, at);
    _mm512_mask_storeu_ps(s + t, n == 16 ? 0xffff : (1u << n) - 1, at);
  }
  __m512 total = _mm512_setzero_ps(), highest = _mm512_set1_ps(_mm512_reduce_max_ps(most));
  for (long t = 0; t < n_keys; t += 16) {
    __mmask16 here = n_keys - t >= 16 ? 0xffff : (1u << (n_keys - t)) - 1;
    __m512 at = _mm512_mask_loadu_ps(none, here, s + t);
    __mmask16 looks = _mm512_cmp_ps_mask(at, none, _CMP_NEQ_UQ);
    at = _mm512_maskz_mov_ps(looks, exponential(_mm512_sub_ps(at, highest)));
    total = _mm512_add_ps(total, at);
    _mm512_mask_storeu_ps(s + t, here, at);
  }
  __m512 part = _mm512_set1_ps(1 / _mm512_reduce_add_ps(total));
  for (long d = 0; d < size; d += 64) {
    long n = (size - d) / 16;
    __m512 a = _mm512_setzero_ps(), b = a, c = a, e = a;
    Walk at_value = walk(seen, seen->values, seen->v_key, from);
    if (n_ahead > 0) ahead = walk(seen, seen->values + d, seen->v_key, from + AHEAD);
    for (long t = 0; t < n_keys; t++) {
      if (t < n_ahead) fetch(&ahead, seen, seen->v_key, n > 3 ? 64 : n * 16);
      const float *at = next(&at_value, seen, seen->v_key) + d;
      if (s[t] == 0) continue;
      __m512 weight = _mm512_set1_ps(s[t]);
      a = _mm512_fmadd_ps(weight, _mm512_loadu_ps(at), a);
      if (n > 1) b = _mm512_fmadd_ps(weight, _mm512_loadu_ps(at + 16), b);
      if (n > 2) c = _mm512_fmadd_ps(weight, _mm512_loadu_ps(at + 32), c);
      if (n > 3) e = _mm512_fmadd_ps(weight, _mm512_loadu_ps(at + 48), e);
    }
    _mm512_storeu_ps(o + d, _mm512_mul_ps(a, part));
    if (n > 1) _mm512_storeu_ps(o + d + 16, _mm512_mul_ps(b, part));
    if (n > 2) _mm512_storeu_ps(o + d + 32, _mm512_mul_ps(c, part));
    if (n > 3) _mm512_storeu_ps(o + d + 48, _mm512_mul_ps(e, part));
  }
}

#define ALL (1L << 40)  // positions in a block where there is only one
static const long FIRST[] = {0};

// Queries (B, H, D), keys and values (B, G, S, D), with the strides given (rows, heads, positions); `allowed` (B, S) and
// `bias` (B, H, S) may be none. `scores` is room for (B, H, S).
void attend_one(const float *q, const float *k, const float *v, const uint8_t *allowed, const float *bias, float *out,
                float *scores, long n_rows, long n_heads, long n_groups, long n_keys, long size, const long *strides,
                float scale, int threads) {
  long share = n_heads / n_groups;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && n_rows * n_heads * n_keys > 1024)
  for (long j = 0; j < n_rows * n_heads; j++) {
    long row = j / n_heads, h = j % n_heads, group = h / share;
    Seen seen = {k + row * strides[2] + group * strides[3], v + row * strides[5] + group * strides[6], strides[4],
                 strides[7], FIRST, ALL, 0, 1};
    attend_head(q + row * strides[0] + h * strides[1], &seen, 0, allowed ? allowed + row * strides[8] : 0,
                bias ? bias + row * strides[9] + h * strides[10] : 0, n_keys, size, scale, scores + j * n_keys,
                out + j * size);
  }
}

// --- choosing one of many logits ------------------------------------------------------------------------------------

#define PAGE 256  // logits whose highest, or whose masses, are found together

#define PARTS for (long k = 0; k < n; k += 16)
#define HERE (n - k >= 16 ? 0xffff : (1u << (n - k)) - 1)

// The highest of each row (M, N) and the first place that has it; NaN where there is one.
void highest(const float *x, long n_rows, long n_all, float *values, long *places, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n_rows * n_all > 65536)
  for (long row = 0; row < n_rows; row++) {
    const float *from = x + row * n_all;
    float most = -INFINITY;
    long page = 0;
    __mmask16 wrong = 0;
    for (long at = 0; at < n_all; at += PAGE) {
      long n = n_all - at < PAGE ? n_all - at : PAGE;
      __m512 high = _mm512_set1_ps(-INFINITY);
      PARTS {
        __m512 here = _mm512_mask_loadu_ps(high, HERE, from + at + k);
        wrong |= _mm512_cmp_ps_mask(here, here, _CMP_UNORD_Q);
        high = _mm512_max_ps(high, here);
      }
      float top = _mm512_reduce_max_ps(high);
      if (top > most) most = top, page = at;
    }
    while (page < n_all - 1 && from[page] != most && !wrong) page++;
    values[row] = wrong ? NAN : most, places[row] = page;
  }
}

// e^((x - top) heat) of those that `some` has; what is less than e^-87 is nothing.
INLINE __m512 weights(__mmask16 some, const float *x, float top, float heat) {
  __m512 at = _mm512_maskz_loadu_ps(some, x);
  at = _mm512_mul_ps(_mm512_sub_ps(at, _mm512_set1_ps(top)), _mm512_set1_ps(heat));
  some &= _mm512_cmp_ps_mask(at, _mm512_set1_ps(-87), _CMP_GE_OQ);
  return _mm512_maskz_mov_ps(some, exponential(at));
}

#define LEVELS 4096
#define LEVELS_PER_NAT 64

typedef struct {
  float x;
  int place;
} Ranked;

static int by_rank(const void *a, const void *b) {  // the greatest first, of equals the one that comes first
  const Ranked *first = a, *second = b;
  return first->x != second->x ? (first->x < second->x ? 1 : -1) : first->place - second->place;
}

INLINE long level(float x, float top, float heat) {
  float depth = (top - x) * heat * LEVELS_PER_NAT;
  return depth < LEVELS - 1 ? (long)depth : LEVELS - 1;
}

// The fewest logits of each row (M, N), greatest first, that together have this share of the mass: all above cuts[row],
// and of those that equal it the ones up to lasts[row]. Logits are counted out into levels by their height; only the
// level at the border is sorted. False where there is no memory.
int nucleus(const float *x, const float *tops, long n_rows, long n_all, float heat, double share, float *cuts,
            long *lasts, int threads) {
  int done = 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && n_rows * n_all > 65536)
  for (long row = 0; row < n_rows; row++) {
    const float *from = x + row * n_all;
    long n = n_all, border = 0, n_ranked = 0;
    double mass[LEVELS] = {0}, total = 0, reached = 0;
    PARTS {
      float w[16];
      _mm512_storeu_ps(w, weights(HERE, from + k, tops[row], heat));
      for (long i = 0; i < 16 && k + i < n; i++)
        if (w[i] > 0) mass[level(from[k + i], tops[row], heat)] += w[i];
    }
    for (long i = 0; i < LEVELS; i++) total += mass[i];
    while (border < LEVELS - 1 && reached + mass[border] < share * total) reached += mass[border++];
    for (long i = 0; i < n; i++) n_ranked += level(from[i], tops[row], heat) == border;
    Ranked *ranked = malloc((n_ranked + 1) * sizeof(Ranked));
    if (!ranked) {
      done = 0;
      continue;
    }
    long j = 0;
    for (long i = 0; i < n; i++)
      if (level(from[i], tops[row], heat) == border) ranked[j++] = (Ranked){from[i], (int)i};
    qsort(ranked, n_ranked, sizeof(Ranked), by_rank);
    cuts[row] = tops[row], lasts[row] = n;
    for (j = 0; j < n_ranked && (j == 0 || reached < share * total); j++) {
      cuts[row] = ranked[j].x, lasts[row] = ranked[j].place;
      float w[16];
      _mm512_storeu_ps(w, weights(1, &ranked[j].x, tops[row], heat));
      reached += w[0];
    }
    free(ranked);
  }
  return done;
}

// What every 256 logits of each row (M, N) weigh together, (M, pages); of those that `nucleus` left, where there are
// `cuts`.
void masses(const float *x, const float *tops, long n_rows, long n_all, float heat, const float *cuts,
            const long *lasts, float *sums, int threads) {
  long n_pages = (n_all + PAGE - 1) / PAGE;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n_rows * n_all > 65536)
  for (long row = 0; row < n_rows; row++)
    for (long page = 0; page < n_pages; page++) {
      const float *from = x + row * n_all + page * PAGE;
      long n = n_all - page * PAGE < PAGE ? n_all - page * PAGE : PAGE;
      __m512 sum = _mm512_setzero_ps();
      PARTS {
        __mmask16 some = HERE;
        if (cuts) {
          __m512 at = _mm512_maskz_loadu_ps(some, from + k), cut = _mm512_set1_ps(cuts[row]);
          long left = lasts[row] - page * PAGE - k + 1;
          __mmask16 before = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
          some &= _mm512_cmp_ps_mask(at, cut, _CMP_GT_OQ) | (_mm512_cmp_ps_mask(at, cut, _CMP_EQ_OQ) & before);
        }
        sum = _mm512_add_ps(sum, weights(some, from + k, tops[row], heat));
      }
      sums[row * n_pages + page] = _mm512_reduce_add_ps(sum);
    }
}

// --- new tokens through a pile of blocks -----------------------------------------------------------------------------

enum { NO_NORM, LAYER_NORM, RMS_NORM };
enum { RELU, GELU, GELU_TANH, SILU };
enum { PRE, POST, PARALLEL };

typedef struct {
  long kind, size;  // of what is normalized
  const float *weight, *bias;
  double eps;
} Norm;

typedef struct {
  long residual, act, gated, window, n_heads, n_groups, size;
  double scale, cross_scale;
  Norm attention_norm, attention_after, cross_norm, feedforward_norm, feedforward_after, query_norm, key_norm;
  Matrix joint, output, cross_query, cross_output, up, down;  // `up` has the gate before it where there is one
} Layer;

typedef struct {
  float *keys, *values;  // (blocks, G, positions in a block, D)
  long stride, head;     // between blocks, between heads
  const float *cross_keys, *cross_values;
  long cross_row, cross_head, cross_key;
} Remembered;

// New tokens, one or several of each row, in their order. A row's blocks are table[row]; a contiguous row is one block.
typedef struct {
  long n_tokens, width;
  const long *rows, *places;  // (M) whose token it is, and at which position it stands
  const long *tables;         // (B, wide)
  long wide, block, fresh;    // positions in a block; whether one that is begun must be cleared
  const float *cos, *sin;     // (M or 1, R/2) or none
  long half, turn_row, interleaved;
  const float *bias;          // (M or 1, H or 1, S) added to the scores of self-attention, or none
  long bias_row, bias_head;
  const long *n_memory;       // (M) positions of an encoder's output, or none
} Step;

static void normalize(const Norm *norm, const float *x, float *y, long n) {
  __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
  float mean = 0;
  if (norm->kind == LAYER_NORM) {
    PARTS sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(HERE, x + k));
    mean = _mm512_reduce_add_ps(sum) / n;
  }
  __m512 middle = _mm512_set1_ps(mean);
  PARTS {
    __m512 at = _mm512_maskz_sub_ps(HERE, _mm512_maskz_loadu_ps(HERE, x + k), middle);
    squares = _mm512_fmadd_ps(at, at, squares);
  }
  __m512 by = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(squares) / n + (float)norm->eps));
  PARTS {
    __m512 at = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(HERE, x + k), middle), by);
    at = _mm512_mul_ps(at, _mm512_maskz_loadu_ps(HERE, norm->weight + k));
    if (norm->bias) at = _mm512_add_ps(at, _mm512_maskz_loadu_ps(HERE, norm->bias + k));
    _mm512_mask_storeu_ps(y + k, HERE, at);
  }
}

// 1 - erf(z) for z >= 0 (Abramowitz & Stegun 7.1.26, within 1.5e-7).
INLINE __m512 complement(__m512 z) {
  __m512 t = _mm512_div_ps(_mm512_set1_ps(1), _mm512_fmadd_ps(z, _mm512_set1_ps(0.3275911f), _mm512_set1_ps(1)));
  __m512 y = _mm512_set1_ps(1.061405429f);
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-1.453152027f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(1.421413741f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(-0.284496736f));
  y = _mm512_fmadd_ps(y, t, _mm512_set1_ps(0.254829592f));
  __m512 square = _mm512_mul_ps(z, z);
  return _mm512_mul_ps(_mm512_mul_ps(y, t), exponential(_mm512_sub_ps(_mm512_setzero_ps(), square)));
}

INLINE __m512 activate(long act, __m512 x) {
  const __m512 one = _mm512_set1_ps(1), zero = _mm512_setzero_ps();
  if (act == RELU) return _mm512_max_ps(x, zero);
  if (act == GELU) {
    __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    __m512 rest = _mm512_mul_ps(half, complement(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678f))));
    // x/2 (1 + erf(x/√2)): where x > 0 what is missing to x, where x < 0 what is left
    return _mm512_mask_sub_ps(rest, _mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), x, rest);
  }
  __m512 u = x;  // x · sigmoid(u)
  if (act == GELU_TANH) {
    __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), one);
    u = _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.59576912f));  // 2 √(2/π)
  }
  return _mm512_div_ps(x, _mm512_add_ps(one, exponential(_mm512_sub_ps(zero, u))));
}

static void rotate(const Step *s, long row, float *x) {
  const float *cos = s->cos + row * s->turn_row, *sin = s->sin + row * s->turn_row;
  for (long i = 0; i < s->half; i++) {
    float *a = x + (s->interleaved ? 2 * i : i), *b = x + (s->interleaved ? 2 * i + 1 : s->half + i);
    float first = *a * cos[i] - *b * sin[i], second = *b * cos[i] + *a * sin[i];
    *a = first, *b = second;
  }
}

// x + y, normalized where that comes after; all of it for each row.
static void add(const Norm *before, const Norm *after, const float *y, float *x, float *room, const Step *s) {
#pragma omp for
  for (long row = 0; row < s->n_tokens; row++) {
    long n = s->width;
    const float *from = y + row * n;
    if (before->kind) {
      normalize(before, from, room + row * n, n);
      from = room + row * n;
    }
    float *to = x + row * n;
    PARTS _mm512_mask_storeu_ps(
        to + k, HERE, _mm512_add_ps(_mm512_maskz_loadu_ps(HERE, to + k), _mm512_maskz_loadu_ps(HERE, from + k)));
    if (after && after->kind) normalize(after, to, to, n);
  }
}

static const float *normed(const Norm *norm, const float *x, float *room, const Step *s) {
  if (!norm->kind) return x;
#pragma omp for
  for (long row = 0; row < s->n_tokens; row++) normalize(norm, x + row * s->width, room + row * s->width, s->width);
  return room;
}

// What another token left in a block may be no number, and spoil the sums of one who masks it.
static void clear(const Layer *layers, long n_layers, const Remembered *remembered, const Step *s) {
#pragma omp for
  for (long i = 0; i < s->n_tokens; i++) {
    if (s->places[i] % s->block) continue;
    long block = s->tables[s->rows[i] * s->wide + s->places[i] / s->block];
    for (long j = 0; j < n_layers; j++) {
      long n = s->block * layers[j].size * sizeof(float);
      for (long g = 0; g < layers[j].n_groups; g++) {
        memset(remembered[j].keys + block * remembered[j].stride + g * remembered[j].head, 0, n);
        memset(remembered[j].values + block * remembered[j].stride + g * remembered[j].head, 0, n);
      }
    }
  }
}

#define TOGETHER 16  // tokens of a row that one thread takes one after the other: they look at the same keys

// How many tokens there are from i on that belong together.
static long together(const Step *s, long i) {
  long n = 1;
  while (n < TOGETHER && i + n < s->n_tokens && s->rows[i + n] == s->rows[i]) n++;
  return n;
}

// Queries, keys and values (M, (H + 2G) D) -> what the heads bring back (M, H D); the new keys and values are kept.
// `groups` are the tokens with which each group of those that belong together begins; a thread has room for its scores.
static void attend_cached(const Layer *l, const Remembered *m, const Step *s, float *joint, float *out,
                          const long *groups, long n_groups, float *scores, long most) {
  long share = l->n_heads / l->n_groups, n = l->size, whole = (l->n_heads + 2 * l->n_groups) * n;
  long n_queries = l->n_heads * n, n_keys = l->n_groups * n;
#pragma omp for
  for (long i = 0; i < s->n_tokens; i++) {
    float *q = joint + i * whole, *k = q + n_queries;
    if (l->query_norm.kind)
      for (long j = 0; j < n_queries; j += l->query_norm.size) normalize(&l->query_norm, q + j, q + j, l->query_norm.size);
    if (l->key_norm.kind)
      for (long j = 0; j < n_keys; j += l->key_norm.size) normalize(&l->key_norm, k + j, k + j, l->key_norm.size);
    if (s->cos)
      for (long j = 0; j < n_queries + n_keys; j += n) rotate(s, i, q + j);
    long block = s->tables[s->rows[i] * s->wide + s->places[i] / s->block];
    for (long g = 0; g < l->n_groups; g++) {
      long at = block * m->stride + g * m->head + s->places[i] % s->block * n;
      for (long d = 0; d < n; d++) m->keys[at + d] = k[g * n + d], m->values[at + d] = k[n_keys + g * n + d];
    }
  }
  float *room = scores + omp_get_thread_num() * most;
#pragma omp for schedule(dynamic)
  for (long j = 0; j < n_groups * l->n_heads; j++) {
    long first = groups[j / l->n_heads], h = j % l->n_heads, at = h / share * m->head;
    Seen seen = {m->keys + at, m->values + at, n, n, s->tables + s->rows[first] * s->wide, s->block, m->stride, 1};
    for (long i = first; i < groups[j / l->n_heads + 1]; i++) {
      long end = s->places[i] + 1, from = l->window && end > l->window ? end - l->window : 0;
      const float *bias = s->bias ? s->bias + i * s->bias_row + h * s->bias_head + from : 0;
      attend_head(joint + i * whole + h * n, &seen, from, 0, bias, end - from, n, l->scale, room,
                  out + (i * l->n_heads + h) * n);
      seen.far = 0;
    }
  }
}

static void attend_memory(const Layer *l, const Remembered *m, const Step *s, const float *q, float *out, float *scores,
                          long most) {
  long share = l->n_heads / l->n_groups, n = l->size;
  float *room = scores + omp_get_thread_num() * most;
#pragma omp for schedule(dynamic)
  for (long j = 0; j < s->n_tokens * l->n_heads; j++) {
    long i = j / l->n_heads, at = s->rows[i] * m->cross_row + j % l->n_heads / share * m->cross_head;
    Seen seen = {m->cross_keys + at, m->cross_values + at, m->cross_key, m->cross_key, FIRST, ALL, 0, 1};
    attend_head(q + j * n, &seen, 0, 0, 0, s->n_memory[i], n, l->cross_scale, room, out + j * n);
  }
}

static void feed_forward(const Layer *l, const Step *s, const float *x, float *hidden, float *y, char *scratch,
                         int threads) {
  long n = l->down.n_inputs, wide = l->up.n_outputs;
  float *active = hidden + s->n_tokens * wide;
  multiply(&l->up, x, s->n_tokens, hidden, scratch, threads);
#pragma omp for
  for (long row = 0; row < s->n_tokens; row++) {
    const float *from = hidden + row * wide;
    PARTS {
      __m512 at = activate(l->act, _mm512_maskz_loadu_ps(HERE, from + k));
      if (l->gated) at = _mm512_mul_ps(at, _mm512_maskz_loadu_ps(HERE, from + n + k));
      _mm512_mask_storeu_ps(active + row * n + k, HERE, at);
    }
  }
  multiply(&l->down, active, s->n_tokens, y, scratch, threads);
}

static long larger(long a, long b) { return a > b ? a : b; }

// x (M, E), new tokens, through all layers, in place.
int decode(const Layer *layers, long n_layers, const Remembered *remembered, const Step *s, float *x, int threads) {
  long most = 1, wide = 0, joint = 0, bytes = 0, n_groups = 0;
  for (long i = 0; i < s->n_tokens; i++)
    most = larger(most, larger(s->places[i] + 1, s->n_memory ? s->n_memory[i] : 0));
  for (const Layer *l = layers; l < layers + n_layers; l++) {
    wide = larger(wide, l->up.n_outputs + l->down.n_inputs);
    joint = larger(joint, larger(l->joint.n_outputs, l->cross_query.n_outputs));
    const Matrix *all[] = {&l->joint, &l->output, &l->cross_query, &l->cross_output, &l->up, &l->down};
    for (int i = 0; i < 6; i++) bytes = larger(bytes, room(all[i], s->n_tokens));
  }
  long n = s->n_tokens, sizes[] = {n * s->width, n * s->width, n * s->width, n * joint, n * joint, n * wide, threads * (most + 16)};
  long total = 0;
  for (int i = 0; i < 7; i++) total += sizes[i] + 16;
  float *block = malloc(total * sizeof(float) + bytes + 64), *parts[7], *rest = block;
  long *groups = malloc((n + 1) * sizeof(long));
  if (!block || !groups) {
    free(block), free(groups);
    return 0;
  }
  for (long i = 0; i < n; i += together(s, i)) groups[n_groups++] = i;
  groups[n_groups] = n;
  for (int i = 0; i < 7; i++) parts[i] = rest, rest += sizes[i] + 16;
  float *room_x = parts[0], *delta = parts[1], *other = parts[2], *qkv = parts[3], *seen = parts[4];
  float *hidden = parts[5], *scores = parts[6];
  char *scratch = (char *)rest;
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (long i = 0; i < n_layers; i++) {
    if (i == 0 && s->fresh) clear(layers, n_layers, remembered, s);
    const Layer *l = layers + i;
    const Remembered *m = remembered + i;
    int post = l->residual == POST, parallel = l->residual == PARALLEL;
    const float *from = post ? x : normed(&l->attention_norm, x, room_x, s);
    multiply(&l->joint, from, n, qkv, scratch, threads);
    attend_cached(l, m, s, qkv, seen, groups, n_groups, scores, most + 16);
    multiply(&l->output, seen, n, delta, scratch, threads);
    if (parallel) {
      if (l->feedforward_norm.kind) from = normed(&l->feedforward_norm, x, room_x, s);
      feed_forward(l, s, from, hidden, other, scratch, threads);
      add(&l->attention_after, 0, delta, x, room_x, s);
      add(&l->feedforward_after, 0, other, x, room_x, s);
      continue;
    }
    add(&l->attention_after, post ? &l->attention_norm : 0, delta, x, room_x, s);
    if (l->cross_query.w) {
      from = post ? x : normed(&l->cross_norm, x, room_x, s);
      multiply(&l->cross_query, from, n, qkv, scratch, threads);
      attend_memory(l, m, s, qkv, seen, scores, most + 16);
      multiply(&l->cross_output, seen, n, delta, scratch, threads);
      Norm none = {0};
      add(&none, post ? &l->cross_norm : 0, delta, x, room_x, s);
    }
    from = post ? x : normed(&l->feedforward_norm, x, room_x, s);
    feed_forward(l, s, from, hidden, delta, scratch, threads);
    add(&l->feedforward_after, post ? &l->feedforward_norm : 0, delta, x, room_x, s);
  }
  free(block), free(groups);
  return 1;
}
