// A prefill and decode steps of a block with a paged KV cache, against the block over the whole sequence.

#include "reference.h"

enum { LENGTH = 29, PREFILL = 26, BLOCK = 8, N_BLOCKS = 6 };

// The rows of several weights one after the other, packed as one matrix.
static PackedMatrix joined(const Reference *r, int64_t kind, float *weights[N_PARTS][2], const int *parts, int n) {
  int64_t total = 0, outputs, inputs, at = 0;
  for (int i = 0; i < n; i++) reference_shape(r, parts[i], &outputs, &inputs), total += outputs;
  float *weight = zeros(total * inputs * sizeof(float)), *bias = weights[parts[0]][1] ? zeros(total * 4) : 0;
  for (int i = 0; i < n; i++) {
    reference_shape(r, parts[i], &outputs, &inputs);
    memcpy(weight + at * inputs, weights[parts[i]][0], outputs * inputs * sizeof(float));
    if (bias) memcpy(bias + at, weights[parts[i]][1], outputs * sizeof(float));
    at += outputs;
  }
  return pack(kind, weight, total, inputs, bias, 0);
}

static void check_block(int rms, int activation, int gated, int rotary, int64_t kind, int64_t cached, double tolerance) {
  float *weights[N_PARTS][2], *cosines, *sines;
  Reference r = random_block(rms, activation, gated, rotary, 1, LENGTH, weights, &cosines, &sines);
  int64_t e = r.width, stride = cached == INT8 ? r.d_head + 2 : r.d_head * 4;  // codes and a scale
  int64_t head_stride = BLOCK * stride, block_stride = r.n_kv_heads * head_stride;
  NormWeights norms[2];
  for (int i = 0; i < 2; i++)
    norms[i] = (NormWeights){rms ? RMS_NORM : LAYER_NORM, e, weights[i][0], weights[i][1], r.eps};
  DecodeLayer layer = {
      .residual = PRE_NORM, .activation = activation, .gated = gated, .n_heads = r.n_heads,
      .n_kv_heads = r.n_kv_heads, .d_head = r.d_head, .scale = r.scale, .attention_norm = norms[0],
      .feedforward_norm = norms[1],
      .qkv = joined(&r, kind, weights, (int[]){QUERY, KEY, VALUE}, 3),
      .output = joined(&r, kind, weights, (int[]){OUTPUT}, 1),
      .up = joined(&r, kind, weights, gated ? (int[]){GATE, UP} : (int[]){UP, UP}, gated ? 2 : 1),
      .down = joined(&r, kind, weights, (int[]){DOWN}, 1),
  };
  LayerCache cache = {
      .kind = cached, .block_stride = block_stride, .head_stride = head_stride, .position_stride = stride};
  cache.keys = (char *)random_floats(N_BLOCKS * block_stride / 4, 1);
  cache.values = (char *)random_floats(N_BLOCKS * block_stride / 4, 1);
  float *x = random_floats(LENGTH * e, 1);
  double *start = zeros(LENGTH * e * sizeof(double)), *expected = zeros(LENGTH * e * sizeof(double));
  for (int64_t i = 0; i < LENGTH * e; i++) start[i] = x[i];
  reference_block(&r, start, expected);
  static const int64_t table[] = {4, 1, 5, 0};  // the sequence's blocks, in no order
  int64_t rows[LENGTH] = {0}, positions[LENGTH], done = 0;
  for (int64_t i = 0; i < LENGTH; i++) positions[i] = i;
  while (done < LENGTH) {  // all of the prompt, then a token at a time
    int64_t n = done ? 1 : PREFILL, pairs = r.d_head / 2;
    DecodeStep step = {.n_tokens = n, .width = e, .rows = rows, .positions = positions + done, .block_tables = table,
                       .max_blocks = 4, .block_size = BLOCK, .clear_blocks = 1};
    if (rotary) step.cos = cosines + done * pairs, step.sin = sines + done * pairs;
    step.n_rotated_pairs = step.rotation_stride = pairs;
    if (!decode(&layer, 1, &cache, &step, x + done * e, threads)) abort();
    done += n;
  }
  char what[120];
  snprintf(what, sizeof(what), "decoding: %s, activation %d%s%s, weights of kind %d, cache of kind %d", rms ? "RMSNorm" : "LayerNorm",
           activation, gated ? ", gated" : "", rotary ? ", rotary" : "", (int)kind, (int)cached);
  compare(what, x, expected, LENGTH * e, tolerance);
}

void check_decoding(void) {
  check_block(0, GELU_TANH, 0, 0, FLOAT32, FLOAT32, 1e-5);
  check_block(0, GELU, 0, 0, FLOAT32, FLOAT32, 1e-5);
  check_block(0, RELU, 0, 0, FLOAT16, FLOAT32, 1e-2);
  check_block(1, SILU, 1, 1, FLOAT32, FLOAT32, 1e-5);
  check_block(1, SILU, 1, 1, BFLOAT16, FLOAT32, 5e-2);
  check_block(1, SILU, 1, 1, INT8, FLOAT32, 5e-2);
  check_block(1, SILU, 1, 1, FLOAT32, INT8, 3e-2);
  check_block(0, GELU, 0, 0, FLOAT32, INT8, 3e-2);
}
