// What decoding consists of, for processors with AVX-512 (with its BF16 and VNNI extensions): products of a few rows
// with a packed matrix, attention of one new token, and a whole pile of blocks for one new token per row. Compiled on
// first use; called by nn/native.py and nn/decode.py.
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
#include <stdlib.h>

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

// One head: a query (D) looks at keys and values (S, D) with these strides between positions. `may` (S), where looking
// is allowed, and `add` (S), what is added to the scores, may be none; `s` is room for (S). D is a multiple of 16.
INLINE void attend_head(const float *query, const float *keys, long k_key, const float *values, long v_key,
                        const uint8_t *may, const float *add, long n_keys, long size, float scale, float *s, float *o) {
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
  __m512 total = _mm512_setzero_ps(), highest = _mm512_set1_ps(most), none = _mm512_set1_ps(-INFINITY);
  for (long t = 0; t < n_keys; t += 16) {
    __mmask16 here = n_keys - t >= 16 ? 0xffff : (1u << (n_keys - t)) - 1;
    __m512 at = _mm512_mask_loadu_ps(none, here, s + t);
    __mmask16 seen = _mm512_cmp_ps_mask(at, none, _CMP_NEQ_UQ);
    at = _mm512_maskz_mov_ps(seen, exponential(_mm512_sub_ps(at, highest)));
    total = _mm512_add_ps(total, at);
    _mm512_mask_storeu_ps(s + t, here, at);
  }
  __m512 part = _mm512_set1_ps(1 / _mm512_reduce_add_ps(total));
  for (long d = 0; d < size; d += 64) {
    long n = (size - d) / 16;
    __m512 a = _mm512_setzero_ps(), b = a, c = a, e = a;
    for (long t = 0; t < n_keys; t++) {
      if (s[t] == 0) continue;
      const float *at = values + t * v_key + d;
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

// Queries (B, H, D), keys and values (B, G, S, D), with the strides given (rows, heads, positions); `allowed` (B, S) and
// `bias` (B, H, S) may be none. `scores` is room for (B, H, S).
void attend_one(const float *q, const float *k, const float *v, const uint8_t *allowed, const float *bias, float *out,
                float *scores, long n_rows, long n_heads, long n_groups, long n_keys, long size, const long *strides,
                float scale, int threads) {
  long share = n_heads / n_groups;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && n_rows * n_heads * n_keys > 1024)
  for (long j = 0; j < n_rows * n_heads; j++) {
    long row = j / n_heads, h = j % n_heads, group = h / share;
    attend_head(q + row * strides[0] + h * strides[1], k + row * strides[2] + group * strides[3], strides[4],
                v + row * strides[5] + group * strides[6], strides[7], allowed ? allowed + row * strides[8] : 0,
                bias ? bias + row * strides[9] + h * strides[10] : 0, n_keys, size, scale, scores + j * n_keys,
                out + j * size);
  }
}

// --- a pile of blocks for one new token per row ---------------------------------------------------------------------

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
  float *keys, *values;  // (rows, G, capacity, D)
  long row, head;        // strides
  const float *cross_keys, *cross_values;
  long cross_row, cross_head, cross_key;
} Remembered;

typedef struct {
  long n_rows, width;
  const long *lengths;       // (B) tokens that each row remembers
  const float *cos, *sin;    // (B or 1, R/2) or none
  long half, turn_row, interleaved;
  const float *bias;         // (B or 1, H or 1, S) added to the scores of self-attention, or none
  long bias_row, bias_head;
  const long *n_memory;      // (B) positions of an encoder's output, or none
} Step;

static void normalize(const Norm *norm, const float *x, float *y, long n) {
  __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
#define PARTS for (long k = 0; k < n; k += 16)
#define HERE (n - k >= 16 ? 0xffff : (1u << (n - k)) - 1)
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
  for (long row = 0; row < s->n_rows; row++) {
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
  for (long row = 0; row < s->n_rows; row++) normalize(norm, x + row * s->width, room + row * s->width, s->width);
  return room;
}

// Queries, keys and values (B, (H + 2G) D) -> what the heads bring back (B, H D); the new keys and values are kept.
static void attend_cached(const Layer *l, const Remembered *m, const Step *s, float *joint, float *out, float *scores,
                          long most) {
  long share = l->n_heads / l->n_groups, n = l->size, whole = (l->n_heads + 2 * l->n_groups) * n;
  long n_queries = l->n_heads * n, n_keys = l->n_groups * n;
#pragma omp for
  for (long row = 0; row < s->n_rows; row++) {
    float *q = joint + row * whole, *k = q + n_queries;
    if (l->query_norm.kind)
      for (long i = 0; i < n_queries; i += l->query_norm.size) normalize(&l->query_norm, q + i, q + i, l->query_norm.size);
    if (l->key_norm.kind)
      for (long i = 0; i < n_keys; i += l->key_norm.size) normalize(&l->key_norm, k + i, k + i, l->key_norm.size);
    if (s->cos)
      for (long i = 0; i < n_queries + n_keys; i += n) rotate(s, row, q + i);
    for (long g = 0; g < l->n_groups; g++) {
      long at = row * m->row + g * m->head + s->lengths[row] * n;
      for (long d = 0; d < n; d++) m->keys[at + d] = k[g * n + d], m->values[at + d] = k[n_keys + g * n + d];
    }
  }
#pragma omp for schedule(dynamic)
  for (long j = 0; j < s->n_rows * l->n_heads; j++) {
    long row = j / l->n_heads, h = j % l->n_heads, end = s->lengths[row] + 1;
    long from = l->window && end > l->window ? end - l->window : 0;
    long at = row * m->row + h / share * m->head + from * n;
    const float *bias = s->bias ? s->bias + row * s->bias_row + h * s->bias_head + from : 0;
    attend_head(joint + row * whole + h * n, m->keys + at, n, m->values + at, n, 0, bias, end - from, n, l->scale,
                scores + j * most, out + j * n);
  }
}

static void attend_memory(const Layer *l, const Remembered *m, const Step *s, const float *q, float *out,
                          float *scores, long most) {
  long share = l->n_heads / l->n_groups, n = l->size;
#pragma omp for schedule(dynamic)
  for (long j = 0; j < s->n_rows * l->n_heads; j++) {
    long row = j / l->n_heads, at = row * m->cross_row + j % l->n_heads / share * m->cross_head;
    attend_head(q + j * n, m->cross_keys + at, m->cross_key, m->cross_values + at, m->cross_key, 0, 0,
                s->n_memory[row], n, l->cross_scale, scores + j * most, out + j * n);
  }
}

static void feed_forward(const Layer *l, const Step *s, const float *x, float *hidden, float *y, char *scratch,
                         int threads) {
  long n = l->down.n_inputs, wide = l->up.n_outputs;
  float *active = hidden + s->n_rows * wide;
  multiply(&l->up, x, s->n_rows, hidden, scratch, threads);
#pragma omp for
  for (long row = 0; row < s->n_rows; row++) {
    const float *from = hidden + row * wide;
    PARTS {
      __m512 at = activate(l->act, _mm512_maskz_loadu_ps(HERE, from + k));
      if (l->gated) at = _mm512_mul_ps(at, _mm512_maskz_loadu_ps(HERE, from + n + k));
      _mm512_mask_storeu_ps(active + row * n + k, HERE, at);
    }
  }
  multiply(&l->down, active, s->n_rows, y, scratch, threads);
}

static long larger(long a, long b) { return a > b ? a : b; }

// x (B, E), one new token of each row, through all layers, in place.
int decode(const Layer *layers, long n_layers, const Remembered *remembered, const Step *s, float *x, int threads) {
  long most = 1, wide = 0, joint = 0, heads = 0, bytes = 0;
  for (long row = 0; row < s->n_rows; row++)
    most = larger(most, larger(s->lengths[row] + 1, s->n_memory ? s->n_memory[row] : 0));
  for (const Layer *l = layers; l < layers + n_layers; l++) {
    wide = larger(wide, l->up.n_outputs + l->down.n_inputs);
    joint = larger(joint, larger(l->joint.n_outputs, l->cross_query.n_outputs));
    heads = larger(heads, l->n_heads);
    const Matrix *all[] = {&l->joint, &l->output, &l->cross_query, &l->cross_output, &l->up, &l->down};
    for (int i = 0; i < 6; i++) bytes = larger(bytes, room(all[i], s->n_rows));
  }
  long n = s->n_rows, sizes[] = {n * s->width, n * s->width, n * s->width, n * joint, n * joint, n * wide, n * heads * most};
  long total = 0;
  for (int i = 0; i < 7; i++) total += sizes[i] + 16;
  float *block = malloc(total * sizeof(float) + bytes + 64), *parts[7], *next = block;
  if (!block) return 0;
  for (int i = 0; i < 7; i++) parts[i] = next, next += sizes[i] + 16;
  float *room_x = parts[0], *delta = parts[1], *other = parts[2], *qkv = parts[3], *seen = parts[4];
  float *hidden = parts[5], *scores = parts[6];
  char *scratch = (char *)next;
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (long i = 0; i < n_layers; i++) {
    const Layer *l = layers + i;
    const Remembered *m = remembered + i;
    int post = l->residual == POST, parallel = l->residual == PARALLEL;
    const float *from = post ? x : normed(&l->attention_norm, x, room_x, s);
    multiply(&l->joint, from, n, qkv, scratch, threads);
    attend_cached(l, m, s, qkv, seen, scores, most);
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
      attend_memory(l, m, s, qkv, seen, scores, most);
      multiply(&l->cross_output, seen, n, delta, scratch, threads);
      Norm none = {0};
      add(&none, post ? &l->cross_norm : 0, delta, x, room_x, s);
    }
    from = post ? x : normed(&l->feedforward_norm, x, room_x, s);
    feed_forward(l, s, from, hidden, delta, scratch, threads);
    add(&l->feedforward_after, post ? &l->feedforward_norm : 0, delta, x, room_x, s);
  }
  free(block);
  return 1;
}
