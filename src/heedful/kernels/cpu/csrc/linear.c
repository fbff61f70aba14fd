// Products of rows with a packed weight: float32, float16, bfloat16, int8 and int4.
//
// A weight (N, K) is packed into panels of 32 outputs, input by input: a thread reads one stream from memory, each lane
// of a vector is one output, and there are no sums across lanes. An output is summed over the inputs in their order for
// any number of rows, so that a row's result is bitwise independent of the rest of the batch.
//
//     N outputs, K inputs, M rows, G inputs in a group

#include "linear.h"

#define PANEL 32  // outputs in a panel
#define TILE 8    // most rows multiplied at once
#define GROUP 32  // group size: inputs that share a scale

typedef struct {
  long n_rows, n_inputs, n_outputs;
  const float *bias;  // (N,) or NULL
  float *y;           // (M, N)
} Product;

INLINE void store_outputs(const Product *p, long row, long n, vec low, vec high) {
  lanes first = first_lanes(p->n_outputs - n), second = first_lanes(p->n_outputs - n - LANES);
  if (p->bias) {
    low = v_add(low, v_load_lanes(first, p->bias + n));
    high = v_add(high, v_load_lanes(second, p->bias + n + LANES));
  }
  float *y = p->y + row * p->n_outputs + n;
  v_store_lanes(y, first, low);
  v_store_lanes(y + LANES, second, high);
}

// --- float32 and float16 (converted in registers): panel (K, 32) ------------------------------------------------------

INLINE void float_tile(const Product *p, const float *x, const void *panel, long row, long n, const int m,
                       const int is_half) {
  vec low[TILE], high[TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (long k = 0; k < p->n_inputs; k++) {
    const __m256i *halves = (const __m256i *)panel + 2 * k;
    const float *floats = (const float *)panel + k * PANEL;
    vec a = is_half ? _mm512_cvtph_ps(_mm256_loadu_si256(halves)) : v_load(floats);
    vec b = is_half ? _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)) : v_load(floats + LANES);
    UNROLL for (int i = 0; i < m; i++) {
      vec at = v_set(x[i * p->n_inputs + k]);
      low[i] = v_fma(a, at, low[i]);
      high[i] = v_fma(b, at, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

// --- bfloat16: panel (K/2, 32, 2), x (M, K/2) pairs ------------------------------------------------------------------

INLINE void bfloat16_tile(const Product *p, const int32_t *x, const int32_t *w, long row, long n, const int m) {
  vec low[TILE], high[TILE];
  long pairs = (p->n_inputs + 1) / 2;
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (long k = 0; k < pairs; k++, w += PANEL) {
    __m512bh a = (__m512bh)_mm512_loadu_si512(w), b = (__m512bh)_mm512_loadu_si512(w + LANES);
    UNROLL for (int i = 0; i < m; i++) {
      __m512bh at = (__m512bh)_mm512_set1_epi32(x[i * pairs + k]);
      low[i] = _mm512_dpbf16_ps(low[i], a, at);
      high[i] = _mm512_dpbf16_ps(high[i], b, at);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

static void round_to_bfloat16(const float *x, long n, int16_t *to) {
  FOR_LANES(n) {
    __m256i at = (__m256i)_mm512_cvtneps_pbh(v_load_lanes(first_lanes(n - k), x + k));
    _mm256_mask_storeu_epi16(to + k, first_lanes(round_up(n - k, 2)), at);
  }
}

// --- int8 and int4: x as int8 with a scale per group -----------------------------------------------------------------

typedef struct {
  long n_groups;
  int8_t *ints;   // (M, groups, G)
  float *scales;  // (M, groups)
  int32_t *sums;  // (M, groups) of the ints
} QuantizedRows;

// With an infinity in a group the scale is infinite, infinities are ±127 and the others 0; with NaN the scale is NaN.
static void quantize_row(const float *x, long n_inputs, const QuantizedRows *q, long row) {
  for (long g = 0; g < q->n_groups; g++) {
    long at = g * GROUP;
    lanes first = first_lanes(n_inputs - at), second = first_lanes(n_inputs - at - LANES);
    vec a = v_load_lanes(first, x + at), b = v_load_lanes(second, x + at + LANES);
    float highest = v_highest(v_max(v_abs(a), v_abs(b)));
    if (v_is_nan(a, b)) highest = NAN;
    if (highest == INFINITY) {
      vec limit = v_set(INFINITY), all = v_set(127), none = v_zero();
      a = v_select(v_equal(a, limit), all, v_select(v_equal(v_sub(none, a), limit), v_sub(none, all), none));
      b = v_select(v_equal(b, limit), all, v_select(v_equal(v_sub(none, b), limit), v_sub(none, all), none));
    }
    // A group below 1e-30 becomes 0: 127 / highest could overflow.
    vec steps = v_set(highest == INFINITY ? 1 : highest > 1e-30f ? 127 / highest : 0);
    __m512i i = _mm512_cvtps_epi32(v_mul(a, steps)), j = _mm512_cvtps_epi32(v_mul(b, steps));
    int8_t *ints = q->ints + (row * q->n_groups + g) * GROUP;
    _mm_storeu_si128((__m128i *)ints, _mm512_cvtsepi32_epi8(i));
    _mm_storeu_si128((__m128i *)(ints + LANES), _mm512_cvtsepi32_epi8(j));
    q->scales[row * q->n_groups + g] = highest / 127;
    q->sums[row * q->n_groups + g] = _mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
  }
}

// 16 bfloat16 elements as float32.
INLINE vec widen(const uint16_t *from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16));
}

// Panel (K/4, 32, 4) of w + 128 as bytes, scales (groups, 32) in bfloat16.
INLINE void int8_tile(const Product *p, const QuantizedRows *q, const uint8_t *w, const uint16_t *scales, long row,
                      long n, const int m) {
  vec low[TILE], high[TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  const int32_t *x = (const int32_t *)q->ints + row * q->n_groups * (GROUP / 4);
  for (long g = 0; g < q->n_groups; g++, scales += PANEL) {
    __m512i a[TILE], b[TILE];
    UNROLL for (int i = 0; i < m; i++) a[i] = b[i] = _mm512_set1_epi32(-128 * q->sums[(row + i) * q->n_groups + g]);
    for (int k = 0; k < GROUP / 4; k++, w += 4 * PANEL) {
      __m512i c = _mm512_loadu_si512(w), d = _mm512_loadu_si512(w + 64);
      UNROLL for (int i = 0; i < m; i++) {
        __m512i at = _mm512_set1_epi32(x[(i * q->n_groups + g) * (GROUP / 4) + k]);
        a[i] = _mm512_dpbusd_epi32(a[i], c, at);
        b[i] = _mm512_dpbusd_epi32(b[i], d, at);
      }
    }
    vec first = widen(scales), second = widen(scales + LANES);
    UNROLL for (int i = 0; i < m; i++) {
      vec by = v_set(q->scales[(row + i) * q->n_groups + g]);
      low[i] = v_fma(v_mul(_mm512_cvtepi32_ps(a[i]), by), first, low[i]);
      high[i] = v_fma(v_mul(_mm512_cvtepi32_ps(b[i]), by), second, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

// Panel (K/4, 16, 4): the low half of a byte is for the first 16 outputs, the high half for the others; scales and zero
// points (groups, 2, 32) in bfloat16.
INLINE void int4_tile(const Product *p, const QuantizedRows *q, const uint8_t *w, const uint16_t *scales, long row,
                      long n, const int m) {
  vec low[TILE], high[TILE];
  const __m512i half = _mm512_set1_epi8(15);
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  const int32_t *x = (const int32_t *)q->ints + row * q->n_groups * (GROUP / 4);
  for (long g = 0; g < q->n_groups; g++, scales += 2 * PANEL) {
    __m512i a[TILE], b[TILE];
    UNROLL for (int i = 0; i < m; i++) a[i] = b[i] = _mm512_set1_epi32(-8 * q->sums[(row + i) * q->n_groups + g]);
    for (int k = 0; k < GROUP / 4; k++, w += 2 * PANEL) {
      __m512i both = _mm512_loadu_si512(w);
      __m512i c = _mm512_and_si512(both, half), d = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
      UNROLL for (int i = 0; i < m; i++) {
        __m512i at = _mm512_set1_epi32(x[(i * q->n_groups + g) * (GROUP / 4) + k]);
        a[i] = _mm512_dpbusd_epi32(a[i], c, at);
        b[i] = _mm512_dpbusd_epi32(b[i], d, at);
      }
    }
    vec first = widen(scales), second = widen(scales + 16), zero = widen(scales + 32), zero2 = widen(scales + 48);
    UNROLL for (int i = 0; i < m; i++) {
      float scale = q->scales[(row + i) * q->n_groups + g];
      vec by = v_set(scale), sum = v_set(scale * q->sums[(row + i) * q->n_groups + g]);
      low[i] = v_fma(v_mul(_mm512_cvtepi32_ps(a[i]), by), first, low[i]);
      high[i] = v_fma(v_mul(_mm512_cvtepi32_ps(b[i]), by), second, high[i]);
      low[i] = v_fma(sum, zero, low[i]);
      high[i] = v_fma(sum, zero2, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

// --- a product -------------------------------------------------------------------------------------------------------

// Panels are scheduled dynamically, a few at a time, so that a preempted thread does not delay the others for long.
// CALL(M) multiplies M rows, from `row` on, by the panel of the outputs from n on.
#define FOR_PANELS(CALL)                                 \
  _Pragma("omp for schedule(dynamic, few)")              \
  for (long j = 0; j < n_panels; j++) {                  \
    long n = j * PANEL;                                  \
    for (long row = 0; row < p.n_rows; row += TILE) {    \
      switch (p.n_rows - row) {                          \
        case 1: CALL(1); break;                          \
        case 2: CALL(2); break;                          \
        case 3: CALL(3); break;                          \
        case 4: CALL(4); break;                          \
        case 5: CALL(5); break;                          \
        case 6: CALL(6); break;                          \
        case 7: CALL(7); break;                          \
        default: CALL(8);                                \
      }                                                  \
    }                                                    \
  }

long packed_scratch(const PackedMatrix *a, long n_rows) {
  long groups = (a->n_inputs + GROUP - 1) / GROUP;
  return n_rows * (a->kind == BFLOAT16 ? (a->n_inputs + 1) / 2 * 4 : a->kind >= INT8 ? groups * (GROUP + 8) : 0);
}

static void multiply_floats(Product p, const PackedMatrix *a, const float *x, long n_panels, long few) {
  if (a->kind == FLOAT32) {
#define CALL(M) float_tile(&p, x + row * p.n_inputs, (const float *)a->weight + n * p.n_inputs, row, n, M, 0)
    FOR_PANELS(CALL)
#undef CALL
  } else {
#define CALL(M) float_tile(&p, x + row * p.n_inputs, (const uint16_t *)a->weight + n * p.n_inputs, row, n, M, 1)
    FOR_PANELS(CALL)
#undef CALL
  }
}

static void multiply_bfloat16(Product p, const PackedMatrix *a, const float *x, char *scratch, long n_panels,
                              long few) {
  long pairs = (p.n_inputs + 1) / 2;
  int32_t *narrow = (int32_t *)scratch;
#pragma omp for
  for (long row = 0; row < p.n_rows; row++)
    round_to_bfloat16(x + row * p.n_inputs, p.n_inputs, (int16_t *)(narrow + row * pairs));
#define CALL(M) bfloat16_tile(&p, narrow + row * pairs, (const int32_t *)a->weight + n * pairs, row, n, M)
  FOR_PANELS(CALL)
#undef CALL
}

static void multiply_ints(Product p, const PackedMatrix *a, const float *x, char *scratch, long n_panels, long few) {
  long groups = (p.n_inputs + GROUP - 1) / GROUP;
  QuantizedRows q = {groups, (int8_t *)scratch, (float *)(scratch + p.n_rows * groups * GROUP), 0};
  q.sums = (int32_t *)(q.scales + p.n_rows * groups);
#pragma omp for
  for (long row = 0; row < p.n_rows; row++) quantize_row(x + row * p.n_inputs, p.n_inputs, &q, row);
  const uint8_t *w = a->weight;
  const uint16_t *scales = a->scales;
  if (a->kind == INT8) {
#define CALL(M) int8_tile(&p, &q, w + n * groups * GROUP, scales + n * groups, row, n, M)
    FOR_PANELS(CALL)
#undef CALL
  } else {
#define CALL(M) int4_tile(&p, &q, w + n * groups * GROUP / 2, scales + n * groups * 2, row, n, M)
    FOR_PANELS(CALL)
#undef CALL
  }
}

void multiply_packed(const PackedMatrix *a, const float *x, long n_rows, float *y, char *scratch, int threads) {
  static const long bits[] = {32, 16, 16, 8, 4};
  Product p = {n_rows, a->n_inputs, a->n_outputs, a->bias, y};
  long n_panels = (a->n_outputs + PANEL - 1) / PANEL, most = n_panels / (2 * threads);
  long few = 1 + 65536 * 8 / (a->n_inputs * PANEL * bits[a->kind]);  // about 64 kB of weights
  few = few < most ? few : most ? most : 1;
  if (a->kind <= FLOAT16) multiply_floats(p, a, x, n_panels, few);
  else if (a->kind == BFLOAT16) multiply_bfloat16(p, a, x, scratch, n_panels, few);
  else multiply_ints(p, a, x, scratch, n_panels, few);
}

// Returns 0 if memory is exhausted.
EXPORT int packed_linear(const PackedMatrix *a, const float *x, long n_rows, float *y, int threads) {
  char *scratch = malloc(packed_scratch(a, n_rows) + 1);
  if (!scratch) return 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  multiply_packed(a, x, n_rows, y, scratch, threads);
  free(scratch);
  return 1;
}
