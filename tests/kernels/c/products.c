// Products with packed weights of every precision. Panels of 32 outputs, input by input; see linear.c.
//
//     M rows, N outputs, K inputs

#include "check.h"

#define PANEL 32
#define GROUP 32

static const char *const NAMES[] = {"float32", "float16", "bfloat16", "int8", "int4"};

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

static float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// IEEE half precision, for numbers that are neither denormal nor too large there: round to nearest, ties to even.
static uint16_t to_half(float x) {
  uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest < 0x38800000) return (uint16_t)sign;
  rest += 0xfff + (rest >> 13 & 1);
  return (uint16_t)(sign | ((rest - 0x38000000) >> 13));
}

static float from_half(uint16_t half) {
  uint32_t rest = half & 0x7fff;
  return of_bits((uint32_t)(half & 0x8000) << 16 | (rest ? (rest << 13) + 0x38000000 : 0));
}

static uint16_t to_bfloat16(float x) {
  uint32_t bits = bits_of(x);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The place of weight (n, k) in panels with `size` inputs adjacent, of K inputs in all.
static int64_t place(int64_t n, int64_t k, int64_t n_inputs, int64_t size) {
  return (n / PANEL * (n_inputs / size) + k / size) * PANEL * size + n % PANEL * size + k % size;
}

// The largest weight of a group, and the least.
static void range(const float *w, int64_t n, float *least, float *most) {
  *least = *most = w[0];
  for (int64_t i = 1; i < n; i++) *least = fminf(*least, w[i]), *most = fmaxf(*most, w[i]);
}

static void pack_ints(int64_t kind, const float *weight, int64_t n, int64_t n_inputs, uint8_t *to, uint16_t *scales,
                      double *rounded) {
  int64_t groups = (n_inputs + GROUP - 1) / GROUP, padded = groups * GROUP;
  for (int64_t g = 0; g < groups; g++) {
    int64_t begin = g * GROUP, end = begin + GROUP < n_inputs ? begin + GROUP : n_inputs;
    float least, most;
    range(weight + n * n_inputs + begin, end - begin, &least, &most);
    float highest = fmaxf(most, -least);
    uint16_t scale = to_half(kind == INT8 ? highest / 127 : (most - least) / 15), zero = to_half((most + least) / 2);
    float step = from_half(scale), middle = from_half(zero);
    uint16_t *of_group = scales + (n / PANEL * groups + g) * PANEL * (kind == INT8 ? 1 : 2) + n % PANEL;
    of_group[0] = scale;
    if (kind == INT4) of_group[PANEL] = zero;
    for (int64_t k = begin; k < end; k++) {
      float w = weight[n * n_inputs + k];
      int q = (int)lrintf(kind == INT8 ? w / step : (w - middle) / step);
      q = kind == INT8 ? (q > 127 ? 127 : q < -127 ? -127 : q) : (q > 7 ? 7 : q < -8 ? -8 : q);
      if (rounded) rounded[n * n_inputs + k] = q * (double)step + (kind == INT8 ? 0 : middle);
      if (kind == INT8) {
        to[place(n, k, padded, 4)] = (uint8_t)(q + 128);
      } else {  // output n in the low half of a byte, n + 16 in the high half
        int64_t at = (n / PANEL * (padded / 4) + k / 4) * 64 + n % 16 * 4 + k % 4;
        to[at] |= (uint8_t)((q + 8) << (n % PANEL < 16 ? 0 : 4));
      }
    }
  }
}

PackedMatrix pack(int64_t kind, const float *weight, int64_t n_outputs, int64_t n_inputs, const float *bias,
                  double *rounded) {
  int64_t panels = (n_outputs + PANEL - 1) / PANEL, groups = (n_inputs + GROUP - 1) / GROUP;
  char *memory = zeros(panels * PANEL * (groups * GROUP) * sizeof(float));
  uint16_t *scales = zeros(panels * PANEL * groups * 2 * sizeof(uint16_t));
  if (kind >= INT8) memset(memory, kind == INT8 ? 128 : 0, panels * PANEL * groups * GROUP);  // 0 in the padding
  for (int64_t n = 0; n < n_outputs; n++) {
    if (kind >= INT8) pack_ints(kind, weight, n, n_inputs, (uint8_t *)memory, scales, rounded);
    for (int64_t k = 0; k < n_inputs && kind < INT8; k++) {
      float w = weight[n * n_inputs + k];
      double value = w;
      if (kind == FLOAT32) ((float *)memory)[place(n, k, n_inputs, 1)] = w;
      if (kind == FLOAT16) value = from_half(((uint16_t *)memory)[place(n, k, n_inputs, 1)] = to_half(w));
      if (kind == BFLOAT16) {
        uint16_t *at = (uint16_t *)memory + place(n, k, (n_inputs + 1) / 2 * 2, 2);
        value = of_bits((uint32_t)(*at = to_bfloat16(w)) << 16);
      }
      if (rounded) rounded[n * n_inputs + k] = value;
    }
  }
  return (PackedMatrix){
      .kind = kind, .n_inputs = n_inputs, .n_outputs = n_outputs, .weight = memory, .scales = scales, .bias = bias};
}

static void check_product(int64_t kind, int64_t m, int64_t n, int64_t k, const float *x, const char *how,
                          double tolerance) {
  float *weight = random_floats(n * k, 0.5), *bias = random_floats(n, 1), *y = zeros(m * n * sizeof(float));
  double *rounded = zeros(n * k * sizeof(double)), *expected = zeros(m * n * sizeof(double));
  PackedMatrix matrix = pack(kind, weight, n, k, bias, rounded);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      double sum = bias[j];
      for (int64_t l = 0; l < k; l++) sum += (double)x[i * k + l] * rounded[j * k + l];
      expected[i * n + j] = sum;
    }
  char what[100];
  snprintf(what, sizeof(what), "%s product, %d rows, %d -> %d%s", NAMES[kind], (int)m, (int)k, (int)n, how);
  expect(what, packed_linear(&matrix, x, m, y, threads));
  compare(what, y, expected, m * n, tolerance);
  for (int64_t i = 1; i < m; i++) {  // a row's result does not depend on the others
    float *alone = zeros(n * sizeof(float));
    packed_linear(&matrix, x + i * k, 1, alone, threads);
    if (memcmp(alone, y + i * n, n * sizeof(float))) {
      expect("a row alone has bitwise the same result", 0);
      return;
    }
  }
}

// Numbers that int8 with a scale for each group, and bfloat16 too, represent exactly: whole multiples of 1/64, of which
// each group has the largest, 127/64.
static float *exact_floats(int64_t m, int64_t k) {
  float *x = zeros(m * k * sizeof(float));
  for (int64_t i = 0; i < m * k; i++)
    x[i] = (float)(i % k % GROUP == 0 ? 127 : (int)(uniform() * 127)) / 64;
  return x;
}

void check_products(void) {
  static const int64_t shapes[][3] = {{1, 70, 96}, {3, 64, 128}, {8, 33, 100}, {13, 96, 130}, {40, 40, 256}};
  for (int i = 0; i < 5; i++) {
    int64_t m = shapes[i][0], n = shapes[i][1], k = shapes[i][2];
    for (int64_t kind = FLOAT32; kind <= INT4; kind++) {
      check_product(kind, m, n, k, exact_floats(m, k), ", exact inputs", 1e-5);
      float *x = random_floats(m * k, 2);
      x[k / 2] = 40;  // an outlier
      check_product(kind, m, n, k, x, "", kind <= FLOAT16 ? 1e-5 : kind == BFLOAT16 ? 5e-3 : 1e-2);
    }
  }
}
