#include "check.h"

int threads = 1;
static int n_failed = 0, n_checks = 0;

double uniform(void) {
  static uint64_t state = 88172645463325252u;
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return (double)(state >> 11) / (double)(1u << 26) / (double)(1u << 26) - 1;
}

void *zeros(int64_t n_bytes) {
  void *memory = calloc(n_bytes + 64, 1);
  if (!memory) abort();
  return memory;
}

float *random_floats(int64_t n, double scale) {
  float *x = zeros(n * sizeof(float));
  for (int64_t i = 0; i < n; i++) x[i] = (float)(uniform() * scale);
  return x;
}

void compare(const char *what, const float *got, const double *expected, int64_t n, double tolerance) {
  double largest = 0, error = 0;
  for (int64_t i = 0; i < n; i++) {
    double difference = fabs(got[i] - expected[i]);
    if (fabs(expected[i]) > largest) largest = fabs(expected[i]);
    if (!(difference <= error)) error = difference;  // NaN too
  }
  int right = error <= tolerance * largest;
  printf("%-6s %-60s error %.1e of %.1e\n", right ? "ok" : "WRONG", what, error / largest, tolerance);
  n_failed += !right, n_checks++;
}

void expect(const char *what, int holds) {
  printf("%-6s %s\n", holds ? "ok" : "WRONG", what);
  n_failed += !holds, n_checks++;
}

int main(int n, char **arguments) {
  threads = n > 1 ? atoi(arguments[1]) : 1;
  expect("the library has the version of structs.h", abi_version() == ABI_VERSION);
  check_products();
  check_attention();
  check_sampling();
  check_decoding();
  check_training();
  printf("%d checks, %d wrong, %d threads\n", n_checks, n_failed, threads);
  return n_failed > 0;
}
