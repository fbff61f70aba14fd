// A pre-norm Transformer block forward and backward: x + attention(norm(x)), then x + feedforward(norm(x)).
//
// In PyTorch a small block is some sixty operators, forward and backward, and a third of the time is memory traffic and
// thread synchronization between the products. Here each thread takes its share of the rows through all sublayers, and
// threads synchronize only to sum the weight gradients (and around attention, if there are fewer sequences than
// threads).

#include "block.h"

// --- memory ----------------------------------------------------------------------------------------------------------

void part_shape(const Block *b, int part, int64_t *outputs, int64_t *inputs) {
  int64_t width = b->a.width, hidden = b->a.hidden;
  int64_t rows[] = {width, width, b->queries, b->keys, b->keys, width, hidden, hidden, width};
  int64_t columns[] = {1, 1, width, width, width, b->queries, width, width, hidden};
  *outputs = rows[part], *inputs = columns[part];
}

// Assigns the pointers into `saved` and the workspace; returns the size of each in floats.
static Block open_block(const BlockArguments *a, int64_t *n_saved, int64_t *n_workspace) {
  Block b = {*a};
  b.rows = a->n_sequences * a->length;
  b.queries = a->n_heads * a->d_head, b.keys = a->n_kv_heads * a->d_head, b.qkv_size = b.queries + 2 * b.keys;
  b.up_size = a->gated ? 2 * a->hidden : a->hidden;
  struct { float **part; int64_t size; } saved[] = {
      {&b.normed[0], a->width}, {&b.normed[1], a->width}, {&b.stats[0], 2},           {&b.stats[1], 2},
      {&b.qkv, b.qkv_size},     {&b.attended, b.queries}, {&b.logsumexp, a->n_heads}, {&b.middle, a->width},
      {&b.up, b.up_size},
  }, temporary[] = {
      {&b.active, a->hidden},      {&b.d_up, b.up_size},   {&b.d_middle, a->width},
      {&b.d_attended, b.queries},  {&b.d_qkv, b.qkv_size}, {&b.d_normed, a->width},
      {&b.d_output[0], a->dropout[DROP_ATTENTION] ? a->width : 0},
      {&b.d_output[1], a->dropout[DROP_FEEDFORWARD] ? a->width : 0},
  };
  float *at = a->saved;
  for (int i = 0; i < 9; i++) *saved[i].part = at, at += round_up(b.rows * saved[i].size, LANES);
  *n_saved = at - a->saved;
  at = a->workspace;
  for (int i = 0; i < 8; i++) *temporary[i].part = at, at += round_up(b.rows * temporary[i].size, LANES);
  b.scratch = at;
  b.scratch_stride = max_long(attention_scratch(&b), GEMM_SCRATCH(a->bfloat16 != 0));
  b.scratch_stride = round_up(max_long(b.scratch_stride, max_long(a->width, a->hidden)), DROPOUT_COLUMNS);
  b.partial = at + a->threads * b.scratch_stride;
  int64_t n_gradients = 0;
  for (int i = 0; i < N_PARTS; i++) {
    int64_t outputs, inputs;
    part_shape(&b, i, &outputs, &inputs);
    if (i != GATE || a->gated) n_gradients += outputs * (inputs + 1);
  }
  b.partial_stride = round_up(n_gradients, LANES);
  *n_workspace = at - a->workspace + a->threads * (b.scratch_stride + b.partial_stride);
  return b;
}

// Floats that forward saves, and that each pass needs as workspace; only the sizes in `a` are read.
EXPORT void block_sizes(const BlockArguments *a, int64_t *n_saved, int64_t *n_workspace) {
  open_block(a, n_saved, n_workspace);
}

// --- per thread ------------------------------------------------------------------------------------------------------

// The rows of this thread; returns whether they are whole sequences, so that attention needs no synchronization.
static int own_rows(const Block *b, int64_t *begin, int64_t *end) {
  int64_t threads = omp_get_num_threads(), i = omp_get_thread_num(), whole = b->a.n_sequences >= threads;
  int64_t unit = whole ? b->a.length : 1, n = b->rows / unit;
  *begin = n * i / threads * unit, *end = n * (i + 1) / threads * unit;
  return whole;
}

static void attend_all(const Block *b, void (*one)(const Block *, int64_t, int64_t, float *), int whole, int64_t begin,
                       int64_t end, float *scratch) {
  int64_t n_kv_heads = b->a.n_kv_heads;
  if (whole) {
    for (int64_t j = begin / b->a.length; j < end / b->a.length; j++)
      for (int64_t head = 0; head < n_kv_heads; head++) one(b, j, head, scratch);
    return;
  }
#pragma omp barrier
#pragma omp for schedule(static)
  for (int64_t j = 0; j < b->a.n_sequences * n_kv_heads; j++) one(b, j / n_kv_heads, j % n_kv_heads, scratch);
}

static Gemm linear(const Block *b, int part, const float *x, float *y, int64_t y_stride) {
  int64_t outputs, inputs;
  part_shape(b, part, &outputs, &inputs);
  const float *const *w = b->a.weights[part];
  return (Gemm){x, inputs, w[0], inputs, 1, inputs, outputs, 0, 0, w[1], y, y_stride, b->a.bfloat16 != 0};
}

// The gradient of a part's input from that of its output; `accumulate` adds to d_x.
static Gemm linear_backward(const Block *b, int part, const float *d_y, int64_t y_stride, float *d_x, int64_t x_stride,
                            int accumulate) {
  int64_t outputs, inputs;
  part_shape(b, part, &outputs, &inputs);
  const float *w = b->a.weights[part][0];
  return (Gemm){d_y, y_stride, w,   inputs,   0, outputs, inputs, accumulate ? d_x : 0,
                x_stride, 0,    d_x, x_stride, b->a.bfloat16 != 0};
}

// y = base + dropout(x · weight + bias): the end of a sublayer.
static void add_output(const Block *b, int part, int place, const float *x, const float *base, float *y, int64_t begin,
                       int64_t end, float *scratch) {
  int64_t n = b->a.width, drop = b->a.dropout[place] > 0;
  Gemm product = linear(b, part, x, y, n);
  if (!drop) product.base = base, product.base_stride = n;
  gemm(product, begin, end, scratch);
  if (drop) drop_rows(b, place, base, y, y, n, n, begin, end, scratch);
}

// The gradient of a sublayer's output before dropout, from that of the sum.
static const float *output_gradient(const Block *b, int place, const float *d_sum, int64_t begin, int64_t end,
                                    float *scratch) {
  float *d_output = b->d_output[place == DROP_FEEDFORWARD];
  int64_t n = b->a.width;
  if (!b->a.dropout[place]) return d_sum;
  drop_rows(b, place, 0, d_sum, d_output, n, n, begin, end, scratch);
  return d_output;
}

EXPORT void block_forward(const BlockArguments *a) {
  int64_t hidden = a->hidden, drop = a->dropout[DROP_HIDDEN] > 0, unused;
  const Block block = open_block(a, &unused, &unused), *b = &block;
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
  {
    int64_t begin, end;
    int whole = own_rows(b, &begin, &end);
    float *scratch = b->scratch + omp_get_thread_num() * b->scratch_stride;
    normalize_rows(b, 0, a->x, begin, end);
    gemm(linear(b, QUERY, b->normed[0], b->qkv, b->qkv_size), begin, end, scratch);
    gemm(linear(b, KEY, b->normed[0], b->qkv + b->queries, b->qkv_size), begin, end, scratch);
    gemm(linear(b, VALUE, b->normed[0], b->qkv + b->queries + b->keys, b->qkv_size), begin, end, scratch);
    rotate_rows(b, b->qkv, begin, end, 1);
    attend_all(b, attend, whole, begin, end, scratch);
    add_output(b, OUTPUT, DROP_ATTENTION, b->attended, a->x, b->middle, begin, end, scratch);
    normalize_rows(b, 1, b->middle, begin, end);
    if (a->gated) gemm(linear(b, GATE, b->normed[1], b->up, b->up_size), begin, end, scratch);
    gemm(linear(b, UP, b->normed[1], b->up + b->up_size - hidden, b->up_size), begin, end, scratch);
    activate_rows(b, begin, end);
    if (drop) drop_rows(b, DROP_HIDDEN, 0, b->active, b->active, hidden, hidden, begin, end, scratch);
    add_output(b, DOWN, DROP_FEEDFORWARD, b->active, b->middle, a->y, begin, end, scratch);
  }
}

// The gradients of all weights from the rows of this thread alone, one after the other in its part of `partial`. A
// thread may be far from the memory where another one has just written: products over its own rows read less of it than
// columns of the whole would.
static void own_gradients(const Block *b, const float *d_attention, const float *d_feedforward, int64_t begin,
                          int64_t end, float *scratch) {
  int64_t n = b->a.width, hidden = b->a.hidden;
  struct { const float *y; int64_t y_stride; const float *x; int64_t x_stride; } of[N_PARTS] = {
      [QUERY] = {b->d_qkv, b->qkv_size, b->normed[0], n},
      [KEY] = {b->d_qkv + b->queries, b->qkv_size, b->normed[0], n},
      [VALUE] = {b->d_qkv + b->queries + b->keys, b->qkv_size, b->normed[0], n},
      [OUTPUT] = {d_attention, n, b->attended, b->queries},
      [UP] = {b->d_up + b->up_size - hidden, b->up_size, b->normed[1], n},
      [GATE] = {b->d_up, b->up_size, b->normed[1], n},
      [DOWN] = {d_feedforward, n, b->active, hidden},
  };
  float *at = b->partial + omp_get_thread_num() * b->partial_stride + 4 * n;  // those of the norms come first
  for (int i = QUERY; i < N_PARTS; i++) {
    WeightGradient g = {of[i].y, of[i].y_stride, of[i].x, of[i].x_stride, .bfloat16 = b->a.bfloat16 != 0};
    float *const *wanted = b->a.gradients[i];
    part_shape(b, i, &g.n_outputs, &g.n_inputs);
    if (!b->a.weights[i][0]) continue;
    g.weight = at, g.bias = wanted[1] ? at + g.n_outputs * g.n_inputs : 0;
    at += g.n_outputs * (g.n_inputs + 1);
    if (!wanted[0] && !wanted[1]) continue;
    weight_gradient(&g, begin, end, scratch);
  }
}

// The sum over threads; each does its share of every weight.
static void sum_gradients(const Block *b) {
  int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
  const float *from = b->partial;
  for (int i = 0; i < 2 * N_PARTS; i++) {
    int64_t outputs, inputs;
    part_shape(b, i / 2, &outputs, &inputs);
    if (!b->a.weights[i / 2][0]) continue;
    int64_t size = i % 2 ? outputs : outputs * inputs;
    float *to = b->a.gradients[i / 2][i % 2];
    int64_t last = to ? size * (me + 1) / threads : 0;
    for (int64_t j = size * me / threads; j < last; j += LANES) {
      lanes here = first_lanes(last - j);
      vec sum = v_load_lanes(here, from + j);
      for (int64_t t = 1; t < threads; t++) sum = v_add(sum, v_load_lanes(here, from + t * b->partial_stride + j));
      v_store_lanes(to + j, here, sum);
    }
    from += size;
  }
}

EXPORT void block_backward(const BlockArguments *a) {
  int64_t n = a->width, hidden = a->hidden, drop = a->dropout[DROP_HIDDEN] > 0, unused;
  const Block block = open_block(a, &unused, &unused), *b = &block;
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
  {
    int64_t begin, end;
    int whole = own_rows(b, &begin, &end);
    float *scratch = b->scratch + omp_get_thread_num() * b->scratch_stride;
    float *d_up = b->d_up + b->up_size - hidden, *d_key = b->d_qkv + b->queries, *d_value = d_key + b->keys;
    const float *d_feedforward = output_gradient(b, DROP_FEEDFORWARD, a->d_y, begin, end, scratch);
    gemm(linear_backward(b, DOWN, d_feedforward, n, b->d_up, b->up_size, 0), begin, end, scratch);
    if (drop) drop_rows(b, DROP_HIDDEN, 0, b->d_up, b->d_up, hidden, b->up_size, begin, end, scratch);
    activate_rows_backward(b, begin, end);
    if (drop) drop_rows(b, DROP_HIDDEN, 0, b->active, b->active, hidden, hidden, begin, end, scratch);
    gemm(linear_backward(b, UP, d_up, b->up_size, b->d_normed, n, 0), begin, end, scratch);
    if (a->gated) gemm(linear_backward(b, GATE, b->d_up, b->up_size, b->d_normed, n, 1), begin, end, scratch);
    normalize_rows_backward(b, 1, b->middle, a->d_y, b->d_middle, begin, end);
    const float *d_attention = output_gradient(b, DROP_ATTENTION, b->d_middle, begin, end, scratch);
    gemm(linear_backward(b, OUTPUT, d_attention, n, b->d_attended, b->queries, 0), begin, end, scratch);
    attend_all(b, attend_backward, whole, begin, end, scratch);
    rotate_rows(b, b->d_qkv, begin, end, -1);
    gemm(linear_backward(b, QUERY, b->d_qkv, b->qkv_size, b->d_normed, n, 0), begin, end, scratch);
    gemm(linear_backward(b, KEY, d_key, b->qkv_size, b->d_normed, n, 1), begin, end, scratch);
    gemm(linear_backward(b, VALUE, d_value, b->qkv_size, b->d_normed, n, 1), begin, end, scratch);
    normalize_rows_backward(b, 0, a->x, b->d_middle, a->d_x, begin, end);
    own_gradients(b, d_attention, d_feedforward, begin, end, scratch);
#pragma omp barrier
    sum_gradients(b);
  }
}
