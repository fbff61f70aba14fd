// A Transformer block forwards and backwards, for processors with AVX-512: what training a small model on a CPU consists
// of. Compiled on first use; called by kernels/cpu/block.py.
//
// A small block is some sixty operations of PyTorch's, forwards and backwards, and what lies between its products (a
// third of the time) is moving numbers and starting threads. Here the rows are dealt out to the threads once, a thread
// goes through all sublayers with its rows, and threads wait for each other only to add up the gradients of the weights
// (and around attention, where there are fewer sequences than threads).
//
//     B batch, T positions, M = B T rows, E model width, F hidden width, H heads, G heads of keys and values, D head size

#include "training_attention.h"

// --- the block: x + attention(norm(x)), then x + network(norm(x)) ----------------------------------------------------

// The rows of this thread, and whether they are whole sequences, so that it attends to them alone.
static int share_out(const Block *b, long *begin, long *end) {
  long threads = omp_get_num_threads(), i = omp_get_thread_num(), alone = b->n_sequences >= threads;
  long unit = alone ? b->length : 1, n = b->n_sequences * b->length / unit;
  *begin = n * i / threads * unit, *end = n * (i + 1) / threads * unit;
  return alone;
}

static void attend_all(const Block *b, void (*one)(const Block *, long, long, float *), int alone, long begin, long end,
                       float *room) {
  if (alone) {
    for (long j = begin / b->length; j < end / b->length; j++)
      for (long group = 0; group < b->n_groups; group++) one(b, j, group, room);
    return;
  }
#pragma omp barrier
#pragma omp for schedule(static)
  for (long j = 0; j < b->n_sequences * b->n_groups; j++) one(b, j / b->n_groups, j % b->n_groups, room);
}

static Product forwards(const Block *b, int part, const float *x, float *y, long y_step) {
  long outputs, inputs;
  part_shape(b, part, &outputs, &inputs);
  return (Product){x, inputs, b->weights[part][0], inputs, 1, inputs, outputs, 0, 0, b->weights[part][1], y, y_step};
}

// The gradient of a part's input, from that of its output; `add` to what is there.
static Product backwards(const Block *b, int part, const float *y, long y_step, float *x, long x_step, int add) {
  long outputs, inputs;
  part_shape(b, part, &outputs, &inputs);
  return (Product){y, y_step, b->weights[part][0], inputs, 0, outputs, inputs, add ? x : 0, x_step, 0, x, x_step};
}

void block_forward(Block *b) {
  long n = b->width, unused;
  block_layout(b, &unused, &unused);
#pragma omp parallel num_threads(b->threads) if (b->threads > 1)
  {
    long begin, end;
    int alone = share_out(b, &begin, &end);
    float *room = b->own + omp_get_thread_num() * b->own_step;
    normalize(b, 0, b->x, begin, end);
    multiply(forwards(b, QUERY, b->normed[0], b->joint, b->whole), begin, end, room);
    multiply(forwards(b, KEY, b->normed[0], b->joint + b->queries, b->whole), begin, end, room);
    multiply(forwards(b, VALUE, b->normed[0], b->joint + b->queries + b->keys, b->whole), begin, end, room);
    rotate(b, b->joint, begin, end, 1);
    attend_all(b, attend, alone, begin, end, room);
    Product output = forwards(b, OUTPUT, b->seen, b->middle, n), down = forwards(b, DOWN, b->active, b->y, n);
    output.base = b->x, down.base = b->middle, output.base_step = down.base_step = n;
    multiply(output, begin, end, room);
    normalize(b, 1, b->middle, begin, end);
    if (b->gated) multiply(forwards(b, GATE, b->normed[1], b->before, b->wide), begin, end, room);
    multiply(forwards(b, UP, b->normed[1], b->before + b->wide - b->hidden, b->wide), begin, end, room);
    feed(b, begin, end);
    multiply(down, begin, end, room);
  }
}

// The gradients of all weights of the rows of each thread, then summed over threads. A thread may be far from the memory
// where another one has just written: products of rows of its own take less of it than columns of the whole would.
static void gradients(const Block *b, long begin, long end, float *room) {
  long n = b->width, me = omp_get_thread_num(), threads = omp_get_num_threads();
  struct { const float *y; long y_step; const float *x; long x_step; } of[N_PARTS] = {
      [QUERY] = {b->d_joint, b->whole, b->normed[0], n},
      [KEY] = {b->d_joint + b->queries, b->whole, b->normed[0], n},
      [VALUE] = {b->d_joint + b->queries + b->keys, b->whole, b->normed[0], n},
      [OUTPUT] = {b->d_middle, n, b->seen, b->queries},
      [UP] = {b->d_before + b->wide - b->hidden, b->wide, b->normed[1], n},
      [GATE] = {b->d_before, b->wide, b->normed[1], n},
      [DOWN] = {b->d_y, n, b->active, b->hidden},
  };
  float *at = b->partial + me * b->partial_step + 4 * n;  // the norms' are there
  for (int i = QUERY; i < N_PARTS; i++) {
    Gradient g = {of[i].y, of[i].y_step, of[i].x, of[i].x_step};
    part_shape(b, i, &g.n_outputs, &g.n_inputs);
    if (!b->weights[i][0]) continue;
    g.weight = at, g.bias = b->gradients[i][1] ? at + g.n_outputs * g.n_inputs : 0;
    at += g.n_outputs * (g.n_inputs + 1);
    for (long c = 0; c < g.n_inputs && (b->gradients[i][0] || g.bias); c += WIDE) gradient(&g, c, begin, end, room);
  }
#pragma omp barrier
  const float *from = b->partial;
  for (int i = 0; i < 2 * N_PARTS; i++) {
    long outputs, inputs;
    part_shape(b, i / 2, &outputs, &inputs);
    if (!b->weights[i / 2][0]) continue;
    long size = i % 2 ? outputs : outputs * inputs;
    float *to = b->gradients[i / 2][i % 2];
    long last = to ? size * (me + 1) / threads : 0;
    for (long j = size * me / threads; j < last; j += 16) {
      __mmask16 here = first(last - j);
      __m512 sum = _mm512_maskz_loadu_ps(here, from + j);
      for (long t = 1; t < threads; t++)
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(here, from + t * b->partial_step + j));
      _mm512_mask_storeu_ps(to + j, here, sum);
    }
    from += size;
  }
}

void block_backward(Block *b) {
  long n = b->width, unused;
  block_layout(b, &unused, &unused);
#pragma omp parallel num_threads(b->threads) if (b->threads > 1)
  {
    long begin, end;
    int alone = share_out(b, &begin, &end);
    float *room = b->own + omp_get_thread_num() * b->own_step;
    float *d_up = b->d_before + b->wide - b->hidden, *d_key = b->d_joint + b->queries, *d_value = d_key + b->keys;
    multiply(backwards(b, DOWN, b->d_y, n, b->d_before, b->wide, 0), begin, end, room);
    feed_back(b, begin, end);
    multiply(backwards(b, UP, d_up, b->wide, b->d_normed, n, 0), begin, end, room);
    if (b->gated) multiply(backwards(b, GATE, b->d_before, b->wide, b->d_normed, n, 1), begin, end, room);
    normalize_back(b, 1, b->middle, b->d_y, b->d_middle, begin, end);
    multiply(backwards(b, OUTPUT, b->d_middle, n, b->d_seen, b->queries, 0), begin, end, room);
    attend_all(b, attend_back, alone, begin, end, room);
    rotate(b, b->d_joint, begin, end, -1);
    multiply(backwards(b, QUERY, b->d_joint, b->whole, b->d_normed, n, 0), begin, end, room);
    multiply(backwards(b, KEY, d_key, b->whole, b->d_normed, n, 1), begin, end, room);
    multiply(backwards(b, VALUE, d_value, b->whole, b->d_normed, n, 1), begin, end, room);
    normalize_back(b, 0, b->x, b->d_middle, b->d_x, begin, end);
    gradients(b, begin, end, room);
  }
}

long block_bytes(void) { return sizeof(Block); }
