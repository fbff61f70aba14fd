// What a step of training does to all parameters at once, for processors with AVX-512: the norm of their gradients,
// scaling them, AdamW. Compiled on first use; called by kernels/cpu/adamw.py.
//
// A small model has a hundred small tensors, and an operator of PyTorch's for each costs more than its arithmetic. Each
// thread has the same share of every tensor in every call, so that it finds it in its own cache.

#include <immintrin.h>
#include <math.h>
#include <omp.h>

#define SHARE(n) \
  long begin = (n) * omp_get_thread_num() / omp_get_num_threads(), \
       end = (n) * (omp_get_thread_num() + 1) / omp_get_num_threads()
#define PARTS for (long k = begin; k < end; k += 16)
#define HERE (end - k >= 16 ? 0xffff : (1u << (end - k)) - 1)
#define TEAM _Pragma("omp parallel num_threads(threads) if (threads > 1)")

// The sum of the squares of all numbers. Those of a tensor are added in float32, sixteen sums side by side.
double squares(long n, float *const *tensors, const long *sizes, int threads) {
  double each[256] = {0}, total = 0;
  if (threads > 256) threads = 256;
  TEAM {
    double own = 0;
    for (long i = 0; i < n; i++) {
      SHARE(sizes[i]);
      __m512 sum = _mm512_setzero_ps();
      PARTS {
        __m512 x = _mm512_maskz_loadu_ps(HERE, tensors[i] + k);
        sum = _mm512_fmadd_ps(x, x, sum);
      }
      own += _mm512_reduce_add_ps(sum);
    }
    each[omp_get_thread_num()] = own;
  }
  for (int i = 0; i < threads; i++) total += each[i];  // in their order: the same every time
  return total;
}

void scale(long n, float *const *tensors, const long *sizes, float by, int threads) {
  TEAM for (long i = 0; i < n; i++) {
    SHARE(sizes[i]);
    PARTS {
      __m512 x = _mm512_maskz_loadu_ps(HERE, tensors[i] + k);
      _mm512_mask_storeu_ps(tensors[i] + k, HERE, _mm512_mul_ps(x, _mm512_set1_ps(by)));
    }
  }
}

typedef struct {
  double lr, beta1, beta2, eps, weight_decay;
} Settings;

// One step of AdamW (Loshchilov & Hutter 2019, algorithm 2) as torch has it; `steps` counts for each tensor.
void adamw(long n, float *const *weights, float *const *gradients, float *const *means, float *const *squares_of,
           float *const *steps, const long *sizes, const Settings *s, int threads) {
  TEAM for (long i = 0; i < n; i++) {
    double step = (double)*steps[i] + 1;
    __m512 keep = _mm512_set1_ps(1 - s->lr * s->weight_decay), eps = _mm512_set1_ps(s->eps);
    __m512 beta2 = _mm512_set1_ps(s->beta2), rest1 = _mm512_set1_ps(1 - s->beta1), rest2 = _mm512_set1_ps(1 - s->beta2);
    __m512 pace = _mm512_set1_ps(s->lr / (1 - pow(s->beta1, step)));
    __m512 correct = _mm512_set1_ps(1 / sqrt(1 - pow(s->beta2, step)));
    SHARE(sizes[i]);
    PARTS {
      __m512 g = _mm512_maskz_loadu_ps(HERE, gradients[i] + k), m = _mm512_maskz_loadu_ps(HERE, means[i] + k);
      __m512 v = _mm512_maskz_loadu_ps(HERE, squares_of[i] + k), w = _mm512_maskz_loadu_ps(HERE, weights[i] + k);
      m = _mm512_fmadd_ps(_mm512_sub_ps(g, m), rest1, m);
      v = _mm512_fmadd_ps(v, beta2, _mm512_mul_ps(_mm512_mul_ps(g, g), rest2));
      __m512 by = _mm512_fmadd_ps(_mm512_sqrt_ps(v), correct, eps);
      w = _mm512_fnmadd_ps(pace, _mm512_div_ps(m, by), _mm512_mul_ps(w, keep));
      _mm512_mask_storeu_ps(means[i] + k, HERE, m);
      _mm512_mask_storeu_ps(squares_of[i] + k, HERE, v);
      _mm512_mask_storeu_ps(weights[i] + k, HERE, w);
    }
  }
  for (long i = 0; i < n; i++) *steps[i] += 1;
}
