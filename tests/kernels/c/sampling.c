// Argmax, top-p and sums of probabilities over rows of logits.

#include "check.h"

enum { ROWS = 3, N = 1000, PAGE = 256 };

static const float *sorted_by;

static int descending(const void *a, const void *b) {  // ties by ascending index
  int64_t i = *(const int64_t *)a, j = *(const int64_t *)b;
  return sorted_by[i] != sorted_by[j] ? (sorted_by[i] < sorted_by[j] ? 1 : -1) : (i > j) - (i < j);
}

// The logits that top-p keeps: the fewest of the greatest whose probabilities reach it.
static void keep_top(const float *x, double inverse_temperature, double top_p, uint8_t *kept, double *p) {
  int64_t order[N];
  double total = 0, reached = 0;
  for (int64_t i = 0; i < N; i++) order[i] = i, kept[i] = 0;
  sorted_by = x;
  qsort(order, N, sizeof(int64_t), descending);
  for (int64_t i = 0; i < N; i++) total += p[i] = exp((x[i] - x[order[0]]) * inverse_temperature);
  for (int64_t i = 0; i < N && (i == 0 || reached < top_p * total); i++) {
    kept[order[i]] = 1;
    reached += p[order[i]];
  }
}

static void check_top_p(const float *x, const float *maxima, float inverse_temperature, double top_p) {
  float cutoffs[ROWS], masses[ROWS * 4];
  double expected[ROWS * 4] = {0}, p[N];
  int64_t last[ROWS];
  int same = 1;
  expect("top-p has memory",
         top_p_cutoff(x, maxima, ROWS, N, inverse_temperature, top_p, cutoffs, last, threads));
  page_masses(x, maxima, ROWS, N, inverse_temperature, cutoffs, last, masses, threads);
  for (int64_t row = 0; row < ROWS; row++) {
    const float *of = x + row * N;
    uint8_t kept[N];
    keep_top(of, inverse_temperature, top_p, kept, p);
    for (int64_t i = 0; i < N; i++) {
      int here = of[i] > cutoffs[row] || (of[i] == cutoffs[row] && i <= last[row]);
      same &= here == kept[i];
      if (kept[i]) expected[row * 4 + i / PAGE] += p[i];
    }
  }
  char what[100];
  snprintf(what, sizeof(what), "top-p %.2f at 1/temperature %.1f", top_p, inverse_temperature);
  expect(what, same);
  compare("sums of its probabilities", masses, expected, ROWS * 4, 1e-5);
}

void check_sampling(void) {
  float *x = random_floats(ROWS * N, 6), values[ROWS];
  int64_t indices[ROWS];
  x[N + 700] = x[N + 30] = 7;            // the first of equals
  x[2 * N + 999] = 8;                    // the last of all
  for (int64_t i = 0; i < 50; i++) x[400 + i] = x[400];  // equals, some of which top-p keeps
  row_argmax(x, ROWS, N, values, indices, threads);
  int64_t first = 0;
  for (int64_t i = 0; i < N; i++) first = x[i] > x[first] ? i : first;
  expect("argmax", indices[0] == first && indices[1] == 30 && indices[2] == 999 && values[2] == 8);
  check_top_p(x, values, 1, 0.9);
  check_top_p(x, values, 0.5f, 0.3);
  check_top_p(x, values, 3, 0.99);
  float saved = x[500];
  x[500] = NAN;
  row_argmax(x, ROWS, N, values, indices, threads);
  expect("argmax of a row with NaN", indices[0] == 500 && isnan(values[0]) && indices[1] == 30);
  x[500] = saved;
}
