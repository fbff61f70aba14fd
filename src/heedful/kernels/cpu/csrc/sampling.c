// Argmax and top-p over rows of logits, without sorting the vocabulary.
//
//     M rows, N logits

#include "common.h"

#define PAGE 256  // logits whose maximum or sum of probabilities is computed together
#define LEVELS 4096
#define LEVELS_PER_NAT 64

// The maximum of each row (M, N) and its first index; for rows with NaN, NaN and its first index.
EXPORT void row_argmax(const float *x, int64_t n_rows, int64_t n, float *values, int64_t *indices, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && n_rows * n > 65536)
  for (int64_t row = 0; row < n_rows; row++) {
    const float *from = x + row * n;
    float most = -INFINITY;
    int64_t index = 0, has_nan = 0;
    for (int64_t page = 0; page < n && !has_nan; page += PAGE) {
      int64_t size = min_long(PAGE, n - page);
      vec high = v_set(-INFINITY);
      lanes wrong = 0;
      FOR_LANES(size) {
        vec at = v_select(first_lanes(size - k), v_load_lanes(first_lanes(size - k), from + page + k), high);
        wrong |= v_is_nan(at, at);
        high = v_max(high, at);
      }
      float top = v_highest(high);
      if (wrong) has_nan = 1, index = page;
      else if (top > most) most = top, index = page;
    }
    if (has_nan) {
      while (from[index] == from[index]) index++;
      most = NAN;
    } else {
      while (index < n - 1 && from[index] != most) index++;
    }
    values[row] = most, indices[row] = index;
  }
}

// Unnormalized probabilities e^((x - maximum) / temperature), 0 outside the lanes.
INLINE vec probabilities(lanes some, const float *x, float maximum, float inverse_temperature) {
  vec at = v_mul(v_sub(v_load_lanes(some, x), v_set(maximum)), v_set(inverse_temperature));
  return v_keep(some, v_exp(at));
}

typedef struct {
  float x;
  int index;
} Ranked;

static int by_rank(const void *a, const void *b) {  // descending; ties by ascending index
  const Ranked *first = a, *second = b;
  return first->x != second->x ? (first->x < second->x ? 1 : -1) : first->index - second->index;
}

INLINE int64_t level(float x, float maximum, float inverse_temperature) {
  float depth = (maximum - x) * inverse_temperature * LEVELS_PER_NAT;
  return depth < LEVELS - 1 ? (int64_t)depth : LEVELS - 1;
}

// The top-p set of one row. Logits are put into a histogram by their distance from the maximum, whole levels are
// included until the next would exceed top_p, and only that one is sorted. Returns 0 if memory is exhausted.
static int row_cutoff(const float *x, int64_t n, float maximum, float inverse_temperature, double top_p, float *cutoff,
                      int64_t *last) {
  double mass[LEVELS] = {0}, total = 0, reached = 0;
  int64_t border = 0, n_ranked = 0, j = 0;
  FOR_LANES(n) {
    float p[LANES];
    v_store(p, probabilities(first_lanes(n - k), x + k, maximum, inverse_temperature));
    for (int64_t i = 0; i < LANES && k + i < n; i++)
      if (p[i] > 0) mass[level(x[k + i], maximum, inverse_temperature)] += p[i];
  }
  for (int64_t i = 0; i < LEVELS; i++) total += mass[i];
  while (border < LEVELS - 1 && reached + mass[border] < top_p * total) reached += mass[border++];
  for (int64_t i = 0; i < n; i++) n_ranked += level(x[i], maximum, inverse_temperature) == border;
  Ranked *ranked = malloc((n_ranked + 1) * sizeof(Ranked));
  if (!ranked) return 0;
  for (int64_t i = 0; i < n; i++)
    if (level(x[i], maximum, inverse_temperature) == border) ranked[j++] = (Ranked){x[i], (int)i};
  qsort(ranked, n_ranked, sizeof(Ranked), by_rank);
  *cutoff = maximum, *last = n;
  for (j = 0; j < n_ranked && (j == 0 || reached < top_p * total); j++) {
    float p[LANES];
    *cutoff = ranked[j].x, *last = ranked[j].index;
    v_store(p, probabilities(1, &ranked[j].x, maximum, inverse_temperature));
    reached += p[0];
  }
  free(ranked);
  return 1;
}

// The fewest logits of each row (M, N), greatest first, whose probabilities sum to top_p: all above cutoffs[row], and
// of those equal to it the ones up to index last[row]. The cutoff is NaN if the maximum is not finite. Returns 0 if
// memory is exhausted.
EXPORT int top_p_cutoff(const float *x, const float *maxima, int64_t n_rows, int64_t n, float inverse_temperature,
                        double top_p, float *cutoffs, int64_t *last, int threads) {
  int done = 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1 && n_rows * n > 65536)
  for (int64_t row = 0; row < n_rows; row++) {
    cutoffs[row] = NAN, last[row] = n;
    if (!isfinite(maxima[row])) continue;
    if (!row_cutoff(x + row * n, n, maxima[row], inverse_temperature, top_p, cutoffs + row, last + row)) done = 0;
  }
  return done;
}

// The sums of unnormalized probabilities of every 256 logits of each row, (M, pages); only of the top-p set if `cutoffs`
// is given.
EXPORT void page_masses(const float *x, const float *maxima, int64_t n_rows, int64_t n, float inverse_temperature,
                        const float *cutoffs, const int64_t *last, float *masses, int threads) {
  int64_t n_pages = (n + PAGE - 1) / PAGE;
#pragma omp parallel for num_threads(threads) if (threads > 1 && n_rows * n > 65536)
  for (int64_t row = 0; row < n_rows; row++)
    for (int64_t page = 0; page < n_pages; page++) {
      const float *from = x + row * n + page * PAGE;
      int64_t size = min_long(PAGE, n - page * PAGE);
      vec sum = v_zero();
      FOR_LANES(size) {
        lanes some = first_lanes(size - k);
        if (cutoffs) {
          vec at = v_load_lanes(some, from + k), cutoff = v_set(cutoffs[row]);
          lanes before = first_lanes(last[row] - page * PAGE - k + 1);
          some &= v_greater(at, cutoff) | (v_equal(at, cutoff) & before) | v_is_nan(at, cutoff);
        }
        sum = v_add(sum, probabilities(some, from + k, maxima[row], inverse_temperature));
      }
      masses[row * n_pages + page] = v_sum(sum);
    }
}
