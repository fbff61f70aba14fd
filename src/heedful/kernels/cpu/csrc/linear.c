// Products of rows with a packed weight: float32, float16, bfloat16, int8 and int4.
//
// A weight (N, K) is packed into panels of 32 outputs, input by input: a thread reads one stream from memory, each lane
// of a vector is one output, and there are no sums across lanes. An output is summed over the inputs in their order for
// any number of rows, so that a row's result is bitwise independent of the rest of the batch.
//
//     N outputs, K inputs, M rows, G inputs in a group

#include "linear.h"
#include "quantize.h"

#define PANEL 32  // outputs in a panel
#define MANY_ROWS 48        // rows for each thread from which on rows are divided among the threads, not panels
#define CHUNK_BYTES 393216  // of the rows that are multiplied by all panels in turn: they stay in the L2 cache

typedef struct {
  int64_t n_rows, n_inputs, n_outputs;
  const float *bias;  // (N,) or NULL
  float *y;           // (M, N)
} Product;

INLINE void store_outputs(const Product *p, int64_t row, int64_t n, vec low, vec high) {
  lanes first = first_lanes(p->n_outputs - n), second = first_lanes(p->n_outputs - n - LANES);
  if (p->bias) {
    low = v_add(low, v_load_lanes(first, p->bias + n));
    high = v_add(high, v_load_lanes(second, p->bias + n + LANES));
  }
  float *y = p->y + row * p->n_outputs + n;
  v_store_lanes(y, first, low);
  v_store_lanes(y + LANES, second, high);
}

// --- float32 and float16 (converted in registers): panel (K, 32) -----------------------------------------------------

INLINE void float_tile(const Product *p, const float *x, const void *panel, int64_t row, int64_t n, const int m,
                       const int is_half) {
  vec low[FLOAT_TILE], high[FLOAT_TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (int64_t k = 0; k < p->n_inputs; k++) {
    const uint16_t *halves = (const uint16_t *)panel + k * PANEL;
    const float *floats = (const float *)panel + k * PANEL;
    vec a = is_half ? v_load_halves(halves) : v_load(floats);
    vec b = is_half ? v_load_halves(halves + LANES) : v_load(floats + LANES);
    UNROLL for (int i = 0; i < m; i++) {
      vec at = v_set(x[i * p->n_inputs + k]);
      low[i] = v_fma(a, at, low[i]);
      high[i] = v_fma(b, at, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

// --- bfloat16: panel (K/2, 32, 2) ------------------------------------------------------------------------------------
//
// With an instruction for it the products are of pairs, and x (M, K/2) is rounded to pairs of bfloat16; without one, x
// is float32 and weights are converted in registers.

#if BFLOAT16_DOT
typedef int32_t BFloat16Input;  // a pair

INLINE void bfloat16_tile(const Product *p, const int32_t *x, const int32_t *w, int64_t row, int64_t n, const int m) {
  vec low[FLOAT_TILE], high[FLOAT_TILE];
  int64_t pairs = (p->n_inputs + 1) / 2;
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (int64_t k = 0; k < pairs; k++, w += PANEL) {
    ivec a = i_load(w), b = i_load(w + LANES);
    UNROLL for (int i = 0; i < m; i++) {
      ivec at = i_set(x[i * pairs + k]);
      low[i] = v_dot_pairs(low[i], a, at);
      high[i] = v_dot_pairs(high[i], b, at);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

// The inputs of the tiles, rounded into scratch memory.
static const BFloat16Input *bfloat16_inputs(const Product *p, const float *x, char *scratch) {
  int64_t pairs = (p->n_inputs + 1) / 2;
  FOR_ROWS(row, p->n_rows) {
    const float *from = x + row * p->n_inputs;
    int16_t *to = (int16_t *)((int32_t *)scratch + row * pairs);
    FOR_LANES(p->n_inputs)
      v_store_bfloat16(to + k, first_lanes(round_up(p->n_inputs - k, 2)),
                       v_load_lanes(first_lanes(p->n_inputs - k), from + k));
  }
  wait_for_rows(p->n_rows);
  return (const int32_t *)scratch;
}
#else
typedef float BFloat16Input;

INLINE void bfloat16_tile(const Product *p, const float *x, const int32_t *w, int64_t row, int64_t n, const int m) {
  vec low[FLOAT_TILE], high[FLOAT_TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (int64_t k = 0; k < p->n_inputs; k += 2, w += PANEL) {
    ivec a = i_load(w), b = i_load(w + LANES);
    const int is_pair = k + 1 < p->n_inputs;
    UNROLL for (int i = 0; i < m; i++) {
      vec at = v_set(x[i * p->n_inputs + k]);
      low[i] = v_fma(v_first_of_pairs(a), at, low[i]);
      high[i] = v_fma(v_first_of_pairs(b), at, high[i]);
    }
    UNROLL for (int i = 0; is_pair && i < m; i++) {
      vec at = v_set(x[i * p->n_inputs + k + 1]);
      low[i] = v_fma(v_second_of_pairs(a), at, low[i]);
      high[i] = v_fma(v_second_of_pairs(b), at, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

static const BFloat16Input *bfloat16_inputs(const Product *p, const float *x, char *scratch) { return x; }
#endif

// --- int8 and int4: x as int8, but for its outliers (quantize.h) -----------------------------------------------------

INLINE void prefetch_lines(const uint8_t *from, const int n) {
  for (int i = 0; i < n; i += 64) prefetch(from + i);
}

// Panel (K/4, 32, 4) of w + 128 as bytes, scales (groups, 32) in float16.
INLINE void int8_tile(const Product *p, const QuantizedRows *q, const uint8_t *w, const uint16_t *scales, int64_t row,
                      int64_t n, int ahead, const int m) {
  const uint8_t *next = w + q->n_groups * GROUP * PANEL;  // panel
  vec low[INT_TILE], high[INT_TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (int64_t g = 0; g < q->n_groups; g++) {
    const int64_t of = row * q->n_groups + g;
    const int32_t *x = (const int32_t *)q->ints + of * (GROUP / 4);
    if (ahead) prefetch_lines(next + g * GROUP * PANEL, GROUP * PANEL);  // this panel was read by the first rows
    ivec a[INT_TILE], b[INT_TILE];
    UNROLL for (int i = 0; i < m; i++) a[i] = b[i] = i_set(q->starts[of + i * q->n_groups]);
    for (int k = 0; k < GROUP / 4; k++) {
      const uint8_t *at = w + (g * (GROUP / 4) + k) * 4 * PANEL;
      ivec c = i_load(at), d = i_load(at + 64);
      UNROLL for (int i = 0; i < m; i++) {
        ivec four = i_set(x[i * q->n_groups * (GROUP / 4) + k]);
        a[i] = i_dot_bytes(a[i], c, four);
        b[i] = i_dot_bytes(b[i], d, four);
      }
    }
    vec first = v_load_halves(scales + g * PANEL), second = v_load_halves(scales + g * PANEL + LANES);
    UNROLL for (int i = 0; i < m; i++) {
      vec by = v_set(q->scales[of + i * q->n_groups]);
      low[i] = v_fma(v_mul(i_to_float(a[i]), by), first, low[i]);
      high[i] = v_fma(v_mul(i_to_float(b[i]), by), second, high[i]);
    }
  }
  prefetch_lines(next, 2048);
  UNROLL for (int i = 0; i < m; i++) {
    const Outlier *x = q->outliers + (row + i) * q->max_outliers;
    for (const Outlier *end = x + q->n_outliers[row + i]; x < end; x++) {
      const uint8_t *at = w + (int64_t)(x->input / 4) * 4 * PANEL;
      const uint16_t *scale = scales + (int64_t)(x->input / GROUP) * PANEL;
      ivec one = i_set(x->ints), start = i_set(-BYTE_OFFSET);
      ivec a = i_dot_bytes(start, i_load(at), one);
      ivec b = i_dot_bytes(start, i_load(at + 64), one);
      vec by = v_set(x->value);
      low[i] = v_fma(v_mul(i_to_float(a), by), v_load_halves(scale), low[i]);
      high[i] = v_fma(v_mul(i_to_float(b), by), v_load_halves(scale + LANES), high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

// Panel (K/4, 16, 4): the low half of a byte is for the first 16 outputs, the high half for the others; scales and zero
// points (groups, 2, 32) in float16.
INLINE void int4_tile(const Product *p, const QuantizedRows *q, const uint8_t *w, const uint16_t *scales, int64_t row,
                      int64_t n, int ahead, const int m) {
  const uint8_t *next = w + q->n_groups * GROUP * PANEL / 2;
  vec low[INT_TILE], high[INT_TILE];
  UNROLL for (int i = 0; i < m; i++) low[i] = high[i] = v_zero();
  for (int64_t g = 0; g < q->n_groups; g++) {
    const int64_t of = row * q->n_groups + g;
    const int32_t *x = (const int32_t *)q->ints + of * (GROUP / 4);
    if (ahead) prefetch_lines(next + g * GROUP * PANEL / 2, GROUP * PANEL / 2);
    ivec a[INT_TILE], b[INT_TILE];
    UNROLL for (int i = 0; i < m; i++) a[i] = b[i] = i_set(q->starts[of + i * q->n_groups]);
    for (int k = 0; k < GROUP / 4; k++) {
      ivec both = i_load(w + (g * (GROUP / 4) + k) * 2 * PANEL);
      ivec c = i_low_nibbles(both), d = i_high_nibbles(both);
      UNROLL for (int i = 0; i < m; i++) {
        ivec four = i_set(x[i * q->n_groups * (GROUP / 4) + k]);
        a[i] = i_dot_nibbles(a[i], c, four);
        b[i] = i_dot_nibbles(b[i], d, four);
      }
    }
    const uint16_t *of_group = scales + g * 2 * PANEL;
    vec first = v_load_halves(of_group), second = v_load_halves(of_group + 16);
    vec zero = v_load_halves(of_group + 32), zero2 = v_load_halves(of_group + 48);
    UNROLL for (int i = 0; i < m; i++) {
      vec by = v_set(q->scales[of + i * q->n_groups]), sum = v_set(q->sums[of + i * q->n_groups]);
      low[i] = v_fma(v_mul(i_to_float(a[i]), by), first, low[i]);
      high[i] = v_fma(v_mul(i_to_float(b[i]), by), second, high[i]);
      low[i] = v_fma(sum, zero, low[i]);
      high[i] = v_fma(sum, zero2, high[i]);
    }
  }
  prefetch_lines(next, 2048);
  UNROLL for (int i = 0; i < m; i++) {
    const Outlier *x = q->outliers + (row + i) * q->max_outliers;
    for (const Outlier *end = x + q->n_outliers[row + i]; x < end; x++) {
      ivec both = i_load(w + (int64_t)(x->input / 4) * 2 * PANEL);
      ivec one = i_set(x->ints), start = i_set(-8);
      ivec a = i_dot_nibbles(start, i_low_nibbles(both), one);
      ivec b = i_dot_nibbles(start, i_high_nibbles(both), one);
      const uint16_t *scale = scales + (int64_t)(x->input / GROUP) * 2 * PANEL;
      vec by = v_set(x->value);
      low[i] = v_fma(v_fma(i_to_float(a), v_load_halves(scale), v_load_halves(scale + 32)), by, low[i]);
      high[i] = v_fma(v_fma(i_to_float(b), v_load_halves(scale + 16), v_load_halves(scale + 48)), by, high[i]);
    }
  }
  UNROLL for (int i = 0; i < m; i++) store_outputs(p, row + i, n, low[i], high[i]);
}

// --- a product -------------------------------------------------------------------------------------------------------

// The inputs of a product as its tiles read them.
typedef struct {
  const PackedMatrix *matrix;
  Product product;
  const float *x;
  const BFloat16Input *narrow;
  QuantizedRows quantized;
} Operands;

// CALL(M) multiplies M rows, from `row` on, by the panel of the outputs from n on.
#define CASE(CALL, M, MOST) if (M <= MOST) CALL(M)
#define FOR_TILES(CALL, MOST)                                         \
  for (int64_t n = first * PANEL; n < last * PANEL; n += PANEL)       \
    for (int64_t row = begin; row < end; row += MOST) {               \
      switch (min_long(end - row, MOST)) {                            \
        case 1: CASE(CALL, 1, MOST); break;                           \
        case 2: CASE(CALL, 2, MOST); break;                           \
        case 3: CASE(CALL, 3, MOST); break;                           \
        case 4: CASE(CALL, 4, MOST); break;                           \
        case 5: CASE(CALL, 5, MOST); break;                           \
        case 6: CASE(CALL, 6, MOST); break;                           \
        case 7: CASE(CALL, 7, MOST); break;                           \
        default: CASE(CALL, 8, MOST);                                 \
      }                                                               \
    }

// Rows begin to end times the panels first to last.
static void multiply_range(const Operands *o, int64_t begin, int64_t end, int64_t first, int64_t last) {
  const Product *p = &o->product;
  const QuantizedRows *q = &o->quantized;
  const uint8_t *w = o->matrix->weight;
  const uint16_t *scales = o->matrix->scales;
  int64_t pairs = (p->n_inputs + 1) / 2;
  switch (o->matrix->kind) {
#define CALL(M) float_tile(p, o->x + row * p->n_inputs, (const float *)w + n * p->n_inputs, row, n, M, 0)
    case FLOAT32: FOR_TILES(CALL, FLOAT_TILE) break;
#undef CALL
#define CALL(M) float_tile(p, o->x + row * p->n_inputs, (const uint16_t *)w + n * p->n_inputs, row, n, M, 1)
    case FLOAT16: FOR_TILES(CALL, FLOAT_TILE) break;
#undef CALL
#define CALL(M) \
  bfloat16_tile(p, o->narrow + row * (BFLOAT16_DOT ? pairs : p->n_inputs), (const int32_t *)w + n * pairs, row, n, M)
    case BFLOAT16: FOR_TILES(CALL, FLOAT_TILE) break;
#undef CALL
#define CALL(M) \
  int8_tile(p, q, w + n * q->n_groups * GROUP, scales + n * q->n_groups, row, n, row == begin + INT_TILE, M)
    case INT8: FOR_TILES(CALL, INT_TILE) break;
#undef CALL
#define CALL(M) \
  int4_tile(p, q, w + n * q->n_groups * GROUP / 2, scales + n * q->n_groups * 2, row, n, row == begin + INT_TILE, M)
    case INT4: FOR_TILES(CALL, INT_TILE) break;
#undef CALL
  }
}

INLINE int64_t scratch_of_rows(const PackedMatrix *a, int64_t n_rows) {
  int64_t ints = count_groups(a->n_inputs) * (GROUP + 12) + 4 + max_outliers(a->n_inputs) * sizeof(Outlier);
  return n_rows * (a->kind == BFLOAT16 ? (a->n_inputs + 1) / 2 * 4 : a->kind >= INT8 ? ints : 0);
}

int64_t packed_scratch(const PackedMatrix *a, int64_t n_rows, int threads) {
  return scratch_of_rows(a, n_rows) * (n_rows == 1 ? threads : 1);
}

// Rounds x (M, K) into scratch memory, where the tiles want it.
static Operands round_inputs(const PackedMatrix *a, Product p, const float *x, char *scratch) {
  Operands o = {a, p, x};
  if (p.n_rows == 1) scratch += omp_get_thread_num() * scratch_of_rows(a, 1);
  if (a->kind == BFLOAT16) o.narrow = bfloat16_inputs(&p, x, scratch);
  if (a->kind < INT8) return o;
  int64_t groups = count_groups(p.n_inputs), all = p.n_rows * groups;
  QuantizedRows q = {groups, max_outliers(p.n_inputs), (int8_t *)scratch, (float *)(scratch + all * GROUP)};
  q.sums = q.scales + all;
  q.starts = (int32_t *)(q.sums + all);
  q.n_outliers = q.starts + all;
  q.outliers = (Outlier *)(q.n_outliers + p.n_rows);
  FOR_ROWS(row, p.n_rows)
    quantize_row(x + row * p.n_inputs, p.n_inputs, &q, row, a->kind == INT8 ? BYTE_OFFSET : 8);
  wait_for_rows(p.n_rows);
  o.quantized = q;
  return o;
}

// A few rows: threads take panels, about 64 kB of weights at a time, so that a preempted thread does not delay the
// others for long. Many rows: each thread has its rows, as in the other loops over rows, so that what it has written is
// still in its own cache.
void multiply_packed(const PackedMatrix *a, const float *x, int64_t n_rows, float *y, char *scratch, int threads) {
  static const int64_t bits[] = {32, 16, 16, 8, 4}, input_bytes[] = {4, 4, BFLOAT16_DOT ? 2 : 4, 1, 1};
  Operands o = round_inputs(a, (Product){n_rows, a->n_inputs, a->n_outputs, a->bias, y}, x, scratch);
  int64_t n_panels = (a->n_outputs + PANEL - 1) / PANEL;
  if (n_rows < MANY_ROWS * threads) {
    int64_t few = 1 + 65536 * 8 / (a->n_inputs * PANEL * bits[a->kind]);
    few = max_long(1, min_long(few, n_panels / (2 * threads)));
#pragma omp for schedule(dynamic)
    for (int64_t j = 0; j < n_panels; j += few) multiply_range(&o, 0, n_rows, j, min_long(j + few, n_panels));
    return;
  }
  int64_t chunk = max_long(24, CHUNK_BYTES / (a->n_inputs * input_bytes[a->kind]) / 24 * 24);
#pragma omp for schedule(static)
  for (int64_t t = 0; t < threads; t++) {
    int64_t share = n_rows / threads, rest = n_rows % threads, begin = t * share + min_long(t, rest);
    int64_t end = begin + share + (t < rest);
    for (; begin < end; begin += chunk) multiply_range(&o, begin, min_long(begin + chunk, end), 0, n_panels);
  }
}

// Returns 0 if memory is exhausted.
EXPORT int packed_linear(const PackedMatrix *a, const float *x, int64_t n_rows, float *y, int threads) {
  char *scratch = malloc(packed_scratch(a, n_rows, threads) + 1);
  if (!scratch) return 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  multiply_packed(a, x, n_rows, y, scratch, threads);
  free(scratch);
  return 1;
}
