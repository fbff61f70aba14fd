// A pre-norm Transformer block forward and backward: x + attention(norm(x)), then x + feedforward(norm(x)).
//
// In PyTorch a small block is some sixty operators, forward and backward, and a third of the time is memory traffic and
// thread synchronization between the products. Here each thread takes its share of the rows through all sublayers, and
// threads synchronize only to sum the weight gradients (and around attention, if there are fewer sequences than
// threads).

#include "block.h"

// --- memory ----------------------------------------------------------------------------------------------------------

void part_shape(const Block *b, int part, long *outputs, long *inputs) {
  long width = b->a.width, hidden = b->a.hidden;
  long rows[] = {width, width, b->queries, b->keys, b->keys, width, hidden, hidden, width};
  long columns[] = {1, 1, width, width, width, b->queries, width, width, hidden};
  *outputs = rows[part], *inputs = columns[part];
}

// Assigns the pointers into `saved` and the workspace; returns the size of each in floats.
static Block open_block(const BlockArguments *a, long *n_saved, long *n_workspace) {
  Block b = {*a};
  b.rows = a->n_sequences * a->length;
  b.queries = a->n_heads * a->d_head, b.keys = a->n_kv_heads * a->d_head, b.qkv_size = b.queries + 2 * b.keys;
  b.up_size = a->gated ? 2 * a->hidden : a->hidden;
  struct { float **part; long size; } saved[] = {
      {&b.normed[0], a->width}, {&b.normed[1], a->width}, {&b.stats[0], 2},           {&b.stats[1], 2},
      {&b.qkv, b.qkv_size},     {&b.attended, b.queries}, {&b.logsumexp, a->n_heads}, {&b.middle, a->width},
      {&b.up, b.up_size},
  }, temporary[] = {
      {&b.active, a->hidden},      {&b.d_up, b.up_size},   {&b.d_middle, a->width},
      {&b.d_attended, b.queries},  {&b.d_qkv, b.qkv_size}, {&b.d_normed, a->width},
  };
  float *at = a->saved;
  for (int i = 0; i < 9; i++) *saved[i].part = at, at += round_up(b.rows * saved[i].size, LANES);
  *n_saved = at - a->saved;
  at = a->workspace;
  for (int i = 0; i < 6; i++) *temporary[i].part = at, at += round_up(b.rows * temporary[i].size, LANES);
  b.scratch = at;
  b.scratch_stride = round_up(max_long(attention_scratch(&b), PANEL_DEPTH * TILE_COLUMNS), LANES);
  b.partial = at + a->threads * b.scratch_stride;
  long n_gradients = 0;
  for (int i = 0; i < N_PARTS; i++) {
    long outputs, inputs;
    part_shape(&b, i, &outputs, &inputs);
    if (i != GATE || a->gated) n_gradients += outputs * (inputs + 1);
  }
  b.partial_stride = round_up(n_gradients, LANES);
  *n_workspace = at - a->workspace + a->threads * (b.scratch_stride + b.partial_stride);
  return b;
}

// Floats that forward saves, and that each pass needs as workspace; only the sizes in `a` are read.
EXPORT void block_sizes(const BlockArguments *a, long *n_saved, long *n_workspace) {
  open_block(a, n_saved, n_workspace);
}

// --- per thread ------------------------------------------------------------------------------------------------------

// The rows of this thread; returns whether they are whole sequences, so that attention needs no synchronization.
static int own_rows(const Block *b, long *begin, long *end) {
  long threads = omp_get_num_threads(), i = omp_get_thread_num(), whole = b->a.n_sequences >= threads;
  long unit = whole ? b->a.length : 1, n = b->rows / unit;
  *begin = n * i / threads * unit, *end = n * (i + 1) / threads * unit;
  return whole;
}

static void attend_all(const Block *b, void (*one)(const Block *, long, long, float *), int whole, long begin, long end,
                       float *scratch) {
  long n_kv_heads = b->a.n_kv_heads;
  if (whole) {
    for (long j = begin / b->a.length; j < end / b->a.length; j++)
      for (long head = 0; head < n_kv_heads; head++) one(b, j, head, scratch);
    return;
  }
#pragma omp barrier
#pragma omp for schedule(static)
  for (long j = 0; j < b->a.n_sequences * n_kv_heads; j++) one(b, j / n_kv_heads, j % n_kv_heads, scratch);
}

static Gemm linear(const Block *b, int part, const float *x, float *y, long y_stride) {
  long outputs, inputs;
  part_shape(b, part, &outputs, &inputs);
  const float *const *w = b->a.weights[part];
  return (Gemm){x, inputs, w[0], inputs, 1, inputs, outputs, 0, 0, w[1], y, y_stride};
}

// The gradient of a part's input from that of its output; `accumulate` adds to d_x.
static Gemm linear_backward(const Block *b, int part, const float *d_y, long y_stride, float *d_x, long x_stride,
                            int accumulate) {
  long outputs, inputs;
  part_shape(b, part, &outputs, &inputs);
  const float *w = b->a.weights[part][0];
  return (Gemm){d_y, y_stride, w, inputs, 0, outputs, inputs, accumulate ? d_x : 0, x_stride, 0, d_x, x_stride};
}

EXPORT void block_forward(const BlockArguments *a) {
  long n = a->width, unused;
  const Block block = open_block(a, &unused, &unused), *b = &block;
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
  {
    long begin, end;
    int whole = own_rows(b, &begin, &end);
    float *scratch = b->scratch + omp_get_thread_num() * b->scratch_stride;
    normalize_rows(b, 0, a->x, begin, end);
    gemm(linear(b, QUERY, b->normed[0], b->qkv, b->qkv_size), begin, end, scratch);
    gemm(linear(b, KEY, b->normed[0], b->qkv + b->queries, b->qkv_size), begin, end, scratch);
    gemm(linear(b, VALUE, b->normed[0], b->qkv + b->queries + b->keys, b->qkv_size), begin, end, scratch);
    rotate_rows(b, b->qkv, begin, end, 1);
    attend_all(b, attend, whole, begin, end, scratch);
    Gemm output = linear(b, OUTPUT, b->attended, b->middle, n), down = linear(b, DOWN, b->active, a->y, n);
    output.base = a->x, down.base = b->middle, output.base_stride = down.base_stride = n;  // the residuals
    gemm(output, begin, end, scratch);
    normalize_rows(b, 1, b->middle, begin, end);
    if (a->gated) gemm(linear(b, GATE, b->normed[1], b->up, b->up_size), begin, end, scratch);
    gemm(linear(b, UP, b->normed[1], b->up + b->up_size - a->hidden, b->up_size), begin, end, scratch);
    activate_rows(b, begin, end);
    gemm(down, begin, end, scratch);
  }
}

// The gradients of all weights from the rows of this thread alone, one after the other in its part of `partial`. A
// thread may be far from the memory where another one has just written: products over its own rows read less of it than
// columns of the whole would.
static void own_gradients(const Block *b, long begin, long end, float *scratch) {
  long n = b->a.width, hidden = b->a.hidden;
  struct { const float *y; long y_stride; const float *x; long x_stride; } of[N_PARTS] = {
      [QUERY] = {b->d_qkv, b->qkv_size, b->normed[0], n},
      [KEY] = {b->d_qkv + b->queries, b->qkv_size, b->normed[0], n},
      [VALUE] = {b->d_qkv + b->queries + b->keys, b->qkv_size, b->normed[0], n},
      [OUTPUT] = {b->d_middle, n, b->attended, b->queries},
      [UP] = {b->d_up + b->up_size - hidden, b->up_size, b->normed[1], n},
      [GATE] = {b->d_up, b->up_size, b->normed[1], n},
      [DOWN] = {b->a.d_y, n, b->active, hidden},
  };
  float *at = b->partial + omp_get_thread_num() * b->partial_stride + 4 * n;  // those of the norms come first
  for (int i = QUERY; i < N_PARTS; i++) {
    WeightGradient g = {of[i].y, of[i].y_stride, of[i].x, of[i].x_stride};
    float *const *wanted = b->a.gradients[i];
    part_shape(b, i, &g.n_outputs, &g.n_inputs);
    if (!b->a.weights[i][0]) continue;
    g.weight = at, g.bias = wanted[1] ? at + g.n_outputs * g.n_inputs : 0;
    at += g.n_outputs * (g.n_inputs + 1);
    if (!wanted[0] && !wanted[1]) continue;
    for (long c = 0; c < g.n_inputs; c += TILE_COLUMNS) weight_gradient(&g, c, begin, end, scratch);
  }
}

// The sum over threads; each does its share of every weight.
static void sum_gradients(const Block *b) {
  long me = omp_get_thread_num(), threads = omp_get_num_threads();
  const float *from = b->partial;
  for (int i = 0; i < 2 * N_PARTS; i++) {
    long outputs, inputs;
    part_shape(b, i / 2, &outputs, &inputs);
    if (!b->a.weights[i / 2][0]) continue;
    long size = i % 2 ? outputs : outputs * inputs;
    float *to = b->a.gradients[i / 2][i % 2];
    long last = to ? size * (me + 1) / threads : 0;
    for (long j = size * me / threads; j < last; j += LANES) {
      lanes here = first_lanes(last - j);
      vec sum = v_load_lanes(here, from + j);
      for (long t = 1; t < threads; t++) sum = v_add(sum, v_load_lanes(here, from + t * b->partial_stride + j));
      v_store_lanes(to + j, here, sum);
    }
    from += size;
  }
}

EXPORT void block_backward(const BlockArguments *a) {
  long n = a->width, unused;
  const Block block = open_block(a, &unused, &unused), *b = &block;
#pragma omp parallel num_threads(a->threads) if (a->threads > 1)
  {
    long begin, end;
    int whole = own_rows(b, &begin, &end);
    float *scratch = b->scratch + omp_get_thread_num() * b->scratch_stride;
    float *d_up = b->d_up + b->up_size - a->hidden, *d_key = b->d_qkv + b->queries, *d_value = d_key + b->keys;
    gemm(linear_backward(b, DOWN, a->d_y, n, b->d_up, b->up_size, 0), begin, end, scratch);
    activate_rows_backward(b, begin, end);
    gemm(linear_backward(b, UP, d_up, b->up_size, b->d_normed, n, 0), begin, end, scratch);
    if (a->gated) gemm(linear_backward(b, GATE, b->d_up, b->up_size, b->d_normed, n, 1), begin, end, scratch);
    normalize_rows_backward(b, 1, b->middle, a->d_y, b->d_middle, begin, end);
    gemm(linear_backward(b, OUTPUT, b->d_middle, n, b->d_attended, b->queries, 0), begin, end, scratch);
    attend_all(b, attend_backward, whole, begin, end, scratch);
    rotate_rows(b, b->d_qkv, begin, end, -1);
    gemm(linear_backward(b, QUERY, b->d_qkv, b->qkv_size, b->d_normed, n, 0), begin, end, scratch);
    gemm(linear_backward(b, KEY, d_key, b->qkv_size, b->d_normed, n, 1), begin, end, scratch);
    gemm(linear_backward(b, VALUE, d_value, b->qkv_size, b->d_normed, n, 1), begin, end, scratch);
    normalize_rows_backward(b, 0, a->x, b->d_middle, a->d_x, begin, end);
    own_gradients(b, begin, end, scratch);
#pragma omp barrier
    sum_gradients(b);
  }
}
