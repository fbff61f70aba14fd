// A prefill or decode step through a stack of blocks with a KV cache, in one call. One team of threads computes all
// layers; the functions below are called by all its threads and divide their work among them. Of a single token every
// thread has its own copy of x and computes what is between two products itself, so that threads wait for each other six
// times in a layer, not fifteen.
//
//     M tokens, E width, H heads, G key/value heads, D head size, S positions

#include "attention.h"
#include "int8_cache.h"
#include "linear.h"

// --- norms and residuals ---------------------------------------------------------------------------------------------

INLINE void normalize(const NormWeights *norm, const float *x, float *y, int64_t n) {
  float mean;
  normalize_row(norm->kind == RMS_NORM, norm->weight, norm->bias, (float)norm->eps, x, y, n, &mean);
}

// x (M, E), normalized if there is a norm.
static const float *normalized(const NormWeights *norm, const float *x, float *scratch, const DecodeStep *s) {
  if (!norm->kind) return x;
  FOR_ROWS(i, s->n_tokens) normalize(norm, x + i * s->width, scratch + i * s->width, s->width);
  wait_for_rows(s->n_tokens);
  return scratch;
}

// x = post(x + pre(y)), each norm if there is one.
static void add_residual(const NormWeights *pre, const NormWeights *post, const float *y, float *x, float *scratch,
                         const DecodeStep *s) {
  int64_t n = s->width;
  FOR_ROWS(i, s->n_tokens) {
    const float *from = y + i * n;
    float *to = x + i * n;
    if (pre && pre->kind) {
      normalize(pre, from, scratch + i * n, n);
      from = scratch + i * n;
    }
    FOR_LANES(n) {
      lanes here = first_lanes(n - k);
      v_store_lanes(to + k, here, v_add(v_load_lanes(here, to + k), v_load_lanes(here, from + k)));
    }
    if (post && post->kind) normalize(post, to, to, n);
  }
  wait_for_rows(s->n_tokens);
}

// --- attention -------------------------------------------------------------------------------------------------------

// Zeroes the blocks that begin with one of the new tokens: a NaN left by an earlier sequence would spread in PyTorch's
// attention although masked (0 · NaN is NaN).
static void clear_blocks(const DecodeLayer *layers, int64_t n_layers, const LayerCache *caches, const DecodeStep *s) {
#pragma omp for
  for (int64_t i = 0; i < s->n_tokens; i++) {
    if (s->positions[i] % s->block_size) continue;
    int64_t block = s->block_tables[s->rows[i] * s->max_blocks + s->positions[i] / s->block_size];
    for (int64_t j = 0; j < n_layers; j++) {
      int64_t n = s->block_size * caches[j].position_stride;
      for (int64_t g = 0; g < layers[j].n_kv_heads; g++) {
        memset(caches[j].keys + block * caches[j].block_stride + g * caches[j].head_stride, 0, n);
        memset(caches[j].values + block * caches[j].block_stride + g * caches[j].head_stride, 0, n);
      }
    }
  }
}

// The number of tokens from i on that one thread computes together.
static int64_t run_length(const DecodeStep *s, int64_t i) {
  int64_t n = 1;
  while (n < MAX_RUN && i + n < s->n_tokens && s->rows[i + n] == s->rows[i]) n++;
  return n;
}

INLINE void normalize_heads(const NormWeights *norm, float *x, int64_t n) {
  if (norm->kind)
    for (int64_t j = 0; j < n; j += norm->size) normalize(norm, x + j, x + j, norm->size);
}

INLINE void store_position(const LayerCache *cache, const float *x, int64_t d_head, char *to) {
  if (cache->kind == INT8) quantize_position(x, d_head, (int8_t *)to);
  else memcpy(to, x, d_head * sizeof(float));
}

// Normalizes and rotates the queries and keys in qkv (M, (H + 2G) D), and writes keys and values to the cache.
static void update_cache(const DecodeLayer *l, const LayerCache *cache, const DecodeStep *s, float *qkv) {
  int64_t n = l->d_head, n_queries = l->n_heads * n, n_keys = l->n_kv_heads * n;
#pragma omp for
  for (int64_t i = 0; i < s->n_tokens; i++) {
    float *q = qkv + i * (n_queries + 2 * n_keys), *k = q + n_queries;
    normalize_heads(&l->query_norm, q, n_queries);
    normalize_heads(&l->key_norm, k, n_keys);
    int64_t turn = i * s->rotation_stride;
    if (s->cos)
      for (int64_t j = 0; j < n_queries + n_keys; j += n)
        rotate_head(q + j, s->cos + turn, s->sin + turn, s->n_rotated_pairs, s->interleaved, 1);
    if (cache->kind == INT8)
      for (int64_t j = 0; j < n_queries + n_keys; j += n) rotate_hadamard(q + j, n);
    int64_t block = s->block_tables[s->rows[i] * s->max_blocks + s->positions[i] / s->block_size];
    int64_t at = block * cache->block_stride + s->positions[i] % s->block_size * cache->position_stride;
    for (int64_t g = 0; g < l->n_kv_heads; g++, at += cache->head_stride) {
      store_position(cache, k + g * n, n, cache->keys + at);
      store_position(cache, k + n_keys + g * n, n, cache->values + at);
    }
  }
}

// Attention of the queries in qkv (M, (H + 2G) D) over the cache -> (M, H D). `runs` are the first tokens of the runs;
// each thread has scratch for its scores.
static void attend_cached(const DecodeLayer *l, const LayerCache *m, const DecodeStep *s, const float *qkv, float *out,
                          const int64_t *runs, int64_t n_runs, float *scratch, int64_t scratch_size) {
  int64_t share = l->n_heads / l->n_kv_heads, n = l->d_head, row_size = (l->n_heads + 2 * l->n_kv_heads) * n;
  float *scores = scratch + omp_get_thread_num() * scratch_size;
#pragma omp for schedule(dynamic)
  for (int64_t j = 0; j < n_runs * l->n_heads; j++) {
    int64_t first = runs[j / l->n_heads], h = j % l->n_heads, at = h / share * m->head_stride;
    const int64_t *table = s->block_tables + s->rows[first] * s->max_blocks;
    int64_t stride = m->position_stride;
    HeadCache cache = {m->keys + at,  m->values + at,  stride, stride, table,
                       s->block_size, m->block_stride, 1,      (int)m->kind};
    int64_t end = s->positions[first] + 1, begin = l->window && end > l->window ? end - l->window : 0;
    int64_t count = runs[j / l->n_heads + 1] - first;
    const float *bias = s->bias ? s->bias + first * s->bias_token_stride + h * s->bias_head_stride : 0;
    const float *queries = qkv + first * row_size + h * n;
    float *to = out + (first * l->n_heads + h) * n;
    if (count == 1)
      attend_head(queries, &cache, begin, 0, bias ? bias + begin : 0, end - begin, n, l->scale, scores, to);
    else
      attend_run(queries, row_size, &cache, end, l->window, bias, s->bias_token_stride, count, n, l->scale, scores, to,
                 l->n_heads * n);
  }
}

// Attention of queries (M, H D) over the encoder's keys and values -> (M, H D).
static void attend_encoder(const DecodeLayer *l, const LayerCache *m, const DecodeStep *s, float *q, float *out,
                           float *scratch, int64_t scratch_size) {
  int64_t share = l->n_heads / l->n_kv_heads, n = l->d_head, stride = m->cross_position_stride;
  float *scores = scratch + omp_get_thread_num() * scratch_size;
#pragma omp for schedule(dynamic)
  for (int64_t j = 0; j < s->n_tokens * l->n_heads; j++) {
    int64_t i = j / l->n_heads, at = s->rows[i] * m->cross_row_stride + j % l->n_heads / share * m->cross_head_stride;
    HeadCache cache = {m->cross_keys + at, m->cross_values + at, stride, stride, FIRST_BLOCK,
                       SINGLE_BLOCK,       0,                    1,      (int)m->kind};
    if (cache.kind == INT8) rotate_hadamard(q + j * n, n);
    attend_head(q + j * n, &cache, 0, 0, 0, s->n_memory[i], n, l->cross_scale, scores, out + j * n);
  }
}

// --- feed-forward ----------------------------------------------------------------------------------------------------

INLINE void activate_row(const float *x, const float *gate, float *y, int64_t n, const int kind) {
  FOR_LANES(n) {
    lanes here = first_lanes(n - k);
    vec derivative, at = activate(kind, v_load_lanes(here, x + k), &derivative);
    if (gate) at = v_mul(at, v_load_lanes(here, gate + k));
    v_store_lanes(y + k, here, at);
  }
}

static void feed_forward(const DecodeLayer *l, const DecodeStep *s, const float *x, float *hidden, float *active,
                         float *y, char *scratch, int threads) {
  int64_t n = l->down.n_inputs, n_up = l->up.n_outputs;
  multiply_packed(&l->up, x, s->n_tokens, hidden, scratch, threads);
  FOR_ROWS(i, s->n_tokens) {
    const float *from = hidden + i * n_up;
    BY_ACTIVATION(l->activation, activate_row, from, l->gated ? from + n : 0, active + i * n, n)
  }
  wait_for_rows(s->n_tokens);
  multiply_packed(&l->down, active, s->n_tokens, y, scratch, threads);
}

// --- the stack -------------------------------------------------------------------------------------------------------

typedef struct {
  float *delta, *delta2, *qkv, *attended, *hidden;
  float *normed, *active, *x, *scores;  // of a single token each thread has its own; scores always
  int64_t active_size, scores_size;     // of one thread
  int64_t *runs, n_runs;
  char *scratch;
  void *memory;
} Workspace;

// Returns 0 if memory is exhausted.
static int allocate(Workspace *w, const DecodeLayer *layers, int64_t n_layers, const DecodeStep *s, int threads) {
  int64_t n = s->n_tokens, most = 1, hidden = 0, active = 0, qkv = 0, bytes = 0, total = 0;
  int64_t copies = n == 1 ? threads : 1;
  for (int64_t i = 0; i < n; i++)
    most = max_long(most, max_long(s->positions[i] + 1, s->n_memory ? s->n_memory[i] : 0));
  for (const DecodeLayer *l = layers; l < layers + n_layers; l++) {
    hidden = max_long(hidden, l->up.n_outputs), active = max_long(active, l->down.n_inputs);
    qkv = max_long(qkv, max_long(l->qkv.n_outputs, l->cross_query.n_outputs));
    const PackedMatrix *all[] = {&l->qkv, &l->output, &l->cross_query, &l->cross_output, &l->up, &l->down};
    for (int i = 0; i < 6; i++) bytes = max_long(bytes, packed_scratch(all[i], n, threads));
  }
  int64_t d_head = 0, longest = 1;
  for (const DecodeLayer *l = layers; l < layers + n_layers; l++) d_head = max_long(d_head, l->d_head);
  for (int64_t i = 0, m; i < n; i += m) longest = max_long(longest, m = run_length(s, i));
  w->scores_size = round_up(longest > 1 ? run_scratch(longest, most, d_head) : most + LANES, LANES);
  w->active_size = n * active;
  enum { PARTS = 9 };
  float **parts[PARTS] = {&w->delta,  &w->delta2, &w->qkv, &w->attended, &w->hidden,
                          &w->normed, &w->active, &w->x,   &w->scores};
  int64_t width = n * s->width;
  int64_t sizes[PARTS] = {width,          width,                    n * qkv,        n * qkv, n * hidden,
                          copies * width, copies * w->active_size, copies * width, threads * w->scores_size};
  for (int i = 0; i < PARTS; i++) total += sizes[i] + LANES;
  int64_t n_runs = (n + 1) * sizeof(int64_t);
  w->memory = malloc(n_runs + total * sizeof(float) + bytes + 64);
  if (!w->memory) return 0;
  w->runs = w->memory, w->n_runs = 0;
  for (int64_t i = 0; i < n; i += run_length(s, i)) w->runs[w->n_runs++] = i;
  w->runs[w->n_runs] = n;
  float *rest = (float *)((char *)w->memory + n_runs);
  for (int i = 0; i < PARTS; i++) *parts[i] = rest, rest += sizes[i] + LANES;
  w->scratch = (char *)rest;
  return 1;
}

static void decode_layer(const DecodeLayer *l, const LayerCache *cache, const DecodeStep *s, const Workspace *w,
                         float *x, int threads) {
  int64_t n = s->n_tokens;
  int post = l->residual == POST_NORM;
  const float *from = post ? x : normalized(&l->attention_norm, x, w->normed, s);
  multiply_packed(&l->qkv, from, n, w->qkv, w->scratch, threads);
  update_cache(l, cache, s, w->qkv);
  attend_cached(l, cache, s, w->qkv, w->attended, w->runs, w->n_runs, w->scores, w->scores_size);
  multiply_packed(&l->output, w->attended, n, w->delta, w->scratch, threads);
  if (l->residual == PARALLEL) {
    if (l->feedforward_norm.kind) from = normalized(&l->feedforward_norm, x, w->normed, s);
    feed_forward(l, s, from, w->hidden, w->active, w->delta2, w->scratch, threads);
    add_residual(&l->attention_post_norm, 0, w->delta, x, w->normed, s);
    add_residual(&l->feedforward_post_norm, 0, w->delta2, x, w->normed, s);
    return;
  }
  add_residual(&l->attention_post_norm, post ? &l->attention_norm : 0, w->delta, x, w->normed, s);
  if (l->cross_query.weight) {
    from = post ? x : normalized(&l->cross_norm, x, w->normed, s);
    multiply_packed(&l->cross_query, from, n, w->qkv, w->scratch, threads);
    attend_encoder(l, cache, s, w->qkv, w->attended, w->scores, w->scores_size);
    multiply_packed(&l->cross_output, w->attended, n, w->delta, w->scratch, threads);
    add_residual(0, post ? &l->cross_norm : 0, w->delta, x, w->normed, s);
  }
  from = post ? x : normalized(&l->feedforward_norm, x, w->normed, s);
  feed_forward(l, s, from, w->hidden, w->active, w->delta, w->scratch, threads);
  add_residual(&l->feedforward_post_norm, post ? &l->feedforward_norm : 0, w->delta, x, w->normed, s);
}

// Runs the new tokens x (M, E) through all layers and the last norm, in place. Returns 0 if memory is exhausted.
EXPORT int decode(const DecodeLayer *layers, int64_t n_layers, const LayerCache *caches, const DecodeStep *s, float *x,
                  int threads) {
  Workspace w;
  if (!allocate(&w, layers, n_layers, s, threads)) return 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (s->clear_blocks) clear_blocks(layers, n_layers, caches, s);
    Workspace mine = w;
    float *rows = x;
    int thread = omp_get_thread_num();
    if (s->n_tokens == 1) {
      mine.normed += thread * s->width, mine.active += thread * w.active_size;
      rows = memcpy(w.x + thread * s->width, x, s->width * sizeof(float));
    }
    for (int64_t i = 0; i < n_layers; i++) decode_layer(layers + i, caches + i, s, &mine, rows, threads);
    const float *last_rows = normalized(&s->norm, rows, mine.normed, s);
    if (thread == 0 && last_rows != x) memcpy(x, last_rows, s->n_tokens * s->width * sizeof(float));
  }
  free(w.memory);
  return 1;
}
