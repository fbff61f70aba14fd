// A block forward and backward, and AdamW. Gradients are compared with differences of the reference's loss.

#include "reference.h"

enum { BATCH = 2, LENGTH = 21 };
static const double STEP = 1e-6;

// Σ d_y · y over the batch: what the gradients are of.
static double loss(const Reference *r, const double *x, const float *d_y) {
  int64_t size = LENGTH * r->width;
  double *y = zeros(size * sizeof(double)), sum = 0;
  for (int64_t b = 0; b < BATCH; b++) {
    reference_block(r, x + b * size, y);
    for (int64_t i = 0; i < size; i++) sum += d_y[b * size + i] * y[i];
  }
  free(y);
  return sum;
}

// Compares a gradient with a central difference of the loss, in the direction of the gradient's signs: the slope there is
// the sum of its absolute values.
static void check_gradient(const char *what, const Reference *r, const double *x, const float *d_y, double *parameter,
                           const float *gradient, int64_t n) {
  double slope[2], sum = 0;
  for (int side = 0; side < 2; side++) {
    for (int64_t i = 0; i < n; i++) parameter[i] += (side ? -2 : 1) * (gradient[i] > 0 ? STEP : -STEP);
    slope[side] = loss(r, x, d_y);
  }
  for (int64_t i = 0; i < n; i++) {
    parameter[i] += gradient[i] > 0 ? STEP : -STEP;
    sum += fabs(gradient[i]);
  }
  float got = (float)sum;
  double expected = (slope[0] - slope[1]) / (2 * STEP);
  compare(what, &got, &expected, 1, 1e-5);
}

static void check_block(int rms, int activation, int gated, int rotary, int causal) {
  static const char *const parts[] = {"attention norm", "feed-forward norm", "query", "key", "value", "output", "up",
                                      "gate", "down"};
  float *weights[N_PARTS][2], *cosines, *sines;
  Reference r = random_block(rms, activation, gated, rotary, causal, LENGTH, weights, &cosines, &sines);
  int64_t e = r.width, size = BATCH * LENGTH * e, n_saved, n_workspace;
  float *x = random_floats(size, 1), *d_y = random_floats(size, 1), *y = zeros(size * 4), *d_x = zeros(size * 4);
  BlockArguments a = {
      .n_sequences = BATCH, .length = LENGTH, .width = e, .hidden = r.hidden, .n_heads = r.n_heads,
      .n_kv_heads = r.n_kv_heads, .d_head = r.d_head, .rms = rms, .activation = activation, .gated = gated,
      .causal = causal, .threads = threads, .scale = r.scale, .eps = r.eps, .x = x, .d_y = d_y, .y = y, .d_x = d_x,
  };
  if (rotary) a.cos = cosines, a.sin = sines, a.n_rotated_pairs = r.d_head / 2;
  int64_t outputs, inputs;
  for (int i = 0; i < N_PARTS; i++)
    for (int j = 0; j < 2; j++) {
      reference_shape(&r, i, &outputs, &inputs);
      a.weights[i][j] = weights[i][j];
      a.gradients[i][j] = weights[i][j] ? zeros(outputs * (j ? 1 : inputs) * sizeof(float)) : 0;
    }
  block_sizes(&a, &n_saved, &n_workspace);
  a.saved = zeros(n_saved * sizeof(float)), a.workspace = zeros(n_workspace * sizeof(float));
  block_forward(&a);
  double *start = zeros(size * sizeof(double)), *expected = zeros(size * sizeof(double));
  for (int64_t i = 0; i < size; i++) start[i] = x[i];
  for (int64_t b = 0; b < BATCH; b++) reference_block(&r, start + b * LENGTH * e, expected + b * LENGTH * e);
  char what[100];
  snprintf(what, sizeof(what), "training block: %s, activation %d%s%s%s", rms ? "RMSNorm" : "LayerNorm", activation,
           gated ? ", gated" : "", rotary ? ", rotary" : "", causal ? ", causal" : "");
  compare(what, y, expected, size, 1e-5);
  block_backward(&a);
  check_gradient("gradient of x", &r, start, d_y, start, d_x, size);
  for (int i = 0; i < N_PARTS; i++)
    for (int j = 0; j < 2; j++) {
      reference_shape(&r, i, &outputs, &inputs);
      snprintf(what, sizeof(what), "gradient of %s's %s", parts[i], j ? "bias" : "weight");
      // That of the key's bias is 0: the softmax does not see what all scores have in common.
      if (weights[i][j] && !(i == KEY && j))
        check_gradient(what, &r, start, d_y, r.weights[i][j], a.gradients[i][j], outputs * (j ? 1 : inputs));
    }
}

static void check_adamw(void) {
  enum { N_TENSORS = 3 };
  static const int64_t sizes[N_TENSORS] = {5, 64, 333};
  AdamWSettings s = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};
  float *tensors[5][N_TENSORS];
  double *expected[N_TENSORS], squares = 0;
  for (int i = 0; i < N_TENSORS; i++) {
    for (int j = 0; j < 4; j++) tensors[j][i] = random_floats(sizes[i], 1);
    tensors[4][i] = zeros(sizeof(float)), tensors[4][i][0] = 3;
    expected[i] = zeros(sizes[i] * sizeof(double));
    for (int64_t k = 0; k < sizes[i]; k++) {
      float *v = tensors[3][i] + k;
      *v = fabsf(*v);
      double g = tensors[1][i][k], m = tensors[2][i][k] * s.beta1 + g * (1 - s.beta1);
      double variance = *v * s.beta2 + g * g * (1 - s.beta2), w = tensors[0][i][k] * (1 - s.lr * s.weight_decay);
      m /= 1 - pow(s.beta1, 4), variance /= 1 - pow(s.beta2, 4);
      expected[i][k] = w - s.lr * m / (sqrt(variance) + s.eps);
      squares += g * g;
    }
  }
  float got = (float)sum_of_squares(N_TENSORS, tensors[1], sizes, threads);
  compare("sum of squares", &got, &squares, 1, 1e-6);
  adamw_step(N_TENSORS, tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], sizes, &s, threads);
  for (int i = 0; i < N_TENSORS; i++) compare("AdamW", tensors[0][i], expected[i], sizes[i], 1e-6);
  expect("AdamW counts its steps", tensors[4][0][0] == 4 && tensors[4][2][0] == 4);
  double half = tensors[1][2][332] * 0.5;
  scale_tensors(N_TENSORS, tensors[1], sizes, 0.5f, threads);
  compare("scaled tensors", tensors[1][2] + 332, &half, 1, 1e-7);
}

void check_training(void) {
  check_block(0, GELU_TANH, 0, 0, 1);
  check_block(0, RELU, 0, 0, 0);
  check_block(1, SILU, 1, 1, 1);
  check_adamw();
}
