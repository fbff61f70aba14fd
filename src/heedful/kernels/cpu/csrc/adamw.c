// Gradient norm, scaling and AdamW over lists of tensors.
//
// A small model has a hundred small tensors, and calling a PyTorch operator for each takes longer than the arithmetic.
// Each thread processes the same share of every tensor in every call, so that it stays in that thread's cache.

#include "common.h"
#include "structs.h"

#define MAX_THREADS 256

// Iterates over the vectors of this thread's share of n elements: offset k, lanes `some`.
#define FOR_SHARE(n)                                                                                    \
  for (int64_t k = (n) * omp_get_thread_num() / omp_get_num_threads(),                                     \
            end = (n) * (omp_get_thread_num() + 1) / omp_get_num_threads(), some = first_lanes(end - k); \
       k < end; k += LANES, some = first_lanes(end - k))
#define PARALLEL_TEAM _Pragma("omp parallel num_threads(threads) if (threads > 1)")

// The sum of squares of all elements; within a tensor it is accumulated in 16 float32 lanes.
EXPORT double sum_of_squares(int64_t n, float *const *tensors, const int64_t *sizes, int threads) {
  double sums[MAX_THREADS] = {0}, total = 0;
  threads = (int)min_long(threads, MAX_THREADS);
  PARALLEL_TEAM {
    double own = 0;
    for (int64_t i = 0; i < n; i++) {
      vec sum = v_zero();
      FOR_SHARE(sizes[i]) {
        vec x = v_load_lanes(some, tensors[i] + k);
        sum = v_fma(x, x, sum);
      }
      own += v_sum(sum);
    }
    sums[omp_get_thread_num()] = own;
  }
  for (int i = 0; i < threads; i++) total += sums[i];  // in thread order, so that the result is deterministic
  return total;
}

EXPORT void scale_tensors(int64_t n, float *const *tensors, const int64_t *sizes, float factor, int threads) {
  PARALLEL_TEAM for (int64_t i = 0; i < n; i++)
    FOR_SHARE(sizes[i])
      v_store_lanes(tensors[i] + k, some, v_mul(v_load_lanes(some, tensors[i] + k), v_set(factor)));
}

// One step of AdamW (Loshchilov & Hutter 2019, algorithm 2) as in torch; `steps` has the step count of each tensor.
EXPORT void adamw_step(int64_t n, float *const *weights, float *const *gradients, float *const *means,
                       float *const *variances, float *const *steps, const int64_t *sizes, const AdamWSettings *s,
                       int threads) {
  PARALLEL_TEAM for (int64_t i = 0; i < n; i++) {
    double step = (double)*steps[i] + 1;
    vec decay = v_set(1 - s->lr * s->weight_decay), eps = v_set(s->eps), beta2 = v_set(s->beta2);
    vec rest1 = v_set(1 - s->beta1), rest2 = v_set(1 - s->beta2);
    vec step_size = v_set(s->lr / (1 - pow(s->beta1, step)));
    vec correction = v_set(1 / sqrt(1 - pow(s->beta2, step)));
    FOR_SHARE(sizes[i]) {
      vec g = v_load_lanes(some, gradients[i] + k), m = v_load_lanes(some, means[i] + k);
      vec v = v_load_lanes(some, variances[i] + k), w = v_load_lanes(some, weights[i] + k);
      m = v_fma(v_sub(g, m), rest1, m);
      v = v_fma(v, beta2, v_mul(v_mul(g, g), rest2));
      vec denominator = v_fma(v_sqrt(v), correction, eps);
      w = v_fnma(step_size, v_div(m, denominator), v_mul(w, decay));
      v_store_lanes(means[i] + k, some, m);
      v_store_lanes(variances[i] + k, some, v);
      v_store_lanes(weights[i] + k, some, w);
    }
  }
  for (int64_t i = 0; i < n; i++) *steps[i] += 1;
}
