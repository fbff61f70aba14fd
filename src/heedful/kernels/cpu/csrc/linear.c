// Products of rows with a packed weight: float32, float16, bfloat16, int8 and int4.
//
// A weight (N, K) is packed into panels of 32 outputs, input by input: a thread reads one stream from memory, each lane
// of a vector is one output, and there are no sums across lanes. An output is summed over the inputs in their order for
// any number of rows, so that a row's result is bitwise independent of the rest of the batch.
//
//     N outputs, K inputs, M rows, G inputs in a group

#include "linear.h"

#define PANEL 32    // outputs in a panel
#define TILE 8      // most rows multiplied at once
#define INT_TILE 4  // most rows of int8 and int4, which need more registers
#define GROUP 32    // group size: inputs that share a scale

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

// 16 float16 elements as float32.
INLINE vec load_halves(const void *from) { return _mm512_cvtph_ps(_mm256_loadu_si256(from)); }

// --- float32 and float16 (converted in registers): panel (K, 32) -----------------------------------------------------

INLINE void float_tile(const Product *p, const float *x, const void *panel, long row, long n, const int m,
                       const int is_half) {
  vec low[TILE], high[TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (long k = 0; k < p->n_inputs; k++) {
    const __m256i *halves = (const __m256i *)panel + 2 * k;
    const float *floats = (const float *)panel + k * PANEL;
    vec a = is_half ? load_halves(halves) : v_load(floats);
    vec b = is_half ? load_halves(halves + 1) : v_load(floats + LANES);
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

// --- int8 and int4: x as int8 with a scale per group, but for its outliers -------------------------------------------
//
// Activations have outliers, mostly in the same few columns, that leave few of the 127 steps to the rest of a group. As
// in LLM.int8() (Dettmers et al. 2022, section 3.2) they are not quantized but multiplied apart: of each row the
// largest element, while it is more than twice the average of the other groups' largest, and at most one for 64 inputs.

typedef struct {
  int32_t input, ints;  // its index k; four bytes, 1 at k mod 4 and else 0, which select one of four weights
  float value;
} Outlier;

typedef struct {
  long n_groups, max_outliers;
  int8_t *ints;         // (M, groups, G), 0 for outliers
  float *scales;        // (M, groups)
  float *sums;          // (M, groups) of the ints, times the scale
  int32_t *starts;      // (M, groups) of the ints, times -128 or -8: the weights' offset
  int32_t *n_outliers;  // (M,)
  Outlier *outliers;    // (M, max_outliers)
} QuantizedRows;

INLINE long count_groups(long n_inputs) { return (n_inputs + GROUP - 1) / GROUP; }
INLINE long max_outliers(long n_inputs) { return (n_inputs + 63) / 64; }

// The group of the largest element, by the largest of each group (n_groups,).
static long largest_group(const float *highest, long n_groups) {
  vec most = v_zero();
  FOR_LANES(n_groups) most = v_max(v_load_lanes(first_lanes(n_groups - k), highest + k), most);
  most = v_set(v_highest(most));
  FOR_LANES(n_groups) {
    lanes some = first_lanes(n_groups - k);
    some &= v_equal(v_load_lanes(some, highest + k), most);
    if (some) return k + __builtin_ctz(some);
  }
  return 0;
}

// Finds the outliers of a row and returns how many there are. highest (groups,): the largest element of each group, 0
// for groups that are not finite; taken (groups,): a bit for each outlier.
static long find_outliers(const float *x, long n_inputs, float *highest, uint32_t *taken, long n_groups,
                          Outlier *outliers) {
  float total = 0;
  long n = 0, most = max_outliers(n_inputs);
  for (long g = 0; g < n_groups; g++) total += highest[g];
  for (; n < most; n++) {
    long g = largest_group(highest, n_groups), at = g * GROUP;
    float largest = highest[g];
    if (largest < 1e-30f || !(largest * (n_groups - 1) > 2 * (total - largest))) break;
    lanes first = first_lanes(n_inputs - at) & ~taken[g];
    lanes second = first_lanes(n_inputs - at - LANES) & ~(taken[g] >> LANES);
    vec a = v_abs(v_load_lanes(first, x + at)), b = v_abs(v_load_lanes(second, x + at + LANES));
    long k = __builtin_ctz(v_equal(a, v_set(largest)) | (uint32_t)v_equal(b, v_set(largest)) << LANES);
    taken[g] |= 1u << k;
    outliers[n] = (Outlier){at + k, 1 << 8 * (k % 4), x[at + k]};
    highest[g] = v_highest(v_max(v_keep(first & ~taken[g], a), v_keep(second & ~(taken[g] >> LANES), b)));
    total += highest[g] - largest;
  }
  return n;
}

// With an infinity in a group the scale is infinite, infinities are ±127 and the others 0; with NaN the scale is NaN.
static void quantize_row(const float *x, long n_inputs, const QuantizedRows *q, long row, int offset) {
  float *scales = q->scales + row * q->n_groups, *sums = q->sums + row * q->n_groups;
  int32_t *starts = q->starts + row * q->n_groups;
  for (long g = 0; g < q->n_groups; g++) {
    long at = g * GROUP;
    vec a = v_load_lanes(first_lanes(n_inputs - at), x + at);
    vec b = v_load_lanes(first_lanes(n_inputs - at - LANES), x + at + LANES);
    scales[g] = v_is_nan(a, b) ? NAN : v_highest(v_max(v_abs(a), v_abs(b)));
    sums[g] = isfinite(scales[g]) ? scales[g] : 0;
    starts[g] = 0;
  }
  uint32_t *taken = (uint32_t *)starts;
  q->n_outliers[row] = find_outliers(x, n_inputs, sums, taken, q->n_groups, q->outliers + row * q->max_outliers);
  for (long g = 0; g < q->n_groups; g++) {
    long at = g * GROUP;
    vec a = v_load_lanes(first_lanes(n_inputs - at) & ~taken[g], x + at);
    vec b = v_load_lanes(first_lanes(n_inputs - at - LANES) & ~(taken[g] >> LANES), x + at + LANES);
    float highest = isfinite(scales[g]) ? sums[g] : scales[g];
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
    int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
    scales[g] = highest / 127;
    sums[g] = scales[g] * sum;
    starts[g] = -offset * sum;
  }
}

INLINE void prefetch_lines(const uint8_t *from, const int n) {
  for (int i = 0; i < n; i += 64) prefetch(from + i);
}

// Panel (K/4, 32, 4) of w + 128 as bytes, scales (groups, 32) in float16.
INLINE void int8_tile(const Product *p, const QuantizedRows *q, const uint8_t *w, const uint16_t *scales, long row,
                      long n, const int m) {
  const uint8_t *next = w + q->n_groups * GROUP * PANEL;  // panel
  vec low[TILE], high[TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (long g = 0; g < q->n_groups; g++) {
    const long of = row * q->n_groups + g;
    const int32_t *x = (const int32_t *)q->ints + of * (GROUP / 4);
    if (row) prefetch_lines(next + g * GROUP * PANEL, GROUP * PANEL);  // this panel was read by the first rows
    __m512i a[TILE], b[TILE];
    UNROLL for (int i = 0; i < m; i++) a[i] = b[i] = _mm512_set1_epi32(q->starts[of + i * q->n_groups]);
    for (int k = 0; k < GROUP / 4; k++) {
      const uint8_t *at = w + (g * (GROUP / 4) + k) * 4 * PANEL;
      __m512i c = _mm512_loadu_si512(at), d = _mm512_loadu_si512(at + 64);
      UNROLL for (int i = 0; i < m; i++) {
        __m512i four = _mm512_set1_epi32(x[i * q->n_groups * (GROUP / 4) + k]);
        a[i] = _mm512_dpbusd_epi32(a[i], c, four);
        b[i] = _mm512_dpbusd_epi32(b[i], d, four);
      }
    }
    vec first = load_halves(scales + g * PANEL), second = load_halves(scales + g * PANEL + LANES);
    UNROLL for (int i = 0; i < m; i++) {
      vec by = v_set(q->scales[of + i * q->n_groups]);
      low[i] = v_fma(v_mul(_mm512_cvtepi32_ps(a[i]), by), first, low[i]);
      high[i] = v_fma(v_mul(_mm512_cvtepi32_ps(b[i]), by), second, high[i]);
    }
  }
  prefetch_lines(next, 2048);
  UNROLL for (int i = 0; i < m; i++) {
    const Outlier *x = q->outliers + (row + i) * q->max_outliers;
    for (const Outlier *end = x + q->n_outliers[row + i]; x < end; x++) {
      const uint8_t *at = w + (long)(x->input / 4) * 4 * PANEL;
      const uint16_t *scale = scales + (long)(x->input / GROUP) * PANEL;
      __m512i one = _mm512_set1_epi32(x->ints), start = _mm512_set1_epi32(-128);
      __m512i a = _mm512_dpbusd_epi32(start, _mm512_loadu_si512(at), one);
      __m512i b = _mm512_dpbusd_epi32(start, _mm512_loadu_si512(at + 64), one);
      vec by = v_set(x->value);
      low[i] = v_fma(v_mul(_mm512_cvtepi32_ps(a), by), load_halves(scale), low[i]);
      high[i] = v_fma(v_mul(_mm512_cvtepi32_ps(b), by), load_halves(scale + LANES), high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

// Panel (K/4, 16, 4): the low half of a byte is for the first 16 outputs, the high half for the others; scales and zero
// points (groups, 2, 32) in float16.
INLINE void int4_tile(const Product *p, const QuantizedRows *q, const uint8_t *w, const uint16_t *scales, long row,
                      long n, const int m) {
  const uint8_t *next = w + q->n_groups * GROUP * PANEL / 2;
  vec low[TILE], high[TILE];
  const __m512i half = _mm512_set1_epi8(15);
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (long g = 0; g < q->n_groups; g++) {
    const long of = row * q->n_groups + g;
    const int32_t *x = (const int32_t *)q->ints + of * (GROUP / 4);
    if (row) prefetch_lines(next + g * GROUP * PANEL / 2, GROUP * PANEL / 2);
    __m512i a[TILE], b[TILE];
    UNROLL for (int i = 0; i < m; i++) a[i] = b[i] = _mm512_set1_epi32(q->starts[of + i * q->n_groups]);
    for (int k = 0; k < GROUP / 4; k++) {
      __m512i both = _mm512_loadu_si512(w + (g * (GROUP / 4) + k) * 2 * PANEL);
      __m512i c = _mm512_and_si512(both, half), d = _mm512_and_si512(_mm512_srli_epi16(both, 4), half);
      UNROLL for (int i = 0; i < m; i++) {
        __m512i four = _mm512_set1_epi32(x[i * q->n_groups * (GROUP / 4) + k]);
        a[i] = _mm512_dpbusd_epi32(a[i], c, four);
        b[i] = _mm512_dpbusd_epi32(b[i], d, four);
      }
    }
    const uint16_t *of_group = scales + g * 2 * PANEL;
    vec first = load_halves(of_group), second = load_halves(of_group + 16);
    vec zero = load_halves(of_group + 32), zero2 = load_halves(of_group + 48);
    UNROLL for (int i = 0; i < m; i++) {
      vec by = v_set(q->scales[of + i * q->n_groups]), sum = v_set(q->sums[of + i * q->n_groups]);
      low[i] = v_fma(v_mul(_mm512_cvtepi32_ps(a[i]), by), first, low[i]);
      high[i] = v_fma(v_mul(_mm512_cvtepi32_ps(b[i]), by), second, high[i]);
      low[i] = v_fma(sum, zero, low[i]);
      high[i] = v_fma(sum, zero2, high[i]);
    }
  }
  prefetch_lines(next, 2048);
  UNROLL for (int i = 0; i < m; i++) {
    const Outlier *x = q->outliers + (row + i) * q->max_outliers;
    for (const Outlier *end = x + q->n_outliers[row + i]; x < end; x++) {
      __m512i both = _mm512_loadu_si512(w + (long)(x->input / 4) * 2 * PANEL);
      __m512i one = _mm512_set1_epi32(x->ints), start = _mm512_set1_epi32(-8);
      __m512i a = _mm512_dpbusd_epi32(start, _mm512_and_si512(both, half), one);
      __m512i b = _mm512_dpbusd_epi32(start, _mm512_and_si512(_mm512_srli_epi16(both, 4), half), one);
      const uint16_t *scale = scales + (long)(x->input / GROUP) * 2 * PANEL;
      vec by = v_set(x->value);
      low[i] = v_fma(v_fma(_mm512_cvtepi32_ps(a), load_halves(scale), load_halves(scale + 32)), by, low[i]);
      high[i] = v_fma(v_fma(_mm512_cvtepi32_ps(b), load_halves(scale + 16), load_halves(scale + 48)), by, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

// --- a product -------------------------------------------------------------------------------------------------------

// Panels are scheduled dynamically, a few at a time, so that a preempted thread does not delay the others for long.
// CALL(M) multiplies M rows, from `row` on, by the panel of the outputs from n on.
#define FOR_PANELS(CALL, MOST)                           \
  _Pragma("omp for schedule(dynamic, few)")              \
  for (long j = 0; j < n_panels; j++) {                  \
    long n = j * PANEL;                                  \
    for (long row = 0; row < p.n_rows; row += MOST) {    \
      switch (min_long(p.n_rows - row, MOST)) {          \
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
  long ints = count_groups(a->n_inputs) * (GROUP + 12) + 4 + max_outliers(a->n_inputs) * sizeof(Outlier);
  return n_rows * (a->kind == BFLOAT16 ? (a->n_inputs + 1) / 2 * 4 : a->kind >= INT8 ? ints : 0);
}

static void multiply_floats(Product p, const PackedMatrix *a, const float *x, long n_panels, long few) {
  if (a->kind == FLOAT32) {
#define CALL(M) float_tile(&p, x + row * p.n_inputs, (const float *)a->weight + n * p.n_inputs, row, n, M, 0)
    FOR_PANELS(CALL, TILE)
#undef CALL
  } else {
#define CALL(M) float_tile(&p, x + row * p.n_inputs, (const uint16_t *)a->weight + n * p.n_inputs, row, n, M, 1)
    FOR_PANELS(CALL, TILE)
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
  FOR_PANELS(CALL, TILE)
#undef CALL
}

static void multiply_ints(Product p, const PackedMatrix *a, const float *x, char *scratch, long n_panels, long few) {
  long groups = count_groups(p.n_inputs), all = p.n_rows * groups;
  QuantizedRows q = {groups, max_outliers(p.n_inputs), (int8_t *)scratch, (float *)(scratch + all * GROUP)};
  q.sums = q.scales + all;
  q.starts = (int32_t *)(q.sums + all);
  q.n_outliers = q.starts + all;
  q.outliers = (Outlier *)(q.n_outliers + p.n_rows);
#pragma omp for
  for (long row = 0; row < p.n_rows; row++)
    quantize_row(x + row * p.n_inputs, p.n_inputs, &q, row, a->kind == INT8 ? 128 : 8);
  const uint8_t *w = a->weight;
  const uint16_t *scales = a->scales;
  if (a->kind == INT8) {
#define CALL(M) int8_tile(&p, &q, w + n * groups * GROUP, scales + n * groups, row, n, M)
    FOR_PANELS(CALL, INT_TILE)
#undef CALL
  } else {
#define CALL(M) int4_tile(&p, &q, w + n * groups * GROUP / 2, scales + n * groups * 2, row, n, M)
    FOR_PANELS(CALL, INT_TILE)
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
