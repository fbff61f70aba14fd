// Quantization of rows of activations, which finds their outliers first.

#include "quantize.h"

// The group of the largest element, by the largest of each group (n_groups,).
static int64_t largest_group(const float *highest, int64_t n_groups) {
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
static int64_t find_outliers(const float *x, int64_t n_inputs, float *highest, uint32_t *taken, int64_t n_groups,
                          Outlier *outliers) {
  float total = 0;
  int64_t n = 0, most = max_outliers(n_inputs);
  for (int64_t g = 0; g < n_groups; g++) total += highest[g];
  for (; n < most; n++) {
    int64_t g = largest_group(highest, n_groups), at = g * GROUP;
    float largest = highest[g];
    if (largest < 1e-30f || !(largest * (n_groups - 1) > 2 * (total - largest))) break;
    lanes first = first_lanes(n_inputs - at) & ~taken[g];
    lanes second = first_lanes(n_inputs - at - LANES) & ~(taken[g] >> LANES);
    vec a = v_abs(v_load_lanes(first, x + at)), b = v_abs(v_load_lanes(second, x + at + LANES));
    int64_t k = __builtin_ctz(v_equal(a, v_set(largest)) | (uint32_t)v_equal(b, v_set(largest)) << LANES);
    taken[g] |= 1u << k;
    outliers[n] = (Outlier){at + k, 1 << 8 * (k % 4), x[at + k]};
    highest[g] = v_highest(v_max(v_keep(first & ~taken[g], a), v_keep(second & ~(taken[g] >> LANES), b)));
    total += highest[g] - largest;
  }
  return n;
}

// With an infinity in a group the scale is infinite, infinities are ±127 and the others 0; with NaN the scale is NaN.
void quantize_row(const float *x, int64_t n_inputs, const QuantizedRows *q, int64_t row, int offset) {
  float *scales = q->scales + row * q->n_groups, *sums = q->sums + row * q->n_groups;
  int32_t *starts = q->starts + row * q->n_groups;
  for (int64_t g = 0; g < q->n_groups; g++) {
    int64_t at = g * GROUP;
    vec a = v_load_lanes(first_lanes(n_inputs - at), x + at);
    vec b = v_load_lanes(first_lanes(n_inputs - at - LANES), x + at + LANES);
    scales[g] = v_is_nan(a, b) ? NAN : v_highest(v_max(v_abs(a), v_abs(b)));
    sums[g] = isfinite(scales[g]) ? scales[g] : 0;
    starts[g] = 0;
  }
  uint32_t *taken = (uint32_t *)starts;
  q->n_outliers[row] = find_outliers(x, n_inputs, sums, taken, q->n_groups, q->outliers + row * q->max_outliers);
  for (int64_t g = 0; g < q->n_groups; g++) {
    int64_t at = g * GROUP;
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
    int8_t *ints = q->ints + (row * q->n_groups + g) * GROUP;
    int32_t sum = v_store_bytes(ints, v_mul(a, steps)) + v_store_bytes(ints + LANES, v_mul(b, steps));
    scales[g] = highest / 127;
    sums[g] = scales[g] * sum;
    starts[g] = -offset * sum;
  }
}
