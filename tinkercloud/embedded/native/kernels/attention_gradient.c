/* The gradient of causal attention, for train_bindings.py, on the cores of one machine.

   Of each query head, with S = scale Q K^T where a row sees a key and P = softmax(S); where scores
   are capped, dS is further multiplied by the slope of the cap:
     dV = P^T dO    dP = dO V^T    dS = P (dP - sum(P dP))    dQ = scale dS K    dK = scale dS^T Q
   (Dao et al. 2022, appendix B.4; here with the whole of a few rows of S at once, so that neither
   the forward pass's result nor its sums are needed.) All sums are float32, those of each sequence
   in an order that depends on its length alone. Of a model in bfloat16 products read dO, P and dS
   rounded where the processor multiplies pairs of such numbers: by pairs, or, where that is slower
   (pairs.h), as floats in the order of the pairs' instruction, with the same bits. Elsewhere dO, P and
   dS are float.

   Names: L rows of a sequence, its entries in gradients.h; Hq / Hkv query and key/value heads, Dh
   head size. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "activations.h"
#include "attention_products.h"
#include "gradients.h"
#include "narrow.h"
#include "pairs.h"
#include "team.h"
#include "vectors.h"

#define BLOCK (6 * TILE_ROWS) /* rows of S at once */
#define TASKS_PER_THREAD 4

/* ---- one query head */

typedef struct {
  int64_t first, length;         /* the sequence's entries */
  int64_t width, stride;         /* Dh, and of rows of S, both with their padding */
  int64_t rows;                  /* numbers of [L and padding][width] */
  int kind;                      /* of words */
  float *keys;                   /* words [L][width], by pairs of rows */
  float *keys_t, *values_t;      /* panels of both, turned: words [panel][Dh][PANEL], of columns */
  float *q, *dout, *dq;          /* [BLOCK][width] */
  float *scores, *dscores;       /* [BLOCK][stride] */
  float *slopes;                 /* [stride], of caps */
  /* Pairs of columns, rows half as wide; and of rows, half as many of these. */
  float *q_columns, *dout_columns, *dscores_columns;
  float *q_rows, *dout_rows, *scores_rows, *dscores_rows;
  float *dk, *dv;                /* of one head, [L and padding][width] */
  float *dkv, *dkv_sum;          /* memory for both, and of all heads that read these keys */
} work_t;

/* Puts the arrays for a sequence of that length into `memory`; returns how many numbers they are. */
static size_t place(const attention_gradient_t *a, int64_t length, work_t *w, float *memory) {
  int64_t padded = ROUND_UP(length, PANEL), turned = padded * a->head_dim;
  w->length = length;
  w->width = ROUND_UP(a->head_dim, LANES);
  w->stride = padded + LANES; /* rows a power of two apart would share few lines of the cache */
  w->rows = ROUND_UP(length, TILE_ROWS) * w->width;
  w->kind = !(HAS_PAIRS && a->is_narrow) ? FLOATS : widens_pairs() ? ROUNDED : PAIRS;
  int64_t block = BLOCK * w->width, wide = BLOCK * w->stride;
  int64_t block_pairs = w->kind == PAIRS ? block / 2 : 0;
  int64_t wide_pairs = w->kind == PAIRS ? wide / 2 : 0;
  struct {
    float **at;
    int64_t size;
  } parts[] = {
      {&w->keys, w->rows},           {&w->dkv, 2 * w->rows},        {&w->dkv_sum, 2 * w->rows},
      {&w->keys_t, turned},          {&w->values_t, turned},        {&w->q, block},
      {&w->dout, block},             {&w->dq, block},               {&w->scores, wide},
      {&w->dscores, wide},           {&w->slopes, w->stride},
      {&w->q_columns, block_pairs},  {&w->dout_columns, block_pairs},
      {&w->q_rows, block_pairs},     {&w->dout_rows, block_pairs},  {&w->scores_rows, wide_pairs},
      {&w->dscores_rows, wide_pairs}, {&w->dscores_columns, wide_pairs},
  };
  size_t total = 0;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    *parts[i].at = memory + total;
    total += (size_t)ROUND_UP(parts[i].size, LANES);
  }
  return total;
}

/* How many words that are pairs of columns, or of rows, take. */
INLINE int64_t words(const work_t *w, int64_t count) {
  return w->kind == PAIRS ? (count + 1) / 2 : count;
}

static void turn(const attention_gradient_t *a, const void *from, int64_t stride, int64_t column,
                 const work_t *w, float *to) {
  float one[w->width], pairs[w->width];
  int64_t padded = ROUND_UP(w->length, PANEL), size = a->head_dim, depth = words(w, size);
  for (int64_t l = 0; l < padded; l++) {
    if (l < w->length)
      read_numbers(a->is_narrow, from, a->rows[w->first + l] * stride + column, one, size);
    else
      memset(one, 0, sizeof one);
    if (w->kind == PAIRS) pair_columns(one, w->width, pairs);
    float *into = to + l / PANEL * PANEL * depth + l % PANEL;
    for (int64_t d = 0; d < depth; d++) into[d * PANEL] = (w->kind == PAIRS ? pairs : one)[d];
  }
}

/* A row of the block whose last key is `last`: scores become probabilities, what came from dO
   becomes the gradient of the scores. seen: keys of the block, a multiple of LANES. */
static void soften(const attention_gradient_t *a, float *scores, float *dscores, float *slopes,
                   int64_t last, int64_t seen) {
  float scale = a->cap == 0.0f ? a->scale : 1.0f;
  if (a->cap != 0.0f) cap_scores(scores, slopes, seen, a->scale, a->cap);
  for (int64_t j = last + 1; j < seen; j++) scores[j] = -INFINITY;
  for (int64_t j = 0; a->window && j <= last - a->window; j++) scores[j] = -INFINITY;
  float top = largest(scores, seen);
  vec sum = {}, dot = {};
  for (int64_t j = 0; j < seen; j += LANES) {
    vec p = exp_vec((load(scores + j) - all(top)) * all(scale));
    store(scores + j, p);
    sum += p;
    dot = fused(p, load(dscores + j), dot);
  }
  float inverse = 1.0f / sum1(sum), mean = sum1(dot) * inverse;
  for (int64_t j = 0; j < seen; j += LANES) {
    vec p = load(scores + j) * all(inverse);
    store(scores + j, p);
    store(dscores + j, p * (load(dscores + j) - all(mean)) * all(a->scale));
  }
  for (int64_t j = 0; a->cap != 0.0f && j < seen; j += LANES)
    store(dscores + j, load(dscores + j) * load(slopes + j));
}

static void round_row(float *row, int64_t count) {
  for (int64_t i = 0; i < count; i++) row[i] = widen1(narrowed(row[i]));
}

/* rows: even. */
static void pair_block(const float *floats, int64_t stride, int64_t rows, int64_t count,
                       float *of_rows, float *of_columns) {
  for (int64_t r = 0; r < rows; r += 2)
    pair_rows(floats + r * stride, floats + (r + 1) * stride, count, of_rows + r / 2 * stride);
  for (int64_t r = 0; r < rows && of_columns; r++)
    pair_columns(floats + r * stride, ROUND_UP(count, 2), of_columns + r * stride / 2);
}

static void read_block(const attention_gradient_t *a, work_t *w, int64_t head, int64_t from,
                       int64_t count, int64_t rows) {
  int64_t size = a->head_dim;
  for (int64_t r = 0; r < rows; r++) {
    int64_t entry = w->first + from + r, row = r < count ? a->rows[entry] : 0;
    float *q = w->q + r * w->width, *dout = w->dout + r * w->width;
    if (r < count)
      read_numbers(a->is_narrow, a->q, row * a->q_stride + head * size, q, size);
    else
      memset(q, 0, (size_t)w->width * sizeof *q);
    if (r < count && (a->owned == NULL || a->owned[entry])) {
      read_numbers(0, a->dout, row * a->dout_stride + head * size, dout, size);
      if (w->kind == ROUNDED) round_row(dout, size);
    } else {
      memset(dout, 0, (size_t)w->width * sizeof *dout);
    }
  }
  if (w->kind != PAIRS) return;
  pair_block(w->q, w->width, rows, w->width, w->q_rows, w->q_columns);
  pair_block(w->dout, w->width, rows, w->width, w->dout_rows, w->dout_columns);
}

static void block(const attention_gradient_t *a, work_t *w, int64_t head, int64_t from) {
  int64_t size = a->head_dim, count = MIN(BLOCK, w->length - from), seen = from + count;
  int64_t rows = ROUND_UP(count, TILE_ROWS), keys = ROUND_UP(seen, LANES), depth = words(w, size);
  int kind = w->kind, pairs = kind == PAIRS;
  read_block(a, w, head, from, count, rows);
  left_t q = {pairs ? w->q_columns : w->q, words(w, w->width), 1};
  left_t dout = {pairs ? w->dout_columns : w->dout, words(w, w->width), 1};
  for (int64_t n = 0; n < keys; n += PANEL) {
    int64_t columns = MIN(PANEL, keys - n);
    panel((out_t){w->scores + n, w->stride}, q, (right_t){w->keys_t + n * depth, PANEL}, rows,
          depth, columns, 1, kind);
    panel((out_t){w->dscores + n, w->stride}, dout, (right_t){w->values_t + n * depth, PANEL}, rows,
          depth, columns, 1, kind);
  }
  int64_t reached = ROUND_UP(seen, TILE_ROWS);
  for (int64_t r = 0; r < rows; r++) {
    float *scores = w->scores + r * w->stride, *dscores = w->dscores + r * w->stride;
    if (r < count) soften(a, scores, dscores, w->slopes, from + r, keys);
    for (int64_t j = r < count ? keys : 0; j < reached; j++) scores[j] = dscores[j] = 0.0f;
    if (kind == ROUNDED && r < count) {
      round_row(scores, keys);
      round_row(dscores, keys);
    }
  }
  if (pairs) {
    pair_block(w->scores, w->stride, rows, reached, w->scores_rows, NULL);
    pair_block(w->dscores, w->stride, rows, reached, w->dscores_rows, w->dscores_columns);
  }
  product((out_t){w->dq, w->width},
          (left_t){pairs ? w->dscores_columns : w->dscores, words(w, w->stride), 1},
          (right_t){w->keys, w->width}, rows, words(w, seen), w->width, 1, kind);
  for (int64_t r = 0; r < count; r++)
    write_numbers(0, a->dq, a->out_rows[w->first + from + r] * a->dq_stride + head * size,
                  w->dq + r * w->width, size);
  product((out_t){w->dk, w->width}, (left_t){pairs ? w->dscores_rows : w->dscores, 1, w->stride},
          (right_t){pairs ? w->q_rows : w->q, w->width}, reached, words(w, rows), w->width, 0, kind);
  product((out_t){w->dv, w->width}, (left_t){pairs ? w->scores_rows : w->scores, 1, w->stride},
          (right_t){pairs ? w->dout_rows : w->dout, w->width}, reached, words(w, rows), w->width, 0,
          kind);
}

/* ---- tasks: the query heads that read one head's keys of one sequence; each of them by itself
   where that would leave threads idle. Heads are added up in their order either way, from memory of
   each head's own: added where they are computed, their order would be that of the threads. */

static void read_keys(const attention_gradient_t *a, work_t *w, int64_t kv_head) {
  int64_t size = a->head_dim, column = kv_head * size;
  float rows[2][w->width];
  for (int64_t l = 0; l < w->length; l++) {
    float *row = w->kind == PAIRS ? rows[l % 2] : w->keys + l * w->width;
    read_numbers(a->is_narrow, a->k, a->rows[w->first + l] * a->k_stride + column, row, size);
    if (w->kind != PAIRS || (l % 2 == 0 && l + 1 < w->length)) continue;
    if (l % 2 == 0) memset(rows[1], 0, sizeof rows[1]);
    pair_rows(rows[0], rows[1], w->width, w->keys + l / 2 * w->width);
  }
  turn(a, a->k, a->k_stride, column, w, w->keys_t);
  turn(a, a->v, a->v_stride, column, w, w->values_t);
}

static void one_head(const attention_gradient_t *a, work_t *w, int64_t head, float *dkv) {
  memset(dkv, 0, (size_t)(2 * w->rows) * sizeof *dkv);
  w->dk = dkv;
  w->dv = dkv + w->rows;
  for (int64_t from = 0; from < w->length; from += BLOCK) block(a, w, head, from);
}

static void add(const work_t *w, const float *dkv) {
  for (int64_t i = 0; i < 2 * w->rows; i++) w->dkv_sum[i] += dkv[i];
}

static void write_keys(const attention_gradient_t *a, const work_t *w, int64_t kv_head) {
  int64_t size = a->head_dim, column = kv_head * size;
  for (int64_t l = 0; l < w->length; l++) {
    int64_t row = a->out_rows[w->first + l];
    const float *dk = w->dkv_sum + l * w->width, *dv = dk + w->rows;
    write_numbers(0, a->dk, row * a->dk_stride + column, dk, size);
    write_numbers(0, a->dv, row * a->dv_stride + column, dv, size);
  }
}

typedef struct {
  attention_gradient_t *a;
  float *memory, *dkv; /* each thread's own, and of all heads or NULL */
  size_t own;
  atomic_long next;
} job_t;

/* What thread `rank` computes that sequence's heads with. */
static work_t work_of(const job_t *job, int rank, int64_t sequence) {
  const int64_t *starts = job->a->starts + sequence;
  work_t w = {.first = starts[0]};
  place(job->a, starts[1] - starts[0], &w, job->memory + (size_t)rank * job->own);
  return w;
}

/* All sequences' gradients of keys and values, before heads are added up: how many numbers lie
   before those of a head, [2][rows] of each. */
static size_t before(const attention_gradient_t *a, const work_t *w, int64_t sequence,
                     int64_t head) {
  int64_t rows = a->starts[sequence] + sequence * TILE_ROWS; /* with their padding */
  return (size_t)(2 * (rows * w->width * a->heads + head * w->rows));
}

static void run_by_keys(team_t *team, int rank, void *argument) {
  (void)team;
  job_t *job = argument;
  const attention_gradient_t *a = job->a;
  int64_t group = a->heads / a->kv_heads, tasks = a->num_sequences * a->kv_heads;
  for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < tasks;) {
    int64_t sequence = task / a->kv_heads, kv_head = task % a->kv_heads;
    work_t w = work_of(job, rank, sequence);
    if (job->dkv == NULL) read_keys(a, &w, kv_head);
    memset(w.dkv_sum, 0, (size_t)(2 * w.rows) * sizeof(float));
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
      float *dkv = job->dkv == NULL ? w.dkv : job->dkv + before(a, &w, sequence, head);
      if (job->dkv == NULL) one_head(a, &w, head, dkv);
      add(&w, dkv);
    }
    write_keys(a, &w, kv_head);
  }
}

static void run_by_head(team_t *team, int rank, void *argument) {
  (void)team;
  job_t *job = argument;
  const attention_gradient_t *a = job->a;
  for (int64_t task; (task = atomic_fetch_add(&job->next, 1)) < a->num_sequences * a->heads;) {
    int64_t sequence = task / a->heads, head = task % a->heads;
    work_t w = work_of(job, rank, sequence);
    read_keys(a, &w, head / (a->heads / a->kv_heads));
    one_head(a, &w, head, job->dkv + before(a, &w, sequence, head));
  }
}

/* 0, or -1 when there is no memory. */
int attention_gradient(team_t *team, attention_gradient_t *a) {
  work_t w;
  int64_t longest = 0;
  for (int64_t s = 0; s < a->num_sequences; s++)
    longest = MAX(longest, a->starts[s + 1] - a->starts[s]);
  size_t own = place(a, longest, &w, NULL);
  int by_head = team->size > 1 && a->num_sequences * a->kv_heads < TASKS_PER_THREAD * team->size;
  size_t shared = by_head ? before(a, &w, a->num_sequences, 0) : 0;
  float *memory = scratch(team, ((size_t)team->size * own + shared) * sizeof(float));
  if (memory == NULL) return -1;
  job_t job = {a, memory, by_head ? memory + (size_t)team->size * own : NULL, own, 0};
  if (by_head) {
    work(team, run_by_head, &job);
    atomic_store(&job.next, 0);
  }
  work(team, run_by_keys, &job);
  return 0;
}
